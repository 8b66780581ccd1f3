/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLI_FOLLOW_H
#define CLI_FOLLOW_H

#include "train/cluster.h"

/** `run` on a host that does not lead: all it is told, with as little said as possible. Ends with the first's exit code. */
int cli_follow(struct mt_cluster *cluster, struct mt_train_control *control);

#endif

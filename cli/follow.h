/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLI_FOLLOW_H
#define CLI_FOLLOW_H

#include "train/cluster.h"

/** `run` on a host that does not lead: takes part in what the first host does, prints errors alone, and returns the
 * first host's exit code. Closes the cluster. */
int cli_follow(struct mt_cluster *cluster, struct mt_train_control *control);

#endif

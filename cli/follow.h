/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "train/cluster.h"

/** `run` on a host that does not lead: takes part in what the first host does, prints errors alone, and returns the
 * first host's exit code. Closes the cluster. */
int cli_follow(struct mt_cluster *cluster, struct mt_train_control *control);

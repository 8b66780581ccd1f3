/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/json.h"
#include "train/setup.h"

/* What hosts that share a run have to have in common, beside data and weights: the version of the program, the model's
 * config.json, the GPU, and how a CPU computes; and the checkpoint that the first host resumes from. */

/** Of this host, as JSON; *out is the caller's. */
int mt_cluster_print_facts(char **out, const struct mt_setup *s, struct mt_err *err);
/** Names the first thing in which this host is not what the first has printed, as far as it has opened inputs and
 * setup: -EINVAL (MT_ERR_USAGE). */
int mt_cluster_compare_facts(const cJSON *first, const struct mt_setup *s, const struct mt_inputs *in,
                             struct mt_err *err);

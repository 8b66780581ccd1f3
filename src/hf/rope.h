/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "hf/hf_config.h"
#include "hf/keys.h"

/** Fills cfg->rope and cfg->n_ropes from rope_theta and rope_scaling, or rope_parameters. The second table is that of
 * layers with a window, if the family has one, or of queries that grow with their positions; head_dim: of the heads of
 * either; with latents, the part that is rotated, and whole heads. */
void mt_rope_read(struct mt_keys *k, struct mt_hf_config *cfg, const int64_t head_dim[MT_MAX_ROPES]);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "hf/hf_config.h"
#include "hf/keys.h"

/** Fills cfg->spec and cfg->layer: of[1] for layers with a window, of[0] for others, whose padding is zero, and what
 * the keys say of each layer. Reads cfg->moe, too. After cfg->rope. */
void mt_layers_read(struct mt_keys *k, struct mt_hf_config *cfg, const struct mt_layer_spec of[2]);

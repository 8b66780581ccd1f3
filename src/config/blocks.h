/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "config/config.h"

/**
 * Training by blocks of layers (BAdam, Luo et al. 2024; LISA, Pan et al. 2024): a run is a chain of phases of
 * train.block_steps steps. In each, one block of neighbouring layers is trained, and what train.blocks_always names;
 * the rest is frozen. In every round of as many phases as there are blocks each is trained once.
 */
struct mt_blocks {
    uint64_t n; /* 0: off */
    uint64_t n_layers;
    uint64_t steps; /* of a phase */
    enum mt_cfg_block_order order;
    uint64_t seed;
};

/** -EINVAL (MT_ERR_USAGE): train.blocks is none of off, layers and a number up to that of the layers. */
int mt_blocks_init(struct mt_blocks *b, const struct mt_config *cfg, int64_t n_layers, struct mt_err *err);
/** Which block phase p (from 0) trains. */
uint64_t mt_blocks_at(const struct mt_blocks *b, uint64_t phase);
/** The layers [*first, *end) of a block. */
void mt_blocks_layers(const struct mt_blocks *b, uint64_t block, int *first, int *end);
/** Steps of the run when the phase is over. */
uint64_t mt_blocks_end(const struct mt_blocks *b, uint64_t phase);

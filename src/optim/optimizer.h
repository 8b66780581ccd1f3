/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_OPTIM_OPTIMIZER_H
#define MT_OPTIM_OPTIMIZER_H

#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/pool.h"
#include "optim/adam.h"
#include "settings/settings.h"
#include "store/planes.h"

/** A state that an optimizer keeps of every trained element. */
struct mt_optimizer_state {
    const char *name; /* in checkpoints, after the tensor's: "exp_avg" */
    const char *use;  /* in the memory table: "first moments" */
    enum mt_dtype dtype;
    size_t block, block_bytes; /* elements that are encoded together, and their bytes; a block divides
                                  MT_PIECE_ALIGN */
};

/**
 * An update of a run of parameters of one tensor, in place. The weight is the split master (hi, lo).
 *
 * Memory   host pointers, borrowed; any alignment; planes do not overlap.
 */
struct mt_update {
    size_t n;
    uint16_t *hi, *lo;
    void *state[MT_MAX_STATES];
    const void *grad;
    enum mt_dtype grad_dtype;
    const struct mt_optimizer_keys *keys;
    double lr, weight_decay; /* weight_decay: 0 where the tensor does not decay */
    uint64_t t;              /* number of the update, from 1 */
    float clip;              /* factor of the gradient, 1 = none */
};

/**
 * An optimizer: all that the rest of the program knows of it. Planes, tiers, memory table, traffic, simulator
 * and checkpoints read the states; only update() computes.
 *
 * An update of an element depends on that element alone (of a block: on that block), so that neither threads,
 * instruction sets, pieces nor tiers change a bit.
 */
struct mt_optimizer {
    const char *type;  /* optimizer.type in the configuration */
    const char *title; /* in what is printed */
    enum mt_dtype state_dtype; /* optimizer.state_dtype */
    int n_states;
    struct mt_optimizer_state state[MT_MAX_STATES];
    /** Returns the number of elements whose new weight is not finite or has an infinite `hi` (0 = good). */
    uint64_t (*update)(const struct mt_optimizer *o, const struct mt_update *u, enum mt_adam_isa isa, mt_pool *pool);
};

/** AdamW with f32 moments: also what a machine's optimizer rate is measured with, on bf16 gradients. */
extern const struct mt_optimizer mt_adamw;

/** By the configuration's names; NULL: there is no such variant. */
const struct mt_optimizer *mt_optimizer_find(const char *type, enum mt_dtype state_dtype);

/** Bytes that an update of an element moves: master and states both ways, the gradient once. */
double mt_optimizer_bytes(const struct mt_optimizer *o, enum mt_dtype grad_dtype);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_OPTIM_OPTIMIZER_H
#define MT_OPTIM_OPTIMIZER_H

#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "optim/adam.h"
#include "settings/settings.h"
#include "store/planes.h"

/** A state that an optimizer keeps for every trained element. */
struct mt_optimizer_state {
    const char *name; /* in checkpoints, appended to the tensor's name: "exp_avg" */
    const char *use;  /* in the memory table: "first moments" */
    enum mt_dtype dtype;
    size_t block, block_bytes; /* number of elements that are encoded together (a divisor of MT_PIECE_ALIGN), and
                                  their bytes */
};

/**
 * An update, in place and on the calling thread, of consecutive parameters of one tensor. The weight is the split
 * master (hi, lo).
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
    double lr, weight_decay; /* weight_decay: 0 for tensors that do not decay */
    uint64_t t;              /* number of the update, from 1 */
    float clip;              /* factor of the gradient, 1 = none */
};

/**
 * An optimizer: all that the rest of the program knows of it. Planes, tiers, memory table, traffic, simulator
 * and checkpoints read the states; only update() computes.
 *
 * The update of an element depends on that element alone (or on its block), so that threads, instruction sets, pieces
 * and tiers do not change a bit.
 */
struct mt_optimizer {
    const char *type;  /* optimizer.type in the configuration */
    const char *title; /* the printed name */
    enum mt_dtype state_dtype; /* optimizer.state_dtype */
    int n_states;
    struct mt_optimizer_state state[MT_MAX_STATES];
    /** Returns the number of elements whose new weight is not finite or has an infinite `hi` (0 = good). */
    uint64_t (*update)(const struct mt_optimizer *o, const struct mt_update *u, enum mt_isa isa);
};

/** AdamW with f32 moments. With bf16 gradients, it is what a machine's optimizer rate is measured with. */
extern const struct mt_optimizer mt_adamw;

/** Finds an optimizer by the configuration's values; NULL: there is no such variant. */
const struct mt_optimizer *mt_optimizer_find(const char *type, enum mt_dtype state_dtype);

/** Bytes that the update of an element moves: master and states are read and written, the gradient is read. */
double mt_optimizer_bytes(const struct mt_optimizer *o, enum mt_dtype grad_dtype);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "optim/isa.h"
#include "optim/optimizer.h"

/** The element-wise rules: how a weight follows from its gradient g, its states m, v and scalars. */
enum mt_rule {
    MT_RULE_ADAMW, /* m += (1 - b1)(g - m), v = b2 v + (1 - b2) g g, w = keep w - step m / (sqrt(v) / sqrt_bc2 + eps) */
    MT_RULE_LION,  /* w = keep w - step sign(b1 m + (1 - b1) g), m = b2 m + (1 - b2) g */
    MT_RULE_SGD,   /* m = b1 m + g, w = keep w - step m; without a state m = g */
};

/** The scalars of an update, computed in double and rounded to FP32 once. */
struct mt_kernel_scalars {
    float clip, beta1, one_minus_beta1, beta2, one_minus_beta2, keep, step, sqrt_bc2, eps;
};

/**
 * An update of consecutive elements in place, in FP32: loads (states may be bf16 or blocks of 8 bits, gradients bf16,
 * masters of 32, 24 or 16 bits), the rule, stores. Masters of 16 bits are rounded by chance. Every instruction set
 * compiles the same body, so that all give the same bits.
 *
 * Memory   host pointers, borrowed; any alignment.
 * Returns  the number of elements whose new weight is not finite or has an infinite `hi` (0 = good).
 */
struct mt_kernel {
    enum mt_rule rule;
    size_t n;
    enum mt_master master;
    uint16_t *hi, *lo;
    uint8_t *lo8;   /* of 24 bits, instead of lo */
    void *state[2]; /* NULL: the rule has no such state */
    enum mt_state_type state_type;
    const void *grad;
    enum mt_dtype grad_dtype;
    const struct mt_along *along;  /* in place of grad, and as it is in f32: grad_dtype; NULL: none */
    struct mt_kernel_scalars s;
    bool stochastic;               /* states in bf16 are rounded up or down by chance, with the mean that they had */
    uint64_t seed, stream, master_stream, first; /* of the random numbers, and of `along`: element i has number first + i */
};
uint64_t mt_kernel_run(const struct mt_kernel *k, enum mt_isa isa);

/** What the kernel takes from an update: all but the rule, its states and the scalars. */
struct mt_kernel mt_kernel_of(const struct mt_update *u);

/** States in blocks of MT_BLOCK8 codes of 8 bits and their bf16 scale. */
enum { MT_BLOCK8 = 32, MT_BLOCK8_BYTES = MT_BLOCK8 + 2 };
/** mt_optimizer_state.bytes of such states, which only matrices have; and of the f32 states of all others. */
size_t mt_block8_bytes(const struct mt_state_shape *t);
size_t mt_block8_rest_bytes(const struct mt_state_shape *t);

/** States of an optimizer in one of the three types: in the order m, v of the rule, then the f32 ones of vectors. */
#define MT_STATE_PLAIN(name_, use_, dtype_, bytes_) \
    {.name = name_, .use = use_, .dtype = dtype_, .block = 1, .block_bytes = bytes_}
#define MT_STATE_BLOCKS8(name_, use_) \
    {.name = name_, .use = use_, .block = MT_BLOCK8, .block_bytes = MT_BLOCK8_BYTES, .bytes = mt_block8_bytes}
#define MT_STATE_REST(name_, use_) MT_STATE_APART(name_, use_ " (vectors)", mt_block8_rest_bytes, false)
/** A state in FP32 of some tensors: those of which bytes_() is not 0. Each tensor's is kept by itself, on the device or
 * for the host. */
#define MT_STATE_APART(name_, use_, bytes_, on_device_)                                                      \
    {.name = name_, .use = use_, .dtype = MT_F32, .block = 1, .block_bytes = sizeof(float), .bytes = bytes_, \
     .apart = true, .on_device = on_device_}
/** Sets state[] of the kernel from an update whose optimizer has `n` states, in one of the three types. */
void mt_kernel_states(struct mt_kernel *k, const struct mt_update *u, enum mt_state_type type, int n);

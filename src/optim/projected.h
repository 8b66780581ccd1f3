/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "optim/adam.h"
#include "optim/kernel.h"
#include "optim/optimizer.h"

/**
 * What APOLLO and GaLore have in common: moments of the gradients of matrices, projected to `rank` dimensions of their
 * smaller side, on the device; all other tensors have AdamW on the host. As in both authors' code, eps is added before
 * bias correction. The order of the states is that of the table below.
 */
enum { MT_LOW_FIRST, MT_LOW_SECOND, MT_LOW_OWN, MT_LOW_REST_FIRST, MT_LOW_REST_SECOND, MT_LOW_N_STATES };

/** Of a projection: at most the smaller side. */
size_t mt_low_rank(size_t rank, size_t rows, size_t cols);
/** Bytes of a projected moment. */
size_t mt_low_bytes(const struct mt_state_shape *t);
/** Makes p, n numbers of +scale and -scale: those of the tensor and `drawn`, however often they are made. */
int mt_low_signs(const struct mt_direction *d, size_t n, double scale, uint64_t drawn, float *p, struct mt_err *err);
/** The factor of a step with bias correction at update t. */
double mt_low_step(const struct mt_adam_rates *r, uint64_t t);
/** update(): the direction is the step of a matrix. The first three keys are beta1, beta2 and eps. */
uint64_t mt_low_update(const struct mt_optimizer *o, const struct mt_update *u, enum mt_isa isa);

/** The states, of which one is the optimizer's own. */
#define MT_LOW_STATES(...)                                                                                       \
    .n_states = MT_LOW_N_STATES,                                                                                 \
    .state = {[MT_LOW_FIRST] = MT_STATE_APART("low_exp_avg", "first moments (projected)", mt_low_bytes, true),   \
              [MT_LOW_SECOND] = MT_STATE_APART("low_exp_avg_sq", "second moments (projected)", mt_low_bytes, true), \
              [MT_LOW_OWN] = MT_STATE_APART(__VA_ARGS__, true),                                                  \
              [MT_LOW_REST_FIRST] = MT_STATE_APART("exp_avg", "first moments (others)", mt_rest_bytes, false),   \
              [MT_LOW_REST_SECOND] = MT_STATE_APART("exp_avg_sq", "second moments (others)", mt_rest_bytes, false)}

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "optim/isa.h"
#include "settings/settings.h"

/**
 * The row of AdamW (Loshchilov and Hutter 2019, alg. 2). Its update of a run of parameters, in place, is
 *
 *   g  = grad * clip
 *   m  = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
 *   w  = w - lr * weight_decay * w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
 *
 * in FP32 with the scalars computed in double and rounded once; the order of operations is that of
 * torch.optim.AdamW. w is the split master (hi, lo). Moments in bf16 are converted to FP32, updated and used there, and
 * rounded to the nearest (ties to even) once, when they are stored: a second moment that shrinks by less than 1/512 of
 * itself in an update (beta2 above 0.998) rounds back to what it was.
 */

/** The scalars of update t at the rate lr, but for clip and keep, of kernels with MT_RULE_ADAMW. */
struct mt_adam_rates {
    double beta1, beta2, eps;
};
struct mt_kernel_scalars;
void mt_adam_scalars(struct mt_kernel_scalars *s, double lr, struct mt_adam_rates r, uint64_t t);

/**
 * The update of an optimizer that makes directions of matrices on the device, which have the state `own`: their step is
 * the direction. It leaves all other tensors to AdamW, with moments in FP32, the states from `rest` on; its first three
 * keys are beta1, beta2 and eps.
 */
struct mt_kernel;
struct mt_update;
struct mt_kernel mt_adam_beside(const struct mt_update *u, int own, int rest);
/** Bytes of such a moment. */
struct mt_state_shape;
size_t mt_rest_bytes(const struct mt_state_shape *t);

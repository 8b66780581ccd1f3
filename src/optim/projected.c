/* SPDX-License-Identifier: Apache-2.0 */
#include "optim/projected.h"

#include <math.h>

#include "base/mem.h"
#include "device/ops.h"

static const uint64_t STREAM = UINT64_C(0xA7) << 56; /* of random projections */

size_t mt_low_rank(size_t rank, size_t rows, size_t cols)
{
    return MT_MIN(rank, MT_MIN(rows, cols));
}

size_t mt_low_bytes(const struct mt_state_shape *t)
{
    return t->matrix ? MT_MAX(t->rows, t->cols) * mt_low_rank(t->rank, t->rows, t->cols) * sizeof(float) : 0;
}

int mt_low_signs(const struct mt_direction *d, size_t n, double scale, uint64_t drawn, float *p, struct mt_err *err)
{
    return mt_op_signs(d->dev,
                       &(struct mt_signs){
                           .n = n,
                           .scale = (float)scale,
                           .seed = d->seed,
                           .stream = STREAM | drawn << 24 | d->tensor,
                           .x = p,
                       },
                       err);
}

double mt_low_step(const struct mt_adam_rates *r, uint64_t t)
{
    return sqrt(1 - pow(r->beta2, (double)t)) / (1 - pow(r->beta1, (double)t));
}

uint64_t mt_low_update(const struct mt_optimizer *, const struct mt_update *u, enum mt_isa isa)
{
    struct mt_kernel k = mt_adam_beside(u, MT_LOW_OWN, MT_LOW_REST_FIRST);
    k.s.eps /= k.rule == MT_RULE_ADAMW ? k.s.sqrt_bc2 : 1;
    return mt_kernel_run(&k, isa);
}

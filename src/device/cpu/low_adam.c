/* SPDX-License-Identifier: Apache-2.0 */
/* AdamW's steps of a projected gradient; rows of norm 1 copied. */
#include <math.h>

#include "device/cpu/cpu.h"

enum { PIECE = MT_DIRECT_PIECE };

struct job {
    const struct mt_low_adam *a;
    bool finite;
};

MT_HOT static void step(float *restrict low, float *restrict m, float *restrict v, const struct mt_low_adam *a,
                        size_t n)
{
    for (size_t i = 0; i < n; i++) {
        m[i] = a->beta1 * m[i] + (1 - a->beta1) * low[i];
        v[i] = a->beta2 * v[i] + (1 - a->beta2) * low[i] * low[i];
        low[i] = m[i] / (__builtin_sqrtf(v[i]) + a->eps);
    }
}

static void sum_piece(void *ctx, size_t piece, int)
{
    const struct job *j = ctx;
    size_t at = piece * PIECE;
    j->a->workspace[piece] = mt_cpu_dot(j->a->low + at, j->a->low + at, MT_MIN((size_t)PIECE, j->a->n - at));
}

static void step_piece(void *ctx, size_t piece, int)
{
    const struct job *j = ctx;
    size_t at = piece * PIECE, n = MT_MIN((size_t)PIECE, j->a->n - at);
    if (j->finite)
        step(j->a->low + at, j->a->m + at, j->a->v + at, j->a, n);
    else
        memset(j->a->low + at, 0, n * sizeof(float));
}

void mt_cpu_run_low_adam(struct mt_cpu_device *d, const struct mt_low_adam *a)
{
    struct job j = {a, false};
    size_t pieces = mt_div_up(a->n, (size_t)PIECE);
    mt_pool_run(d->pool, sum_piece, &j, pieces);
    j.finite = isfinite(mt_cpu_sum(a->workspace, pieces));
    mt_pool_run(d->pool, step_piece, &j, pieces);
}

MT_HOT static void copy_signed(float *restrict to, const float *restrict x, size_t n)
{
    float sign = mt_cpu_dot(to, x, n) < 0 ? -1 : 1;
    for (size_t i = 0; i < n; i++)
        to[i] = sign * x[i];
}

static void copy_row(const void *args, size_t row)
{
    const struct mt_unit_rows *a = args;
    const float *x = a->from + row * a->cols;
    float norm = mt_cpu_dot(x, x, a->cols);
    if (norm > 0.25f && norm < 4)
        copy_signed(a->to + row * a->cols, x, a->cols);
}

void mt_cpu_run_unit_rows(struct mt_cpu_device *d, const struct mt_unit_rows *a)
{
    mt_cpu_by_rows(d, copy_row, a, a->rows, a->cols);
}

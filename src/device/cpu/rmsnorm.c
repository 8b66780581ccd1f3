/* SPDX-License-Identifier: Apache-2.0 */
/*
 * y = xhat w, xhat = x rstd (Zhang and Sennrich 2019). Backward, with g = dy w:
 *
 *   dx = rstd (g - xhat mean(g xhat)),   dw = sum over rows of dy xhat
 *
 * dw is summed over fixed blocks of rows, then over blocks in order.
 */
#include <string.h>

#include "device/cpu/cpu.h"

enum { ROW_BLOCK = 32, PIECE = 2048 };

MT_HOT static void scale_by(float *restrict y, const float *restrict w, float plus, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] *= w[i] + plus;
}

/* The first element of a row. */
static size_t row_at(const struct mt_row_groups *g, size_t c, size_t row)
{
    return g->group ? row / g->group * g->ld + row % g->group * g->stride : row * c;
}

static float square_sum(const struct mt_rmsnorm *a, size_t row)
{
    size_t at = row_at(&a->x_at, a->c, row);
    return mt_cpu_dot_rows(a->dtype, a->x, at, a->x, at, a->c);
}

static void forward_row(const void *args, size_t row)
{
    const struct mt_rmsnorm *a = args;
    float x[PIECE], w[PIECE], tmp[PIECE];
    if (!a->use_rstd)
        a->rstd[row] = 1.0f / sqrtf(square_sum(a, row) / (float)a->c + a->eps);
    for (size_t c = 0; c < a->c; c += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->c - c), from = row_at(&a->x_at, a->c, row) + c;
        size_t at = row_at(&a->y_at, a->c, row) + c;
        float *y = mt_cpu_row_place(a->dtype, a->y, at, tmp);
        mt_cpu_scale(y, mt_cpu_row_f32(a->dtype, a->x, from, n, x), a->rstd[row], n);
        if (!a->plus_one && !a->round_once)
            mt_cpu_round_row(a->dtype, y, n);
        scale_by(y, mt_cpu_row_f32(a->dtype, a->w, c, n, w), a->plus_one ? 1.0f : 0.0f, n);
        mt_cpu_store_row(a->dtype, a->y, at, n, y);
    }
}

void mt_cpu_run_rmsnorm(struct mt_cpu_device *d, const struct mt_rmsnorm *a)
{
    mt_cpu_by_rows(d, forward_row, a, a->n, a->c);
}

size_t mt_cpu_rmsnorm_bwd_workspace(const struct mt_device_limits *, const struct mt_rmsnorm_bwd *a)
{
    return mt_cpu_sums_bytes(a->n, ROW_BLOCK, a->c);
}

/* sum over the row of dy w x; times rstd it is the sum of g xhat. */
static float project(const struct mt_rmsnorm_bwd *a, size_t row)
{
    float x[PIECE], w[PIECE], g[PIECE], sum = 0;
    for (size_t c = 0; c < a->c; c += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->c - c), from = row_at(&a->x_at, a->c, row) + c;
        mt_cpu_load_row(g, a->dtype, a->dy, row_at(&a->dy_at, a->c, row) + c, n);
        scale_by(g, mt_cpu_row_f32(a->dtype, a->w, c, n, w), a->plus_one ? 1.0f : 0.0f, n);
        sum += mt_cpu_dot(g, mt_cpu_row_f32(a->dtype, a->x, from, n, x), n);
    }
    return sum;
}

MT_HOT static void input_gradient(float *restrict dx, const float *restrict g,
                                  const float *restrict x, const float *restrict res, float rstd,
                                  float mean, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dx[i] = rstd * (g[i] - x[i] * rstd * mean) + (res ? res[i] : 0.0f);
}

static void backward_row(const void *args, size_t row, float *dw)
{
    const struct mt_rmsnorm_bwd *a = args;
    float x[PIECE], w[PIECE], dy[PIECE], g[PIECE], res[PIECE], out[PIECE];
    float rstd = a->rstd[row], mean = project(a, row) * rstd / (float)a->c;
    for (size_t c = 0; c < a->c; c += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->c - c), at = row_at(&a->dx_at, a->c, row) + c;
        const float *px = mt_cpu_row_f32(a->dtype, a->x, row_at(&a->x_at, a->c, row) + c, n, x);
        const float *pd = mt_cpu_row_f32(a->dtype, a->dy, row_at(&a->dy_at, a->c, row) + c, n, dy);
        const float *pr = a->dres ? mt_cpu_row_f32(a->dtype, a->dres, at, n, res) : NULL;
        memcpy(g, pd, n * sizeof(float));
        scale_by(g, mt_cpu_row_f32(a->dtype, a->w, c, n, w), a->plus_one ? 1.0f : 0.0f, n);
        input_gradient(out, g, px, pr, rstd, mean, n);
        if (dw) {
            mt_cpu_scale(g, px, rstd, n);
            if (!a->plus_one && !a->round_once)
                mt_cpu_round_row(a->dtype, g, n); /* the normalised value, which is multiplied by w */
            mt_cpu_add_products(dw + c, pd, g, n);
        }
        mt_cpu_store_row(a->dtype, a->dx, at, n, out);
    }
}

void mt_cpu_run_rmsnorm_bwd(struct mt_cpu_device *d, const struct mt_rmsnorm_bwd *a)
{
    mt_cpu_sum_rows(d, backward_row, a, a->n, (struct mt_cpu_sums){ROW_BLOCK, a->c, a->dw, a->workspace});
}

enum { BIAS_ROWS = 64 };

size_t mt_cpu_bias_bwd_workspace(const struct mt_device_limits *, const struct mt_bias_bwd *a)
{
    return mt_cpu_sums_bytes(a->n, BIAS_ROWS, a->c);
}

static void bias_chunk(void *ctx, size_t chunk, int)
{
    const struct mt_bias_bwd *a = ctx;
    float *sum = (float *)a->workspace + chunk * a->c, tmp[PIECE], own[PIECE];
    size_t end = MT_MIN(a->n, (chunk + 1) * BIAS_ROWS);
    memset(sum, 0, a->c * sizeof(float));
    for (size_t r = chunk * BIAS_ROWS; r < end; r++)
        for (size_t c = 0; c < a->c; c += PIECE) {
            size_t n = MT_MIN((size_t)PIECE, a->c - c);
            const float *x = mt_cpu_row_f32(a->dtype, a->dy, r * a->ld + c, n, tmp);
            if (a->x)
                mt_cpu_add_products(sum + c, x, mt_cpu_row_f32(a->dtype, a->x, r * a->ld + c, n, own), n);
            else
                mt_cpu_add_scaled(sum + c, x, 1, n);
        }
    if (a->scale)
        mt_cpu_multiply(sum, sum, a->scale, a->c);
}

void mt_cpu_run_bias_bwd(struct mt_cpu_device *d, const struct mt_bias_bwd *a)
{
    size_t blocks = mt_div_up(a->n, BIAS_ROWS);
    mt_pool_run(d->pool, bias_chunk, (void *)(uintptr_t)a, blocks);
    mt_cpu_fold(d, a->db, a->workspace, blocks, a->c);
}

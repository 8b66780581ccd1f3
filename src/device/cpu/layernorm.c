/* SPDX-License-Identifier: Apache-2.0 */
/*
 * y = xhat w + b, xhat = (x - mean) rstd (Ba, Kiros and Hinton 2016). Backward, with g = dy w:
 *
 *   dx = rstd (g - mean(g) - xhat mean(g xhat)),   dw = sum over rows of dy xhat,   db = sum over rows of dy
 *
 * Sums over rows are over fixed blocks of rows, then over blocks in order. The mean of a row is computed wherever the
 * row is read: it costs no memory traffic, and records need not hold it.
 */

#include "device/cpu/cpu.h"

enum { ROW_BLOCK = 32, PIECE = 2048 };

static float mean_of(enum mt_dtype t, const void *base, size_t first, size_t c)
{
    float x[PIECE], sum = 0;
    for (size_t at = 0; at < c; at += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, c - at);
        sum += mt_cpu_sum(mt_cpu_row_f32(t, base, first + at, n, x), n);
    }
    return sum / (float)c;
}

MT_HOT static void centre(float *restrict y, const float *restrict x, float mean, float rstd, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = (x[i] - mean) * rstd;
}

MT_HOT static void weigh(float *restrict y, const float *restrict w, const float *restrict b, float plus, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = y[i] * (w[i] + plus) + (b ? b[i] : 0.0f);
}

static float rstd_of(const struct mt_layernorm *a, size_t row, float mean)
{
    float x[PIECE], d[PIECE], sum = 0;
    for (size_t c = 0; c < a->c; c += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->c - c);
        centre(d, mt_cpu_row_f32(a->dtype, a->x, row * a->c + c, n, x), mean, 1, n);
        sum += mt_cpu_dot(d, d, n);
    }
    return 1.0f / sqrtf(sum / (float)a->c + a->eps);
}

static void forward_row(const void *args, size_t row)
{
    const struct mt_layernorm *a = args;
    float x[PIECE], w[PIECE], b[PIECE], tmp[PIECE];
    float mean = mean_of(a->dtype, a->x, row * a->c, a->c);
    if (!a->use_rstd)
        a->rstd[row] = rstd_of(a, row, mean);
    for (size_t c = 0; c < a->c; c += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->c - c), at = row * a->c + c;
        float *y = mt_cpu_row_place(a->dtype, a->y, at, tmp);
        centre(y, mt_cpu_row_f32(a->dtype, a->x, at, n, x), mean, a->rstd[row], n);
        weigh(y, mt_cpu_row_f32(a->dtype, a->w, c, n, w),
              a->biased ? mt_cpu_row_f32(a->dtype, a->w, a->c + c, n, b) : NULL, a->plus_one ? 1.0f : 0.0f, n);
        mt_cpu_store_row(a->dtype, a->y, at, n, y);
    }
}

void mt_cpu_run_layernorm(struct mt_cpu_device *d, const struct mt_layernorm *a)
{
    mt_cpu_by_rows(d, forward_row, a, a->n, a->c);
}

/* The workspace has a row for each block of rows: its parts of dw and db. */
static size_t sums_of(const struct mt_layernorm_bwd *a)
{
    return (a->biased ? 2 : 1) * a->c;
}

size_t mt_cpu_layernorm_bwd_workspace(const struct mt_device_limits *, const struct mt_layernorm_bwd *a)
{
    return mt_cpu_sums_bytes(a->n, ROW_BLOCK, sums_of(a));
}

MT_HOT static void multiply(float *restrict y, const float *restrict dy, const float *restrict w, float plus, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = dy[i] * (w[i] + plus);
}

/* A piece of a row: xhat, and g = dy w. */
struct piece {
    size_t n;
    const float *dy;
    float xhat[PIECE], g[PIECE], converted[PIECE];
};

static void load_piece(struct piece *p, const struct mt_layernorm_bwd *a, size_t row, size_t c, float mean)
{
    float x[PIECE], w[PIECE];
    size_t n = p->n = MT_MIN((size_t)PIECE, a->c - c);
    p->dy = mt_cpu_row_f32(a->dtype, a->dy, row * a->c + c, n, p->converted);
    centre(p->xhat, mt_cpu_row_f32(a->dtype, a->x, row * a->c + c, n, x), mean, a->rstd[row], n);
    multiply(p->g, p->dy, mt_cpu_row_f32(a->dtype, a->w, c, n, w), a->plus_one ? 1.0f : 0.0f, n);
}

MT_HOT static void input_gradient(float *restrict dx, const float *restrict g, const float *restrict xhat,
                                  const float *restrict res, const float mean[2], float rstd, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dx[i] = rstd * (g[i] - mean[0] - xhat[i] * mean[1]) + (res ? res[i] : 0.0f);
}

static void backward_row(const void *args, size_t row, float *sums)
{
    const struct mt_layernorm_bwd *a = args;
    struct piece p;
    float res[PIECE], out[PIECE];
    float mean = mean_of(a->dtype, a->x, row * a->c, a->c), of[2] = {0, 0};
    for (size_t c = 0; c < a->c; c += PIECE) {
        load_piece(&p, a, row, c, mean);
        of[0] += mt_cpu_sum(p.g, p.n);
        of[1] += mt_cpu_dot(p.g, p.xhat, p.n);
    }
    of[0] /= (float)a->c;
    of[1] /= (float)a->c;
    for (size_t c = 0; c < a->c; c += PIECE) {
        size_t at = row * a->c + c;
        load_piece(&p, a, row, c, mean);
        const float *pr = a->dres ? mt_cpu_row_f32(a->dtype, a->dres, at, p.n, res) : NULL;
        input_gradient(out, p.g, p.xhat, pr, of, a->rstd[row], p.n);
        if (sums)
            mt_cpu_add_products(sums + c, p.dy, p.xhat, p.n);
        if (sums && a->biased)
            mt_cpu_add_scaled(sums + a->c + c, p.dy, 1, p.n);
        mt_cpu_store_row(a->dtype, a->dx, at, p.n, out);
    }
}

void mt_cpu_run_layernorm_bwd(struct mt_cpu_device *d, const struct mt_layernorm_bwd *a)
{
    mt_cpu_sum_rows(d, backward_row, a, a->n, (struct mt_cpu_sums){ROW_BLOCK, sums_of(a), a->dw, a->workspace});
}

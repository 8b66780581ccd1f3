/* SPDX-License-Identifier: Apache-2.0 */
/* The rows' norms and scales of DoRA, and columns scaled by them. */
#include <math.h>

#include "device/cpu/cpu.h"

enum { PIECE = 2048 };

static float sum_of_squares(const struct mt_dora_scale *a, size_t row)
{
    float tmp[PIECE], sum = 0;
    for (size_t c = 0; c < a->c; c += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->c - c);
        const float *w = mt_cpu_row_f32(a->dtype, a->w, row * a->c + c, n, tmp);
        sum += mt_cpu_dot(w, w, n);
    }
    return sum;
}

/* Of rank r, in pieces of at most PIECE: sum over k of b_k (2 s wa_k + s^2 gram_k . b). */
static float of_adapter(const struct mt_dora_scale *a, size_t row)
{
    float bk[PIECE], bl[PIECE], term[PIECE], sum = 0;
    for (size_t k = 0; k < a->r; k += PIECE) {
        size_t nk = MT_MIN((size_t)PIECE, a->r - k);
        const float *b = mt_cpu_row_f32(a->dtype, a->b, row * a->r + k, nk, bk);
        for (size_t i = 0; i < nk; i++)
            term[i] = 0;
        for (size_t l = 0; l < a->r; l += PIECE) {
            size_t nl = MT_MIN((size_t)PIECE, a->r - l);
            const float *other = mt_cpu_row_f32(a->dtype, a->b, row * a->r + l, nl, bl);
            for (size_t i = 0; i < nk; i++)
                term[i] += mt_cpu_dot(a->gram + (k + i) * a->r + l, other, nl);
        }
        for (size_t i = 0; i < nk; i++)
            term[i] = 2 * a->s * a->wa[row * a->r + k + i] + a->s * a->s * term[i];
        sum += mt_cpu_dot(b, term, nk);
    }
    return sum;
}

static void scale_chunk(void *ctx, size_t chunk, int thread)
{
    const struct mt_dora_scale *a = ctx;
    size_t per = mt_cpu_rows_per_chunk(a->c + a->r * a->r), end = MT_MIN(a->n, (chunk + 1) * per);
    (void)thread;
    for (size_t row = chunk * per; row < end; row++) {
        float m;
        if (!a->magnitude) {
            a->scale[row] = 1;
            a->inverse[row] = 0;
            continue;
        }
        a->inverse[row] = 1 / sqrtf(sum_of_squares(a, row) + of_adapter(a, row));
        a->scale[row] = *mt_cpu_row_f32(a->dtype, a->magnitude, row, 1, &m) * a->inverse[row];
    }
}

void mt_cpu_run_dora_scale(struct mt_cpu_device *d, const struct mt_dora_scale *a)
{
    mt_pool_run(d->pool, scale_chunk, (void *)(uintptr_t)a, mt_div_up(a->n, mt_cpu_rows_per_chunk(a->c + a->r * a->r)));
}

MT_HOT static void scale_row(float *y, const float *x, const float *scale, size_t n)
{
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++)
        y[i] = x[i] * scale[i];
}

MT_HOT static void add_row(float *y, const float *x, size_t n)
{
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++)
        y[i] = x[i] + y[i];
}

static void columns_chunk(void *ctx, size_t chunk, int thread)
{
    const struct mt_scale_columns *a = ctx;
    float x[PIECE], y[PIECE];
    size_t per = mt_cpu_rows_per_chunk(a->c), end = MT_MIN(a->n, (chunk + 1) * per);
    (void)thread;
    for (size_t row = chunk * per; row < end; row++)
        for (size_t c = 0; c < a->c; c += PIECE) {
            size_t n = MT_MIN((size_t)PIECE, a->c - c), at = row * a->c + c;
            scale_row(y, mt_cpu_row_f32(a->dtype, a->x, at, n, x), a->scale + c, n);
            if (a->bias)
                add_row(y, mt_cpu_row_f32(a->dtype, a->bias, c, n, x), n);
            if (a->add)
                add_row(y, mt_cpu_row_f32(a->out_dtype, a->add, at, n, x), n);
            mt_cpu_store_row(a->out_dtype, a->out, at, n, y);
        }
}

void mt_cpu_run_scale_columns(struct mt_cpu_device *d, const struct mt_scale_columns *a)
{
    mt_pool_run(d->pool, columns_chunk, (void *)(uintptr_t)a, mt_div_up(a->n, mt_cpu_rows_per_chunk(a->c)));
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gate = sigmoid(<x, w>), act *= gate; backward with d = dgate gate (1 - gate): dx += d w, dw += sum over rows of d x.
 */
#include <string.h>

#include "device/cpu/cpu.h"
#include "device/cpu/vecmath.h"

enum { ROW_BLOCK = 32, PIECE = 2048 };

MT_HOT static void scale(float *y, const float *x, float by, size_t n)
{
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++)
        y[i] = by * x[i];
}

MT_HOT static void add_scaled(float *restrict y, const float *restrict x, float by, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] += by * x[i];
}

static void forward_row(const struct mt_shared_gate *a, size_t row)
{
    float x[PIECE], w[PIECE], dot = 0;
    for (size_t c = 0; c < a->c; c += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->c - c);
        const float *px = mt_cpu_row_f32(a->dtype, a->x, row * a->c + c, n, x);
        dot += mt_cpu_dot(px, mt_cpu_row_f32(a->dtype, a->w, c, n, w), n);
    }
    a->gate[row] = mt_sigmoidf(dot);
    for (size_t c = 0; c < a->f; c += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->f - c), at = row * a->f + c;
        float *y = mt_cpu_row_place(a->dtype, a->act, at, x);
        scale(y, mt_cpu_row_f32(a->dtype, a->act, at, n, x), a->gate[row], n);
        mt_cpu_store_row(a->dtype, a->act, at, n, y);
    }
}

static void forward_chunk(void *ctx, size_t chunk, int thread)
{
    const struct mt_shared_gate *a = ctx;
    size_t per = mt_cpu_rows_per_chunk(a->c + a->f), end = MT_MIN(a->n, (chunk + 1) * per);
    (void)thread;
    for (size_t r = chunk * per; r < end; r++)
        forward_row(a, r);
}

void mt_cpu_run_shared_gate(struct mt_cpu_device *d, const struct mt_shared_gate *a)
{
    size_t per = mt_cpu_rows_per_chunk(a->c + a->f);
    mt_pool_run(d->pool, forward_chunk, (void *)(uintptr_t)a, mt_div_up(a->n, per));
}

size_t mt_cpu_shared_gate_bwd_workspace(const struct mt_device_limits *l, const struct mt_shared_gate_bwd *a)
{
    (void)l;
    return mt_div_up(a->n, ROW_BLOCK) * a->c * sizeof(float);
}

static void backward_chunk(void *ctx, size_t chunk, int thread)
{
    const struct mt_shared_gate_bwd *a = ctx;
    float x[PIECE], w[PIECE], *dw = a->dw ? (float *)a->workspace + chunk * a->c : NULL;
    size_t end = MT_MIN(a->n, (chunk + 1) * ROW_BLOCK);
    (void)thread;
    if (dw)
        memset(dw, 0, a->c * sizeof(*dw));
    for (size_t c = 0; c < a->c; c += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->c - c);
        const float *pw = mt_cpu_row_f32(a->dtype, a->w, c, n, w);
        for (size_t r = chunk * ROW_BLOCK; r < end; r++) {
            float g = a->gate[r], d = a->dgate[r] * (g * (1.0f - g));
            add_scaled(a->dx + r * a->c + c, pw, d, n);
            if (dw)
                add_scaled(dw + c, mt_cpu_row_f32(a->dtype, a->x, r * a->c + c, n, x), d, n);
        }
    }
}

void mt_cpu_run_shared_gate_bwd(struct mt_cpu_device *d, const struct mt_shared_gate_bwd *a)
{
    size_t blocks = mt_div_up(a->n, ROW_BLOCK);
    mt_pool_run(d->pool, backward_chunk, (void *)(uintptr_t)a, blocks);
    if (a->dw)
        mt_cpu_fold(d, a->dw, a->workspace, blocks, a->c);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* y = x s, s = sigmoid(gate); dx = dy s, dgate = dy x s (1 - s). */
#include "device/cpu/cpu.h"
#include "device/cpu/vecmath.h"

enum { PIECE = 512, ROW_BLOCK = 16 };

MT_HOT static void forward(float *y, const float *x, const float *gate, size_t n)
{
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++)
        y[i] = x[i] * mt_sigmoidf(gate[i]);
}

/* dx overwrites dy, dgate gate; either may be the array itself. */
MT_HOT static void backward(float *dx, float *dgate, const float *dy, const float *x, const float *gate, size_t n)
{
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++) {
        float s = mt_sigmoidf(gate[i]), d = dy[i] * s;
        dgate[i] = d * x[i] * (1.0f - s);
        dx[i] = d;
    }
}

static void forward_chunk(void *ctx, size_t chunk, int thread)
{
    const struct mt_head_gate *a = ctx;
    size_t end = MT_MIN(a->n, (chunk + 1) * ROW_BLOCK);
    float x[PIECE], gate[PIECE], y[PIECE];
    (void)thread;
    for (size_t r = chunk * ROW_BLOCK; r < end; r++)
        for (size_t i = 0; i < a->x.n * a->x.dim;) {
            size_t h = i / a->x.dim, c = i % a->x.dim, n = MT_MIN((size_t)PIECE, a->x.dim - c);
            size_t to = mt_heads_at(&a->y, r, h) + c;
            float *p = mt_cpu_row_place(a->dtype, a->y.p, to, y);
            forward(p, mt_cpu_row_f32(a->dtype, a->x.p, mt_heads_at(&a->x, r, h) + c, n, x),
                    mt_cpu_row_f32(a->dtype, a->gate.p, mt_heads_at(&a->gate, r, h) + c, n, gate), n);
            mt_cpu_store_row(a->dtype, a->y.p, to, n, p);
            i += n;
        }
}

void mt_cpu_run_head_gate(struct mt_cpu_device *d, const struct mt_head_gate *a)
{
    mt_pool_run(d->pool, forward_chunk, (void *)(uintptr_t)a, mt_div_up(a->n, ROW_BLOCK));
}

static void backward_chunk(void *ctx, size_t chunk, int thread)
{
    const struct mt_head_gate_bwd *b = ctx;
    const struct mt_head_gate *a = &b->fwd;
    size_t end = MT_MIN(a->n, (chunk + 1) * ROW_BLOCK);
    float x[PIECE], gate[PIECE], dy[PIECE], dx[PIECE], dgate[PIECE];
    (void)thread;
    for (size_t r = chunk * ROW_BLOCK; r < end; r++)
        for (size_t i = 0; i < a->x.n * a->x.dim;) {
            size_t h = i / a->x.dim, c = i % a->x.dim, n = MT_MIN((size_t)PIECE, a->x.dim - c);
            size_t to = mt_heads_at(&b->dx, r, h) + c, to_gate = mt_heads_at(&b->dgate, r, h) + c;
            float *px = mt_cpu_row_place(a->dtype, b->dx.p, to, dx);
            float *pg = mt_cpu_row_place(a->dtype, b->dgate.p, to_gate, dgate);
            backward(px, pg, mt_cpu_row_f32(a->dtype, b->dy.p, mt_heads_at(&b->dy, r, h) + c, n, dy),
                     mt_cpu_row_f32(a->dtype, a->x.p, mt_heads_at(&a->x, r, h) + c, n, x),
                     mt_cpu_row_f32(a->dtype, a->gate.p, mt_heads_at(&a->gate, r, h) + c, n, gate), n);
            mt_cpu_store_row(a->dtype, b->dx.p, to, n, px);
            mt_cpu_store_row(a->dtype, b->dgate.p, to_gate, n, pg);
            i += n;
        }
}

void mt_cpu_run_head_gate_bwd(struct mt_cpu_device *d, const struct mt_head_gate_bwd *b)
{
    mt_pool_run(d->pool, backward_chunk, (void *)(uintptr_t)b, mt_div_up(b->fwd.n, ROW_BLOCK));
}

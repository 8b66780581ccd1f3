/* SPDX-License-Identifier: Apache-2.0 */
/*
 * y = t silu(z), t = w xhat, xhat = x rstd. Backward: dz = dy t silu'(z), and with dt = dy silu(z), g = w dt:
 * dx = rstd (g - xhat mean(g xhat)), dw = sum over rows and heads of dt xhat; over blocks of rows, then over blocks.
 * With the gate first: norm_of_gated.c.
 */
#include <math.h>

#include "device/cpu/cpu.h"
#include "device/cpu/gated.h"
#include "device/cpu/vecmath.h"

enum { ROW_BLOCK = 32, MOST = 1024 }; /* MOST: elements of a head */

/* A head of a row: what forward and backward make of it. */
struct head {
    float rstd;
    float x[MOST], z[MOST], w[MOST], xhat[MOST], t[MOST]; /* the last two rounded */
};

MT_HOT static void gate(float *restrict y, const float *restrict t, const float *restrict z, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = t[i] * (z[i] * mt_sigmoidf(z[i]));
}

/* dz, and in place of dy dt. */
MT_HOT static void gate_backward(float *restrict dz, float *restrict dy, const float *restrict t,
                                 const float *restrict z, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float s = mt_sigmoidf(z[i]);
        dz[i] = dy[i] * t[i] * (s * (1.0f + z[i] * (1.0f - s)));
        dy[i] *= z[i] * s;
    }
}

MT_HOT static void input_gradient(float *restrict dx, const float *restrict g, const float *restrict x, float rstd,
                                  float mean, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dx[i] = rstd * (g[i] - x[i] * rstd * mean);
}

static void load(const struct mt_gated_norm *a, size_t row, size_t head, struct head *h)
{
    size_t n = a->x.dim;
    mt_cpu_load_row(h->x, a->dtype, a->x.p, mt_heads_at(&a->x, row, head), n);
    mt_cpu_load_row(h->z, a->dtype, a->z.p, mt_cpu_gate_at(&a->z, n, row, head), n);
    h->rstd = 1.0f / sqrtf(mt_cpu_dot(h->x, h->x, n) / (float)n + a->eps);
    mt_cpu_scale(h->xhat, h->x, h->rstd, n);
    mt_cpu_round_row(a->dtype, h->xhat, n);
    mt_cpu_multiply(h->t, h->xhat, h->w, n);
    mt_cpu_round_row(a->dtype, h->t, n);
}

static void forward_row(const void *args, size_t row)
{
    const struct mt_gated_norm *a = args;
    struct head h;
    float tmp[MOST];
    mt_cpu_load_row(h.w, a->dtype, a->w, 0, a->x.dim);
    for (size_t i = 0; i < a->x.n; i++) {
        size_t to = mt_heads_at(&a->y, row, i);
        load(a, row, i, &h);
        float *y = mt_cpu_row_place(a->dtype, a->y.p, to, tmp);
        gate(y, h.t, h.z, a->x.dim);
        mt_cpu_store_row(a->dtype, a->y.p, to, a->x.dim, y);
    }
}

void mt_cpu_run_gated_norm(struct mt_cpu_device *d, const struct mt_gated_norm *a)
{
    mt_cpu_by_rows(d, a->gate_first ? mt_cpu_norm_of_gated_row : forward_row, a, a->n, a->x.n * a->x.dim);
}

size_t mt_cpu_gated_norm_bwd_workspace(const struct mt_device_limits *, const struct mt_gated_norm_bwd *b)
{
    return mt_cpu_sums_bytes(b->fwd.n, ROW_BLOCK, mt_gated_norm_weights(&b->fwd));
}

static void backward_head(const struct mt_gated_norm_bwd *b, size_t row, size_t i, struct head *h, float *dw)
{
    const struct mt_gated_norm *a = &b->fwd;
    size_t n = a->x.dim, to = mt_heads_at(&b->dx, row, i), to_z = mt_cpu_gate_at(&b->dz, n, row, i);
    float dy[MOST], g[MOST], tmp[MOST];
    load(a, row, i, h);
    mt_cpu_load_row(dy, a->dtype, b->dy.p, mt_heads_at(&b->dy, row, i), n);
    float *dz = mt_cpu_row_place(a->dtype, b->dz.p, to_z, tmp);
    gate_backward(dz, dy, h->t, h->z, n);
    mt_cpu_store_row(a->dtype, b->dz.p, to_z, n, dz);
    if (dw)
        mt_cpu_add_products(dw, dy, h->xhat, n);
    mt_cpu_multiply(g, dy, h->w, n);
    float mean = mt_cpu_dot(g, h->x, n) * h->rstd / (float)n;
    float *dx = mt_cpu_row_place(a->dtype, b->dx.p, to, tmp);
    input_gradient(dx, g, h->x, h->rstd, mean, n);
    mt_cpu_store_row(a->dtype, b->dx.p, to, n, dx);
}

static void backward_row(const void *args, size_t row, float *dw)
{
    const struct mt_gated_norm_bwd *b = args;
    struct head h;
    mt_cpu_load_row(h.w, b->fwd.dtype, b->fwd.w, 0, b->fwd.x.dim);
    for (size_t i = 0; i < b->fwd.x.n; i++)
        backward_head(b, row, i, &h, dw);
}

void mt_cpu_run_gated_norm_bwd(struct mt_cpu_device *d, const struct mt_gated_norm_bwd *b)
{
    mt_cpu_sum_rows(d, b->fwd.gate_first ? mt_cpu_norm_of_gated_row_bwd : backward_row, b, b->fwd.n,
                    (struct mt_cpu_sums){ROW_BLOCK, mt_gated_norm_weights(&b->fwd), b->dw, b->workspace});
}

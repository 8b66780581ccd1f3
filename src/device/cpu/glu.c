/* SPDX-License-Identifier: Apache-2.0 */
/* out = act(g) u; dg = dout u act'(g), du = dout act(g). Computed in f32, rounded once. */
#include "device/cpu/cpu.h"
#include "device/cpu/vecmath.h"

enum { PIECE = 1024 };

/* act(x) = x s(x); gelu's s = (1 + tanh(k (x + 0.044715 x^3))) / 2 (Hendrycks and Gimpel 2016). */
MT_HOT_PART float gate_of(enum mt_glu_kind kind, float x)
{
    if (kind == MT_GLU_SILU)
        return mt_sigmoidf(x);
    return 0.5f * (1.0f + mt_tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}

/* act'(x) */
MT_HOT_PART float slope_of(enum mt_glu_kind kind, float x, float s)
{
    if (kind == MT_GLU_SILU)
        return s * (1.0f + x * (1.0f - s));
    return s + x * (2.0f * s * (1.0f - s) * 0.7978845608f * (1.0f + 3.0f * 0.044715f * x * x));
}

MT_HOT_PART void forward_of(enum mt_glu_kind kind, float *restrict y, const float *restrict g,
                            const float *restrict u, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = g[i] * gate_of(kind, g[i]) * u[i];
}

MT_HOT static void silu_forward(float *restrict y, const float *restrict g, const float *restrict u, size_t n)
{
    forward_of(MT_GLU_SILU, y, g, u, n);
}

MT_HOT static void gelu_forward(float *restrict y, const float *restrict g, const float *restrict u, size_t n)
{
    forward_of(MT_GLU_GELU_TANH, y, g, u, n);
}

/* Each may lie over another of the same index: dg over g, du over u, y over dy. */
struct pieces {
    float *dg, *du, *y;
    const float *g, *u, *dy;
};

MT_HOT_PART void backward_of(enum mt_glu_kind kind, const struct pieces *p, size_t n)
{
    float *dg = p->dg, *du = p->du, *y = p->y;
    const float *g = p->g, *u = p->u, *dy = p->dy;
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++) {
        float s = gate_of(kind, g[i]), act = g[i] * s, up = u[i], gate = dy[i] * up;
        du[i] = dy[i] * act;
        dg[i] = gate * slope_of(kind, g[i], s);
        y[i] = act * up;
    }
}

MT_HOT static void silu_backward(const struct pieces *p, size_t n)
{
    backward_of(MT_GLU_SILU, p, n);
}

MT_HOT static void gelu_backward(const struct pieces *p, size_t n)
{
    backward_of(MT_GLU_GELU_TANH, p, n);
}

static void forward_chunk(void *ctx, size_t chunk, int thread)
{
    const struct mt_glu *a = ctx;
    size_t per = mt_cpu_rows_per_chunk(a->f), end = MT_MIN(a->n, (chunk + 1) * per);
    float g[PIECE], u[PIECE], tmp[PIECE];
    (void)thread;
    for (size_t r = chunk * per; r < end; r++)
        for (size_t c = 0; c < a->f; c += PIECE) {
            size_t n = MT_MIN((size_t)PIECE, a->f - c), at = r * 2 * a->f + c;
            const float *pg = mt_cpu_row_f32(a->dtype, a->gate_up, at, n, g);
            const float *pu = mt_cpu_row_f32(a->dtype, a->gate_up, at + a->f, n, u);
            float *y = mt_cpu_row_place(a->dtype, a->out, r * a->f + c, tmp);
            (a->kind == MT_GLU_SILU ? silu_forward : gelu_forward)(y, pg, pu, n);
            mt_cpu_store_row(a->dtype, a->out, r * a->f + c, n, y);
        }
}

void mt_cpu_run_glu(struct mt_cpu_device *d, const struct mt_glu *a)
{
    mt_pool_run(d->pool, forward_chunk, (void *)(uintptr_t)a,
                mt_div_up(a->n, mt_cpu_rows_per_chunk(a->f)));
}

static void backward_chunk(void *ctx, size_t chunk, int thread)
{
    const struct mt_glu_bwd *a = ctx;
    size_t per = mt_cpu_rows_per_chunk(a->f), end = MT_MIN(a->n, (chunk + 1) * per);
    float g[PIECE], u[PIECE], dy[PIECE];
    (void)thread;
    for (size_t r = chunk * per; r < end; r++)
        for (size_t c = 0; c < a->f; c += PIECE) {
            size_t n = MT_MIN((size_t)PIECE, a->f - c), at = r * 2 * a->f + c;
            struct pieces p = {.g = mt_cpu_row_f32(a->dtype, a->gate_up, at, n, g),
                               .u = mt_cpu_row_f32(a->dtype, a->gate_up, at + a->f, n, u),
                               .dy = mt_cpu_row_f32(a->dtype, a->dout, r * a->f + c, n, dy),
                               .dg = mt_cpu_row_place(a->dtype, a->dgate_up, at, g),
                               .du = mt_cpu_row_place(a->dtype, a->dgate_up, at + a->f, u)};
            p.y = a->out ? mt_cpu_row_place(a->dtype, a->out, r * a->f + c, dy) : dy;
            (a->kind == MT_GLU_SILU ? silu_backward : gelu_backward)(&p, n);
            mt_cpu_store_row(a->dtype, a->dgate_up, at, n, p.dg);
            mt_cpu_store_row(a->dtype, a->dgate_up, at + a->f, n, p.du);
            if (a->out)
                mt_cpu_store_row(a->dtype, a->out, r * a->f + c, n, p.y);
        }
}

void mt_cpu_run_glu_bwd(struct mt_cpu_device *d, const struct mt_glu_bwd *a)
{
    mt_pool_run(d->pool, backward_chunk, (void *)(uintptr_t)a,
                mt_div_up(a->n, mt_cpu_rows_per_chunk(a->f)));
}

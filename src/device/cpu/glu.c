/* SPDX-License-Identifier: Apache-2.0 */
/* y = act(g) u; dg = dy u act'(g), du = dy act(g). Computed in f32, rounded once. */
#include <string.h>

#include "device/cpu/cpu.h"
#include "device/cpu/vecmath.h"

enum { PIECE = 1024 };

/* y = act * up. dy/dgate = slope * up, dy/dup = du; slope or du is 0 where gate or up was clamped. Without a gate,
 * it is the only input that is called the gate: up is 1. */
struct terms {
    float act, up, slope, du;
};

struct shape {
    float alpha, limit;
};

/* act(x) = x s(x); gelu's s = (1 + tanh(k (x + 0.044715 x^3))) / 2 (Hendrycks and Gimpel 2016). */
MT_HOT_PART struct terms terms_of(enum mt_glu_kind kind, struct shape p, float g, float u)
{
    if (kind == MT_GLU_SILU) {
        float s = mt_sigmoidf(g);
        return (struct terms){g * s, u, s * (1.0f + g * (1.0f - s)), g * s};
    }
    if (kind == MT_GLU_GELU_TANH) {
        float s = 0.5f * (1.0f + mt_tanhf(0.7978845608f * (g + 0.044715f * g * g * g)));
        float slope = s + g * (2.0f * s * (1.0f - s) * 0.7978845608f * (1.0f + 3.0f * 0.044715f * g * g));
        return (struct terms){g * s, u, slope, g * s};
    }
    if (kind == MT_GLU_RELU2) {
        float r = g < 0.0f ? 0.0f : g; /* a NaN stays one */
        return (struct terms){r * r, 1.0f, 2.0f * r, 0.0f};
    }
    float x = g > p.limit ? p.limit : g, v = u > p.limit ? p.limit : u, s = mt_sigmoidf(p.alpha * x), act = x * s;
    v = v < -p.limit ? -p.limit : v;
    return (struct terms){act, v + 1.0f, x == g ? s * (1.0f + p.alpha * x * (1.0f - s)) : 0.0f, v == u ? act : 0.0f};
}

/* dg may overwrite g, du u, and y dy. */
struct pieces {
    float *dg, *du, *y;
    const float *g, *u, *dy;
    struct shape shape;
    float weight; /* of the expert */
};

MT_HOT_PART void forward_of(enum mt_glu_kind kind, const struct pieces *p, size_t n)
{
    float *restrict y = p->y;
    const float *restrict g = p->g, *restrict u = p->u;
    struct shape shape = p->shape;
    for (size_t i = 0; i < n; i++) {
        struct terms t = terms_of(kind, shape, g[i], u[i]);
        y[i] = t.act * t.up;
    }
}

MT_HOT_PART void backward_of(enum mt_glu_kind kind, const struct pieces *p, size_t n)
{
    float *dg = p->dg, *du = p->du, *y = p->y;
    const float *g = p->g, *u = p->u, *dy = p->dy;
    struct shape shape = p->shape;
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++) {
        struct terms t = terms_of(kind, shape, g[i], u[i]);
        float gate = dy[i] * t.up;
        du[i] = dy[i] * t.du;
        dg[i] = gate * t.slope;
        y[i] = t.act * t.up;
    }
}

/* Multiplies all three by the expert's weight; returns the sum of dy y without it, in MT_LANES lanes. */
MT_HOT_PART float expert_of(enum mt_glu_kind kind, const struct pieces *p, size_t n)
{
    float *dg = p->dg, *du = p->du, *y = p->y, product[PIECE];
    const float *g = p->g, *u = p->u, *dy = p->dy;
    struct shape shape = p->shape;
    float w = p->weight;
    const bool gated = kind != MT_GLU_RELU2;
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++) {
        struct terms t = terms_of(kind, shape, g[i], gated ? u[i] : 1.0f);
        float d = dy[i], weighted = w * d, out = t.act * t.up;
        product[i] = d * out;
        if (gated)
            du[i] = weighted * t.du;
        dg[i] = weighted * t.up * t.slope;
        y[i] = w * out;
    }
    return mt_cpu_sum(product, n);
}

#define FOR_KIND(name, kind)                                                                       \
    MT_HOT static void name##_forward(const struct pieces *p, size_t n)                            \
    {                                                                                              \
        forward_of(kind, p, n);                                                                    \
    }                                                                                              \
    MT_HOT static void name##_backward(const struct pieces *p, size_t n)                           \
    {                                                                                              \
        backward_of(kind, p, n);                                                                   \
    }                                                                                              \
    MT_HOT static float name##_expert(const struct pieces *p, size_t n)                            \
    {                                                                                              \
        return expert_of(kind, p, n);                                                              \
    }
FOR_KIND(silu, MT_GLU_SILU)
FOR_KIND(gelu, MT_GLU_GELU_TANH)
FOR_KIND(clamped, MT_GLU_CLAMPED)
#undef FOR_KIND

MT_HOT static float relu2_expert(const struct pieces *p, size_t n)
{
    return expert_of(MT_GLU_RELU2, p, n);
}

static const struct {
    void (*forward)(const struct pieces *p, size_t n);
    void (*backward)(const struct pieces *p, size_t n);
    float (*expert)(const struct pieces *p, size_t n);
} loops[] = {
    [MT_GLU_SILU] = {silu_forward, silu_backward, silu_expert},
    [MT_GLU_GELU_TANH] = {gelu_forward, gelu_backward, gelu_expert},
    [MT_GLU_CLAMPED] = {clamped_forward, clamped_backward, clamped_expert},
    [MT_GLU_RELU2] = {.expert = relu2_expert},
};

static void forward_chunk(void *ctx, size_t chunk, int thread)
{
    const struct mt_glu *a = ctx;
    size_t per = mt_cpu_rows_per_chunk(a->f), end = MT_MIN(a->n, (chunk + 1) * per);
    float g[PIECE], u[PIECE], tmp[PIECE];
    (void)thread;
    for (size_t r = chunk * per; r < end; r++)
        for (size_t c = 0; c < a->f; c += PIECE) {
            size_t n = MT_MIN((size_t)PIECE, a->f - c), at = r * 2 * a->f + c;
            struct pieces p = {.shape = {a->alpha, a->limit},
                               .g = mt_cpu_row_f32(a->dtype, a->gate_up, at, n, g),
                               .u = mt_cpu_row_f32(a->dtype, a->gate_up, at + a->f, n, u),
                               .y = mt_cpu_row_place(a->dtype, a->out, r * a->f + c, tmp)};
            loops[a->kind].forward(&p, n);
            mt_cpu_store_row(a->dtype, a->out, r * a->f + c, n, p.y);
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
            struct pieces p = {.shape = {a->alpha, a->limit},
                               .g = mt_cpu_row_f32(a->dtype, a->gate_up, at, n, g),
                               .u = mt_cpu_row_f32(a->dtype, a->gate_up, at + a->f, n, u),
                               .dy = mt_cpu_row_f32(a->dtype, a->dout, r * a->f + c, n, dy),
                               .dg = mt_cpu_row_place(a->dtype, a->dgate_up, at, g),
                               .du = mt_cpu_row_place(a->dtype, a->dgate_up, at + a->f, u)};
            p.y = a->out ? mt_cpu_row_place(a->dtype, a->out, r * a->f + c, dy) : dy;
            loops[a->kind].backward(&p, n);
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

/* --- of an expert ----------------------------------------------------------------------------- */

/* <down_bias, d_o> of a row. */
static float bias_part(const struct mt_expert_glu_bwd *a, size_t row)
{
    float b[PIECE], d[PIECE], sum = 0;
    for (size_t c = 0; a->down_bias && c < a->c; c += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->c - c);
        sum += mt_cpu_dot(mt_cpu_row_f32(a->dtype, a->down_bias, c, n, b),
                          mt_cpu_row_f32(a->dtype, a->d_o, row * a->c + c, n, d), n);
    }
    return sum;
}

static void expert_row(const struct mt_expert_glu_bwd *a, size_t r)
{
    float g[PIECE], u[PIECE], dy[PIECE], sum = 0;
    size_t entry = a->list ? (size_t)a->list[r] : r, inputs = mt_glu_inputs(a->kind);
    for (size_t c = 0; c < a->f; c += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->f - c), at = r * inputs * a->f + c, at_out = r * a->f + c;
        struct pieces p = {.shape = {a->alpha, a->limit}, .weight = a->weights[entry],
                           .g = mt_cpu_row_f32(a->dtype, a->gate_up, at, n, g),
                           .dy = mt_cpu_row_f32(a->dtype, a->dout, at_out, n, dy),
                           .dg = mt_cpu_row_place(a->dtype, a->dgate_up, at, g),
                           .y = mt_cpu_row_place(a->dtype, a->out, at_out, dy)};
        if (inputs == 2) {
            p.u = mt_cpu_row_f32(a->dtype, a->gate_up, at + a->f, n, u);
            p.du = mt_cpu_row_place(a->dtype, a->dgate_up, at + a->f, u);
        }
        sum += loops[a->kind].expert(&p, n);
        mt_cpu_store_row(a->dtype, a->dgate_up, at, n, p.dg);
        if (inputs == 2)
            mt_cpu_store_row(a->dtype, a->dgate_up, at + a->f, n, p.du);
        mt_cpu_store_row(a->dtype, a->out, at_out, n, p.y);
    }
    a->dweights[entry] = sum + bias_part(a, r);
}

static void expert_chunk(void *ctx, size_t chunk, int thread)
{
    const struct mt_expert_glu_bwd *a = ctx;
    size_t per = mt_cpu_rows_per_chunk(a->f), end = MT_MIN(a->n_padded, (chunk + 1) * per);
    size_t bytes = a->f * mt_dtype_size(a->dtype), inputs = mt_glu_inputs(a->kind);
    (void)thread;
    for (size_t r = chunk * per; r < end; r++) {
        if (r < a->n) {
            expert_row(a, r);
            continue;
        }
        memset((char *)a->dgate_up + inputs * r * bytes, 0, inputs * bytes);
        memset((char *)a->out + r * bytes, 0, bytes);
    }
}

void mt_cpu_run_expert_glu_bwd(struct mt_cpu_device *d, const struct mt_expert_glu_bwd *a)
{
    mt_pool_run(d->pool, expert_chunk, (void *)(uintptr_t)a, mt_div_up(a->n_padded, mt_cpu_rows_per_chunk(a->f)));
}

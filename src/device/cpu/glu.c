/* SPDX-License-Identifier: Apache-2.0 */
/* y = act(g) u; dg = dy u act'(g), du = dy act(g). Computed in f32, rounded once. Without a gate, u is 1. */
#include <string.h>

#include "device/cpu/pointwise.h"
#include "device/cpu/vecmath.h"

enum { PIECE = MT_CPU_PIECE };

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

enum { G, U, DY };
enum { DG, DU, Y };

/* A unit; the output is of `in[G]` alone where `gated` is false. */
MT_HOT_PART void forward_of(enum mt_glu_kind kind, bool gated, struct shape shape, const struct mt_cpu_piece *p)
{
    float *restrict y = p->out[Y];
    const float *restrict g = p->in[G], *restrict u = p->in[U];
    for (size_t i = 0; i < p->n; i++) {
        struct terms t = terms_of(kind, shape, g[i], gated ? u[i] : 1.0f);
        y[i] = t.act * t.up;
    }
}

/* dg may overwrite g, du u, and y dy. */
MT_HOT_PART void backward_of(enum mt_glu_kind kind, bool gated, struct shape shape, const struct mt_cpu_piece *p)
{
    float *dg = p->out[DG], *du = p->out[DU], *y = p->out[Y];
    const float *g = p->in[G], *u = p->in[U], *dy = p->in[DY];
    MT_INDEPENDENT
    for (size_t i = 0; i < p->n; i++) {
        struct terms t = terms_of(kind, shape, g[i], gated ? u[i] : 1.0f);
        float gate = dy[i] * t.up;
        if (gated)
            du[i] = dy[i] * t.du;
        dg[i] = gate * t.slope;
        y[i] = t.act * t.up;
    }
}

/* Multiplies all three by the expert's weight; returns the sum of dy y without it, in MT_LANES lanes. */
MT_HOT_PART float expert_of(enum mt_glu_kind kind, bool gated, struct shape shape, float w,
                            const struct mt_cpu_piece *p)
{
    float *dg = p->out[DG], *du = p->out[DU], *y = p->out[Y], product[PIECE];
    const float *g = p->in[G], *u = p->in[U], *dy = p->in[DY];
    MT_INDEPENDENT
    for (size_t i = 0; i < p->n; i++) {
        struct terms t = terms_of(kind, shape, g[i], gated ? u[i] : 1.0f);
        float d = dy[i], weighted = w * d, out = t.act * t.up;
        product[i] = d * out;
        if (gated)
            du[i] = weighted * t.du;
        dg[i] = weighted * t.up * t.slope;
        y[i] = w * out;
    }
    return mt_cpu_sum(product, p->n);
}

#define FOR_KIND(name, kind, gated)                                                                \
    MT_HOT static void name##_forward(struct shape s, const struct mt_cpu_piece *p)                \
    {                                                                                              \
        forward_of(kind, gated, s, p);                                                             \
    }                                                                                              \
    MT_HOT static void name##_backward(struct shape s, const struct mt_cpu_piece *p)               \
    {                                                                                              \
        backward_of(kind, gated, s, p);                                                            \
    }                                                                                              \
    MT_HOT static float name##_expert(struct shape s, float w, const struct mt_cpu_piece *p)       \
    {                                                                                              \
        return expert_of(kind, gated, s, w, p);                                                    \
    }                                                                                              \
    static const struct loops name = {name##_forward, name##_backward, name##_expert};
struct loops {
    void (*forward)(struct shape s, const struct mt_cpu_piece *p);
    void (*backward)(struct shape s, const struct mt_cpu_piece *p);
    float (*expert)(struct shape s, float w, const struct mt_cpu_piece *p);
};
FOR_KIND(silu, MT_GLU_SILU, true)
FOR_KIND(gelu, MT_GLU_GELU_TANH, true)
FOR_KIND(clamped, MT_GLU_CLAMPED, true)
FOR_KIND(relu2, MT_GLU_RELU2, false)
FOR_KIND(gelu_alone, MT_GLU_GELU_TANH, false)
#undef FOR_KIND

static const struct loops *const units[] = {
    [MT_GLU_SILU] = &silu, [MT_GLU_GELU_TANH] = &gelu, [MT_GLU_CLAMPED] = &clamped, [MT_GLU_RELU2] = &relu2};
static const struct loops *const activations[] = {[MT_ACTIVATE_RELU2] = &relu2, [MT_ACTIVATE_GELU_TANH] = &gelu_alone};

struct unit {
    const struct loops *loops;
    struct shape shape;
};

static void forward(const void *args, const struct mt_cpu_piece *p)
{
    const struct unit *u = args;
    u->loops->forward(u->shape, p);
}

static void backward(const void *args, const struct mt_cpu_piece *p)
{
    const struct unit *u = args;
    u->loops->backward(u->shape, p);
}

void mt_cpu_run_glu(struct mt_cpu_device *d, const struct mt_glu *a)
{
    struct unit u = {units[a->kind], {a->alpha, a->limit}};
    mt_cpu_run_pointwise(d, &(struct mt_cpu_pointwise){
        .f = forward, .args = &u, .n = a->n, .heads = 1, .dim = a->f,
        .in = {mt_cpu_rows(a->dtype, a->gate_up, 0, 2 * a->f), mt_cpu_rows(a->dtype, a->gate_up, a->f, 2 * a->f)},
        .out = {[Y] = mt_cpu_rows(a->dtype, a->out, 0, a->f)}});
}

void mt_cpu_run_glu_bwd(struct mt_cpu_device *d, const struct mt_glu_bwd *a)
{
    struct unit u = {units[a->kind], {a->alpha, a->limit}};
    mt_cpu_run_pointwise(d, &(struct mt_cpu_pointwise){
        .f = backward, .args = &u, .n = a->n, .heads = 1, .dim = a->f,
        .in = {mt_cpu_rows(a->dtype, a->gate_up, 0, 2 * a->f), mt_cpu_rows(a->dtype, a->gate_up, a->f, 2 * a->f),
               mt_cpu_rows(a->dtype, a->dout, 0, a->f)},
        .out = {mt_cpu_rows(a->dtype, a->dgate_up, 0, 2 * a->f), mt_cpu_rows(a->dtype, a->dgate_up, a->f, 2 * a->f),
                mt_cpu_rows(a->dtype, a->out, 0, a->f)}});
}

void mt_cpu_run_activate(struct mt_cpu_device *d, const struct mt_activate *a)
{
    mt_cpu_run_pointwise(d, &(struct mt_cpu_pointwise){
        .f = forward, .args = &(struct unit){.loops = activations[a->kind]}, .n = a->n, .heads = 1, .dim = a->f,
        .in = {mt_cpu_rows(a->dtype, a->x, 0, a->f)}, .out = {[Y] = mt_cpu_rows(a->dtype, a->out, 0, a->f)}});
}

void mt_cpu_run_activate_bwd(struct mt_cpu_device *d, const struct mt_activate_bwd *a)
{
    mt_cpu_run_pointwise(d, &(struct mt_cpu_pointwise){
        .f = backward, .args = &(struct unit){.loops = activations[a->kind]}, .n = a->n, .heads = 1, .dim = a->f,
        .in = {[G] = mt_cpu_rows(a->dtype, a->x, 0, a->f), [DY] = mt_cpu_rows(a->dtype, a->dout, 0, a->f)},
        .out = {[DG] = mt_cpu_rows(a->dtype, a->dx, 0, a->f), [Y] = mt_cpu_rows(a->dtype, a->out, 0, a->f)}});
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

static void expert_row(const void *args, size_t r)
{
    const struct mt_expert_glu_bwd *a = args;
    float g[PIECE], u[PIECE], dy[PIECE], sum = 0;
    size_t bytes = a->f * mt_dtype_size(a->dtype), inputs = mt_glu_inputs(a->kind);
    if (r >= a->n) {
        memset((char *)a->dgate_up + inputs * r * bytes, 0, inputs * bytes);
        memset((char *)a->out + r * bytes, 0, bytes);
        return;
    }
    size_t entry = a->list ? (size_t)a->list[r] : r;
    for (size_t c = 0; c < a->f; c += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->f - c), at = r * inputs * a->f + c, at_out = r * a->f + c;
        struct mt_cpu_piece p = {.n = n, .in = {[G] = mt_cpu_row_f32(a->dtype, a->gate_up, at, n, g),
                                                [DY] = mt_cpu_row_f32(a->dtype, a->dout, at_out, n, dy)},
                                 .out = {[DG] = mt_cpu_row_place(a->dtype, a->dgate_up, at, g),
                                         [Y] = mt_cpu_row_place(a->dtype, a->out, at_out, dy)}};
        if (inputs == 2) {
            p.in[U] = mt_cpu_row_f32(a->dtype, a->gate_up, at + a->f, n, u);
            p.out[DU] = mt_cpu_row_place(a->dtype, a->dgate_up, at + a->f, u);
        }
        sum += units[a->kind]->expert((struct shape){a->alpha, a->limit}, a->weights[entry], &p);
        mt_cpu_store_row(a->dtype, a->dgate_up, at, n, p.out[DG]);
        if (inputs == 2)
            mt_cpu_store_row(a->dtype, a->dgate_up, at + a->f, n, p.out[DU]);
        mt_cpu_store_row(a->dtype, a->out, at_out, n, p.out[Y]);
    }
    a->dweights[entry] = sum + bias_part(a, r);
}

void mt_cpu_run_expert_glu_bwd(struct mt_cpu_device *d, const struct mt_expert_glu_bwd *a)
{
    mt_cpu_by_rows(d, expert_row, a, a->n_padded, a->f);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* y = act(x); dx = dy act'(x). Computed in f32, rounded once. */
#include "device/cpu/cpu.h"
#include "device/cpu/vecmath.h"

enum { PIECE = 1024 };

struct value {
    float y, slope;
};

MT_HOT_PART struct value value_of(enum mt_activate_kind kind, float x)
{
    if (kind == MT_ACTIVATE_RELU2) {
        float r = x < 0.0f ? 0.0f : x; /* a NaN stays one */
        return (struct value){r * r, 2.0f * r};
    }
    float s = 0.5f * (1.0f + mt_tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
    return (struct value){
        x * s, s + x * (2.0f * s * (1.0f - s) * 0.7978845608f * (1.0f + 3.0f * 0.044715f * x * x))};
}

MT_HOT_PART void forward_of(enum mt_activate_kind kind, float *restrict y, const float *restrict x,
                            size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = value_of(kind, x[i]).y;
}

/* dx may be x, and y dy. */
MT_HOT_PART void backward_of(enum mt_activate_kind kind, float *dx, float *y, const float *x,
                             const float *dy, size_t n)
{
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++) {
        struct value v = value_of(kind, x[i]);
        dx[i] = dy[i] * v.slope;
        y[i] = v.y;
    }
}

#define FOR_KIND(name, kind)                                                                       \
    MT_HOT static void name##_forward(float *y, const float *x, size_t n)                          \
    {                                                                                              \
        forward_of(kind, y, x, n);                                                                 \
    }                                                                                              \
    MT_HOT static void name##_backward(float *dx, float *y, const float *x, const float *dy,       \
                                       size_t n)                                                   \
    {                                                                                              \
        backward_of(kind, dx, y, x, dy, n);                                                        \
    }
FOR_KIND(relu2, MT_ACTIVATE_RELU2)
FOR_KIND(gelu, MT_ACTIVATE_GELU_TANH)
#undef FOR_KIND

static const struct {
    void (*forward)(float *y, const float *x, size_t n);
    void (*backward)(float *dx, float *y, const float *x, const float *dy, size_t n);
} loops[] = {
    [MT_ACTIVATE_RELU2] = {relu2_forward, relu2_backward},
    [MT_ACTIVATE_GELU_TANH] = {gelu_forward, gelu_backward},
};

static void forward_chunk(void *ctx, size_t chunk, int thread)
{
    const struct mt_activate *a = ctx;
    size_t per = mt_cpu_rows_per_chunk(a->f), end = MT_MIN(a->n, (chunk + 1) * per) * a->f;
    float x[PIECE], tmp[PIECE];
    (void)thread;
    for (size_t at = chunk * per * a->f; at < end; at += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, end - at);
        float *y = mt_cpu_row_place(a->dtype, a->out, at, tmp);
        loops[a->kind].forward(y, mt_cpu_row_f32(a->dtype, a->x, at, n, x), n);
        mt_cpu_store_row(a->dtype, a->out, at, n, y);
    }
}

void mt_cpu_run_activate(struct mt_cpu_device *d, const struct mt_activate *a)
{
    mt_pool_run(d->pool, forward_chunk, (void *)(uintptr_t)a,
                mt_div_up(a->n, mt_cpu_rows_per_chunk(a->f)));
}

static void backward_chunk(void *ctx, size_t chunk, int thread)
{
    const struct mt_activate_bwd *a = ctx;
    size_t per = mt_cpu_rows_per_chunk(a->f), end = MT_MIN(a->n, (chunk + 1) * per) * a->f;
    float tmp_x[PIECE], tmp_dy[PIECE], unwanted[PIECE];
    (void)thread;
    for (size_t at = chunk * per * a->f; at < end; at += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, end - at);
        const float *x = mt_cpu_row_f32(a->dtype, a->x, at, n, tmp_x);
        const float *dy = mt_cpu_row_f32(a->dtype, a->dout, at, n, tmp_dy);
        float *dx = mt_cpu_row_place(a->dtype, a->dx, at, tmp_x);
        float *y = a->out ? mt_cpu_row_place(a->dtype, a->out, at, tmp_dy) : unwanted;
        loops[a->kind].backward(dx, y, x, dy, n);
        mt_cpu_store_row(a->dtype, a->dx, at, n, dx);
        if (a->out)
            mt_cpu_store_row(a->dtype, a->out, at, n, y);
    }
}

void mt_cpu_run_activate_bwd(struct mt_cpu_device *d, const struct mt_activate_bwd *a)
{
    mt_pool_run(d->pool, backward_chunk, (void *)(uintptr_t)a,
                mt_div_up(a->n, mt_cpu_rows_per_chunk(a->f)));
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * xIELU (Huang and Schlag 2024), and its gradient by x and by both alphas, which are sums over all elements: over
 * chunks of rows, then over chunks in order. Computed in f32, rounded once.
 */
#include "device/cpu/pointwise.h"
#include "device/cpu/vecmath.h"

enum { PIECE = MT_CPU_PIECE };

/* The numbers of the curve, with the derivatives of softplus for backward. */
struct curve {
    float p, n, beta, eps;
    float dp, dn;
};

static float softplus(float x)
{
    return x > 20 ? x : log1pf(expf(x));
}

static struct curve curve_of(enum mt_dtype t, const void *shape)
{
    float tmp[4];
    const float *s = mt_cpu_row_f32(t, shape, 0, 4, tmp);
    return (struct curve){.p = softplus(s[0]), .n = s[2] + softplus(s[1]), .beta = s[2], .eps = s[3],
                          .dp = mt_sigmoidf(s[0]), .dn = mt_sigmoidf(s[1])};
}

/* e^x - 1 for x <= 0, with a small relative error: 2 t / (1 - t), t = tanh(x / 2). */
MT_HOT_PART float expm1_of(float x)
{
    float t = mt_tanh_close(0.5f * x);
    return 2.0f * t / (1.0f - t);
}

/* What an multiplies where x <= 0. */
MT_HOT_PART float bend(const struct curve *c, float x)
{
    return expm1_of(x < c->eps ? x : c->eps) - x;
}

MT_HOT static void forward_piece(float *restrict y, const float *restrict x, const struct curve *c, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = (x[i] > 0.0f ? c->p * x[i] * x[i] : c->n * bend(c, x[i])) + c->beta * x[i];
}

/* dx may be x, and y dy. of_p and of_n: what the alphas' gradients sum. */
MT_HOT static void backward_piece(const struct curve *c, float *xdx, float *dyy, float *restrict of_p,
                                  float *restrict of_n, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float x = xdx[i], dy = dyy[i], e = expm1_of(x < c->eps ? x : c->eps), bent = e - x;
        bool above = x > 0.0f;
        float slope = above ? 2.0f * c->p * x : c->n * ((x < c->eps ? e + 1.0f : 0.0f) - 1.0f);
        of_p[i] = above ? dy * x * x : 0.0f;
        of_n[i] = above ? 0.0f : dy * bent;
        dyy[i] = (above ? c->p * x * x : c->n * bent) + c->beta * x;
        xdx[i] = dy * (slope + c->beta);
    }
}

static void forward(const void *args, const struct mt_cpu_piece *p)
{
    forward_piece(p->out[0], p->in[0], args, p->n);
}

void mt_cpu_run_xielu(struct mt_cpu_device *d, const struct mt_xielu *a)
{
    struct curve c = curve_of(a->dtype, a->shape);
    mt_cpu_run_pointwise(d, &(struct mt_cpu_pointwise){
        .f = forward, .args = &c, .n = a->n, .heads = 1, .dim = a->f, .in = {mt_cpu_rows(a->dtype, a->x, 0, a->f)},
        .out = {mt_cpu_rows(a->dtype, a->out, 0, a->f)}});
}

MT_CPU_SUMS(xielu_bwd, n, mt_cpu_rows_per_chunk(a->f), 2)

static void backward_chunk(void *ctx, size_t chunk, int)
{
    const struct mt_xielu_bwd *a = ctx;
    size_t per = mt_cpu_rows_per_chunk(a->f), end = MT_MIN(a->n, (chunk + 1) * per) * a->f;
    struct curve c = curve_of(a->dtype, a->shape);
    float x[PIECE], dy[PIECE], of_p[PIECE], of_n[PIECE], sum[2] = {0, 0};
    for (size_t at = chunk * per * a->f; at < end; at += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, end - at);
        mt_cpu_load_row(x, a->dtype, a->x, at, n);
        mt_cpu_load_row(dy, a->dtype, a->dout, at, n);
        backward_piece(&c, x, dy, of_p, of_n, n);
        sum[0] += mt_cpu_sum(of_p, n);
        sum[1] += mt_cpu_sum(of_n, n);
        mt_cpu_store_row(a->dtype, a->dx, at, n, x);
        if (a->out)
            mt_cpu_store_row(a->dtype, a->out, at, n, dy);
    }
    if (!a->dshape)
        return;
    float *partial = (float *)a->workspace + 2 * chunk;
    partial[0] = sum[0] * c.dp;
    partial[1] = sum[1] * c.dn;
}

void mt_cpu_run_xielu_bwd(struct mt_cpu_device *d, const struct mt_xielu_bwd *a)
{
    size_t chunks = mt_div_up(a->n, mt_cpu_rows_per_chunk(a->f));
    mt_pool_run(d->pool, backward_chunk, (void *)(uintptr_t)a, chunks);
    if (a->dshape)
        mt_cpu_fold(d, a->dshape, a->workspace, chunks, 2);
}

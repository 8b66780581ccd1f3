/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rmsnorm: y = xhat w, xhat = x rstd (Zhang and Sennrich 2019). layernorm: y = xhat w + b, xhat = (x - mean) rstd (Ba,
 * Kiros and Hinton 2016). Backward, with g = dy w, where rmsnorm has no mean(g) and no db:
 *
 *   dx = rstd (g - mean(g) - xhat mean(g xhat)),   dw = sum over rows of dy xhat,   db = sum over rows of dy
 *
 * Sums over rows are over fixed blocks of rows, then over blocks in order. The mean of a row is computed wherever the
 * row is read: it costs no memory traffic, and records need not hold it.
 */
#include <string.h>

#include "device/cpu/cpu.h"

enum { ROW_BLOCK = 32, PIECE = 2048 };
static const float zeros[PIECE];

/* Either operation's arguments, in the form of rmsnorm's. */
struct norm {
    struct mt_rmsnorm of;
    bool centred, biased;
};

struct norm_bwd {
    struct mt_rmsnorm_bwd of;
    bool centred, biased;
};

/* The first element of a row. */
static size_t row_at(const struct mt_row_groups *g, size_t c, size_t row)
{
    return g->group ? row / g->group * g->ld + row % g->group * g->stride : row * c;
}

static float mean_of(bool centred, enum mt_dtype t, const void *base, size_t first, size_t c)
{
    float x[PIECE], sum = 0;
    for (size_t at = 0; centred && at < c; at += PIECE) {
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

MT_HOT static void weigh(float *restrict y, const float *restrict x, const float *restrict w, const float *restrict b,
                         float plus, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float v = x[i] * (w[i] + plus);
        y[i] = b ? v + b[i] : v;
    }
}

static float rstd_of(const struct norm *s, size_t from, float mean)
{
    float x[PIECE], d[PIECE], sum = 0;
    for (size_t c = 0; c < s->of.c; c += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, s->of.c - c);
        const float *p = mt_cpu_row_f32(s->of.dtype, s->of.x, from + c, n, x);
        if (s->centred)
            centre(d, p, mean, 1, n);
        sum += s->centred ? mt_cpu_dot(d, d, n) : mt_cpu_dot(p, p, n);
    }
    return 1.0f / sqrtf(sum / (float)s->of.c + s->of.eps);
}

static void forward_row(const void *args, size_t row)
{
    const struct norm *s = args;
    const struct mt_rmsnorm *a = &s->of;
    size_t from = row_at(&a->x_at, a->c, row), to = row_at(&a->y_at, a->c, row);
    float x[PIECE], xhat[PIECE], w[PIECE], bias[PIECE], tmp[PIECE];
    float mean = mean_of(s->centred, a->dtype, a->x, from, a->c);
    if (!a->use_rstd)
        a->rstd[row] = rstd_of(s, from, mean);
    for (size_t c = 0; c < a->c; c += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->c - c);
        const float *b = s->biased ? mt_cpu_row_f32(a->dtype, a->w, a->c + c, n, bias) : s->centred ? zeros : NULL;
        float *y = mt_cpu_row_place(a->dtype, a->y, to + c, tmp);
        centre(xhat, mt_cpu_row_f32(a->dtype, a->x, from + c, n, x), mean, a->rstd[row], n);
        if (!a->plus_one && !a->round_once)
            mt_cpu_round_row(a->dtype, xhat, n);
        weigh(y, xhat, mt_cpu_row_f32(a->dtype, a->w, c, n, w), b, a->plus_one ? 1.0f : 0.0f, n);
        mt_cpu_store_row(a->dtype, a->y, to + c, n, y);
    }
}

void mt_cpu_run_rmsnorm(struct mt_cpu_device *d, const struct mt_rmsnorm *a)
{
    mt_cpu_by_rows(d, forward_row, &(struct norm){.of = *a}, a->n, a->c);
}

void mt_cpu_run_layernorm(struct mt_cpu_device *d, const struct mt_layernorm *a)
{
    const struct norm s = {.of = {.n = a->n, .c = a->c, .dtype = a->dtype, .eps = a->eps, .plus_one = a->plus_one,
                                  .round_once = true, .x = a->x, .w = a->w, .y = a->y, .rstd = a->rstd,
                                  .use_rstd = a->use_rstd},
                           .centred = true, .biased = a->biased};
    mt_cpu_by_rows(d, forward_row, &s, a->n, a->c);
}

/* The workspace has a row for each block of rows: its parts of dw and db. */
MT_CPU_SUMS(rmsnorm_bwd, n, ROW_BLOCK, a->c)
MT_CPU_SUMS(layernorm_bwd, n, ROW_BLOCK, (a->biased ? 2 : 1) * a->c)

/* A piece of a row: x, xhat, and g = dy w. */
struct piece {
    size_t n;
    const float *dy, *x;
    float xhat[PIECE], g[PIECE], own_dy[PIECE], own_x[PIECE];
};

static void load_piece(struct piece *p, const struct mt_rmsnorm_bwd *a, size_t row, size_t c, float mean)
{
    float w[PIECE];
    size_t n = p->n = MT_MIN((size_t)PIECE, a->c - c);
    p->dy = mt_cpu_row_f32(a->dtype, a->dy, row_at(&a->dy_at, a->c, row) + c, n, p->own_dy);
    p->x = mt_cpu_row_f32(a->dtype, a->x, row_at(&a->x_at, a->c, row) + c, n, p->own_x);
    centre(p->xhat, p->x, mean, a->rstd[row], n);
    weigh(p->g, p->dy, mt_cpu_row_f32(a->dtype, a->w, c, n, w), NULL, a->plus_one ? 1.0f : 0.0f, n);
}

/* The means over a row of g and of g xhat. */
struct means {
    float g, along;
};

static struct means means_of(const struct norm_bwd *s, size_t row, float mean, struct piece *p)
{
    float sum = 0, along = 0, rstd = s->of.rstd[row], n = (float)s->of.c;
    for (size_t c = 0; c < s->of.c; c += PIECE) {
        load_piece(p, &s->of, row, c, mean);
        sum += s->centred ? mt_cpu_sum(p->g, p->n) : 0;
        along += mt_cpu_dot(p->g, s->centred ? p->xhat : p->x, p->n);
    }
    return (struct means){sum / n, s->centred ? along / n : along * rstd / n};
}

MT_HOT static void input_gradient(float *restrict dx, const float *restrict g, const float *restrict xhat,
                                  const float *restrict res, struct means m, float rstd, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dx[i] = rstd * (g[i] - m.g - xhat[i] * m.along) + (res ? res[i] : 0.0f);
}

static void backward_row(const void *args, size_t row, float *sums)
{
    const struct norm_bwd *s = args;
    const struct mt_rmsnorm_bwd *a = &s->of;
    struct piece p;
    float res[PIECE], out[PIECE], mean = mean_of(s->centred, a->dtype, a->x, row_at(&a->x_at, a->c, row), a->c);
    struct means m = means_of(s, row, mean, &p);
    for (size_t c = 0; c < a->c; c += PIECE) {
        size_t at = row_at(&a->dx_at, a->c, row) + c;
        load_piece(&p, a, row, c, mean);
        input_gradient(out, p.g, p.xhat, a->dres ? mt_cpu_row_f32(a->dtype, a->dres, at, p.n, res) : NULL, m,
                       a->rstd[row], p.n);
        if (sums && !a->plus_one && !a->round_once)
            mt_cpu_round_row(a->dtype, p.xhat, p.n); /* the value that was multiplied by w */
        if (sums)
            mt_cpu_add_products(sums + c, p.dy, p.xhat, p.n);
        if (sums && s->biased)
            mt_cpu_add_scaled(sums + a->c + c, p.dy, 1, p.n);
        mt_cpu_store_row(a->dtype, a->dx, at, p.n, out);
    }
}

static void run_backward(struct mt_cpu_device *d, const struct norm_bwd *s)
{
    mt_cpu_sum_rows(d, backward_row, s, s->of.n,
                    (struct mt_cpu_sums){ROW_BLOCK, (s->biased ? 2 : 1) * s->of.c, s->of.dw, s->of.workspace});
}

void mt_cpu_run_rmsnorm_bwd(struct mt_cpu_device *d, const struct mt_rmsnorm_bwd *a)
{
    run_backward(d, &(struct norm_bwd){.of = *a});
}

void mt_cpu_run_layernorm_bwd(struct mt_cpu_device *d, const struct mt_layernorm_bwd *a)
{
    const struct norm_bwd s = {.of = {.n = a->n, .c = a->c, .dtype = a->dtype, .plus_one = a->plus_one,
                                      .round_once = true, .dy = a->dy, .x = a->x, .w = a->w, .rstd = a->rstd,
                                      .dres = a->dres, .dx = a->dx, .dw = a->dw, .workspace = a->workspace},
                               .centred = true, .biased = a->biased};
    run_backward(d, &s);
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * y = w xhat, xhat = u rstd, u = x silu(z), rstd = 1 / sqrt(mean(u^2) + eps). Backward, with g = w dy:
 *
 *   du = rstd (g - xhat mean(g xhat)),  dx = du silu(z),  dz = du x silu'(z),  dw = sum over rows of dy xhat
 *
 * A head may have tens of thousands of elements: it is taken in pieces, twice, and u is made again.
 */
#include <math.h>

#include "device/cpu/gated.h"
#include "device/cpu/vecmath.h"

enum { PIECE = 512 };

/* Elements [first, first + n) of a head of a row. */
struct piece {
    size_t n;
    float x[PIECE], z[PIECE], u[PIECE], w[PIECE];
};

MT_HOT static void gate(float *restrict u, const float *restrict x, const float *restrict z, size_t n)
{
    for (size_t i = 0; i < n; i++)
        u[i] = x[i] * (z[i] * mt_sigmoidf(z[i]));
}

/* g becomes dx, z dz. */
MT_HOT static void input_gradients(float *restrict g, float *restrict z, const float *restrict x,
                                   const float *restrict u, const float rstd, const float mean, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float s = mt_sigmoidf(z[i]), du = rstd * (g[i] - u[i] * rstd * mean);
        g[i] = du * (z[i] * s);
        z[i] = du * x[i] * (s * (1.0f + z[i] * (1.0f - s)));
    }
}

static void load(const struct mt_gated_norm *a, size_t row, size_t head, size_t first, struct piece *p)
{
    p->n = MT_MIN((size_t)PIECE, a->x.dim - first);
    mt_cpu_load_row(p->x, a->dtype, a->x.p, mt_heads_at(&a->x, row, head) + first, p->n);
    mt_cpu_load_row(p->z, a->dtype, a->z.p, mt_cpu_gate_at(&a->z, a->x.dim, row, head) + first, p->n);
    mt_cpu_load_row(p->w, a->dtype, a->w, head * a->x.dim + first, p->n);
    gate(p->u, p->x, p->z, p->n);
}

static float rstd_of(const struct mt_gated_norm *a, double squares)
{
    return 1.0f / sqrtf((float)(squares / (double)a->x.dim) + a->eps);
}

static void forward_head(const struct mt_gated_norm *a, size_t row, size_t head)
{
    struct piece p;
    double squares = 0;
    for (size_t at = 0; at < a->x.dim; at += p.n) {
        load(a, row, head, at, &p);
        squares += (double)mt_cpu_dot(p.u, p.u, p.n);
    }
    float rstd = rstd_of(a, squares);
    for (size_t at = 0; at < a->x.dim; at += p.n) {
        float xhat[PIECE];
        load(a, row, head, at, &p);
        mt_cpu_scale(xhat, p.u, rstd, p.n);
        mt_cpu_round_row(a->dtype, xhat, p.n);
        mt_cpu_multiply(xhat, xhat, p.w, p.n);
        mt_cpu_store_row(a->dtype, a->y.p, mt_heads_at(&a->y, row, head) + at, p.n, xhat);
    }
}

void mt_cpu_norm_of_gated_row(const void *args, size_t row)
{
    const struct mt_gated_norm *a = args;
    for (size_t i = 0; i < a->x.n; i++)
        forward_head(a, row, i);
}

/* dw: of the head; NULL: not wanted. */
static void backward_head(const struct mt_gated_norm_bwd *b, size_t row, size_t head, float *dw)
{
    const struct mt_gated_norm *a = &b->fwd;
    struct piece p;
    float dy[PIECE], xhat[PIECE];
    double squares = 0, along = 0;
    for (size_t at = 0; at < a->x.dim; at += p.n) {
        load(a, row, head, at, &p);
        mt_cpu_load_row(dy, a->dtype, b->dy.p, mt_heads_at(&b->dy, row, head) + at, p.n);
        mt_cpu_multiply(dy, dy, p.w, p.n);
        squares += (double)mt_cpu_dot(p.u, p.u, p.n);
        along += (double)mt_cpu_dot(dy, p.u, p.n);
    }
    float rstd = rstd_of(a, squares), mean = (float)along * rstd / (float)a->x.dim;
    for (size_t at = 0; at < a->x.dim; at += p.n) {
        load(a, row, head, at, &p);
        mt_cpu_load_row(dy, a->dtype, b->dy.p, mt_heads_at(&b->dy, row, head) + at, p.n);
        mt_cpu_scale(xhat, p.u, rstd, p.n);
        mt_cpu_round_row(a->dtype, xhat, p.n);
        if (dw)
            mt_cpu_add_products(dw + at, dy, xhat, p.n);
        mt_cpu_multiply(dy, dy, p.w, p.n);
        input_gradients(dy, p.z, p.x, p.u, rstd, mean, p.n);
        mt_cpu_store_row(a->dtype, b->dx.p, mt_heads_at(&b->dx, row, head) + at, p.n, dy);
        mt_cpu_store_row(a->dtype, b->dz.p, mt_cpu_gate_at(&b->dz, a->x.dim, row, head) + at, p.n, p.z);
    }
}

void mt_cpu_norm_of_gated_row_bwd(const void *args, size_t row, float *dw)
{
    const struct mt_gated_norm_bwd *b = args;
    for (size_t i = 0; i < b->fwd.x.n; i++)
        backward_head(b, row, i, dw ? dw + i * b->fwd.x.dim : NULL);
}

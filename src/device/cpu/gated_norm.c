/* SPDX-License-Identifier: Apache-2.0 */
/*
 * xhat = u rstd, rstd = 1 / sqrt(mean(u^2) + eps), t = w xhat. With the gate last u = x and y = t silu(z); with the
 * gate first u = x silu(z) and y = t. Backward, with dt = dy silu(z), or dy, and g = w dt:
 *
 *   du = rstd (g - xhat mean(g xhat)),  dw = sum over rows (and with the gate last heads) of dt xhat
 *   gate last: dx = du, dz = dy t silu'(z);   gate first: dx = du silu(z), dz = du x silu'(z)
 *
 * Sums over rows are over blocks of rows, then over blocks. With the gate first a head may have tens of thousands of
 * elements: it is taken in pieces, twice, and u is made again.
 */
#include <math.h>
#include <string.h>

#include "device/cpu/cpu.h"
#include "device/cpu/vecmath.h"

enum { ROW_BLOCK = 32, MOST = 1024, PIECE = 512 }; /* MOST: elements of a head with the gate last; of a piece, else */

/* Elements [at, at + n) of a head of a row; dy, dt and g of backward. */
struct piece {
    size_t at, n;
    float x[MOST], z[MOST], w[MOST], u[MOST], xhat[MOST], dy[MOST], dt[MOST], g[MOST];
};

/* y = t silu(z) */
MT_HOT static void gate(float *restrict y, const float *restrict t, const float *restrict z, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = t[i] * (z[i] * mt_sigmoidf(z[i]));
}

/* dz = dy t silu'(z) */
MT_HOT static void gate_gradient(float *restrict dz, const float *restrict dy, const float *restrict t,
                                 const float *restrict z, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float s = mt_sigmoidf(z[i]);
        dz[i] = dy[i] * t[i] * (s * (1.0f + z[i] * (1.0f - s)));
    }
}

MT_HOT static void input_gradient(float *restrict du, const float *restrict g, const float *restrict u, float rstd,
                                  float mean, size_t n)
{
    for (size_t i = 0; i < n; i++)
        du[i] = rstd * (g[i] - u[i] * rstd * mean);
}

/* Where an element of a head's gate is, whose elements may lie in wider heads. */
static size_t gate_at(const struct mt_heads *z, size_t dim, size_t row, size_t head, size_t at)
{
    size_t i = head * dim;
    return mt_heads_at(z, row, i / z->dim) + i % z->dim + at;
}

/* A piece from p->at on; b: with the gradients, or NULL. A head of one piece is loaded once. */
static void load(const struct mt_gated_norm *a, const struct mt_gated_norm_bwd *b, size_t row, size_t head, size_t at,
                 struct piece *p)
{
    if (p->n == a->x.dim)
        return;
    p->at = at;
    p->n = MT_MIN((size_t)(a->gate_first ? PIECE : MOST), a->x.dim - at);
    mt_cpu_load_row(p->x, a->dtype, a->x.p, mt_heads_at(&a->x, row, head) + at, p->n);
    mt_cpu_load_row(p->z, a->dtype, a->z.p, gate_at(&a->z, a->x.dim, row, head, at), p->n);
    mt_cpu_load_row(p->w, a->dtype, a->w, (a->gate_first ? head * a->x.dim : 0) + at, p->n);
    if (a->gate_first)
        gate(p->u, p->x, p->z, p->n);
    else
        memcpy(p->u, p->x, p->n * sizeof(*p->u));
    if (!b)
        return;
    mt_cpu_load_row(p->dy, a->dtype, b->dy.p, mt_heads_at(&b->dy, row, head) + at, p->n);
    if (a->gate_first)
        memcpy(p->dt, p->dy, p->n * sizeof(*p->dt));
    else
        gate(p->dt, p->dy, p->z, p->n);
    mt_cpu_multiply(p->g, p->dt, p->w, p->n);
}

static float rstd_of(const struct mt_gated_norm *a, double squares)
{
    return 1.0f / sqrtf((float)(squares / (double)a->x.dim) + a->eps);
}

static void normalise(const struct mt_gated_norm *a, struct piece *p, float rstd)
{
    mt_cpu_scale(p->xhat, p->u, rstd, p->n);
    mt_cpu_round_row(a->dtype, p->xhat, p->n);
}

static void forward_head(const struct mt_gated_norm *a, size_t row, size_t head)
{
    struct piece p;
    p.n = 0;
    double squares = 0;
    for (size_t at = 0; at < a->x.dim; at += p.n) {
        load(a, NULL, row, head, at, &p);
        squares += (double)mt_cpu_dot(p.u, p.u, p.n);
    }
    for (size_t at = 0; at < a->x.dim; at += p.n) {
        load(a, NULL, row, head, at, &p);
        normalise(a, &p, rstd_of(a, squares));
        mt_cpu_multiply(p.xhat, p.xhat, p.w, p.n);
        if (!a->gate_first) {
            mt_cpu_round_row(a->dtype, p.xhat, p.n);
            gate(p.u, p.xhat, p.z, p.n);
        }
        mt_cpu_store_row(a->dtype, a->y.p, mt_heads_at(&a->y, row, head) + at, p.n, a->gate_first ? p.xhat : p.u);
    }
}

static void forward_row(const void *args, size_t row)
{
    const struct mt_gated_norm *a = args;
    for (size_t i = 0; i < a->x.n; i++)
        forward_head(a, row, i);
}

void mt_cpu_run_gated_norm(struct mt_cpu_device *d, const struct mt_gated_norm *a)
{
    mt_cpu_by_rows(d, forward_row, a, a->n, a->x.n * a->x.dim);
}

MT_CPU_SUMS(gated_norm_bwd, fwd.n, ROW_BLOCK, mt_gated_norm_weights(&a->fwd))

/* A piece's dx and dz. */
static void store_gradients(const struct mt_gated_norm_bwd *b, size_t row, size_t head, struct piece *p, float rstd,
                            float mean)
{
    const struct mt_gated_norm *a = &b->fwd;
    float du[MOST], dx[MOST], dz[MOST];
    input_gradient(du, p->g, p->u, rstd, mean, p->n);
    if (a->gate_first) {
        gate(dx, du, p->z, p->n);
        gate_gradient(dz, du, p->x, p->z, p->n);
    } else {
        mt_cpu_multiply(p->xhat, p->xhat, p->w, p->n);
        mt_cpu_round_row(a->dtype, p->xhat, p->n);
        gate_gradient(dz, p->dy, p->xhat, p->z, p->n);
    }
    mt_cpu_store_row(a->dtype, b->dx.p, mt_heads_at(&b->dx, row, head) + p->at, p->n, a->gate_first ? dx : du);
    mt_cpu_store_row(a->dtype, b->dz.p, gate_at(&b->dz, a->x.dim, row, head, p->at), p->n, dz);
}

/* dw: of the head; NULL: not wanted. */
static void backward_head(const struct mt_gated_norm_bwd *b, size_t row, size_t head, float *dw)
{
    const struct mt_gated_norm *a = &b->fwd;
    struct piece p;
    p.n = 0;
    double squares = 0, along = 0;
    for (size_t at = 0; at < a->x.dim; at += p.n) {
        load(a, b, row, head, at, &p);
        squares += (double)mt_cpu_dot(p.u, p.u, p.n);
        along += (double)mt_cpu_dot(p.g, p.u, p.n);
    }
    float rstd = rstd_of(a, squares), mean = (float)along * rstd / (float)a->x.dim;
    for (size_t at = 0; at < a->x.dim; at += p.n) {
        load(a, b, row, head, at, &p);
        normalise(a, &p, rstd);
        if (dw)
            mt_cpu_add_products(dw + at, p.dt, p.xhat, p.n);
        store_gradients(b, row, head, &p, rstd, mean);
    }
}

static void backward_row(const void *args, size_t row, float *dw)
{
    const struct mt_gated_norm_bwd *b = args;
    for (size_t i = 0; i < b->fwd.x.n; i++)
        backward_head(b, row, i, dw && b->fwd.gate_first ? dw + i * b->fwd.x.dim : dw);
}

void mt_cpu_run_gated_norm_bwd(struct mt_cpu_device *d, const struct mt_gated_norm_bwd *b)
{
    mt_cpu_sum_rows(d, backward_row, b, b->fwd.n,
                    (struct mt_cpu_sums){ROW_BLOCK, mt_gated_norm_weights(&b->fwd), b->dw, b->workspace});
}

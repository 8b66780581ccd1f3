/* SPDX-License-Identifier: Apache-2.0 */
/* Gates of the delta rule and of heads, and norms with a gate, against their definitions in double. */
#include <math.h>
#include <string.h>

#include "harness.h"

DEVICE_TEST(gates_match_the_definition)
{
    enum { N = 131, HEADS = 6, LD = 15 };
    double *x, *al, *dt, *db, *dg, *sum = scratch(h, 2 * HEADS), *zero = scratch(h, N * LD), *want = scratch(h, N * LD);
    double *beta = scratch(h, N * HEADS), *g = scratch(h, N * HEADS);
    struct dbuf *bx = buf_random(h, h->dtype, N * LD, 3, &x), *bal = buf_random(h, h->dtype, HEADS, 1, &al);
    struct dbuf *bdt = buf_random(h, h->dtype, HEADS, 1, &dt), *bdb = buf_random(h, MT_F32, N * HEADS, 1, &db);
    struct dbuf *bdg = buf_random(h, MT_F32, N * HEADS, 1, &dg), *bd = buf_values(h, h->dtype, N * LD, zero);
    struct dbuf *bb = buf_nan(h, MT_F32, N * HEADS), *bg = buf_nan(h, MT_F32, N * HEADS);
    struct dbuf *bl = buf_values(h, MT_F32, HEADS, zero), *bt = buf_values(h, MT_F32, HEADS, zero);
    /* three groups of [b b a a], and columns of something else */
    size_t e = mt_dtype_size(h->dtype);
    struct mt_heads vb = {bx->p, LD, 4, 3, 2}, va = {(char *)bx->p + 2 * e, LD, 4, 3, 2};
    struct mt_delta_gates a = {.n = N, .dtype = h->dtype, .a = va, .b = vb, .a_log = bal->p, .dt_bias = bdt->p,
                               .beta = bb->p, .g = bg->p};
    struct mt_delta_gates_bwd b = {.fwd = a, .dbeta = bdb->p, .dg = bdg->p, .da = va, .db = vb, .da_log = bl->p,
                                   .ddt_bias = bt->p};
    b.db.p = bd->p;
    b.da.p = (char *)bd->p + 2 * e;
    b.workspace = workspace(h, mt_op_delta_gates_bwd_workspace(h->dev, &b));
    RUN(h, mt_op_delta_gates, &a);
    RUN(h, mt_op_delta_gates_bwd, &b);
    for (size_t t = 0; t < N; t++)
        for (size_t i = 0; i < HEADS; i++) {
            size_t at = t * LD + i / 2 * 4 + i % 2;
            double s = x[at + 2] + dt[i];
            size_t o = t * HEADS + i;
            beta[o] = sigmoid(x[at]);
            g[o] = -exp(al[i]) * log1p(exp(s));
            want[at] = db[o] * beta[o] * (1 - beta[o]);
            want[at + 2] = -exp(al[i]) * dg[o] * sigmoid(s);
            sum[i] += dg[o] * g[o];
            sum[HEADS + i] += want[at + 2];
        }
    expect_close(h, "beta", buf_get(h, bb), beta, N * HEADS, tolerance(h, 1e-6, 4e-3));
    expect_close(h, "g", buf_get(h, bg), g, N * HEADS, 1e-6);
    expect_close(h, "da, db", buf_get(h, bd), want, N * LD, tolerance(h, 1e-6, 8e-3));
    expect_close(h, "da_log", buf_get(h, bl), sum, HEADS, 2e-6);
    expect_close(h, "ddt_bias", buf_get(h, bt), sum + HEADS, HEADS, 2e-6);
}

/* Steps beyond both limits are there, and their gradients are 0. */
DEVICE_TEST(plain_gates_match_the_definition)
{
    enum { N = 131, HEADS = 6, LD = 11 };
    double *x, *al, *dt, *db, *dg, *ds, *sum = scratch(h, 3 * HEADS), *zero = scratch(h, N * LD);
    double *beta = scratch(h, N * HEADS), *g = scratch(h, N * HEADS), *want = scratch(h, N * LD);
    struct dbuf *bx = buf_random(h, h->dtype, N * LD, 3, &x), *bal = buf_random(h, h->dtype, HEADS, 1, &al);
    struct dbuf *bdt = buf_random(h, h->dtype, HEADS, 1, &dt), *bdb = buf_random(h, MT_F32, N * HEADS, 1, &db);
    struct dbuf *bdg = buf_random(h, MT_F32, N * HEADS, 1, &dg), *bd = buf_values(h, h->dtype, N * LD, zero);
    struct dbuf *bds = buf_random(h, MT_F32, N * HEADS, 1, &ds), *bb = buf_nan(h, MT_F32, N * HEADS);
    struct dbuf *bg = buf_nan(h, MT_F32, N * HEADS), *bl = buf_values(h, MT_F32, HEADS, zero);
    struct dbuf *bt = buf_values(h, MT_F32, HEADS, zero), *bs = buf_values(h, MT_F32, HEADS, zero);
    struct mt_heads va = {bx->p, LD, 3, 3, 2};
    struct mt_delta_gates a = {.n = N, .dtype = h->dtype, .plain = true, .least = 0.3f, .most = 2, .a = va,
                               .a_log = bal->p, .dt_bias = bdt->p, .beta = bb->p, .g = bg->p};
    struct mt_delta_gates_bwd b = {.fwd = a, .dbeta = bdb->p, .dg = bdg->p, .dskip = bds->p, .da = va, .da_log = bl->p,
                                   .ddt_bias = bt->p, .dd = bs->p};
    b.da.p = bd->p;
    b.workspace = workspace(h, mt_op_delta_gates_bwd_workspace(h->dev, &b));
    RUN(h, mt_op_delta_gates, &a);
    RUN(h, mt_op_delta_gates_bwd, &b);
    for (size_t t = 0; t < N; t++)
        for (size_t i = 0; i < HEADS; i++) {
            size_t at = t * LD + i / 2 * 3 + i % 2, o = t * HEADS + i;
            double s = x[at] + dt[i], step = log1p(exp(s)), least = (double)0.3f;
            beta[o] = fmin(fmax(step, least), 2);
            g[o] = -exp(al[i]) * beta[o];
            want[at] = step >= least && step <= 2 ? (db[o] - exp(al[i]) * dg[o]) * sigmoid(s) : 0;
            sum[i] += dg[o] * g[o];
            sum[HEADS + i] += want[at];
            sum[2 * HEADS + i] += ds[o];
        }
    expect_close(h, "beta", buf_get(h, bb), beta, N * HEADS, 1e-6);
    expect_close(h, "g", buf_get(h, bg), g, N * HEADS, 1e-6);
    expect_close(h, "da", buf_get(h, bd), want, N * LD, tolerance(h, 1e-6, 8e-3));
    expect_close(h, "da_log", buf_get(h, bl), sum, HEADS, 2e-6);
    expect_close(h, "ddt_bias", buf_get(h, bt), sum + HEADS, HEADS, 2e-6);
    expect_close(h, "dd", buf_get(h, bs), sum + 2 * HEADS, HEADS, 2e-6);
}

static void gated_norm_case(struct harness *h, size_t nk, size_t r, size_t dim)
{
    enum { N = 67 };
    size_t heads = nk * r, c = heads * dim, ld = nk * (r * dim + 5);
    double eps = 1e-6, *x, *z, *w, *dy, *dw0, *y = scratch(h, N * c), *dx = scratch(h, N * c), *dz = scratch(h, N * ld);
    double *dw = scratch(h, dim), *zero = scratch(h, N * ld);
    struct dbuf *bx = buf_random(h, h->dtype, N * c, 2, &x), *bz = buf_random(h, h->dtype, N * ld, 2, &z);
    struct dbuf *bw = buf_random(h, h->dtype, dim, 1, &w), *bdy = buf_random(h, h->dtype, N * c, 1, &dy);
    struct dbuf *by = buf_nan(h, h->dtype, N * c), *bdz = buf_values(h, h->dtype, N * ld, zero);
    struct dbuf *bdw = buf_random(h, MT_F32, dim, 1, &dw0);
    struct mt_gated_norm a = {.n = N, .dtype = h->dtype, .eps = (float)eps, .x = mt_heads(bx->p, c, heads, dim),
                              .z = {bz->p, ld, r * dim + 5, nk, r * dim}, .y = mt_heads(by->p, c, heads, dim), .w = bw->p};
    struct mt_gated_norm_bwd b = {.fwd = a, .dy = mt_heads(bdy->p, c, heads, dim), .dz = a.z, .dw = bdw->p};
    b.dx = b.dy; /* in place */
    b.dz.p = bdz->p;
    b.workspace = workspace(h, mt_op_gated_norm_bwd_workspace(h->dev, &b));
    RUN(h, mt_op_gated_norm, &a);
    RUN(h, mt_op_gated_norm_bwd, &b);
    memcpy(dw, dw0, dim * sizeof(double));
    for (size_t t = 0; t < N; t++)
        for (size_t i = 0; i < heads; i++) {
            double sq = 0, dot = 0, *xi = x + t * c + i * dim, *di = dy + t * c + i * dim;
            size_t at = t * ld + i / r * (r * dim + 5) + i % r * dim;
            for (size_t k = 0; k < dim; k++)
                sq += xi[k] * xi[k];
            double rs = 1 / sqrt(sq / (double)dim + eps);
            for (size_t k = 0; k < dim; k++) {
                double s = sigmoid(z[at + k]), gate = z[at + k] * s;
                y[t * c + i * dim + k] = w[k] * xi[k] * rs * gate;
                dz[at + k] = di[k] * w[k] * xi[k] * rs * (s * (1 + z[at + k] * (1 - s)));
                dw[k] += di[k] * gate * xi[k] * rs;
                dot += di[k] * gate * w[k] * xi[k] * rs;
            }
            for (size_t k = 0; k < dim; k++) {
                double gate = z[at + k] * sigmoid(z[at + k]);
                dx[t * c + i * dim + k] = rs * (di[k] * gate * w[k] - xi[k] * rs * dot / (double)dim);
            }
        }
    expect_close(h, "y", buf_get(h, by), y, N * c, tolerance(h, 1e-6, 8e-3));
    expect_close(h, "dx", buf_get(h, bdy), dx, N * c, tolerance(h, 2e-6, 8e-3));
    expect_close(h, "dz", buf_get(h, bdz), dz, N * ld, tolerance(h, 1e-6, 8e-3));
    expect_close(h, "dw", buf_get(h, bdw), dw, dim, tolerance(h, 2e-6, 4e-3));
}

DEVICE_TEST(gated_norm_matches_the_definition)
{
    gated_norm_case(h, 1, 1, 8);
    gated_norm_case(h, 2, 3, 24);
    gated_norm_case(h, 1, 2, 136);
}

/* The gate before the norm, and weights of each head. */
static void norm_of_gated_case(struct harness *h, size_t heads, size_t dim)
{
    enum { N = 67 };
    size_t c = heads * dim, ld = heads * (dim + 5);
    double eps = 1e-5, *x, *z, *w, *dy, *dw0, *y = scratch(h, N * c), *dx = scratch(h, N * c), *dz = scratch(h, N * ld);
    double *dw = scratch(h, c), *zero = scratch(h, N * ld), *u = scratch(h, dim);
    struct dbuf *bx = buf_random(h, h->dtype, N * c, 2, &x), *bz = buf_random(h, h->dtype, N * ld, 2, &z);
    struct dbuf *bw = buf_random(h, h->dtype, c, 1, &w), *bdy = buf_random(h, h->dtype, N * c, 1, &dy);
    struct dbuf *by = buf_nan(h, h->dtype, N * c), *bdz = buf_values(h, h->dtype, N * ld, zero);
    struct dbuf *bdw = buf_random(h, MT_F32, c, 1, &dw0);
    struct mt_gated_norm a = {.n = N, .dtype = h->dtype, .gate_first = true, .eps = (float)eps,
                              .x = mt_heads(bx->p, c, heads, dim), .z = {bz->p, ld, dim + 5, heads, dim},
                              .y = mt_heads(by->p, c, heads, dim), .w = bw->p};
    struct mt_gated_norm_bwd b = {.fwd = a, .dy = mt_heads(bdy->p, c, heads, dim), .dz = a.z, .dw = bdw->p};
    b.dx = b.dy; /* in place */
    b.dz.p = bdz->p;
    b.workspace = workspace(h, mt_op_gated_norm_bwd_workspace(h->dev, &b));
    RUN(h, mt_op_gated_norm, &a);
    RUN(h, mt_op_gated_norm_bwd, &b);
    memcpy(dw, dw0, c * sizeof(double));
    for (size_t t = 0; t < N; t++)
        for (size_t i = 0; i < heads; i++) {
            double sq = 0, dot = 0, *xi = x + t * c + i * dim, *di = dy + t * c + i * dim, *zi = z + t * ld + i * (dim + 5);
            for (size_t k = 0; k < dim; k++) {
                u[k] = xi[k] * zi[k] * sigmoid(zi[k]);
                sq += u[k] * u[k];
                dot += di[k] * w[i * dim + k] * u[k];
            }
            double rs = 1 / sqrt(sq / (double)dim + eps);
            for (size_t k = 0; k < dim; k++) {
                double s = sigmoid(zi[k]), du = rs * (di[k] * w[i * dim + k] - u[k] * rs * rs * dot / (double)dim);
                y[t * c + i * dim + k] = w[i * dim + k] * u[k] * rs;
                dx[t * c + i * dim + k] = du * zi[k] * s;
                dz[t * ld + i * (dim + 5) + k] = du * xi[k] * s * (1 + zi[k] * (1 - s));
                dw[i * dim + k] += di[k] * u[k] * rs;
            }
        }
    expect_close(h, "y", buf_get(h, by), y, N * c, tolerance(h, 1e-6, 8e-3));
    expect_close(h, "dx", buf_get(h, bdy), dx, N * c, tolerance(h, 2e-6, 8e-3));
    expect_close(h, "dz", buf_get(h, bdz), dz, N * ld, tolerance(h, 2e-6, 8e-3));
    expect_close(h, "dw", buf_get(h, bdw), dw, c, tolerance(h, 2e-6, 4e-3));
}

DEVICE_TEST(norm_of_gated_matches_the_definition)
{
    norm_of_gated_case(h, 1, 8);
    norm_of_gated_case(h, 3, 24);
    norm_of_gated_case(h, 2, 1160);
}

DEVICE_TEST(head_gates_match_the_definition)
{
    enum { N = 37, HEADS = 3, DIM = 24, LD = 2 * HEADS * DIM, C = HEADS * DIM };
    double *x, *z, *dy, *y = scratch(h, N * C), *dx = scratch(h, N * C), *dz = scratch(h, N * LD), *zero = scratch(h, N * LD);
    struct dbuf *bx = buf_random(h, h->dtype, N * C, 1, &x), *bz = buf_random(h, h->dtype, N * LD, 2, &z);
    struct dbuf *bdy = buf_random(h, h->dtype, N * C, 1, &dy), *by = buf_nan(h, h->dtype, N * C);
    struct dbuf *bdz = buf_values(h, h->dtype, N * LD, zero);
    size_t at = DIM * mt_dtype_size(h->dtype);
    struct mt_head_gate a = {.n = N, .dtype = h->dtype, .x = mt_heads(bx->p, C, HEADS, DIM),
                             .gate = {(char *)bz->p + at, LD, 2 * DIM, HEADS, DIM}, .y = mt_heads(by->p, C, HEADS, DIM)};
    struct mt_head_gate_bwd b = {.fwd = a, .dy = mt_heads(bdy->p, C, HEADS, DIM), .dgate = a.gate};
    b.dx = b.dy;
    b.dgate.p = (char *)bdz->p + at;
    RUN(h, mt_op_head_gate, &a);
    RUN(h, mt_op_head_gate_bwd, &b);
    for (size_t i = 0; i < N * C; i++) {
        size_t g = i / C * LD + i % C / DIM * 2 * DIM + DIM + i % DIM;
        double s = sigmoid(z[g]);
        y[i] = x[i] * s;
        dx[i] = dy[i] * s;
        dz[g] = dy[i] * x[i] * s * (1 - s);
    }
    expect_close(h, "y", buf_get(h, by), y, N * C, tolerance(h, 1e-6, 4e-3));
    expect_close(h, "dx", buf_get(h, bdy), dx, N * C, tolerance(h, 1e-6, 4e-3));
    expect_close(h, "dgate", buf_get(h, bdz), dz, N * LD, tolerance(h, 1e-6, 4e-3));
}

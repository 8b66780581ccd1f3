/* SPDX-License-Identifier: Apache-2.0 */
/* RMSNorm, QK-norm with rotary embedding, bias gradient. */
#include <math.h>

#include "base/mem.h"
#include "harness.h"

static void rmsnorm_case(struct harness *h, size_t n, size_t c, bool residual, bool plus_one)
{
    double *x, *r = NULL, *w, eps = 1e-6;
    struct dbuf *dx = buf_random(h, h->dtype, n * c, 2, &x), *dw = buf_random(h, h->dtype, c, 1, &w);
    struct dbuf *dr = residual ? buf_random(h, h->dtype, n * c, 1, &r) : NULL;
    struct dbuf *sum = residual ? buf_nan(h, h->dtype, n * c) : NULL;
    struct dbuf *y = buf_nan(h, h->dtype, n * c), *rstd = buf_nan(h, MT_F32, n);
    double *want = scratch(h, n * c), *want_rstd = scratch(h, n);
    struct mt_rmsnorm a = {.n = n, .c = c, .dtype = h->dtype, .eps = (float)eps, .plus_one = plus_one,
                           .x = dx->p, .residual = dr ? dr->p : NULL, .sum = sum ? sum->p : NULL,
                           .w = dw->p, .y = y->p, .rstd = rstd->p};
    RUN(h, mt_op_rmsnorm, &a);
    double *s = residual ? buf_get(h, sum) : x;
    for (size_t i = 0; residual && i < n * c; i++)
        want[i] = x[i] + r[i];
    if (residual)
        expect_close(h, "sum", s, want, n * c, tolerance(h, 1e-7, 3e-3));
    for (size_t i = 0; i < n; i++) {
        double sq = 0;
        for (size_t k = 0; k < c; k++)
            sq += s[i * c + k] * s[i * c + k];
        want_rstd[i] = 1 / sqrt(sq / (double)c + eps);
        for (size_t k = 0; k < c; k++)
            want[i * c + k] = s[i * c + k] * want_rstd[i] * (w[k] + plus_one);
    }
    expect_close(h, "rstd", buf_get(h, rstd), want_rstd, n, 1e-6);
    double *first = buf_get(h, y);
    expect_close(h, "y", first, want, n * c, tolerance(h, 1e-6, 4e-3));
    if (residual)
        return;
    a.use_rstd = true; /* the second time from what was stored: the same bits */
    RUN(h, mt_op_rmsnorm, &a);
    double *again = buf_get(h, y);
    expect_close(h, "y again", again, first, n * c, 0);
}

static void rmsnorm_matches_the_definition(struct harness *h)
{
    rmsnorm_case(h, 1, 8, false, false);
    rmsnorm_case(h, 37, 72, false, false);
    rmsnorm_case(h, 5, 4104, false, false);
    rmsnorm_case(h, 19, 264, true, false);
    rmsnorm_case(h, 6, 40, false, true);
}

static void rmsnorm_backward_case(struct harness *h, size_t n, size_t c, bool dres, bool in_place)
{
    double *x, *w, *dy, *r = NULL, *dw0, eps = 1e-6, *rs = scratch(h, n);
    struct dbuf *bx = buf_random(h, h->dtype, n * c, 2, &x), *bw = buf_random(h, h->dtype, c, 1, &w);
    struct dbuf *by = buf_random(h, h->dtype, n * c, 1, &dy), *bdw = buf_random(h, MT_F32, c, 1, &dw0);
    struct dbuf *br = dres ? buf_random(h, h->dtype, n * c, 1, &r) : NULL;
    struct dbuf *rstd = buf_nan(h, MT_F32, n), *y = buf_nan(h, h->dtype, n * c);
    struct dbuf *dx = in_place ? (dres ? br : by) : buf_nan(h, h->dtype, n * c);
    RUN(h, mt_op_rmsnorm, &(struct mt_rmsnorm){.n = n, .c = c, .dtype = h->dtype, .eps = (float)eps,
                                               .x = bx->p, .w = bw->p, .y = y->p, .rstd = rstd->p});
    RUN(h, mt_op_rmsnorm_bwd,
        &(struct mt_rmsnorm_bwd){.n = n, .c = c, .dtype = h->dtype, .dy = by->p, .x = bx->p, .w = bw->p,
                                 .rstd = rstd->p, .dres = br ? br->p : NULL, .dx = dx->p, .dw = bdw->p,
                                 .workspace = workspace(h, mt_op_rmsnorm_bwd_workspace(h->dev, n, c))});
    double *want = scratch(h, n * c), *want_dw = scratch(h, c);
    for (size_t i = 0; i < n; i++) {
        double sq = 0, dot = 0;
        for (size_t k = 0; k < c; k++)
            sq += x[i * c + k] * x[i * c + k];
        rs[i] = 1 / sqrt(sq / (double)c + eps);
        for (size_t k = 0; k < c; k++)
            dot += dy[i * c + k] * w[k] * x[i * c + k] * rs[i];
        for (size_t k = 0; k < c; k++) {
            double xhat = x[i * c + k] * rs[i];
            want[i * c + k] =
                rs[i] * (dy[i * c + k] * w[k] - xhat * dot / (double)c) + (r ? r[i * c + k] : 0);
            want_dw[k] += dy[i * c + k] * xhat;
        }
    }
    for (size_t k = 0; k < c; k++)
        want_dw[k] += dw0[k];
    expect_close(h, "dx", buf_get(h, dx), want, n * c, tolerance(h, 2e-6, 4e-3));
    expect_close(h, "dw", buf_get(h, bdw), want_dw, c, tolerance(h, 2e-6, 4e-3));
}

static void rmsnorm_backward_matches_the_derivative(struct harness *h)
{
    rmsnorm_backward_case(h, 1, 8, false, false);
    rmsnorm_backward_case(h, 67, 72, false, true);
    rmsnorm_backward_case(h, 40, 2056, true, false);
    rmsnorm_backward_case(h, 33, 136, true, true);
}

static void bias_gradient_is_the_column_sum(struct harness *h)
{
    size_t n = 131, c = 72, ld = 80;
    double *dy, *db0, *want = scratch(h, c);
    struct dbuf *by = buf_random(h, h->dtype, n * ld, 1, &dy), *db = buf_random(h, MT_F32, c, 1, &db0);
    RUN(h, mt_op_bias_bwd,
        &(struct mt_bias_bwd){.n = n, .c = c, .ld = ld, .dtype = h->dtype, .dy = by->p, .db = db->p,
                              .workspace = workspace(h, mt_op_bias_bwd_workspace(h->dev, n, c))});
    for (size_t k = 0; k < c; k++) {
        want[k] = db0[k];
        for (size_t i = 0; i < n; i++)
            want[k] += dy[i * ld + k];
    }
    expect_close(h, "db", buf_get(h, db), want, c, 1e-6);
}

struct rope {
    size_t n, n_q, n_kv, d, rot;
    bool norm;
};

static void turn(double *x, const double *cos_t, const double *sin_t, size_t rot, double sign)
{
    for (size_t i = 0; i < rot / 2; i++) {
        double a = x[i], b = x[i + rot / 2], s = sign * sin_t[i];
        x[i] = a * cos_t[i] - b * s;
        x[i + rot / 2] = b * cos_t[i] + a * s;
    }
}

static void rope_case(struct harness *h, const struct rope *s)
{
    size_t heads = s->n_q + s->n_kv, ld = (s->n_q + 2 * s->n_kv) * s->d, ldo = heads * s->d;
    size_t half = s->rot / 2, pos_max = s->n + 3;
    double *x, *cs, *sn, *wq = NULL, *wk = NULL, *dy, *dq0 = NULL, *dk0 = NULL, eps = 1e-6;
    int32_t *pos = (int32_t *)(void *)scratch(h, s->n);
    for (size_t i = 0; i < s->n; i++)
        pos[i] = (int32_t)((i * 5 + 2) % pos_max);
    struct dbuf *qkv = buf_random(h, h->dtype, s->n * ld, 1, &x), *bp = buf_ints(h, pos, s->n);
    struct dbuf *bc = buf_random(h, MT_F32, pos_max * half, 1, &cs);
    struct dbuf *bs = buf_random(h, MT_F32, pos_max * half, 1, &sn);
    struct dbuf *bq = s->norm ? buf_random(h, h->dtype, s->d, 1, &wq) : NULL;
    struct dbuf *bk = s->norm ? buf_random(h, h->dtype, s->d, 1, &wk) : NULL;
    struct dbuf *qk = buf_nan(h, h->dtype, s->n * ldo), *rstd = buf_nan(h, MT_F32, s->n * heads);
    RUN(h, mt_op_qk_rope,
        &(struct mt_qk_rope){.n = s->n, .n_q = s->n_q, .n_kv = s->n_kv, .head_dim = s->d, .rot = s->rot,
                             .dtype = h->dtype, .eps = (float)eps, .qkv = qkv->p, .ld_qkv = ld,
                             .qk = qk->p, .ld_qk = ldo, .positions = bp->p, .cos_t = bc->p,
                             .sin_t = bs->p, .max_pos = pos_max, .q_norm = bq ? bq->p : NULL,
                             .k_norm = bk ? bk->p : NULL, .rstd = rstd->p});
    struct dbuf *g = buf_random(h, h->dtype, s->n * ldo, 1, &dy), *dqkv = buf_nan(h, h->dtype, s->n * ld);
    struct dbuf *bdq = s->norm ? buf_random(h, MT_F32, s->d, 1, &dq0) : NULL;
    struct dbuf *bdk = s->norm ? buf_random(h, MT_F32, s->d, 1, &dk0) : NULL;
    RUN(h, mt_op_qk_rope_bwd,
        &(struct mt_qk_rope_bwd){
            .n = s->n, .n_q = s->n_q, .n_kv = s->n_kv, .head_dim = s->d, .rot = s->rot,
            .dtype = h->dtype, .dqk = g->p, .ld_dqk = ldo, .dqkv = dqkv->p, .ld_dqkv = ld,
            .qkv = qkv->p, .ld_qkv = ld, .positions = bp->p, .cos_t = bc->p, .sin_t = bs->p,
            .max_pos = pos_max, .q_norm = bq ? bq->p : NULL, .k_norm = bk ? bk->p : NULL,
            .rstd = rstd->p, .dq_norm = bdq ? bdq->p : NULL, .dk_norm = bdk ? bdk->p : NULL,
            .workspace = workspace(h, mt_op_qk_rope_bwd_workspace(h->dev, s->n, s->n_q, s->n_kv, s->d))});
    double *want = scratch(h, s->n * ldo), *want_dx = scratch(h, s->n * ld), *got_dx = buf_get(h, dqkv);
    double *wdq = scratch(h, s->d), *wdk = scratch(h, s->d);
    for (size_t i = 0; i < s->n; i++)
        for (size_t hd = 0; hd < heads; hd++) {
            const double *in = x + i * ld + hd * s->d, *w = hd < s->n_q ? wq : wk;
            double *y = want + i * ldo + hd * s->d, *dx = want_dx + i * ld + hd * s->d, sq = 0, dot = 0;
            double *dw = hd < s->n_q ? wdq : wdk;
            for (size_t k = 0; k < s->d; k++)
                sq += in[k] * in[k];
            double rs = s->norm ? 1 / sqrt(sq / (double)s->d + eps) : 1;
            for (size_t k = 0; k < s->d; k++) {
                y[k] = in[k] * rs * (w ? w[k] : 1);
                dx[k] = dy[i * ldo + hd * s->d + k];
            }
            turn(y, cs + (size_t)pos[i] * half, sn + (size_t)pos[i] * half, s->rot, 1);
            turn(dx, cs + (size_t)pos[i] * half, sn + (size_t)pos[i] * half, s->rot, -1);
            for (size_t k = 0; w && k < s->d; k++) {
                dw[k] += dx[k] * in[k] * rs;
                dx[k] *= w[k];
                dot += dx[k] * in[k] * rs;
            }
            for (size_t k = 0; w && k < s->d; k++)
                dx[k] = rs * (dx[k] - in[k] * rs * dot / (double)s->d);
        }
    for (size_t i = 0; i < s->n; i++) /* v is not the operation's business */
        for (size_t k = ldo; k < ld; k++)
            got_dx[i * ld + k] = 0;
    expect_close(h, "qk", buf_get(h, qk), want, s->n * ldo, tolerance(h, 1e-6, 6e-3));
    expect_close(h, "dqkv", got_dx, want_dx, s->n * ld, tolerance(h, 2e-6, 6e-3));
    for (size_t k = 0; s->norm && k < s->d; k++) {
        wdq[k] += dq0[k];
        wdk[k] += dk0[k];
    }
    if (s->norm) {
        expect_close(h, "dq_norm", buf_get(h, bdq), wdq, s->d, tolerance(h, 2e-6, 6e-3));
        expect_close(h, "dk_norm", buf_get(h, bdk), wdk, s->d, tolerance(h, 2e-6, 6e-3));
    }
}

static void rope_turns_pairs(struct harness *h)
{
    rope_case(h, &(struct rope){1, 1, 1, 8, 8, false});
    rope_case(h, &(struct rope){37, 7, 1, 24, 24, false});
    rope_case(h, &(struct rope){33, 4, 2, 64, 32, false});
    rope_case(h, &(struct rope){70, 4, 2, 16, 16, true});
    rope_case(h, &(struct rope){9, 2, 2, 128, 64, true});
}

const struct device_test norm_tests[] = {
    {"rmsnorm_matches_the_definition", rmsnorm_matches_the_definition},
    {"rmsnorm_backward_matches_the_derivative", rmsnorm_backward_matches_the_derivative},
    {"bias_gradient_is_the_column_sum", bias_gradient_is_the_column_sum},
    {"rope_turns_pairs", rope_turns_pairs},
    {NULL, NULL},
};

/* SPDX-License-Identifier: Apache-2.0 */
/* RMSNorm, QK-norm with rotary embedding, bias gradient. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "harness.h"

/* A norm of rows: RMSNorm, or if it is `centred` LayerNorm. */
struct norm {
    size_t n, c;
    bool plus_one, centred, biased;
};

static size_t norm_params(const struct norm *s)
{
    return (s->biased ? 2 : 1) * s->c;
}

/* xhat of a row; returns its rstd. */
static double normalised(const double *x, size_t c, bool centred, double *xhat)
{
    double mean = 0, sq = 0;
    for (size_t k = 0; centred && k < c; k++)
        mean += x[k] / (double)c;
    for (size_t k = 0; k < c; k++)
        sq += (x[k] - mean) * (x[k] - mean);
    double rstd = 1 / sqrt(sq / (double)c + (centred ? 1e-5 : 1e-6));
    for (size_t k = 0; k < c; k++)
        xhat[k] = (x[k] - mean) * rstd;
    return rstd;
}

/* Adds the gradient of a row's input to dx. */
static void norm_gradient(const struct norm *s, const double *dy, const double *xhat, const double *w, double rstd,
                          double *dx)
{
    double sum = 0, dot = 0;
    for (size_t k = 0; k < s->c; k++) {
        double g = dy[k] * (w[k] + s->plus_one);
        sum += s->centred ? g / (double)s->c : 0;
        dot += g * xhat[k] / (double)s->c;
    }
    for (size_t k = 0; k < s->c; k++)
        dx[k] += rstd * (dy[k] * (w[k] + s->plus_one) - sum - xhat[k] * dot);
}

static void norm_forward(struct harness *h, const struct norm *s, const struct mt_rmsnorm *a)
{
    const struct mt_layernorm b = {.n = a->n, .c = a->c, .dtype = a->dtype, .eps = 1e-5f, .plus_one = a->plus_one,
                                   .biased = s->biased, .x = a->x, .w = a->w, .y = a->y, .rstd = a->rstd,
                                   .use_rstd = a->use_rstd};
    if (s->centred)
        RUN(h, mt_op_layernorm, &b);
    else
        RUN(h, mt_op_rmsnorm, a);
}

static void norm_case(struct harness *h, const struct norm *s)
{
    size_t n = s->n, c = s->c;
    double *x, *w, *want = scratch(h, n * c), *want_rstd = scratch(h, n), close = s->centred ? 2e-6 : 1e-6;
    struct dbuf *dx = buf_random(h, h->dtype, n * c, 2, &x), *dw = buf_random(h, h->dtype, norm_params(s), 1, &w);
    struct dbuf *y = buf_nan(h, h->dtype, n * c), *rstd = buf_nan(h, MT_F32, n);
    struct mt_rmsnorm a = {.n = n, .c = c, .dtype = h->dtype, .eps = 1e-6f, .plus_one = s->plus_one,
                           .x = dx->p, .w = dw->p, .y = y->p, .rstd = rstd->p};
    norm_forward(h, s, &a);
    for (size_t i = 0; i < n; i++) {
        want_rstd[i] = normalised(x + i * c, c, s->centred, want + i * c);
        for (size_t k = 0; k < c; k++)
            want[i * c + k] = want[i * c + k] * (w[k] + s->plus_one) + (s->biased ? w[c + k] : 0);
    }
    expect_close(h, "rstd", buf_get(h, rstd), want_rstd, n, close);
    double *first = buf_get(h, y);
    expect_close(h, "y", first, want, n * c, tolerance(h, close, 4e-3));
    a.use_rstd = true; /* the second time from what was stored: the same bits */
    norm_forward(h, s, &a);
    expect_close(h, "y again", buf_get(h, y), first, n * c, 0);
}

/* gpt-oss' norm rounds once: no result is further from the definition than half a step. */
DEVICE_TEST(rmsnorm_can_round_once)
{
    static const size_t widths[] = {40, 33, 2880, 9000};
    for (size_t i = 0; i < MT_ARRAY_LEN(widths); i++) {
        size_t n = 3, c = widths[i];
        double *x, *w;
        struct dbuf *bx = buf_random(h, h->dtype, n * c, 2, &x), *bw = buf_random(h, h->dtype, c, 1, &w);
        struct dbuf *y = buf_nan(h, h->dtype, n * c), *rstd = buf_nan(h, MT_F32, n);
        RUN(h, mt_op_rmsnorm, &(struct mt_rmsnorm){.n = n, .c = c, .dtype = h->dtype, .eps = 1e-6f, .round_once = true,
                                                   .x = bx->p, .w = bw->p, .y = y->p, .rstd = rstd->p});
        double *got = buf_get(h, y), *rs = buf_get(h, rstd), most = 0;
        for (size_t k = 0; k < n * c; k++) {
            double want = x[k] * rs[k / c] * w[k % c];
            most = fmax(most, fabs(got[k] - want) / fabs(want));
        }
        if (!(most < tolerance(h, 2e-7, 1.0 / 256 + 1e-6)))
            must(h, "y", -1, &(struct mt_err){.msg = "was rounded more than once"});
    }
}

DEVICE_TEST(rmsnorm_matches_the_definition)
{
    static const struct {
        size_t n, c;
        bool plus_one;
    } shapes[] = {
        {1, 8, false},    {37, 72, false},   {5, 4104, false}, {19, 264, false},   {6, 40, true},
        {7, 33, false},   {7, 33, true},     {2, 2056, false}, {2, 2056, true},    {2, 9000, false},
        {1, 9000, true},  {2, 16400, false}, {1, 33000, false},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(shapes); i++)
        norm_case(h, &(struct norm){shapes[i].n, shapes[i].c, shapes[i].plus_one, false, false});
}

struct norm_shape {
    size_t n, c;
    bool dres, in_place, plus_one, round_once;
};

static void norm_backward(struct harness *h, const struct norm *s, const struct mt_rmsnorm_bwd *a)
{
    const struct mt_layernorm_bwd b = {.n = a->n, .c = a->c, .dtype = a->dtype, .plus_one = a->plus_one,
                                       .biased = s->biased, .dy = a->dy, .x = a->x, .w = a->w, .rstd = a->rstd,
                                       .dres = a->dres, .dx = a->dx, .dw = a->dw, .workspace = a->workspace};
    if (s->centred)
        RUN(h, mt_op_layernorm_bwd, &b);
    else
        RUN(h, mt_op_rmsnorm_bwd, a);
}

static size_t norm_workspace(struct harness *h, const struct norm *s)
{
    return s->centred ? mt_op_layernorm_bwd_workspace(h->dev, &(struct mt_layernorm_bwd){.n = s->n, .c = s->c,
                                                                                         .biased = s->biased})
                      : mt_op_rmsnorm_bwd_workspace(h->dev, &(struct mt_rmsnorm_bwd){.n = s->n, .c = s->c});
}

static void norm_backward_case(struct harness *h, const struct norm_shape *shape, bool centred, bool biased)
{
    const struct norm s = {shape->n, shape->c, shape->plus_one, centred, biased};
    size_t n = s.n, c = s.c, params = norm_params(&s);
    double *x, *w, *dy, *r = NULL, *dw, *xhat = scratch(h, c), *want = scratch(h, n * c);
    struct dbuf *bx = buf_random(h, h->dtype, n * c, 2, &x), *bw = buf_random(h, h->dtype, params, 1, &w);
    struct dbuf *by = buf_random(h, h->dtype, n * c, 1, &dy), *bdw = buf_random(h, MT_F32, params, 1, &dw);
    struct dbuf *br = shape->dres ? buf_random(h, h->dtype, n * c, 1, &r) : NULL;
    struct dbuf *rstd = buf_nan(h, MT_F32, n), *y = buf_nan(h, h->dtype, n * c), *dx2 = buf_nan(h, h->dtype, n * c);
    struct dbuf *dx = !shape->in_place ? buf_nan(h, h->dtype, n * c) : br ? br : by;
    norm_forward(h, &s, &(struct mt_rmsnorm){.n = n, .c = c, .dtype = h->dtype, .eps = 1e-6f, .x = bx->p, .w = bw->p,
                                             .y = y->p, .rstd = rstd->p});
    struct mt_rmsnorm_bwd a = {.n = n, .c = c, .dtype = h->dtype, .plus_one = shape->plus_one,
                               .round_once = shape->round_once, .dy = by->p, .x = bx->p, .w = bw->p, .rstd = rstd->p,
                               .dres = br ? br->p : NULL, .dx = dx2->p};
    norm_backward(h, &s, &a); /* without dw */
    a.dx = dx->p;
    a.dw = bdw->p;
    a.workspace = workspace(h, norm_workspace(h, &s));
    norm_backward(h, &s, &a);
    for (size_t i = 0; i < n; i++) {
        double one = normalised(x + i * c, c, centred, xhat);
        for (size_t k = 0; k < c; k++) {
            want[i * c + k] = r ? r[i * c + k] : 0;
            dw[k] += dy[i * c + k] * xhat[k];
            if (biased)
                dw[c + k] += dy[i * c + k];
        }
        norm_gradient(&s, dy + i * c, xhat, w, one, want + i * c);
    }
    double *got = buf_get(h, dx), close = centred ? 3e-6 : 2e-6;
    expect_close(h, "dx", got, want, n * c, tolerance(h, close, 4e-3));
    expect_close(h, "dx without dw", buf_get(h, dx2), got, n * c, 0);
    expect_close(h, "dw and db", buf_get(h, bdw), dw, params, centred ? close : tolerance(h, close, 4e-3));
}

DEVICE_TEST(rmsnorm_backward_matches_the_derivative)
{
    static const struct norm_shape shapes[] = {
        {1, 8, false, false, false},   {67, 72, false, true, false}, {40, 2056, true, false, false},
        {33, 136, true, true, false},  {21, 40, true, true, true},   {13, 33, false, true, false},
        {9, 35, true, true, true},     {6, 9000, true, false, false}, {3, 16400, false, true, false},
        {5003, 8, true, false, false}, {3, 6008, true, false, false}, {3, 6008, false, true, true},
        {3, 12008, false, true, true}, {3, 12008, false, false, false}, {2, 33, false, false, true},
        {19, 40, true, true, false, true}, {5, 33, true, false, false, true},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(shapes); i++)
        norm_backward_case(h, &shapes[i], false, false);
}

DEVICE_TEST(layernorm_matches_the_definition)
{
    static const size_t widths[] = {8, 33, 40, 264, 2056, 6008, 9000, 33000};
    for (size_t i = 0; i < MT_ARRAY_LEN(widths); i++) {
        norm_case(h, &(struct norm){1 + 300 / widths[i], widths[i], i % 2, true, true});
        norm_case(h, &(struct norm){2, widths[i], !(i % 2), true, false});
    }
}

DEVICE_TEST(layernorm_backward_matches_the_derivative)
{
    static const struct norm_shape shapes[] = {
        {1, 8, false, false, false},   {67, 72, false, true, false}, {40, 2056, true, false, true},
        {33, 136, true, true, false},  {13, 33, false, true, false}, {9, 35, true, true, true},
        {6, 9000, true, false, false}, {3, 6008, false, true, true}, {3, 12008, true, true, false},
        {3, 16400, false, true, true}, {1003, 8, true, false, false},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(shapes); i++) {
        norm_backward_case(h, &shapes[i], true, true);
        norm_backward_case(h, &shapes[i], true, false);
    }
}

static void bias_case(struct harness *h, size_t n, size_t c, size_t ld)
{
    double *dy, *db0, *want = scratch(h, c);
    struct dbuf *by = buf_random(h, h->dtype, n * ld, 1, &dy), *db = buf_random(h, MT_F32, c, 1, &db0);
    struct mt_bias_bwd a = {.n = n, .c = c, .ld = ld, .dtype = h->dtype, .dy = by->p, .db = db->p};
    a.workspace = workspace(h, mt_op_bias_bwd_workspace(h->dev, &a));
    RUN(h, mt_op_bias_bwd, &a);
    for (size_t k = 0; k < c; k++) {
        want[k] = db0[k];
        for (size_t i = 0; i < n; i++)
            want[k] += dy[i * ld + k];
    }
    expect_close(h, "db", buf_get(h, db), want, c, 1e-6);
}

DEVICE_TEST(bias_gradient_is_the_column_sum)
{
    bias_case(h, 131, 72, 80);
    bias_case(h, 1, 8, 8);
    bias_case(h, 70, 33, 35);
    bias_case(h, 1500, 520, 520);
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

struct rope_buffers {
    struct dbuf *qkv, *qk, *dqk, *dqkv, *positions, *cos_t, *sin_t, *q_norm, *k_norm, *rstd;
};

/* Queries, and behind them keys, in rows of `ld`. */
static struct mt_heads rope_side(const struct rope *s, const struct dbuf *b, enum mt_dtype t, size_t ld, bool keys)
{
    return mt_heads((char *)b->p + (keys ? s->n_q * s->d * mt_dtype_size(t) : 0), ld, keys ? s->n_kv : s->n_q, s->d);
}
#define SIDES(q_field, k_field, b, ld) \
    .q_field = rope_side(s, b, h->dtype, ld, false), .k_field = rope_side(s, b, h->dtype, ld, true)

/* Backward over its own gradient, and without a norm forward over its own input: the same bits. */
static void rope_in_place(struct harness *h, const struct rope *s, const struct rope_buffers *b)
{
    size_t qk = (s->n_q + s->n_kv) * s->d, ld = qk + s->n_kv * s->d;
    double *want = scratch(h, s->n * qk), *want_dx = buf_get(h, b->dqkv), *out = buf_get(h, b->qk);
    struct mt_qk_rope_bwd a = {
        .fwd = {.n = s->n, .rot = s->rot, .dtype = h->dtype, SIDES(q, k, b->qkv, ld),
                .positions = b->positions->p, .cos_t = b->cos_t->p, .sin_t = b->sin_t->p, .max_pos = s->n + 3,
                .q_norm = s->norm ? b->q_norm->p : NULL, .k_norm = s->norm ? b->k_norm->p : NULL,
                .rstd = b->rstd->p},
        SIDES(dq, dk, b->dqk, qk), SIDES(to_dq, to_dk, b->dqk, qk)};
    a.workspace = workspace(h, mt_op_qk_rope_bwd_workspace(h->dev, &a));
    RUN(h, mt_op_qk_rope_bwd, &a);
    for (size_t i = 0; i < s->n; i++)
        memcpy(want + i * qk, want_dx + i * ld, qk * sizeof(double));
    expect_close(h, "dqkv in place", buf_get(h, b->dqk), want, s->n * qk, 0);
    if (s->norm)
        return;
    RUN(h, mt_op_qk_rope,
        &(struct mt_qk_rope){.n = s->n, .rot = s->rot, .dtype = h->dtype, SIDES(q, k, b->qkv, ld),
                             SIDES(to_q, to_k, b->qkv, ld), .positions = b->positions->p, .cos_t = b->cos_t->p,
                             .sin_t = b->sin_t->p, .max_pos = s->n + 3});
    double *got = buf_get(h, b->qkv);
    for (size_t i = 0; i < s->n; i++)
        memcpy(want + i * qk, got + i * ld, qk * sizeof(double));
    expect_close(h, "qk in place", want, out, s->n * qk, 0);
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
    struct mt_qk_rope fwd = {.n = s->n, .rot = s->rot, .dtype = h->dtype, .eps = (float)eps, SIDES(q, k, qkv, ld),
                             SIDES(to_q, to_k, qk, ldo), .positions = bp->p, .cos_t = bc->p,
                             .sin_t = bs->p, .max_pos = pos_max, .q_norm = bq ? bq->p : NULL,
                             .k_norm = bk ? bk->p : NULL, .rstd = rstd->p};
    RUN(h, mt_op_qk_rope, &fwd);
    struct dbuf *g = buf_random(h, h->dtype, s->n * ldo, 1, &dy), *dqkv = buf_nan(h, h->dtype, s->n * ld);
    struct dbuf *bdq = s->norm ? buf_random(h, MT_F32, s->d, 1, &dq0) : NULL;
    struct dbuf *bdk = s->norm ? buf_random(h, MT_F32, s->d, 1, &dk0) : NULL;
    struct mt_qk_rope_bwd a = {
        .fwd = fwd, SIDES(dq, dk, g, ldo), SIDES(to_dq, to_dk, dqkv, ld),
        .dq_norm = bdq ? bdq->p : NULL, .dk_norm = bdk ? bdk->p : NULL};
    a.workspace = workspace(h, mt_op_qk_rope_bwd_workspace(h->dev, &a));
    RUN(h, mt_op_qk_rope_bwd, &a);
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
    rope_in_place(h, s, &(struct rope_buffers){qkv, qk, g, dqkv, bp, bc, bs, bq, bk, rstd});
}

DEVICE_TEST(rope_turns_pairs)
{
    rope_case(h, &(struct rope){1, 1, 1, 8, 8, false});
    rope_case(h, &(struct rope){37, 7, 1, 24, 24, false});
    rope_case(h, &(struct rope){33, 4, 2, 64, 32, false});
    rope_case(h, &(struct rope){70, 4, 2, 16, 16, true});
    rope_case(h, &(struct rope){9, 2, 2, 128, 64, true});
    rope_case(h, &(struct rope){21, 3, 1, 80, 80, true});
    rope_case(h, &(struct rope){13, 3, 1, 20, 12, true});
    rope_case(h, &(struct rope){13, 5, 5, 20, 6, false});
    rope_case(h, &(struct rope){3, 2, 1, 262, 260, true});
    rope_case(h, &(struct rope){2, 1, 1, 262, 260, false});
    rope_case(h, &(struct rope){2, 1, 1, 270, 12, true});
    rope_case(h, &(struct rope){6, 2, 1, 32, 0, true});
    rope_case(h, &(struct rope){6, 4, 1, 256, 256, true});
    rope_case(h, &(struct rope){3, 1, 1, 512, 512, true});
    rope_case(h, &(struct rope){5, 2, 1, 512, 128, true});
    rope_case(h, &(struct rope){4200, 1, 1, 16, 16, true});
}

static void turn_pairs(double *x, const double *cos_t, const double *sin_t, size_t rot, double sign)
{
    for (size_t i = 0; i < rot / 2; i++) {
        double a = x[2 * i], b = x[2 * i + 1], s = sign * sin_t[i];
        x[2 * i] = a * cos_t[i] - b * s;
        x[2 * i + 1] = b * cos_t[i] + a * s;
    }
}

/* A key part that all heads share, as in multi-head latent attention: written to a part of each head; its gradient is
 * the sum. Queries lie apart. rot 0 copies. */
static void rope_shared_case(struct harness *h, size_t n, size_t heads, size_t d, size_t rot, size_t gap, bool pairs)
{
    void (*rotated)(double *, const double *, const double *, size_t, double) = pairs ? turn_pairs : turn;
    size_t half = rot / 2, ld = heads * (d + gap);
    double *x, *key, *cs, *sn, *dy;
    int32_t *pos = (int32_t *)(void *)scratch(h, n);
    for (size_t i = 0; i < n; i++)
        pos[i] = (int32_t)((i * 3 + 1) % n);
    struct dbuf *bx = buf_random(h, h->dtype, n * ld, 1, &x), *bkey = buf_random(h, h->dtype, n * (d + 8), 1, &key);
    struct dbuf *bp = buf_ints(h, pos, n), *bc = buf_random(h, MT_F32, n * (half + 1), 1, &cs);
    struct dbuf *bs = buf_random(h, MT_F32, n * (half + 1), 1, &sn), *out = buf_nan(h, h->dtype, n * 2 * ld);
    size_t e = mt_dtype_size(h->dtype);
    struct mt_heads q = {bx->p, ld, d + gap, heads, d}, shared = {(char *)bkey->p + 8 * e, d + 8, 0, heads, d};
    struct mt_heads to_q = {(char *)out->p + gap * e, 2 * ld, d + gap, heads, d}, to_k = to_q;
    to_k.p = (char *)out->p + (ld + gap) * e;
    struct mt_qk_rope a = {.n = n, .rot = rot, .pairs = pairs, .dtype = h->dtype, .q = q, .k = shared, .to_q = to_q, .to_k = to_k,
                           .positions = rot ? bp->p : NULL, .cos_t = rot ? bc->p : NULL, .sin_t = rot ? bs->p : NULL,
                           .max_pos = n};
    RUN(h, mt_op_qk_rope, &a);
    struct dbuf *g = buf_random(h, h->dtype, n * 2 * ld, 1, &dy), *dx = buf_nan(h, h->dtype, n * ld);
    struct dbuf *dkey = buf_nan(h, h->dtype, n * (d + 8));
    struct mt_qk_rope_bwd b = {.fwd = a, .dq = to_q, .dk = to_k, .to_dq = q, .to_dk = shared};
    b.dq.p = (char *)g->p + gap * e;
    b.dk.p = (char *)g->p + (ld + gap) * e;
    b.to_dq.p = dx->p;
    b.to_dk.p = (char *)dkey->p + 8 * e;
    b.workspace = workspace(h, mt_op_qk_rope_bwd_workspace(h->dev, &b));
    RUN(h, mt_op_qk_rope_bwd, &b);
    double *got = buf_get(h, out), *got_dx = buf_get(h, dx), *got_key = buf_get(h, dkey), *want = scratch(h, d);
    for (size_t i = 0; i < n; i++) {
        const double *c = cs + (size_t)pos[i] * half, *s = sn + (size_t)pos[i] * half;
        double *sum = scratch(h, d);
        for (size_t k = 0; k < heads; k++) {
            size_t at = (i * 2) * ld + gap + k * (d + gap);
            memcpy(want, x + i * ld + k * (d + gap), d * sizeof(double));
            rotated(want, c, s, rot, 1);
            expect_close(h, "a query", got + at, want, d, tolerance(h, 1e-6, 6e-3));
            memcpy(want, key + i * (d + 8) + 8, d * sizeof(double));
            rotated(want, c, s, rot, 1);
            expect_close(h, "a shared key", got + at + ld, want, d, tolerance(h, 1e-6, 6e-3));
            memcpy(want, dy + at, d * sizeof(double));
            rotated(want, c, s, rot, -1);
            expect_close(h, "its gradient", got_dx + i * ld + k * (d + gap), want, d, tolerance(h, 1e-6, 6e-3));
            for (size_t m = 0; m < d; m++)
                sum[m] += dy[at + ld + m];
        }
        rotated(sum, c, s, rot, -1);
        expect_close(h, "the shared key's gradient", got_key + i * (d + 8) + 8, sum, d, tolerance(h, 2e-6, 6e-3));
    }
}

DEVICE_TEST(rope_of_heads_anywhere)
{
    rope_shared_case(h, 9, 4, 16, 16, 24, false);
    rope_shared_case(h, 5, 3, 64, 64, 0, false);
    rope_shared_case(h, 7, 2, 8, 0, 16, false);
    rope_shared_case(h, 6, 5, 10, 6, 3, false);
    rope_shared_case(h, 7, 4, 64, 64, 128, true);
    rope_shared_case(h, 3, 2, 12, 10, 1, true);
    rope_shared_case(h, 3, 19, 16, 8, 8, false); /* more heads than a loop takes at once */
}

/* The same rows with the statistics that there are, then with factors of 1 + w, rounded once or twice, and a gradient to
 * add to. dy: the values at b.dy, which are the first run's dx. */
static void rmsnorm_again(struct harness *h, struct mt_rmsnorm a, struct mt_rmsnorm_bwd b, const double *x, const double *w,
                          const double *dy, size_t first, size_t elems)
{
    size_t e = mt_dtype_size(h->dtype);
    double *old, *want = scratch(h, a.c), *xhat = scratch(h, a.c);
    struct dbuf *y = buf_nan(h, h->dtype, elems), *dx = buf_nan(h, h->dtype, elems);
    b.dres = (char *)buf_random(h, h->dtype, elems, 1, &old)->p + first * e;
    b.dx = (char *)dx->p + first * e;
    a.y = (char *)y->p + first * e;
    a.use_rstd = true;
    for (int flags = 0; flags < 4; flags++) {
        a.plus_one = b.plus_one = flags & 1;
        a.round_once = b.round_once = flags >> 1;
        RUN(h, mt_op_rmsnorm, &a);
        RUN(h, mt_op_rmsnorm_bwd, &b);
        double *got = buf_get(h, y), *got_dx = buf_get(h, dx);
        for (size_t r = 0; r < a.n; r++) {
            size_t k = r / a.x_at.group * a.x_at.ld + first + r % a.x_at.group * a.x_at.stride;
            double rstd = normalised(x + k, a.c, false, xhat);
            for (size_t i = 0; i < a.c; i++)
                want[i] = xhat[i] * (w[i] + a.plus_one);
            expect_close(h, "y with known statistics", got + k, want, a.c, tolerance(h, 1e-6, 8e-3));
            memcpy(want, old + k, a.c * sizeof(*want));
            norm_gradient(&(struct norm){.c = a.c, .plus_one = a.plus_one}, dy + k, xhat, w, rstd, want);
            expect_close(h, "dx added to a gradient", got_dx + k, want, a.c, tolerance(h, 3e-6, 8e-3));
        }
    }
}

/* Heads inside wider rows, and a projection's columns among others: the bits of rows side by side. */
static void rmsnorm_of_rows_apart(struct harness *h, size_t n, size_t group, size_t c, size_t gap, size_t first)
{
    size_t rows = n * group, stride = c + gap, ld = first + group * stride, e = mt_dtype_size(h->dtype);
    double *x, *w, *dy;
    struct dbuf *bx = buf_random(h, h->dtype, n * ld, 1, &x), *bw = buf_random(h, h->dtype, c, 1, &w);
    struct dbuf *bd = buf_random(h, h->dtype, n * ld, 1, &dy), *y = buf_nan(h, h->dtype, n * ld);
    struct dbuf *rstd = buf_nan(h, MT_F32, rows), *dw = buf_random(h, MT_F32, c, 1, NULL);
    struct mt_row_groups at = {group, ld, stride};
    struct mt_rmsnorm a = {.n = rows, .c = c, .dtype = h->dtype, .eps = 1e-6f, .x = (char *)bx->p + first * e, .w = bw->p,
                           .y = (char *)y->p + first * e, .rstd = rstd->p, .x_at = at, .y_at = at};
    RUN(h, mt_op_rmsnorm, &a);
    struct mt_rmsnorm_bwd b = {.n = rows, .c = c, .dtype = h->dtype, .dy = (char *)bd->p + first * e, .x = a.x, .w = bw->p,
                               .rstd = rstd->p, .dx = (char *)bd->p + first * e, .x_at = at, .dy_at = at, .dx_at = at,
                               .dw = dw->p};
    b.workspace = workspace(h, mt_op_rmsnorm_bwd_workspace(h->dev, &b));
    RUN(h, mt_op_rmsnorm_bwd, &b);
    double *got = buf_get(h, y), *got_dx = buf_get(h, bd);
    rmsnorm_again(h, a, b, x, w, got_dx, first, n * ld);
    for (size_t r = 0; r < rows; r++) {
        size_t k = r / group * ld + first + r % group * stride;
        double *xhat = scratch(h, c), *want = scratch(h, c), *want_dx = scratch(h, c);
        double s = normalised(x + k, c, false, xhat);
        for (size_t i = 0; i < c; i++)
            want[i] = xhat[i] * w[i];
        norm_gradient(&(struct norm){.c = c}, dy + k, xhat, w, s, want_dx);
        expect_close(h, "y of a row apart", got + k, want, c, tolerance(h, 1e-6, 8e-3));
        expect_close(h, "dx of a row apart", got_dx + k, want_dx, c, tolerance(h, 3e-6, 8e-3));
    }
}

DEVICE_TEST(rmsnorm_takes_rows_apart)
{
    rmsnorm_of_rows_apart(h, 7, 3, 64, 0, 32);
    rmsnorm_of_rows_apart(h, 5, 1, 40, 0, 8);
    rmsnorm_of_rows_apart(h, 6, 2, 24, 5, 3);
    rmsnorm_of_rows_apart(h, 3, 2, 1032, 0, 16);
    rmsnorm_of_rows_apart(h, 3, 2, 4104, 8, 0); /* four vectors a thread, of float and of bf16 */
    rmsnorm_of_rows_apart(h, 3, 2, 8256, 8, 0);
}

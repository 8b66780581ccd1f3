/* SPDX-License-Identifier: Apache-2.0 */
/* Which experts a token goes to, with what weights, and the gradient of that; the lists of the experts. */
#include <errno.h>
#include <float.h>
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "harness.h"

struct route {
    size_t n, e, k, padded; /* rows, and rows behind them */
    struct mt_router_rule rule;
    bool bias, f32_logits, aux, scaled;
    const double *scale; /* [e] of the experts, if scaled */
};

static void softmax(double *p, const double *x, size_t n)
{
    double max = x[0], sum = 0;
    for (size_t i = 0; i < n; i++)
        max = fmax(max, x[i]);
    for (size_t i = 0; i < n; i++)
        sum += p[i] = exp(x[i] - max);
    for (size_t i = 0; i < n; i++)
        p[i] /= sum;
}

static void score(enum mt_router_score kind, double *s, const double *x, size_t e)
{
    if (kind == MT_SCORE_SOFTMAX)
        softmax(s, x, e);
    for (size_t i = 0; kind != MT_SCORE_SOFTMAX && i < e; i++)
        s[i] = kind == MT_SCORE_SIGMOID ? sigmoid(x[i]) : x[i];
}

static size_t largest(const double *v, size_t n)
{
    size_t best = 0;
    for (size_t i = 1; i < n; i++)
        if (v[i] > v[best])
            best = i;
    return best;
}

static double count_of_group(const struct mt_router_rule *rule, const double *key, size_t n)
{
    size_t best = largest(key, n);
    double second = -DBL_MAX;
    for (size_t i = 0; i < n; i++)
        second = i == best ? second : fmax(second, key[i]);
    return rule->group == MT_GROUP_MAX ? key[best] : key[best] + second;
}

static void choose(const struct route *c, double *ids, const double *x, const double *bias)
{
    double key[MT_MAX_EXPERTS], groups[MT_MAX_EXPERTS];
    size_t n_group = MT_MAX(c->rule.n_group, (size_t)1), per = c->e / n_group;
    score(c->rule.score, key, x, c->e);
    for (size_t i = 0; bias && i < c->e; i++)
        key[i] += bias[i];
    for (size_t g = 0; n_group > 1 && g < n_group; g++)
        groups[g] = count_of_group(&c->rule, key + g * per, per);
    for (size_t i = 0; n_group > 1 && i < c->rule.topk_group; i++)
        groups[largest(groups, n_group)] = -INFINITY;
    for (size_t i = 0; n_group > 1 && i < c->e; i++)
        key[i] = groups[i / per] == -INFINITY ? key[i] : -DBL_MAX;
    for (size_t j = 0; j < c->k; j++) {
        ids[j] = (double)largest(key, c->e);
        key[(size_t)ids[j]] = -INFINITY;
    }
}

static void weigh(const struct route *c, double *w, const double *x, const double *ids)
{
    double s[MT_MAX_EXPERTS], sum = 0;
    score(c->rule.score, s, x, c->e);
    for (size_t j = 0; j < c->k; j++)
        w[j] = s[(size_t)ids[j]];
    if (c->rule.softmax_chosen)
        softmax(w, w, c->k);
    for (size_t j = 0; j < c->k; j++)
        sum += w[j];
    double eps = (double)c->rule.eps;
    double by = c->rule.renorm == MT_RENORM_SUM ? sum + eps : c->rule.renorm == MT_RENORM_MAX ? fmax(sum, eps) : 1;
    for (size_t j = 0; j < c->k; j++)
        w[j] *= (double)c->rule.scale / by * (c->scale ? c->scale[(size_t)ids[j]] : 1);
}

/* What the gradient is checked against: the loss whose derivative it is to be. */
static double loss_of(const struct route *c, const double *x, const double *ids, const double *dw, const double *f,
                      double aux_scale)
{
    double w[MT_MAX_EXPERTS], q[MT_MAX_EXPERTS], sum = 0;
    weigh(c, w, x, ids);
    for (size_t j = 0; j < c->k; j++)
        sum += dw[j] * w[j];
    softmax(q, x, c->e);
    for (size_t i = 0; f && i < c->e; i++)
        sum += aux_scale * f[i] * q[i];
    return sum;
}

static void gradient(const struct route *c, double *dx, double *x, const double *ids, const double *dw, const double *f,
                     double aux_scale)
{
    const double step = 1e-4;
    for (size_t i = 0; i < c->e; i++) {
        double old = x[i], side[2];
        for (int k = 0; k < 2; k++) {
            x[i] = old + (k ? step : -step);
            side[k] = loss_of(c, x, ids, dw, f, aux_scale);
        }
        x[i] = old;
        dx[i] = (side[1] - side[0]) / (2 * step);
    }
}

/* Rows of the gradient of the experts' own scales: zero but for the chosen ones. */
static void scale_gradient(const struct route *c, double *rows, const double *x, const double *ids, const double *dw)
{
    struct route without = *c;
    without.scale = NULL;
    for (size_t i = 0; i < c->n; i++) {
        double w[MT_MAX_EXPERTS];
        weigh(&without, w, x + i * c->e, ids + i * c->k);
        for (size_t j = 0; j < c->k; j++)
            rows[i * c->e + (size_t)ids[i * c->k + j]] = dw[i * c->k + j] * w[j];
    }
}

static void route_case(struct harness *h, const struct route *given)
{
    struct route with = *given, *c = &with;
    size_t n = c->n, e = c->e, k = c->k, rows = n + c->padded;
    double *of_experts;
    struct dbuf *be = c->scaled ? buf_random(h, h->dtype, e, 1, &of_experts) : NULL;
    c->scale = be ? of_experts : NULL;
    enum mt_dtype lt = c->f32_logits ? MT_F32 : h->dtype;
    double *x, *bias = NULL, *dw, *f = NULL, *ids = scratch(h, rows * k), *w = scratch(h, rows * k);
    struct dbuf *logits = buf_random(h, lt, n * e, 2, &x), *bb = c->bias ? buf_random(h, MT_F32, e, 0.3, &bias) : NULL;
    struct dbuf *bids = buf_nan(h, MT_BF16, rows * k), *bw = buf_nan(h, MT_F32, rows * k);
    struct mt_router a = {.n = n, .n_padded = rows, .e = e, .k = k, .dtype = h->dtype, .logits_dtype = lt,
                          .rule = c->rule, .logits = logits->p, .select_bias = bb ? bb->p : NULL, .ids = bids->p,
                          .expert_scale = be ? be->p : NULL, .weights = bw->p};
    RUN(h, mt_op_router, &a);
    for (size_t i = 0; i < rows; i++) {
        if (i < n) {
            choose(c, ids + i * k, x + i * e, bias);
            weigh(c, w + i * k, x + i * e, ids + i * k);
        }
        for (size_t j = 0; i >= n && j < k; j++)
            ids[i * k + j] = MT_NO_EXPERT;
    }
    expect_close(h, "ids", buf_get_shorts(h, bids), ids, rows * k, 0);
    double tol = c->rule.round_weights ? tolerance(h, 2e-6, 3e-3) : 2e-6;
    expect_close(h, "weights", buf_get(h, bw), w, rows * k, tol);

    struct dbuf *bdw = buf_random(h, MT_F32, n * k, 1, &dw), *bf = c->aux ? buf_random(h, MT_F32, e, 1, &f) : NULL;
    struct dbuf *dx = buf_nan(h, h->dtype, n * e), *ds = be ? buf_nan(h, MT_F32, n * e) : NULL;
    struct mt_router_bwd b = {.n = n, .e = e, .k = k, .dtype = h->dtype, .logits_dtype = lt, .rule = c->rule,
                              .logits = logits->p, .ids = bids->p, .dweights = bdw->p, .aux = bf ? bf->p : NULL,
                              .aux_scale = 0.7f, .expert_scale = a.expert_scale, .dscale = ds ? ds->p : NULL,
                              .dlogits = dx->p};
    RUN(h, mt_op_router_bwd, &b);
    double *want = scratch(h, n * e);
    for (size_t i = 0; i < n; i++)
        gradient(c, want + i * e, x + i * e, ids + i * k, dw + i * k, f, (double)0.7f);
    expect_close(h, "dlogits", buf_get(h, dx), want, n * e, tolerance(h, 1e-5, 3e-3));
    memset(want, 0, n * e * sizeof(*want));
    scale_gradient(c, want, x, ids, dw);
    if (ds)
        expect_close(h, "dscale", buf_get(h, ds), want, n * e, 2e-6);
}

static const struct mt_router_rule qwen2 = {.score = MT_SCORE_SOFTMAX, .scale = 1, .round_weights = true};
static const struct mt_router_rule qwen3 = {.score = MT_SCORE_SOFTMAX, .renorm = MT_RENORM_SUM, .scale = 1,
                                            .round_weights = true};
static const struct mt_router_rule mixtral = {.score = MT_SCORE_SOFTMAX, .renorm = MT_RENORM_SUM, .scale = 1};
static const struct mt_router_rule gpt_oss = {.score = MT_SCORE_RAW, .softmax_chosen = true, .scale = 1,
                                              .round_weights = true};
static const struct mt_router_rule glm4 = {.score = MT_SCORE_SIGMOID, .n_group = 1, .topk_group = 1,
                                           .renorm = MT_RENORM_SUM, .eps = 1e-20f, .scale = 2.5f};
static const struct mt_router_rule minimax = {.score = MT_SCORE_SIGMOID, .renorm = MT_RENORM_SUM, .scale = 1};
static const struct mt_router_rule deepseek3 = {.score = MT_SCORE_SIGMOID, .n_group = 8, .topk_group = 4,
                                                .renorm = MT_RENORM_SUM, .eps = 1e-20f, .scale = 2.5f};
static const struct mt_router_rule deepseek2 = {.score = MT_SCORE_SOFTMAX, .n_group = 5, .topk_group = 2,
                                                .group = MT_GROUP_MAX, .scale = 16};
static const struct mt_router_rule ernie = {.score = MT_SCORE_SOFTMAX, .renorm = MT_RENORM_MAX, .eps = 1e-12f,
                                            .scale = 1, .round_weights = true};

DEVICE_TEST(routers_choose_and_weigh)
{
    struct mt_router_rule floor = ernie, all_steps = {.score = MT_SCORE_SOFTMAX, .softmax_chosen = true,
                                                      .renorm = MT_RENORM_SUM, .eps = 0.5f, .scale = 3},
                          plain = {.score = MT_SCORE_SIGMOID, .scale = 1};
    floor.eps = 0.9f; /* of some rows the sum is less */
    route_case(h, &(struct route){.n = 37, .e = 12, .k = 3, .padded = 5, .rule = qwen3, .aux = true});
    route_case(h, &(struct route){.n = 9, .e = 60, .k = 4, .rule = qwen2});
    route_case(h, &(struct route){.n = 9, .e = 128, .k = 8, .padded = 3, .rule = mixtral, .scaled = true}); /* Gemma 4 */
    route_case(h, &(struct route){.n = 5, .e = 35, .k = 3, .rule = gpt_oss, .scaled = true, .aux = true});
    route_case(h, &(struct route){.n = 5, .e = 40, .k = 3, .rule = qwen3, .f32_logits = true, .scaled = true, .aux = true});
    route_case(h, &(struct route){.n = 5, .e = 9, .k = 3, .padded = 2, .rule = gpt_oss, .f32_logits = true, .scaled = true,
                                  .aux = true});
    route_case(h, &(struct route){.n = 5, .e = 8, .k = 2, .rule = mixtral});
    route_case(h, &(struct route){.n = 11, .e = 33, .k = 4, .padded = 1, .rule = gpt_oss, .aux = true});
    route_case(h, &(struct route){.n = 6, .e = 128, .k = 8, .rule = glm4, .bias = true, .f32_logits = true});
    route_case(h, &(struct route){.n = 6, .e = 47, .k = 6, .rule = minimax, .bias = true, .aux = true});
    route_case(h, &(struct route){.n = 13, .e = 32, .k = 4, .padded = 2, .rule = deepseek3, .bias = true, .f32_logits = true});
    route_case(h, &(struct route){.n = 7, .e = 160, .k = 6, .rule = deepseek2});
    route_case(h, &(struct route){.n = 7, .e = 64, .k = 6, .rule = ernie, .bias = true, .f32_logits = true});
    route_case(h, &(struct route){.n = 19, .e = 16, .k = 5, .rule = floor});
    route_case(h, &(struct route){.n = 8, .e = 40, .k = 5, .rule = all_steps});
    route_case(h, &(struct route){.n = 5, .e = 20, .k = 3, .rule = all_steps, .f32_logits = true, .aux = true});
    route_case(h, &(struct route){.n = 4, .e = 7, .k = 7, .rule = qwen2}); /* all of them */
    route_case(h, &(struct route){.n = 2, .e = 40, .k = 40, .rule = glm4, .f32_logits = true});
    route_case(h, &(struct route){.n = 1, .e = 5, .k = 1, .rule = qwen2});
    route_case(h, &(struct route){.n = 3, .e = 1, .k = 1, .rule = plain, .f32_logits = true, .aux = true});
    route_case(h, &(struct route){.n = 1, .e = MT_MAX_EXPERTS, .k = 16, .rule = gpt_oss, .f32_logits = true});
    route_case(h, &(struct route){.n = 300, .e = 130, .k = 3, .rule = mixtral, .f32_logits = true});
}

/* Experts 0 and 3, 1 and 4, .. get the same logit, in every row another. */
DEVICE_TEST(equal_experts_go_by_index)
{
    enum { N = 6, E = 70, K = 5 };
    double *x = scratch(h, N * E), *want = scratch(h, N * K);
    for (size_t i = 0; i < N; i++)
        for (size_t j = 0; j < E; j++)
            x[i * E + j] = i < 3 ? (double)(j % 3 == i) : 0.5;
    struct dbuf *logits = buf_values(h, h->dtype, N * E, x), *ids = buf_nan(h, MT_BF16, N * K);
    struct dbuf *w = buf_nan(h, MT_F32, N * K);
    struct mt_router a = {.n = N, .n_padded = N, .e = E, .k = K, .dtype = h->dtype, .logits_dtype = h->dtype, .rule = qwen3,
                          .logits = logits->p, .ids = ids->p, .weights = w->p};
    for (size_t i = 0; i < N; i++)
        for (size_t j = 0; j < K; j++)
            want[i * K + j] = (double)(i < 3 ? 3 * j + i : j);
    RUN(h, mt_op_router, &a);
    expect_close(h, "ids", buf_get_shorts(h, ids), want, N * K, 0);
    a.rule = gpt_oss;
    RUN(h, mt_op_router, &a);
    expect_close(h, "ids by logits", buf_get_shorts(h, ids), want, N * K, 0);
    a.rule = deepseek3; /* equal groups too: the first four of eight are those that can be chosen */
    a.e = 64;
    a.rule.topk_group = 1;
    a.n = a.n_padded = 1;
    a.logits = buf_values(h, h->dtype, E, x + 3 * E)->p;
    RUN(h, mt_op_router, &a);
    expect_close(h, "ids in groups", buf_get_shorts(h, ids), want + 3 * K, K, 0);
}

/* A row that is not finite says so in its weights, and harms no other. */
DEVICE_TEST(rows_that_are_not_finite_say_so)
{
    enum { N = 7, E = 37, K = 3 };
    static const double odd[N] = {0, NAN, 0, INFINITY, -INFINITY, 0, 0};
    double *x, *dw, *clean;
    buf_random(h, h->dtype, N * E, 1, &x);
    clean = scratch(h, N * E);
    memcpy(clean, x, N * E * sizeof(double));
    for (size_t i = 0; i < N; i++)
        x[i * E + 35 - i] = odd[i] != 0 ? odd[i] : x[i * E + 35 - i];
    struct dbuf *ids[2], *w[2], *dx[2], *bdw = buf_random(h, MT_F32, N * K, 1, &dw);
    for (int k = 0; k < 2; k++) {
        ids[k] = buf_nan(h, MT_BF16, N * K);
        w[k] = buf_nan(h, MT_F32, N * K);
        dx[k] = buf_nan(h, h->dtype, N * E);
        struct mt_router a = {.n = N - 1, .n_padded = N, .e = E, .k = K, .dtype = h->dtype, .logits_dtype = h->dtype,
                              .rule = qwen3, .logits = buf_values(h, h->dtype, N * E, k ? x : clean)->p, .ids = ids[k]->p,
                              .weights = w[k]->p};
        RUN(h, mt_op_router, &a);
        struct mt_router_bwd b = {.n = N, .e = E, .k = K, .dtype = h->dtype, .logits_dtype = h->dtype, .rule = qwen3,
                                  .logits = a.logits, .ids = ids[k]->p, .dweights = bdw->p, .dlogits = dx[k]->p};
        RUN(h, mt_op_router_bwd, &b);
    }
    double *got = buf_get_shorts(h, ids[1]), *want = buf_get_shorts(h, ids[0]), *gw = buf_get(h, w[1]);
    double *gx = buf_get(h, dx[1]), *want_x = buf_get(h, dx[0]);
    for (size_t i = 0; i < N; i++) {
        bool bad = false;
        for (size_t j = 0; j < K; j++)
            bad |= odd[i] != 0 ? got[i * K + j] != (double)j || !isnan(gw[i * K + j]) : got[i * K + j] != want[i * K + j];
        for (size_t j = 0; j < E; j++)
            bad |= odd[i] != 0 ? !isnan(gx[i * E + j]) : gx[i * E + j] != want_x[i * E + j];
        for (size_t j = 0; i == N - 1 && j < E; j++) /* padding */
            bad |= gx[i * E + j] != 0;
        if (bad)
            must(h, "a row that is not finite", -EINVAL, &(struct mt_err){.msg = "or one beside it"});
    }
}

static void stats_case(struct harness *h, size_t n, size_t e)
{
    double *x, *sum, p[MT_MAX_EXPERTS];
    struct dbuf *logits = buf_random(h, h->dtype, n * e, 2, &x), *bs = buf_random(h, MT_F32, e, 1, &sum);
    struct mt_router_stats a = {.n = n, .e = e, .dtype = h->dtype, .logits = logits->p, .prob_sum = bs->p};
    a.workspace = workspace(h, mt_op_router_stats_workspace(h->dev, &a));
    RUN(h, mt_op_router_stats, &a);
    for (size_t i = 0; i < n; i++) {
        softmax(p, x + i * e, e);
        for (size_t j = 0; j < e; j++)
            sum[j] += p[j];
    }
    expect_close(h, "sums of probabilities", buf_get(h, bs), sum, e, 1e-6);
}

DEVICE_TEST(probabilities_add_up)
{
    stats_case(h, 1, 5);
    stats_case(h, 131, 12);
    stats_case(h, 77, 130);
    stats_case(h, 3, MT_MAX_EXPERTS);
    stats_case(h, 70, 1);
}

/* --- lists ------------------------------------------------------------------------------------ */

struct lists {
    size_t n, e, k;
    size_t only;        /* all rows choose experts from here on; e: any */
    size_t skip, spoil; /* each so manieth row goes nowhere, or has a weight that is not finite; 0: none */
    size_t bucket;      /* 0: 1 */
};

/* Of each entry: how many are before it in its expert's list, after the padded lists of the experts before. */
static void padded_places(double *places, const uint16_t *ids, const double *starts, const struct lists *c)
{
    size_t place = 0, bucket = MT_MAX(c->bucket, (size_t)1);
    for (size_t i = 0; i < c->n * c->k; i++)
        places[i] = -1;
    for (size_t x = 0; x < c->e; x++) {
        size_t at = place;
        for (size_t i = 0; i < c->n * c->k; i++)
            if (ids[i] == x)
                places[i] = (double)at++;
        place += mt_align_up((size_t)(starts[x + 1] - starts[x]), bucket);
    }
}

static void lists_case(struct harness *h, const struct lists *c)
{
    size_t n = c->n, e = c->e, k = c->k, total = 0;
    uint16_t *ids = (uint16_t *)(void *)scratch(h, mt_div_up(n * k, 4));
    double *w = scratch(h, n * k), *counts = scratch(h, e + 1), *starts = scratch(h, e + 1), *list = scratch(h, n * k);
    for (size_t i = 0; i < n; i++) {
        bool skipped = c->skip && i % c->skip == 1;
        for (size_t j = 0; j < k; j++) {
            ids[i * k + j] = (uint16_t)(((c->only < e ? c->only : i * i * 7 + i / 3) + j) % e);
            ids[i * k + j] = skipped ? MT_NO_EXPERT : ids[i * k + j];
            w[i * k + j] = skipped ? 0 : 0.25;
            counts[ids[i * k + j] < e ? ids[i * k + j] : e] += !skipped;
        }
        if (!skipped && c->spoil && i % c->spoil == 2) {
            w[i * k + i % k] = i % 2 ? NAN : INFINITY;
            counts[e]++;
        }
    }
    for (size_t x = 0; x < e; x++) {
        starts[x] = (double)total;
        for (size_t i = 0; i < n * k; i++)
            if (ids[i] == x)
                list[total++] = (double)i;
    }
    starts[e] = (double)total;
    struct dbuf *bc = buf_nan(h, MT_F32, e + 1), *bs = buf_nan(h, MT_F32, e + 1), *bl = buf_nan(h, MT_F32, n * k);
    struct dbuf *bp = buf_nan(h, MT_F32, n * k);
    double *places = scratch(h, n * k);
    padded_places(places, ids, starts, c);
    struct mt_route_lists a = {.n = n, .e = e, .k = k, .ids = buf_shorts(h, ids, n * k)->p,
                               .weights = buf_values(h, MT_F32, n * k, w)->p, .counts = bc->p, .starts = bs->p,
                               .list = bl->p, .places = bp->p, .bucket = c->bucket ? c->bucket : 1};
    a.workspace = workspace(h, mt_op_route_lists_workspace(h->dev, &a));
    RUN(h, mt_op_route_lists, &a);
    expect_close(h, "counts", buf_get_ints(h, bc), counts, e + 1, 0);
    expect_close(h, "starts", buf_get_ints(h, bs), starts, e + 1, 0);
    expect_close(h, "list", buf_get_ints(h, bl), list, total, 0);
    expect_close(h, "places", buf_get_ints(h, bp), places, n * k, 0);
}

DEVICE_TEST(lists_hold_each_entry_once)
{
    lists_case(h, &(struct lists){.n = 1, .e = 5, .k = 2, .only = 5});
    lists_case(h, &(struct lists){.n = 300, .e = 12, .k = 3, .only = 12, .skip = 7, .spoil = 5, .bucket = 32});
    lists_case(h, &(struct lists){.n = 257, .e = 130, .k = 8, .only = 130, .spoil = 3, .bucket = 128});
    lists_case(h, &(struct lists){.n = 1030, .e = 7, .k = 7, .only = 7});  /* every expert has all */
    lists_case(h, &(struct lists){.n = 513, .e = 40, .k = 2, .only = 17}); /* two experts have all */
    lists_case(h, &(struct lists){.n = 600, .e = 1000, .k = 1, .only = 1000, .bucket = 16}); /* most have none */
    lists_case(h, &(struct lists){.n = 256, .e = 1, .k = 1, .only = 1, .skip = 2});
    lists_case(h, &(struct lists){.n = 2, .e = 3, .k = 2, .only = 3, .skip = 2});
    lists_case(h, &(struct lists){.n = 20, .e = MT_MAX_EXPERTS, .k = 10, .only = MT_MAX_EXPERTS});
}

DEVICE_TEST(routers_refuse_bad_rules)
{
    enum { E = 12, K = 3 };
    double *x;
    struct dbuf *logits = buf_random(h, h->dtype, E, 1, &x), *ids = buf_nan(h, MT_BF16, K), *w = buf_nan(h, MT_F32, K);
    const struct mt_router good = {.n = 1, .n_padded = 1, .e = E, .k = K, .dtype = h->dtype, .logits_dtype = h->dtype,
                                   .rule = qwen3, .logits = logits->p, .ids = ids->p, .weights = w->p};
    struct mt_router a = good;
    a.k = E + 1;
    expect_rejected(h, "more experts than there are", mt_op_router(h->dev, &a, NULL));
    a = good;
    a.e = MT_MAX_EXPERTS + 1;
    expect_rejected(h, "too many experts", mt_op_router(h->dev, &a, NULL));
    a = good;
    a.rule.n_group = 5;
    a.rule.topk_group = 2;
    expect_rejected(h, "groups of different sizes", mt_op_router(h->dev, &a, NULL));
    a.rule.n_group = 6;
    a.rule.topk_group = 1;
    expect_rejected(h, "groups of fewer experts than are chosen", mt_op_router(h->dev, &a, NULL));
    a = good;
    a.n_padded = 0;
    expect_rejected(h, "fewer rows with padding than without", mt_op_router(h->dev, &a, NULL));
}

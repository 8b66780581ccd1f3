/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "harness.h"

struct shape {
    size_t n_q, n_kv, d, window;
    int n_docs;
    int32_t len[6];
    size_t most_n, most_len; /* 0: of these documents */
    bool sinks;
    size_t d_v; /* 0: d */
    bool apart; /* a gap after each head of queries, and each head's values behind its keys */
    double cap;
};

/* Where heads begin in a row of queries, keys and values. */
struct place {
    size_t at, stride, n, dim;
};
struct places {
    struct place q, k, v;
    size_t ld;
};

static struct places places_of(const struct shape *s)
{
    size_t d = s->d, d_v = s->d_v ? s->d_v : d, qw = s->n_q * d, kw = s->n_kv * d;
    if (!s->apart)
        return (struct places){{0, d, s->n_q, d}, {qw, d, s->n_kv, d}, {qw + kw, d_v, s->n_kv, d_v},
                               qw + kw + s->n_kv * d_v};
    size_t q = d + 8, kv = d + d_v + 16, first = s->n_q * q;
    return (struct places){{0, q, s->n_q, d}, {first, kv, s->n_kv, d}, {first + d, kv, s->n_kv, d_v},
                           first + s->n_kv * kv};
}

static struct mt_heads view(const struct places *p, const struct place *x, const struct dbuf *b, enum mt_dtype t)
{
    return (struct mt_heads){(char *)b->p + x->at * mt_dtype_size(t), p->ld, x->stride, x->n, x->dim};
}

static size_t element(const struct places *p, const struct place *x, size_t row, size_t head)
{
    return row * p->ld + x->at + head * x->stride;
}

struct reference {
    double *o, *dx;         /* dx: laid out as the rows */
    double *sinks, *dsinks; /* NULL where there are none */
};

/* One query row of one head, forward and backward, in double. */
static void reference_row(const struct shape *s, const struct places *at, const double *x, const double *dO, size_t doc,
                          size_t i, size_t head, double *p, struct reference *r)
{
    size_t kv = head / (s->n_q / s->n_kv), d = s->d, d_v = at->v.dim, row = doc + i, out = (row * s->n_q + head) * d_v;
    size_t first = s->window && i + 1 > s->window ? i + 1 - s->window : 0;
    const double *q = x + element(at, &at->q, row, head), *g = dO + out;
    double max = -1e300, sum = 0, delta = 0, scale = 1 / sqrt((double)d), *slope = p + i + 1;
    for (size_t j = first; j <= i; j++) {
        const double *k = x + element(at, &at->k, doc + j, kv);
        p[j] = 0;
        for (size_t c = 0; c < d; c++)
            p[j] += q[c] * k[c] * scale;
        slope[j] = 1;
        if (s->cap > 0) {
            double t = tanh(p[j] / s->cap);
            p[j] = s->cap * t;
            slope[j] = 1 - t * t;
        }
        max = fmax(max, p[j]);
    }
    for (size_t j = first; j <= i; j++)
        sum += p[j] = exp(p[j] - max);
    double sink = r->sinks ? exp(r->sinks[head] - max) : 0;
    sum += sink;
    for (size_t j = first; j <= i; j++) {
        const double *v = x + element(at, &at->v, doc + j, kv);
        p[j] /= sum;
        for (size_t c = 0; c < d_v; c++)
            r->o[out + c] += p[j] * v[c];
    }
    for (size_t c = 0; c < d_v; c++)
        delta += g[c] * r->o[out + c];
    if (r->sinks)
        r->dsinks[head] -= sink / sum * delta;
    for (size_t j = first; j <= i; j++) {
        size_t key = element(at, &at->k, doc + j, kv), value = element(at, &at->v, doc + j, kv);
        double dp = 0;
        for (size_t c = 0; c < d_v; c++) {
            dp += g[c] * x[value + c];
            r->dx[value + c] += p[j] * g[c];
        }
        double ds = p[j] * (dp - delta) * slope[j] * scale;
        for (size_t c = 0; c < d; c++) {
            r->dx[element(at, &at->q, row, head) + c] += ds * x[key + c];
            r->dx[key + c] += ds * q[c];
        }
    }
}

/* What comes between forward and backward; of r, the sinks. */
static struct mt_attention_sink_bwd run_sinks(struct harness *h, const struct mt_attention *a, struct reference *r)
{
    struct dbuf *sinks = buf_random(h, h->dtype, a->q.n, 2, &r->sinks);
    struct mt_attention_sink f = {.n = a->n, .dtype = a->dtype, .sinks = sinks->p, .o = a->o, .lse = a->lse};
    RUN(h, mt_op_attention_sink, &f);
    return (struct mt_attention_sink_bwd){.n = a->n, .dtype = a->dtype, .sinks = sinks->p, .o = a->o, .lse = a->lse};
}

/* Gaps between heads keep what they held, which is not a number; then they count as 0. */
static void check_gaps(struct harness *h, const struct places *at, size_t n, double *got)
{
    bool *head = (bool *)scratch(h, at->ld);
    const struct place *all[] = {&at->q, &at->k, &at->v};
    for (size_t k = 0; k < 3; k++)
        for (size_t i = 0; i < all[k]->n * all[k]->dim; i++)
            head[element(at, all[k], 0, i / all[k]->dim) + i % all[k]->dim] = true;
    double touched = 0;
    for (size_t i = 0; i < n * at->ld; i++)
        if (!head[i % at->ld]) {
            touched += !isnan(got[i]);
            got[i] = 0;
        }
    expect_close(h, "gaps that were written", &touched, &(double){0}, 1, 0);
}

/* Without a sink, the score of a query's only key has no gradient at all. */
static void check_lone(struct harness *h, const struct shape *s, const struct places *at, const int32_t *cu,
                       const double *dx)
{
    double not_zero = 0;
    for (int doc = 0; doc < s->n_docs; doc++)
        for (int32_t i = 0; i < (s->window == 1 ? s->len[doc] : 1); i++)
            for (size_t c = 0; c < s->n_q * s->d; c++)
                not_zero += dx[element(at, &at->q, (size_t)(cu[doc] + i), c / s->d) + c % s->d] != 0;
    if (!strstr(mt_device_limits(h->dev)->name, "cuDNN")) /* whose sums are its own */
        expect_close(h, "gradients of queries with one key", &not_zero, &(double){0}, 1, 0);
}

static void attention_case(struct harness *h, const struct shape *s)
{
    size_t n = 0, max_len = 0;
    struct places at = places_of(s);
    int32_t cu[8] = {0};
    for (int i = 0; i < s->n_docs; i++) {
        cu[i + 1] = cu[i] + s->len[i];
        max_len = MT_MAX(max_len, (size_t)s->len[i]);
    }
    n = (size_t)cu[s->n_docs];
    double *x, *dO;
    size_t ow = s->n_q * at.v.dim;
    struct dbuf *qkv = buf_random(h, h->dtype, n * at.ld, 1.2, &x), *o = buf_nan(h, h->dtype, n * ow);
    struct dbuf *g = buf_random(h, h->dtype, n * ow, 1, &dO), *lse = buf_nan(h, MT_F32, s->n_q * n);
    struct dbuf *dqkv = buf_nan(h, h->dtype, n * at.ld), *bcu = buf_ints(h, cu, (size_t)s->n_docs + 1);
    struct mt_attention a = {
        .n = n, .window = s->window, .n_docs = (size_t)s->n_docs, .max_len = max_len, .most_n = s->most_n,
        .most_len = s->most_len, .dtype = h->dtype, .scale = (float)(1 / sqrt((double)s->d)), .cap = (float)s->cap,
        .cu_seqlens = bcu->p, .cu_seqlens_host = cu, .q = view(&at, &at.q, qkv, h->dtype),
        .k = view(&at, &at.k, qkv, h->dtype), .v = view(&at, &at.v, qkv, h->dtype),
        .o = mt_heads(o->p, ow, s->n_q, at.v.dim), .lse = lse->p};
    a.workspace = workspace(h, mt_op_attention_workspace(h->dev, &a));
    RUN(h, mt_op_attention, &a);
    struct reference r = {scratch(h, n * ow), scratch(h, n * at.ld), NULL, NULL};
    struct mt_attention_sink_bwd sink = {0};
    struct dbuf *dsinks = s->sinks ? buf_random(h, MT_F32, s->n_q, 1, &r.dsinks) : NULL;
    if (s->sinks)
        sink = run_sinks(h, &a, &r);
    struct mt_attention_bwd b = {.fwd = a, .d_o = mt_heads(g->p, ow, s->n_q, at.v.dim),
                                 .dq = view(&at, &at.q, dqkv, h->dtype), .dk = view(&at, &at.k, dqkv, h->dtype),
                                 .dv = view(&at, &at.v, dqkv, h->dtype)};
    RUN(h, mt_op_attention_bwd, &b);
    double *p = scratch(h, 2 * max_len), *got = buf_get(h, dqkv);
    for (int doc = 0; doc < s->n_docs; doc++)
        for (int32_t i = 0; i < s->len[doc]; i++)
            for (size_t head = 0; head < s->n_q; head++)
                reference_row(s, &at, x, dO, (size_t)cu[doc], (size_t)i, head, p, &r);
    check_gaps(h, &at, n, got);
    expect_close(h, "o", buf_get(h, o), r.o, n * ow, tolerance(h, 2e-6, 4e-3));
    expect_close(h, "dqkv", got, r.dx, n * at.ld, tolerance(h, 4e-6, 8e-3));
    if (!s->sinks) {
        check_lone(h, s, &at, cu, got);
        return;
    }
    sink.d_o = b.d_o;
    sink.dsinks = dsinks->p;
    sink.workspace = workspace(h, mt_op_attention_sink_bwd_workspace(h->dev, &sink));
    RUN(h, mt_op_attention_sink_bwd, &sink);
    /* a sum of terms of either sign, of o as rounded */
    expect_close(h, "dsinks", buf_get(h, dsinks), r.dsinks, s->n_q, tolerance(h, 1e-5, 1e-2));
}

static void attention_of_odd_shapes(struct harness *h)
{
    static const struct shape shapes[] = {
        {1, 1, 8, 0, 1, {1}},
        {1, 1, 64, 0, 1, {65}},
        {7, 1, 24, 0, 3, {1, 63, 70}},
        {4, 2, 80, 0, 2, {129, 2}},
        {2, 2, 96, 17, 2, {100, 5}},
        {4, 1, 128, 64, 1, {150}},
        {2, 1, 16, 1, 2, {40, 40}},
        {4, 4, 16, 1000, 4, {3, 64, 128, 7}},
        /* several tiles of queries on the cuda device */
        {2, 1, 16, 0, 2, {600, 30}},
        {2, 2, 8, 100, 1, {700}},
        {4, 2, 64, 0, 3, {7, 290, 1}},
        {4, 1, 128, 40, 3, {30, 200, 129}},
        /* shorter than what was planned */
        {2, 1, 16, 0, 1, {65}, 200, 128},
        {2, 1, 16, 0, 1, {1}, 200, 128},
        {2, 1, 16, 30, 2, {70, 70}, 150, 128},
        {2, 1, 16, 0, 2, {64, 64}, 300, 128},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(shapes); i++)
        attention_case(h, &shapes[i]);
}

/* As multi-head latent attention, output gates and capped scores have them. */
static void attention_of_heads_anywhere(struct harness *h)
{
    static const struct shape shapes[] = {
        {.n_q = 2, .n_kv = 2, .d = 24, .d_v = 16, .n_docs = 2, .len = {70, 9}},
        {.n_q = 2, .n_kv = 1, .d = 16, .d_v = 40, .n_docs = 1, .len = {131}},
        {.n_q = 4, .n_kv = 2, .d = 192, .d_v = 128, .n_docs = 2, .len = {40, 3}, .apart = true},
        {.n_q = 3, .n_kv = 3, .d = 10, .d_v = 7, .n_docs = 2, .len = {33, 65}, .apart = true},
        {.n_q = 4, .n_kv = 2, .d = 64, .window = 20, .n_docs = 3, .len = {64, 1, 50}, .apart = true},
        {.n_q = 2, .n_kv = 1, .d = 16, .d_v = 8, .n_docs = 1, .len = {600}, .apart = true, .sinks = true},
        {.n_q = 2, .n_kv = 1, .d = 32, .n_docs = 2, .len = {100, 7}, .cap = 1.5},
        {.n_q = 1, .n_kv = 1, .d = 16, .d_v = 24, .window = 30, .n_docs = 1, .len = {150}, .cap = 50},
        {.n_q = 2, .n_kv = 2, .d = 9, .n_docs = 1, .len = {620}, .apart = true, .cap = 0.7},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(shapes); i++)
        attention_case(h, &shapes[i]);
}

static void attention_sinks_take_their_part(struct harness *h)
{
    static const struct shape shapes[] = {
        {.n_q = 1, .n_kv = 1, .d = 8, .n_docs = 1, .len = {1}, .sinks = true},
        {.n_q = 8, .n_kv = 1, .d = 64, .n_docs = 2, .len = {65, 3}, .sinks = true},
        {.n_q = 4, .n_kv = 2, .d = 16, .window = 17, .n_docs = 3, .len = {100, 5, 64}, .sinks = true},
        {.n_q = 3, .n_kv = 1, .d = 20, .n_docs = 1, .len = {37}, .sinks = true},
        {.n_q = 48, .n_kv = 8, .d = 64, .n_docs = 1, .len = {3}, .sinks = true},
        {.n_q = 16, .n_kv = 1, .d = 18, .n_docs = 1, .len = {40}, .sinks = true},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(shapes); i++)
        attention_case(h, &shapes[i]);
}

static void attention_keeps_documents_apart(struct harness *h)
{
    /* the same document alone and behind another gives the same bits; heads of 64, which our own kernels take */
    enum { LEN = 70, D = 64 };
    double *x;
    struct dbuf *two = buf_random(h, h->dtype, 2 * LEN * 3 * D, 1, &x);
    struct dbuf *oa = buf_nan(h, h->dtype, 2 * LEN * D), *ob = buf_nan(h, h->dtype, LEN * D);
    struct dbuf *la = buf_nan(h, MT_F32, 2 * LEN), *lb = buf_nan(h, MT_F32, LEN);
    int32_t cu[] = {0, LEN, 2 * LEN};
    size_t e = mt_dtype_size(h->dtype);
    struct mt_attention a = {.n = 2 * LEN, .n_docs = 2, .max_len = LEN, .dtype = h->dtype, .scale = 0.25f,
                             .cu_seqlens = buf_ints(h, cu, 3)->p, .cu_seqlens_host = cu,
                             .q = mt_heads(two->p, 3 * D, 1, D), .k = mt_heads((char *)two->p + D * e, 3 * D, 1, D),
                             .v = mt_heads((char *)two->p + 2 * D * e, 3 * D, 1, D), .o = mt_heads(oa->p, D, 1, D),
                             .lse = la->p};
    a.workspace = workspace(h, mt_op_attention_workspace(h->dev, &a));
    RUN(h, mt_op_attention, &a);
    size_t skip = (size_t)LEN * 3 * D * e;
    a.n = LEN;
    a.n_docs = 1;
    a.q.p = (char *)two->p + skip;
    a.k.p = (char *)two->p + skip + D * e;
    a.v.p = (char *)two->p + skip + 2 * D * e;
    a.o.p = ob->p;
    a.lse = lb->p;
    RUN(h, mt_op_attention, &a);
    /* cuDNN may have one kernel for a batch of one, and another for two */
    bool same = h->dtype == MT_F32 || !strstr(mt_device_limits(h->dev)->name, "attention: cuDNN");
    expect_close(h, "second document", buf_get(h, oa) + LEN * D, buf_get(h, ob), LEN * D, same ? 0 : 4e-3);
}

const struct device_test attention_tests[] = {
    {"attention_of_odd_shapes", attention_of_odd_shapes},
    {"attention_of_heads_anywhere", attention_of_heads_anywhere},
    {"attention_sinks_take_their_part", attention_sinks_take_their_part},
    {"attention_keeps_documents_apart", attention_keeps_documents_apart},
    {NULL, NULL},
};

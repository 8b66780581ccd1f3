/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
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

/* Relative errors of o. */
static const double O_F32 = 2e-6, O_BF16 = 3e-3;

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
    double *o, *lse, *dx;   /* dx: laid out as the rows */
    double *sinks, *dsinks; /* NULL where there are none */
    double *spread;         /* of dsinks, if all elements of o are off by their size, independently: its square */
    size_t n;
};

/* One query row of one head, forward and backward, in double. */
static void reference_row(const struct shape *s, const struct places *at, const double *x, const double *dO, size_t doc,
                          size_t i, size_t head, double *p, struct reference *r)
{
    size_t kv = head / (s->n_q / s->n_kv), d = s->d, d_v = at->v.dim, row = doc + i, out = (row * s->n_q + head) * d_v;
    size_t first = s->window && i + 1 > s->window ? i + 1 - s->window : 0;
    const double *q = x + element(at, &at->q, row, head), *g = dO + out;
    double max = -1e300, sum = 0, delta = 0, o2 = 0, g2 = 0, scale = 1 / sqrt((double)d), *slope = p + i + 1;
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
    r->lse[head * r->n + row] = max + log(sum);
    for (size_t j = first; j <= i; j++) {
        const double *v = x + element(at, &at->v, doc + j, kv);
        p[j] /= sum;
        for (size_t c = 0; c < d_v; c++)
            r->o[out + c] += p[j] * v[c];
    }
    for (size_t c = 0; c < d_v; c++) {
        delta += g[c] * r->o[out + c];
        o2 += r->o[out + c] * r->o[out + c];
        g2 += g[c] * g[c];
    }
    if (r->sinks) {
        r->dsinks[head] -= sink / sum * delta;
        r->spread[head] += sink / sum * (sink / sum) * o2 * g2 / (double)d_v;
    }
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

/* What attention is given: rows of queries, keys and values; the gradient of o; sinks, or NULL. */
struct given {
    const struct shape *s;
    struct places at;
    struct dbuf *x, *d_o, *sinks;
    const int32_t *cu;
};
struct attended {
    struct mt_attention_bwd args;
    struct dbuf *o, *lse, *dx;
    size_t n;
};

/* Documents [doc, doc + n_docs) by themselves, forward and backward. */
static struct attended attend(struct harness *h, const struct given *g, int doc, int n_docs)
{
    const struct shape *s = g->s;
    const struct places *at = &g->at;
    size_t first = (size_t)g->cu[doc], n = (size_t)g->cu[doc + n_docs] - first, ow = s->n_q * at->v.dim;
    size_t e = mt_dtype_size(h->dtype), max_len = 0;
    int32_t *cu = (int32_t *)(void *)scratch(h, (size_t)n_docs + 1);
    for (int i = 0; i < n_docs; i++) {
        cu[i + 1] = g->cu[doc + i + 1] - (int32_t)first;
        max_len = MT_MAX(max_len, (size_t)s->len[doc + i]);
    }
    struct dbuf x = *g->x;
    x.p = (char *)x.p + first * at->ld * e;
    struct attended r = {.n = n, .o = buf_nan(h, h->dtype, n * ow), .lse = buf_nan(h, MT_F32, s->n_q * n),
                         .dx = buf_nan(h, h->dtype, n * at->ld)};
    struct mt_attention a = {
        .n = n, .window = s->window, .n_docs = (size_t)n_docs, .max_len = max_len, .most_n = s->most_n,
        .most_len = s->most_len, .dtype = h->dtype, .scale = (float)(1 / sqrt((double)s->d)), .cap = (float)s->cap,
        .cu_seqlens = buf_ints(h, cu, (size_t)n_docs + 1)->p, .cu_seqlens_host = cu, .q = view(at, &at->q, &x, h->dtype),
        .k = view(at, &at->k, &x, h->dtype), .v = view(at, &at->v, &x, h->dtype),
        .o = mt_heads(r.o->p, ow, s->n_q, at->v.dim), .lse = r.lse->p};
    a.workspace = workspace(h, mt_op_attention_workspace(h->dev, &a));
    RUN(h, mt_op_attention, &a);
    if (g->sinks) {
        struct mt_attention_sink f = {.n = n, .dtype = a.dtype, .sinks = g->sinks->p, .o = a.o, .lse = a.lse};
        RUN(h, mt_op_attention_sink, &f);
    }
    r.args = (struct mt_attention_bwd){
        .fwd = a, .d_o = mt_heads((char *)g->d_o->p + first * ow * e, ow, s->n_q, at->v.dim),
        .dq = view(at, &at->q, r.dx, h->dtype), .dk = view(at, &at->k, r.dx, h->dtype),
        .dv = view(at, &at->v, r.dx, h->dtype), .sinks = s->sinks};
    RUN(h, mt_op_attention_bwd, &r.args);
    return r;
}

/* Terms of either sign cancel, errors do not: what o may be off by bounds these, not a part of the sum (four of their
 * standard deviations, of which o's roundings take three fifths). */
static void check_sinks(struct harness *h, const struct given *g, const struct attended *r, struct dbuf *dsinks,
                        const struct reference *want)
{
    const struct mt_attention *a = &r->args.fwd;
    struct mt_attention_sink_bwd sink = {.n = a->n, .dtype = a->dtype, .sinks = g->sinks->p, .o = a->o, .lse = a->lse,
                                         .d_o = r->args.d_o, .dsinks = dsinks->p};
    sink.workspace = workspace(h, mt_op_attention_sink_bwd_workspace(h->dev, &sink));
    RUN(h, mt_op_attention_sink_bwd, &sink);
    double *got = buf_get(h, dsinks), wrong = 0;
    for (size_t i = 0; i < a->q.n; i++)
        wrong += !(fabs(got[i] - want->dsinks[i]) <=
                   4 * tolerance(h, O_F32, O_BF16) * sqrt(want->spread[i]) + 1e-6 * (1 + fabs(want->dsinks[i])));
    expect_close(h, "heads whose dsinks are off by more than o explains", &wrong, &(double){0}, 1, 0);
}

/* The part of rows that is queries, keys or values. */
static double *part_of(struct harness *h, const struct places *at, const struct place *x, const double *rows, size_t n)
{
    double *part = scratch(h, n * x->n * x->dim);
    for (size_t i = 0; i < n * x->n * x->dim; i++)
        part[i] = rows[element(at, x, i / (x->n * x->dim), i / x->dim % x->n) + i % x->dim];
    return part;
}

/* Each of the gradients by itself: one may be small beside another. */
static void check_gradients(struct harness *h, const struct given *g, const double *got, const double *want, size_t n)
{
    const struct places *at = &g->at;
    size_t keys = g->s->window ? MT_MIN(n, (size_t)g->s->window) : n;
    double bf16 = at->q.dim < 64 || keys < 64 ? 8e-3 : 4e-3; /* roundings of a few products, or keys, do not average */
    const struct {
        const char *name;
        const struct place *at;
    } parts[] = {{"dq", &at->q}, {"dk", &at->k}, {"dv", &at->v}};
    for (size_t i = 0; i < MT_ARRAY_LEN(parts); i++)
        expect_close(h, parts[i].name, part_of(h, at, parts[i].at, got, n), part_of(h, at, parts[i].at, want, n),
                     n * parts[i].at->n * parts[i].at->dim, tolerance(h, 4e-6, bf16));
}

/* A document's bits do not depend on what else is in its batch. */
static void check_alone(struct harness *h, const struct given *g, const struct attended *all, int doc)
{
    const struct shape *s = g->s;
    if (h->dtype == MT_BF16 && strstr(mt_device_limits(h->dev)->name, "cuDNN"))
        return; /* its bits are its own, and each shape costs a plan */
    struct attended one = attend(h, g, doc, 1);
    size_t ow = s->n_q * g->at.v.dim, first = (size_t)g->cu[doc];
    double *lse = buf_get(h, all->lse), *lse_one = buf_get(h, one.lse);
    const double *dx = buf_get(h, all->dx) + first * g->at.ld;
    expect_close(h, "o of a document alone", buf_get(h, one.o), buf_get(h, all->o) + first * ow, one.n * ow, 0);
    for (size_t head = 0; head < s->n_q; head++)
        expect_close(h, "log-sum-exps of a document alone", lse_one + head * one.n, lse + head * all->n + first, one.n, 0);
    const struct place *parts[] = {&g->at.q, &g->at.k, &g->at.v};
    for (size_t i = 0; i < MT_ARRAY_LEN(parts); i++)
        expect_close(h, "a gradient of a document alone", part_of(h, &g->at, parts[i], buf_get(h, one.dx), one.n),
                     part_of(h, &g->at, parts[i], dx, one.n), one.n * parts[i]->n * parts[i]->dim, 0);
}

static void attention_case(struct harness *h, const struct shape *s)
{
    int32_t cu[8] = {0};
    size_t max_len = 0;
    for (int i = 0; i < s->n_docs; i++) {
        cu[i + 1] = cu[i] + s->len[i];
        max_len = MT_MAX(max_len, (size_t)s->len[i]);
    }
    struct given g = {.s = s, .at = places_of(s), .cu = cu};
    size_t n = (size_t)cu[s->n_docs], ow = s->n_q * g.at.v.dim;
    double *x, *d_o;
    struct reference r = {.o = scratch(h, n * ow), .lse = scratch(h, n * s->n_q), .dx = scratch(h, n * g.at.ld), .n = n};
    g.x = buf_random(h, h->dtype, n * g.at.ld, 1.2, &x);
    g.d_o = buf_random(h, h->dtype, n * ow, 1, &d_o);
    r.spread = scratch(h, s->n_q);
    struct dbuf *dsinks = s->sinks ? buf_random(h, MT_F32, s->n_q, 1, &r.dsinks) : NULL;
    g.sinks = s->sinks ? buf_random(h, h->dtype, s->n_q, 2, &r.sinks) : NULL;
    struct attended all = attend(h, &g, 0, s->n_docs);
    double *p = scratch(h, 2 * max_len), *got = buf_get(h, all.dx);
    for (int doc = 0; doc < s->n_docs; doc++)
        for (int32_t i = 0; i < s->len[doc]; i++)
            for (size_t head = 0; head < s->n_q; head++)
                reference_row(s, &g.at, x, d_o, (size_t)cu[doc], (size_t)i, head, p, &r);
    check_gaps(h, &g.at, n, got);
    expect_close(h, "o", buf_get(h, all.o), r.o, n * ow, tolerance(h, O_F32, O_BF16));
    expect_close(h, "log-sum-exps", buf_get(h, all.lse), r.lse, n * s->n_q, 1e-6);
    check_gradients(h, &g, got, r.dx, n);
    if (s->sinks)
        check_sinks(h, &g, &all, dsinks, &r);
    else
        check_lone(h, s, &g.at, cu, got);
    if (s->n_docs > 1)
        check_alone(h, &g, &all, s->n_docs - 1);
}

DEVICE_TEST(attention_of_odd_shapes)
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
DEVICE_TEST(attention_of_heads_anywhere)
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

/* Widths for which the cuda device has kernels of its own; in their tiles of 16 to 128 rows these are several. */
DEVICE_TEST(attention_of_wide_heads)
{
    static const struct shape shapes[] = {
        {.n_q = 2, .n_kv = 1, .d = 64, .n_docs = 2, .len = {131, 2}, .cap = 4},
        {.n_q = 3, .n_kv = 1, .d = 96, .n_docs = 3, .len = {1, 140, 33}},
        {.n_q = 1, .n_kv = 1, .d = 96, .window = 20, .n_docs = 1, .len = {70}, .cap = 30, .apart = true},
        {.n_q = 2, .n_kv = 2, .d = 128, .n_docs = 1, .len = {50}, .cap = 2, .sinks = true},
        {.n_q = 2, .n_kv = 1, .d = 192, .d_v = 128, .window = 50, .n_docs = 2, .len = {132, 9}},
        {.n_q = 1, .n_kv = 1, .d = 192, .d_v = 128, .n_docs = 1, .len = {66}, .cap = 20},
        {.n_q = 2, .n_kv = 1, .d = 256, .n_docs = 2, .len = {135, 17}},
        {.n_q = 1, .n_kv = 1, .d = 256, .window = 30, .n_docs = 2, .len = {1, 67}, .cap = 50, .sinks = true},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(shapes); i++)
        attention_case(h, &shapes[i]);
}

DEVICE_TEST(attention_sinks_take_their_part)
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

/* --- with a cache ----------------------------------------------------------------------------------- */

/* Documents that a cache knows, and where their next tokens are in blocks that lie in no order. */
struct cached {
    size_t block, ld;
    int32_t *table, past[8];
    struct dbuf *cache;
};

/* The next tokens of each document, `step` of the first, one more of the second ...; those that have ended are left out.
 * Their results to o and lse, which are of whole documents. Returns how many tokens there were. */
static size_t go_on(struct harness *h, const struct given *g, const double *x, struct cached *c, size_t step, double *o,
                    double *lse)
{
    const struct shape *s = g->s;
    const struct places *at = &g->at;
    size_t n = 0, docs = 0, ow = s->n_q * at->v.dim, all = (size_t)g->cu[s->n_docs];
    int32_t *cu = (int32_t *)(void *)scratch(h, 8), *past = (int32_t *)(void *)scratch(h, 8), *table = (int32_t *)(void *)scratch(h, 8 * c->ld);
    double *rows = scratch(h, all * at->ld);
    size_t *from = (size_t *)(void *)scratch(h, all);
    for (int doc = 0; doc < s->n_docs; doc++) {
        size_t left = (size_t)(s->len[doc] - c->past[doc]), k = MT_MIN(left, step + (step > 1 ? (size_t)doc : 0));
        if (!k)
            continue;
        memcpy(table + docs * c->ld, c->table + (size_t)doc * c->ld, c->ld * sizeof(*table));
        past[docs] = c->past[doc];
        for (size_t i = 0; i < k; i++) {
            from[n + i] = (size_t)(g->cu[doc] + c->past[doc]) + i;
            memcpy(rows + (n + i) * at->ld, x + from[n + i] * at->ld, at->ld * sizeof(*rows));
        }
        c->past[doc] += (int32_t)k;
        cu[++docs] = (int32_t)(n += k);
    }
    if (!n)
        return 0;
    struct dbuf *in = buf_values(h, h->dtype, n * at->ld, rows), *out = buf_nan(h, h->dtype, n * ow),
                *stat = buf_nan(h, MT_F32, s->n_q * n);
    struct mt_attention_cached a = {
        .of = {.n = n, .window = s->window, .n_docs = docs, .max_len = 700, .dtype = h->dtype,
               .scale = (float)(1 / sqrt((double)s->d)), .cap = (float)s->cap, .cu_seqlens = buf_ints(h, cu, docs + 1)->p,
               .cu_seqlens_host = cu, .q = view(at, &at->q, in, h->dtype), .k = view(at, &at->k, in, h->dtype),
               .v = view(at, &at->v, in, h->dtype), .o = mt_heads(out->p, ow, s->n_q, at->v.dim), .lse = stat->p},
        .block = c->block, .table_ld = c->ld, .past = buf_ints(h, past, docs)->p, .past_host = past,
        .table = buf_ints(h, table, docs * c->ld)->p, .table_host = table, .cache = c->cache->p};
    a.of.workspace = workspace(h, mt_op_attention_cached_workspace(h->dev, &a));
    RUN(h, mt_op_attention_cached, &a);
    double *got = buf_get(h, out), *got_lse = buf_get(h, stat);
    for (size_t i = 0; i < n; i++) {
        memcpy(o + from[i] * ow, got + i * ow, ow * sizeof(*o));
        for (size_t head = 0; head < s->n_q; head++)
            lse[head * all + from[i]] = got_lse[head * n + i];
    }
    return n;
}

/* Whatever pieces documents come in, results are those of whole ones: on the cpu device to the bit. */
static void cached_case(struct harness *h, const struct shape *s, size_t block)
{
    static const size_t steps[] = {37, 1, 1, 20, 1, 64, 1, 1, 1, 130, 1, 33, 200, 140, 1, 1, 1, 100};
    struct shape forward = *s;
    int32_t cu[8] = {0};
    double *x, *unused;
    for (int i = 0; i < s->n_docs; i++)
        cu[i + 1] = cu[i] + s->len[i];
    struct given g = {.s = &forward, .at = places_of(s), .cu = cu};
    size_t n = (size_t)cu[s->n_docs], ow = s->n_q * g.at.v.dim, longest = 700, most = 202;
    g.x = buf_random(h, h->dtype, n * g.at.ld, 1.2, &x);
    g.d_o = buf_random(h, h->dtype, n * ow, 1, &unused);
    forward.sinks = false;
    struct attended whole = attend(h, &g, 0, s->n_docs);
    struct cached c = {.block = block, .ld = mt_div_up(s->window ? s->window + most : longest, block) + 1};
    size_t blocks = (size_t)s->n_docs * c.ld, elems = block * (s->n_kv * (s->d + g.at.v.dim));
    c.table = (int32_t *)(void *)scratch(h, blocks);
    for (size_t i = 0; i < blocks; i++)
        c.table[i] = (int32_t)(blocks - 1 - i);
    c.cache = buf_nan(h, h->dtype, blocks * elems); /* what is not written is not read */
    double *o = scratch(h, n * ow), *lse = scratch(h, s->n_q * n);
    for (size_t i = 0; i < MT_ARRAY_LEN(steps); i++)
        go_on(h, &g, x, &c, steps[i], o, lse);
    bool exact = !strcmp(h->device_name, "cpu");
    expect_close(h, "o by pieces", o, buf_get(h, whole.o), n * ow, exact ? 0 : tolerance(h, 2 * O_F32, O_BF16));
    expect_close(h, "log-sum-exps by pieces", lse, buf_get(h, whole.lse), s->n_q * n, exact ? 0 : 2e-6);
}

DEVICE_TEST(attention_goes_on_from_a_cache)
{
    static const struct shape shapes[] = {
        {.n_q = 4, .n_kv = 2, .d = 24, .n_docs = 2, .len = {600, 150}},
        {.n_q = 3, .n_kv = 1, .d = 64, .window = 40, .n_docs = 2, .len = {400, 33}},
        {.n_q = 2, .n_kv = 2, .d = 16, .window = 1, .n_docs = 1, .len = {90}},
        {.n_q = 4, .n_kv = 2, .d = 32, .d_v = 16, .window = 129, .n_docs = 3, .len = {300, 7, 131}, .cap = 3, .apart = true},
        {.n_q = 34, .n_kv = 1, .d = 24, .n_docs = 1, .len = {80}, .cap = 3},
        {.n_q = 8, .n_kv = 1, .d = 192, .d_v = 512, .n_docs = 1, .len = {40}, .cap = 3},
        {.n_q = 2, .n_kv = 1, .d = 8, .window = 530, .n_docs = 1, .len = {690}}, /* more keys than are summed at once */
        {.n_q = 3, .n_kv = 1, .d = 16, .d_v = 512, .n_docs = 1, .len = {50}},
        {.n_q = 5, .n_kv = 1, .d = 18, .d_v = 500, .n_docs = 2, .len = {50, 20}, .cap = 3}, /* no whole vectors */
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(shapes); i++) {
        cached_case(h, &shapes[i], i % 2 ? 16 : 23);
        buffers_done(h);
    }
}

/* --- in chunks -------------------------------------------------------------------------------------- */

/* The tokens [from, to), of which the first may go on with a document, into their places of what is of all. */
static void chunk_of(struct harness *h, const struct given *g, const struct attended *all, size_t from, size_t to,
                     const struct dbuf *sums, double *lse)
{
    const struct shape *s = g->s;
    const struct places *at = &g->at;
    const struct mt_attention_bwd *whole = &all->args;
    size_t e = mt_dtype_size(h->dtype), n = to - from, past = 0, docs = 0, first = from * at->ld * e;
    int32_t *cu = (int32_t *)(void *)scratch(h, 8);
    for (int d = 0; d < s->n_docs; d++) {
        size_t begin = (size_t)g->cu[d], end = MT_MIN((size_t)g->cu[d + 1], to);
        if (end <= from || begin >= to)
            continue;
        past = docs ? past : from - MT_MIN(begin, from);
        cu[++docs] = (int32_t)(end - from);
    }
    struct dbuf *stat = buf_nan(h, MT_F32, s->n_q * n);
    struct mt_attention_bwd b = *whole;
    struct mt_attention *a = &b.fwd;
    a->n = n;
    a->past = past;
    a->n_docs = docs;
    a->cu_seqlens = buf_ints(h, cu, docs + 1)->p;
    a->cu_seqlens_host = cu;
    a->lse = stat->p;
    a->q.p = (char *)a->q.p + first;
    a->k.p = (char *)a->k.p + first - past * at->ld * e;
    a->v.p = (char *)a->v.p + first - past * at->ld * e;
    a->o.p = (char *)a->o.p + from * a->o.ld * e;
    a->workspace = workspace(h, mt_op_attention_workspace(h->dev, a));
    RUN(h, mt_op_attention, a);
    double *got = buf_get(h, stat);
    for (size_t head = 0; head < s->n_q; head++)
        memcpy(lse + head * (size_t)g->cu[s->n_docs] + from, got + head * n, n * sizeof(*lse));
    if (!sums)
        return;
    b.d_o.p = (char *)b.d_o.p + from * a->o.ld * e;
    b.dq.p = (char *)b.dq.p + first;
    b.dk.p = (char *)b.dk.p + first;
    b.dv.p = (char *)b.dv.p + first;
    b.dk_sum = view(at, &at->k, sums, MT_F32);
    b.dv_sum = view(at, &at->v, sums, MT_F32);
    b.dk_sum.p = (float *)b.dk_sum.p + (from - past) * at->ld;
    b.dv_sum.p = (float *)b.dv_sum.p + (from - past) * at->ld;
    RUN(h, mt_op_attention_bwd, &b);
}

/* Chunks in order, then back from the last to the first: what the whole gives, but for the order of sums. */
static void chunked_case(struct harness *h, const struct shape *s, size_t chunk)
{
    int32_t cu[8] = {0};
    double *x, *unused;
    for (int i = 0; i < s->n_docs; i++)
        cu[i + 1] = cu[i] + s->len[i];
    struct given g = {.s = s, .at = places_of(s), .cu = cu};
    size_t n = (size_t)cu[s->n_docs], ow = s->n_q * g.at.v.dim;
    g.x = buf_random(h, h->dtype, n * g.at.ld, 1.2, &x);
    g.d_o = buf_random(h, h->dtype, n * ow, 1, &unused);
    struct attended whole = attend(h, &g, 0, s->n_docs), by = whole;
    by.o = buf_nan(h, h->dtype, n * ow);
    by.dx = buf_nan(h, h->dtype, n * g.at.ld);
    by.args.fwd.o.p = by.o->p;
    by.args.dq = view(&g.at, &g.at.q, by.dx, h->dtype);
    by.args.dk = view(&g.at, &g.at.k, by.dx, h->dtype);
    by.args.dv = view(&g.at, &g.at.v, by.dx, h->dtype);
    double *lse = scratch(h, s->n_q * n), *want = buf_get(h, whole.dx);
    struct dbuf *sums = buf_values(h, MT_F32, n * g.at.ld, scratch(h, n * g.at.ld));
    for (size_t at = 0; at < n; at += chunk)
        chunk_of(h, &g, &by, at, MT_MIN(at + chunk, n), NULL, lse);
    for (size_t at = (n - 1) / chunk * chunk + chunk; at; at -= chunk)
        chunk_of(h, &g, &by, at - chunk, MT_MIN(at, n), sums, lse);
    double *dx = buf_get(h, by.dx);
    check_gaps(h, &g.at, n, dx);
    check_gaps(h, &g.at, n, want);
    expect_close(h, "o in chunks", buf_get(h, by.o), buf_get(h, whole.o), n * ow, tolerance(h, 2 * O_F32, O_BF16));
    expect_close(h, "log-sum-exps in chunks", lse, buf_get(h, whole.lse), s->n_q * n, 2e-6);
    check_gradients(h, &g, dx, want, n);
    const char *engine = getenv("MEGATRAIN_ATTENTION");
    if (!engine || strcmp(engine, "own")) /* its sums of the first chunk are not those that the backward of chunks makes */
        check_lone(h, s, &g.at, cu, dx);
}

DEVICE_TEST(attention_goes_on_in_chunks)
{
    static const struct shape shapes[] = {
        {.n_q = 4, .n_kv = 2, .d = 24, .n_docs = 1, .len = {300}},
        {.n_q = 3, .n_kv = 1, .d = 64, .window = 40, .n_docs = 3, .len = {7, 161, 33}},
        {.n_q = 2, .n_kv = 2, .d = 16, .window = 1, .n_docs = 1, .len = {90}},
        {.n_q = 4, .n_kv = 2, .d = 192, .d_v = 128, .n_docs = 2, .len = {70, 31}, .apart = true},
        {.n_q = 2, .n_kv = 1, .d = 16, .n_docs = 4, .len = {64, 1, 63, 64}, .cap = 3},
        {.n_q = 2, .n_kv = 1, .d = 96, .n_docs = 1, .len = {71}, .cap = 3},
        {.n_q = 1, .n_kv = 1, .d = 128, .window = 17, .n_docs = 1, .len = {90}},
        {.n_q = 2, .n_kv = 1, .d = 256, .n_docs = 2, .len = {40, 9}},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(shapes); i++)
        for (size_t chunk = 19; chunk <= 64; chunk += 45) {
            chunked_case(h, &shapes[i], chunk);
            buffers_done(h);
        }
}

/* --- random shapes --------------------------------------------------------------------------------- */

static size_t below(uint64_t *state, size_t n)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (size_t)(*state >> 33) % n;
}

static struct shape random_shape(uint64_t *r)
{
    static const size_t widths[][2] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}};
    struct shape s = {.n_kv = 1 + below(r, 3), .n_docs = 1 + (int)below(r, 5), .apart = below(r, 3) == 0,
                      .sinks = below(r, 4) == 0, .window = below(r, 2) ? 1 + below(r, 90) : 0};
    const size_t *w = widths[below(r, MT_ARRAY_LEN(widths))];
    bool odd = below(r, 5) == 0;
    s.n_q = s.n_kv * (1 + below(r, 4));
    s.d = odd ? 8 + below(r, 93) : w[0];
    s.d_v = odd ? 1 + below(r, 100) : w[1];
    s.cap = below(r, 4) ? 0 : 0.5 * (double)(1 + below(r, 100));
    for (int i = 0; i < s.n_docs; i++)
        s.len[i] = 1 + (int32_t)below(r, s.d > 128 ? 50 : 90);
    s.len[below(r, (size_t)s.n_docs)] += (int32_t)below(r, s.d > 128 ? 80 : 150);
    return s;
}

/* A few, or several hundred with MEGATRAIN_TEST_FULL; one that fails is printed. */
DEVICE_TEST(attention_of_random_shapes)
{
    const char *full = getenv("MEGATRAIN_TEST_FULL"), *engine = getenv("MEGATRAIN_ATTENTION");
    bool own = !strcmp(h->device_name, "cuda") && engine && !strcmp(engine, "own");
    int n = full && *full ? (own && h->dtype == MT_BF16 ? 400 : 20) : own && h->dtype == MT_BF16 ? 20 : 1;
    uint64_t r = 20261126;
    for (int i = 0; i < n; i++) {
        struct shape s = random_shape(&r);
        int before = h->failures;
        attention_case(h, &s);
        if (h->failures > before)
            printf("    in shape %d: %zu/%zu heads of %zu/%zu, window %zu, %d documents from %d on, cap %g%s%s\n", i, s.n_q,
                   s.n_kv, s.d, s.d_v, s.window, s.n_docs, s.len[0], s.cap, s.sinks ? ", sinks" : "",
                   s.apart ? ", apart" : "");
        buffers_done(h);
    }
}

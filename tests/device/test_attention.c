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
};

struct reference {
    double *o, *dq, *dk, *dv;
    double *sinks, *dsinks; /* NULL where there are none */
};

/* One query row of one head, forward and backward, in double. */
static void reference_row(const struct shape *s, const double *x, size_t ld, const double *dO, size_t doc,
                          size_t i, size_t head, double scale, double *p, struct reference *r)
{
    size_t kv = head / (s->n_q / s->n_kv), d = s->d, row = doc + i, qw = s->n_q * d, kw = s->n_kv * d;
    size_t first = s->window && i + 1 > s->window ? i + 1 - s->window : 0;
    const double *q = x + row * ld + head * d;
    double max = -1e300, sum = 0, delta = 0;
    for (size_t j = first; j <= i; j++) {
        const double *k = x + (doc + j) * ld + qw + kv * d;
        p[j] = 0;
        for (size_t c = 0; c < d; c++)
            p[j] += q[c] * k[c] * scale;
        max = fmax(max, p[j]);
    }
    for (size_t j = first; j <= i; j++)
        sum += p[j] = exp(p[j] - max);
    double sink = r->sinks ? exp(r->sinks[head] - max) : 0;
    sum += sink;
    for (size_t j = first; j <= i; j++) {
        const double *v = x + (doc + j) * ld + qw + kw + kv * d;
        p[j] /= sum;
        for (size_t c = 0; c < d; c++)
            r->o[row * qw + head * d + c] += p[j] * v[c];
    }
    const double *g = dO + row * qw + head * d;
    for (size_t c = 0; c < d; c++)
        delta += g[c] * r->o[row * qw + head * d + c];
    if (r->sinks)
        r->dsinks[head] -= sink / sum * delta;
    for (size_t j = first; j <= i; j++) {
        const double *k = x + (doc + j) * ld + qw + kv * d, *v = k + kw;
        double dp = 0;
        for (size_t c = 0; c < d; c++) {
            dp += g[c] * v[c];
            r->dv[(doc + j) * kw + kv * d + c] += p[j] * g[c];
        }
        double ds = p[j] * (dp - delta) * scale;
        for (size_t c = 0; c < d; c++) {
            r->dq[row * qw + head * d + c] += ds * k[c];
            r->dk[(doc + j) * kw + kv * d + c] += ds * q[c];
        }
    }
}

/* What comes between forward and backward; of r, the sinks. */
static struct mt_attention_sink_bwd run_sinks(struct harness *h, const struct mt_attention *a, struct reference *r)
{
    struct dbuf *sinks = buf_random(h, h->dtype, a->n_q, 2, &r->sinks);
    struct mt_attention_sink f = {.n = a->n, .n_q = a->n_q, .head_dim = a->head_dim, .dtype = a->dtype, .sinks = sinks->p,
                                  .o = a->o, .ld_o = a->ld_o, .lse = a->lse};
    RUN(h, mt_op_attention_sink, &f);
    return (struct mt_attention_sink_bwd){.n = a->n, .n_q = a->n_q, .head_dim = a->head_dim, .dtype = a->dtype,
                                          .sinks = sinks->p, .o = a->o, .ld_o = a->ld_o, .lse = a->lse};
}

static void attention_case(struct harness *h, const struct shape *s)
{
    size_t n = 0, max_len = 0, d = s->d, qw = s->n_q * d, kw = s->n_kv * d, ld = qw + 2 * kw;
    int32_t cu[8] = {0};
    for (int i = 0; i < s->n_docs; i++) {
        cu[i + 1] = cu[i] + s->len[i];
        max_len = MT_MAX(max_len, (size_t)s->len[i]);
    }
    n = (size_t)cu[s->n_docs];
    double *x, *dO, scale = 1 / sqrt((double)d);
    struct dbuf *qkv = buf_random(h, h->dtype, n * ld, 1.2, &x), *o = buf_nan(h, h->dtype, n * qw);
    struct dbuf *g = buf_random(h, h->dtype, n * qw, 1, &dO), *lse = buf_nan(h, MT_F32, s->n_q * n);
    struct dbuf *dqkv = buf_nan(h, h->dtype, n * ld), *bcu = buf_ints(h, cu, (size_t)s->n_docs + 1);
    size_t e = mt_dtype_size(h->dtype);
    struct mt_attention a = {
        .n = n, .n_q = s->n_q, .n_kv = s->n_kv, .head_dim = d, .window = s->window,
        .n_docs = (size_t)s->n_docs, .max_len = max_len, .most_n = s->most_n, .most_len = s->most_len, .dtype = h->dtype, .scale = (float)scale,
        .cu_seqlens = bcu->p, .cu_seqlens_host = cu, .q = qkv->p, .k = (char *)qkv->p + qw * e,
        .v = (char *)qkv->p + (qw + kw) * e, .ld_q = ld, .ld_k = ld, .ld_v = ld, .o = o->p, .ld_o = qw,
        .lse = lse->p};
    a.workspace = workspace(h, mt_op_attention_workspace(h->dev, &a));
    RUN(h, mt_op_attention, &a);
    struct reference r = {scratch(h, n * qw), scratch(h, n * qw), scratch(h, n * kw), scratch(h, n * kw), NULL, NULL};
    struct mt_attention_sink_bwd sink = {0};
    struct dbuf *dsinks = s->sinks ? buf_random(h, MT_F32, s->n_q, 1, &r.dsinks) : NULL;
    if (s->sinks)
        sink = run_sinks(h, &a, &r);
    struct mt_attention_bwd b = {.fwd = a, .d_o = g->p, .dq = dqkv->p, .dk = (char *)dqkv->p + qw * e,
                                 .dv = (char *)dqkv->p + (qw + kw) * e, .ld_dq = ld, .ld_dk = ld,
                                 .ld_dv = ld};
    RUN(h, mt_op_attention_bwd, &b);
    double *p = scratch(h, max_len), *want = scratch(h, n * ld);
    for (int doc = 0; doc < s->n_docs; doc++)
        for (int32_t i = 0; i < s->len[doc]; i++)
            for (size_t head = 0; head < s->n_q; head++)
                reference_row(s, x, ld, dO, (size_t)cu[doc], (size_t)i, head, scale, p, &r);
    for (size_t i = 0; i < n; i++) {
        memcpy(want + i * ld, r.dq + i * qw, qw * sizeof(double));
        memcpy(want + i * ld + qw, r.dk + i * kw, kw * sizeof(double));
        memcpy(want + i * ld + qw + kw, r.dv + i * kw, kw * sizeof(double));
    }
    expect_close(h, "o", buf_get(h, o), r.o, n * qw, tolerance(h, 2e-6, 4e-3));
    expect_close(h, "dqkv", buf_get(h, dqkv), want, n * ld, tolerance(h, 4e-6, 8e-3));
    if (!s->sinks)
        return;
    sink.d_o = g->p;
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
        /* shorter than what was planned */
        {2, 1, 16, 0, 1, {65}, 200, 128},
        {2, 1, 16, 0, 1, {1}, 200, 128},
        {2, 1, 16, 30, 2, {70, 70}, 150, 128},
        {2, 1, 16, 0, 2, {64, 64}, 300, 128},
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
    /* the same document alone and behind another gives the same bits */
    enum { LEN = 70, D = 16 };
    double *x;
    struct dbuf *two = buf_random(h, h->dtype, 2 * LEN * 3 * D, 1, &x);
    struct dbuf *oa = buf_nan(h, h->dtype, 2 * LEN * D), *ob = buf_nan(h, h->dtype, LEN * D);
    struct dbuf *la = buf_nan(h, MT_F32, 2 * LEN), *lb = buf_nan(h, MT_F32, LEN);
    int32_t cu[] = {0, LEN, 2 * LEN};
    size_t e = mt_dtype_size(h->dtype);
    struct mt_attention a = {.n = 2 * LEN, .n_q = 1, .n_kv = 1, .head_dim = D, .n_docs = 2,
                             .max_len = LEN, .dtype = h->dtype, .scale = 0.25f,
                             .cu_seqlens = buf_ints(h, cu, 3)->p, .cu_seqlens_host = cu, .q = two->p,
                             .k = (char *)two->p + D * e, .v = (char *)two->p + 2 * D * e, .ld_q = 3 * D,
                             .ld_k = 3 * D, .ld_v = 3 * D, .o = oa->p, .ld_o = D, .lse = la->p};
    a.workspace = workspace(h, mt_op_attention_workspace(h->dev, &a));
    RUN(h, mt_op_attention, &a);
    size_t skip = (size_t)LEN * 3 * D * e;
    a.n = LEN;
    a.n_docs = 1;
    a.q = (char *)two->p + skip;
    a.k = (char *)two->p + skip + D * e;
    a.v = (char *)two->p + skip + 2 * D * e;
    a.o = ob->p;
    a.lse = lb->p;
    RUN(h, mt_op_attention, &a);
    /* cuDNN may have one kernel for a batch of one, and another for two */
    bool same = h->dtype == MT_F32 || !strstr(mt_device_limits(h->dev)->name, "attention: cuDNN");
    expect_close(h, "second document", buf_get(h, oa) + LEN * D, buf_get(h, ob), LEN * D, same ? 0 : 4e-3);
}

const struct device_test attention_tests[] = {
    {"attention_of_odd_shapes", attention_of_odd_shapes},
    {"attention_sinks_take_their_part", attention_sinks_take_their_part},
    {"attention_keeps_documents_apart", attention_keeps_documents_apart},
    {NULL, NULL},
};

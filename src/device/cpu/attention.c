/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Causal attention over documents, a tile of queries at a time (Dao et al. 2022, without the online
 * rescaling: a tile's scores over all keys it sees fit the workspace, which is linear in the length).
 *
 *   forward   S = scale Q K^T, lse = log sum exp S, O = softmax(S) V
 *   backward  P = exp(S - lse), dV += P^T dO, dP = dO V^T, dS = scale P (dP - rowsum(dO O)),
 *             dQ = dS K, dK += dS^T Q
 *
 * Forward's unit of work is a query head and tile of a document; backward's is a key head of a document,
 * with its query heads and tiles in a fixed order inside, so that dK and dV need no atomics.
 */
#include <string.h>

#include "device/cpu/cpu.h"
#include "device/cpu/vecmath.h"

enum { QUERY_TILE = 64 };

/* A thread's floats in the workspace. */
struct room {
    struct mt_cpu_gemm *gemm;
    int thread;
    float *s, *dp;     /* [QUERY_TILE, len] */
    float *q, *o, *dO; /* [QUERY_TILE, d] */
    float *k, *v, *dk, *dv; /* [len, d] */
};

static size_t room_floats(size_t max_len, size_t d)
{
    return 2 * QUERY_TILE * max_len + 3 * QUERY_TILE * d + 4 * max_len * d;
}

static struct room room_of(struct mt_cpu_device *dev, const struct mt_attention *a, int thread)
{
    size_t len = a->max_len, d = a->head_dim;
    float *p = (float *)a->workspace + (size_t)thread * room_floats(len, d);
    struct room r = {.gemm = dev->gemm, .thread = thread, .s = p};
    r.dp = r.s + QUERY_TILE * len;
    r.q = r.dp + QUERY_TILE * len;
    r.o = r.q + QUERY_TILE * d;
    r.dO = r.o + QUERY_TILE * d;
    r.k = r.dO + QUERY_TILE * d;
    r.v = r.k + len * d;
    r.dk = r.v + len * d;
    r.dv = r.dk + len * d;
    return r;
}

size_t mt_cpu_attention_workspace(mt_device *dev, size_t n, size_t max_len, size_t n_q, size_t n_kv,
                                  size_t head_dim, enum mt_dtype dtype)
{
    (void)n;
    (void)n_q;
    (void)n_kv;
    (void)dtype;
    return (size_t)dev->limits.n_threads * room_floats(max_len, head_dim) * sizeof(float);
}

/* Rows of a head as f32: in place for f32, else converted into tmp; *ld is their distance. */
static const float *head_rows(enum mt_dtype t, const void *base, size_t ld_in, size_t row,
                              size_t head, size_t n, size_t d, float *tmp, size_t *ld)
{
    size_t first = row * ld_in + head * d;
    if (t == MT_F32) {
        *ld = ld_in;
        return (const float *)base + first;
    }
    for (size_t i = 0; i < n; i++)
        mt_cpu_bf16_to_f32(tmp + i * d, (const uint16_t *)base + first + i * ld_in, d);
    *ld = d;
    return tmp;
}

static void product(const struct room *r, bool ta, bool tb, size_t m, size_t n, size_t k, float alpha, bool accumulate,
                    const float *a, size_t lda, const float *b, size_t ldb, float *d, size_t ldd)
{
    mt_cpu_gemm_tile(r->gemm, r->thread,
                     &(struct mt_cpu_tile){.m = m, .n = n, .k = k, .trans_a = ta, .trans_b = tb, .dtype = MT_F32,
                                           .alpha = alpha, .accumulate = accumulate, .a = a, .b = b, .lda = lda,
                                           .ldb = ldb, .ldd = ldd, .d = d});
}

/* Queries [q0, q0 + n) of a document see keys [k0, k0 + n_keys). */
struct span {
    size_t doc, len, q0, n, k0, n_keys;
};

static struct span span_of(const struct mt_attention *a, size_t doc, size_t tile)
{
    struct span s = {.doc = (size_t)a->cu_seqlens[doc]};
    s.len = (size_t)a->cu_seqlens[doc + 1] - s.doc;
    s.q0 = tile * QUERY_TILE;
    s.n = MT_MIN((size_t)QUERY_TILE, s.len - s.q0);
    s.k0 = a->window && s.q0 + 1 > a->window ? s.q0 + 1 - a->window : 0;
    s.n_keys = s.q0 + s.n - s.k0;
    return s;
}

/* Keys that query i of the span sees: [*from, *to), counted from k0. */
static void visible(const struct mt_attention *a, const struct span *s, size_t i, size_t *from,
                    size_t *to)
{
    size_t q = s->q0 + i, first = a->window && q + 1 > a->window ? q + 1 - a->window : 0;
    *from = MT_MAX(first, s->k0) - s->k0;
    *to = q + 1 - s->k0;
}

MT_HOT static float exp_row(float *restrict x, float shift, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] = mt_expf(x[i] - shift);
    return mt_cpu_sum(x, n);
}

MT_HOT static float max_of(const float *x, size_t n)
{
    float lane[MT_LANES];
    for (int k = 0; k < MT_LANES; k++)
        lane[k] = -INFINITY;
    size_t i = 0;
    for (; i + MT_LANES <= n; i += MT_LANES)
        for (int k = 0; k < MT_LANES; k++)
            lane[k] = x[i + (size_t)k] > lane[k] ? x[i + (size_t)k] : lane[k];
    for (int k = 0; i < n; i++, k++)
        lane[k] = x[i] > lane[k] ? x[i] : lane[k];
    for (int k = 1; k < MT_LANES; k++)
        lane[0] = lane[k] > lane[0] ? lane[k] : lane[0];
    return lane[0];
}

static void hide(float *row, size_t from, size_t to, size_t n)
{
    memset(row, 0, from * sizeof(float));
    memset(row + to, 0, (n - to) * sizeof(float));
}

static void forward_tile(const struct mt_attention *a, const struct span *s, size_t head,
                         const struct room *r)
{
    size_t d = a->head_dim, kv = head / (a->n_q / a->n_kv), ld_q, ld_k, ld_v;
    size_t row = s->doc + s->q0, key = s->doc + s->k0;
    const float *q = head_rows(a->dtype, a->q, a->ld_q, row, head, s->n, d, r->q, &ld_q);
    const float *k = head_rows(a->dtype, a->k, a->ld_k, key, kv, s->n_keys, d, r->k, &ld_k);
    const float *v = head_rows(a->dtype, a->v, a->ld_v, key, kv, s->n_keys, d, r->v, &ld_v);
    product(r, false, true, s->n, s->n_keys, d, a->scale, 0, q, ld_q, k, ld_k, r->s, s->n_keys);
    for (size_t i = 0; i < s->n; i++) {
        float *x = r->s + i * s->n_keys;
        size_t from, to;
        visible(a, s, i, &from, &to);
        hide(x, from, to, s->n_keys);
        float max = max_of(x + from, to - from), sum = exp_row(x + from, max, to - from);
        a->lse[head * a->n + row + i] = max + logf(sum);
        r->dp[i] = 1.0f / sum;
    }
    product(r, false, false, s->n, d, s->n_keys, 1, 0, r->s, s->n_keys, v, ld_v, r->o, d);
    for (size_t i = 0; i < s->n; i++) {
        for (size_t c = 0; c < d; c++)
            r->o[i * d + c] *= r->dp[i];
        mt_cpu_store_row(a->dtype, a->o, (row + i) * a->ld_o + head * d, d, r->o + i * d);
    }
}

/* The doc and tile of a unit of work: tiles of all documents in a row. */
static struct span find_span(const struct mt_attention *a, size_t tile)
{
    size_t doc = 0;
    for (;; doc++) {
        size_t tiles =
            mt_div_up((size_t)(a->cu_seqlens[doc + 1] - a->cu_seqlens[doc]), QUERY_TILE);
        if (tile < tiles)
            break;
        tile -= tiles;
    }
    return span_of(a, doc, tile);
}

struct job {
    struct mt_cpu_device *dev;
    const struct mt_attention *a;
    const struct mt_attention_bwd *b;
};

static void forward_chunk(void *ctx, size_t chunk, int thread)
{
    const struct job *j = ctx;
    const struct mt_attention *a = j->a;
    struct room r = room_of(j->dev, a, thread);
    struct span s = find_span(a, chunk / a->n_q);
    forward_tile(a, &s, chunk % a->n_q, &r);
}

void mt_cpu_run_attention(struct mt_cpu_device *d, const struct mt_attention *a)
{
    size_t tiles = 0;
    for (size_t i = 0; i < a->n_docs; i++)
        tiles += mt_div_up((size_t)(a->cu_seqlens[i + 1] - a->cu_seqlens[i]), QUERY_TILE);
    struct job j = {.dev = d, .a = a};
    mt_pool_run(d->pool, forward_chunk, &j, tiles * a->n_q);
}

MT_HOT static void score_gradient(float *restrict dp, const float *restrict p, float delta, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dp[i] = p[i] * (dp[i] - delta);
}

static void backward_tile(const struct mt_attention_bwd *b, const struct span *s, size_t head,
                          const struct room *r)
{
    const struct mt_attention *a = &b->fwd;
    size_t d = a->head_dim, kv = head / (a->n_q / a->n_kv), ld_q, ld_k, ld_v, ld_o, ld_do;
    size_t row = s->doc + s->q0, key = s->doc + s->k0;
    const float *q = head_rows(a->dtype, a->q, a->ld_q, row, head, s->n, d, r->q, &ld_q);
    const float *o = head_rows(a->dtype, a->o, a->ld_o, row, head, s->n, d, r->o, &ld_o);
    const float *dO = head_rows(a->dtype, b->d_o, a->ld_o, row, head, s->n, d, r->dO, &ld_do);
    /* bf16: the document's keys and values were converted once, by the caller */
    const float *k = a->dtype == MT_F32 ? (const float *)a->k + key * a->ld_k + kv * d
                                        : r->k + s->k0 * d;
    const float *v = a->dtype == MT_F32 ? (const float *)a->v + key * a->ld_v + kv * d
                                        : r->v + s->k0 * d;
    ld_k = a->dtype == MT_F32 ? a->ld_k : d;
    ld_v = a->dtype == MT_F32 ? a->ld_v : d;
    product(r, false, true, s->n, s->n_keys, d, a->scale, 0, q, ld_q, k, ld_k, r->s, s->n_keys);
    product(r, false, true, s->n, s->n_keys, d, 1, 0, dO, ld_do, v, ld_v, r->dp, s->n_keys);
    for (size_t i = 0; i < s->n; i++) {
        float *p = r->s + i * s->n_keys, *dp = r->dp + i * s->n_keys;
        size_t from, to;
        visible(a, s, i, &from, &to);
        hide(p, from, to, s->n_keys);
        hide(dp, from, to, s->n_keys);
        exp_row(p + from, a->lse[head * a->n + row + i], to - from);
        score_gradient(dp + from, p + from, mt_cpu_dot(dO + i * ld_do, o + i * ld_o, d), to - from);
    }
    product(r, true, false, s->n_keys, d, s->n, 1, 1, r->s, s->n_keys, dO, ld_do, r->dv + s->k0 * d, d);
    product(r, true, false, s->n_keys, d, s->n, a->scale, 1, r->dp, s->n_keys, q, ld_q,
            r->dk + s->k0 * d, d);
    product(r, false, false, s->n, d, s->n_keys, a->scale, 0, r->dp, s->n_keys, k, ld_k, r->o, d);
    for (size_t i = 0; i < s->n; i++)
        mt_cpu_store_row(a->dtype, b->dq, (row + i) * b->ld_dq + head * d, d, r->o + i * d);
}

static void backward_chunk(void *ctx, size_t chunk, int thread)
{
    const struct job *j = ctx;
    const struct mt_attention_bwd *b = j->b;
    const struct mt_attention *a = &b->fwd;
    struct room r = room_of(j->dev, a, thread);
    size_t doc = chunk / a->n_kv, kv = chunk % a->n_kv, group = a->n_q / a->n_kv, ld;
    size_t first = (size_t)a->cu_seqlens[doc], len = (size_t)a->cu_seqlens[doc + 1] - first;
    size_t d = a->head_dim;
    if (a->dtype != MT_F32) {
        head_rows(a->dtype, a->k, a->ld_k, first, kv, len, d, r.k, &ld);
        head_rows(a->dtype, a->v, a->ld_v, first, kv, len, d, r.v, &ld);
    }
    memset(r.dk, 0, len * d * sizeof(float));
    memset(r.dv, 0, len * d * sizeof(float));
    for (size_t h = kv * group; h < (kv + 1) * group; h++)
        for (size_t t = 0; t < mt_div_up(len, QUERY_TILE); t++) {
            struct span s = span_of(a, doc, t);
            backward_tile(b, &s, h, &r);
        }
    for (size_t i = 0; i < len; i++) {
        mt_cpu_store_row(a->dtype, b->dk, (first + i) * b->ld_dk + kv * d, d, r.dk + i * d);
        mt_cpu_store_row(a->dtype, b->dv, (first + i) * b->ld_dv + kv * d, d, r.dv + i * d);
    }
}

void mt_cpu_run_attention_bwd(struct mt_cpu_device *d, const struct mt_attention_bwd *b)
{
    struct job j = {.dev = d, .b = b};
    mt_pool_run(d->pool, backward_chunk, &j, b->fwd.n_docs * b->fwd.n_kv);
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Causal attention over documents, a block of queries at a time (Dao et al. 2022, without the online
 * rescaling: the scores of a block over all its keys fit the workspace, which is linear in the length).
 *
 *   forward   S = scale Q K^T, lse = log sum exp S, O = softmax(S) V
 *   backward  P = exp(S - lse), dV += P^T dO, dP = dO V^T, dS = P (dP - rowsum(dO O)),
 *             dQ = scale dS K, dK += dS^T (scale Q)
 *
 * Where a query has one key, O = P V, and rowsum(dO O) is taken as P dP: without a sink P is 1, and dS is 0 to the bit,
 * not the difference of two sums in another order, of which Adam would make whole updates.
 *
 * With a cap, scores are c = cap tanh(S / cap), and dS is multiplied by the slope 1 - (c / cap)^2.
 *
 * Scores are kept transposed, a few queries side by side for each key: the product kernels write them in the strips
 * that the next product reads (gemm_kernel.h), and softmax runs down columns (columns.h). Keys and values are packed
 * once for all queries that attend to them.
 *
 * With a cache, keys and values come from its blocks, and queries have the places in tiles and strips that they would
 * have in the whole document, since the keys that a strip begins with depend on these: so results have the same bits.
 * A token that is alone in its strip has its heads side by side in it, instead of other tokens.
 *
 * A chunk of work is a key head and a tile of a document in forward, and a key head of a document in backward, whose
 * query heads and blocks run in a fixed order, so that dK and dV need no atomics.
 */
#include <string.h>

#include "device/carve.h"
#include "device/cpu/columns.h"
#include "device/cpu/cpu.h"
#include "device/cpu/gemm_kernel.h"

/* TILE: queries of a forward chunk. BLOCK, KEYS: queries and keys that backward handles at a time. PANEL: keys that are
 * summed before the sum is added to the total. */
enum { TILE = 128, BLOCK = 64, KEYS = 96, PANEL = 512 };
_Static_assert(BLOCK % MT_CPU_GEMM_COLS == 0, "a block must be whole strips");
_Static_assert(KEYS % MT_CPU_GEMM_ROWS == 0, "KEYS must be whole strips");

/* A thread's part of the operation's workspace. */
struct workspace {
    const struct mt_cpu_gemm_isa *isa;
    float *k, *v, *t;         /* strips: keys; values; values (in backward keys) with dimensions as lanes */
    float *s;                 /* scores [key][query] of a strip of queries; in backward of KEYS keys, BLOCK queries */
    float *ds, *dp;           /* gradients of scores: laid out as s; and in strips of queries */
    float *slope;             /* of the cap: laid out as s */
    float *q, *dO;            /* strips of BLOCK rows, lanes are queries */
    float *q_rows, *dO_rows;  /* the same, lanes are dimensions */
    float *dk, *dv;           /* [len, width] */
    float *out, *rows;        /* a product [dimension][query]; its transpose */
    float *lse, *delta, *row; /* of BLOCK queries; one row */
    size_t width, width_v;    /* of a head of keys and of values, rounded up to whole strips of columns */
    size_t wide;              /* the larger, plus a strip of rows */
};

/* Lays the buffers out from `at`; returns the number of floats. `at` NULL: only counts. */
static size_t lay_out(struct workspace *r, float *at, const struct mt_attention *a)
{
    size_t d = a->q.dim, d_v = a->v.dim, len = a->max_len + MT_CPU_GEMM_ROWS;
    size_t wide_k = mt_align_up(d, MT_CPU_GEMM_COLS) + MT_CPU_GEMM_ROWS;
    size_t wide_v = mt_align_up(d_v, MT_CPU_GEMM_COLS) + MT_CPU_GEMM_ROWS, wide = MT_MAX(wide_k, wide_v);
    size_t scores = MT_MAX(len * MT_CPU_GEMM_COLS, (size_t)KEYS * BLOCK);
    r->wide = wide;
    struct {
        float **p;
        size_t n;
    } parts[] = {{&r->k, len * d},        {&r->v, len * d_v},         {&r->t, len * wide},
                 {&r->dk, len * wide_k},  {&r->dv, len * wide_v},     {&r->s, scores},
                 {&r->ds, KEYS * BLOCK},   {&r->q, BLOCK * d},         {&r->dO, BLOCK * d_v},
                 {&r->q_rows, BLOCK * wide_k}, {&r->dO_rows, BLOCK * wide_v}, {&r->dp, KEYS * BLOCK},
                 {&r->out, BLOCK * wide}, {&r->rows, BLOCK * wide},   {&r->lse, BLOCK},
                 {&r->delta, BLOCK},      {&r->row, wide},            {&r->slope, a->cap > 0 ? KEYS * BLOCK : 0}};
    struct mt_carve c = {(char *)at, 0};
    for (size_t i = 0; i < MT_ARRAY_LEN(parts); i++)
        *parts[i].p = mt_carve(&c, parts[i].n * sizeof(float), 64);
    return c.used / sizeof(float);
}

static struct workspace workspace_of(struct mt_cpu_device *dev, const struct mt_attention *a, int thread)
{
    struct workspace r = {.isa = mt_cpu_gemm_isa(dev->gemm)};
    size_t floats = lay_out(&r, NULL, a);
    lay_out(&r, (float *)a->workspace + (size_t)thread * floats, a);
    r.width = mt_align_up(a->q.dim, r.isa->nr);
    r.width_v = mt_align_up(a->v.dim, r.isa->nr);
    return r;
}

size_t mt_cpu_attention_workspace(const struct mt_device_limits *l, const struct mt_attention *a)
{
    struct workspace r;
    return (size_t)l->n_threads * lay_out(&r, NULL, a) * sizeof(float);
}

/* Rows [row, row + n) of a head. */
struct rows {
    enum mt_dtype dtype;
    struct mt_heads of;
    size_t row, head, n;
};

static struct mt_cpu_panel strips(const struct rows *x, bool rows_are_lanes, float factor, size_t width, float *dst)
{
    size_t lanes = rows_are_lanes ? x->n : x->of.dim, k = rows_are_lanes ? x->of.dim : x->n;
    return (struct mt_cpu_panel){.dtype = x->dtype, .src = x->of.p, .first = mt_heads_at(&x->of, x->row, x->head),
                                .ld = x->of.ld, .trans = rows_are_lanes, .lanes = lanes, .k = k, .factor = factor,
                                .dst = dst, .pitch = k * width};
}

static const float *row_of(const struct rows *x, size_t i, float *tmp)
{
    return mt_cpu_row_f32(x->dtype, x->of.p, mt_heads_at(&x->of, x->row + i, x->head), x->of.dim, tmp);
}

/* Queries [q0, q0 + n) of a document; they attend to keys [k0, k0 + n_keys). The query at position p of the document is
 * row doc + p, modulo 2^64 where it began before; its key is row keys + p. */
struct span {
    size_t doc, keys, len, past, q0, n, k0, n_keys;
};

static struct span document(const struct mt_attention *a, size_t doc)
{
    size_t first = (size_t)a->cu_seqlens[doc], past = doc ? 0 : a->past;
    size_t len = (size_t)a->cu_seqlens[doc + 1] - first + past;
    return (struct span){.doc = first - past, .keys = first - past + a->past, .len = len, .past = past};
}

/* The first key that a query attends to. */
static size_t first_key(const struct mt_attention *a, size_t q)
{
    return a->window && q + 1 > a->window ? q + 1 - a->window : 0;
}

/* A tile of a document's queries, from q0 on. */
static struct span span_of(const struct mt_attention *a, struct span s, size_t q0)
{
    s.q0 = q0;
    s.n = MT_MIN((size_t)TILE, s.len - q0);
    s.k0 = first_key(a, q0);
    s.n_keys = q0 + s.n - s.k0;
    return s;
}

/* A strip of queries [q, q + n), and the keys [from, to) that any of them attends to, counted from `key`, the first
 * packed one. A strip of keys begins at `from`. With `heads` it is n heads of the query q instead. */
struct strip {
    size_t q, n, from, to, key;
    bool heads;
};

static struct strip strip_of(const struct mt_attention *a, const struct workspace *r, size_t q, size_t n, size_t key)
{
    size_t first = MT_MAX(first_key(a, q), key) - key;
    return (struct strip){q, n, first / r->isa->mr * r->isa->mr, q + n - key, key, false};
}

/* s[key][query] = sum over d of key * query, for a strip of queries and whole strips of keys, up to end_of_keys(). */
static void scores(const struct mt_cpu_gemm_isa *isa, const struct strip *c, const float *keys, const float *queries,
                   size_t d, float *s, size_t ld)
{
    for (size_t i = c->from; i < c->to; i += isa->mr)
        isa->multiply(d, keys + i * d, queries, NULL, 0, s + (i - c->from) * ld, ld);
}

/* The end of the last whole strip of keys. */
static size_t end_of_keys(const struct mt_cpu_gemm_isa *isa, const struct strip *c)
{
    return mt_align_up(c->to, isa->mr);
}

static void hide_some(float *s, size_t from, size_t to)
{
    for (size_t j = from; j < to; j++)
        s[j] = -INFINITY;
}

/* Masks scores, up to the key `to`, of keys after a query and of keys before its window. */
static void hide(const struct mt_attention *a, const struct strip *c, size_t to, size_t nr, float *s, size_t ld)
{
    if (c->heads) {
        for (size_t i = c->from; i < to && a->window && c->key + i + a->window <= c->q; i++)
            hide_some(s + (i - c->from) * ld, 0, nr);
        return;
    }
    size_t late = c->q + 1 > c->key ? c->q + 1 - c->key : 0; /* first key that is later than some query */
    for (size_t i = MT_MAX(late, c->from); i < to; i++)
        hide_some(s + (i - c->from) * ld, 0, MT_MIN(nr, c->key + i - c->q));
    if (!a->window)
        return;
    for (size_t i = c->from; i < to && c->key + i + a->window < c->q + nr; i++) {
        size_t last = c->key + i + a->window; /* first query whose window begins after the key */
        hide_some(s + (i - c->from) * ld, last > c->q ? last - c->q : 0, nr);
    }
}

/* out[dimension][query] = sum over the strip's keys of r->t[dimension][key] s[key][query]; n_keys keys are packed. */
static void weigh(const struct workspace *r, const struct strip *c, size_t n_keys, const float *s, size_t d,
                  bool accumulate, float *out)
{
    const struct mt_cpu_gemm_isa *isa = r->isa;
    size_t nr = isa->nr;
    for (size_t i = 0; i < d; i += isa->mr)
        for (size_t p = c->from; p < c->to; p += PANEL)
            isa->multiply(MT_MIN((size_t)PANEL, c->to - p), r->t + i * n_keys + p * isa->mr, s + (p - c->from) * nr,
                          accumulate || p > c->from ? out + i * nr : NULL, nr, out + i * nr, nr);
}

/* Transposes a strip's out[dimension][query] to r->rows, for store_weighed(). */
static void transpose_out(const struct workspace *r, const float *out, size_t d)
{
    const struct mt_cpu_gemm_isa *isa = r->isa;
    size_t nr = isa->nr;
    isa->panel_b(&(struct mt_cpu_panel){.dtype = MT_F32, .src = out, .ld = nr, .trans = true, .lanes = d, .k = nr,
                                      .factor = 1, .dst = r->rows, .pitch = nr * nr});
}

/* Stores a query's column of r->rows, times `factor`, as a row of a head. */
static void store_weighed(const struct workspace *r, size_t query, float factor, enum mt_dtype t,
                          const struct mt_heads *to, size_t token, size_t head)
{
    size_t nr = r->isa->nr, first = mt_heads_at(to, token, head), d = to->dim;
    float *row = mt_cpu_row_place(t, to->p, first, r->row);
    for (size_t i = 0; i < d; i += nr)
        for (size_t j = 0; j < MT_MIN(nr, d - i); j++)
            row[i + j] = factor * r->rows[i * nr + query * nr + j];
    mt_cpu_store_row(t, to->p, first, d, row);
}

/* Outputs of a strip whose scores are in r->s. */
static void attend_strip(const struct mt_attention *a, const struct span *s, const struct strip *c, size_t head,
                         const struct workspace *r)
{
    size_t d_v = a->v.dim, nr = r->isa->nr, n_keys = c->to - c->from, row = s->doc + c->q;
    float max[MT_CPU_GEMM_COLS], sum[MT_CPU_GEMM_COLS];
    if (a->cap > 0)
        mt_cpu_cap_columns(r->s, nr, a->cap, n_keys, nr);
    hide(a, c, c->to, nr, r->s, nr);
    mt_cpu_column_max(max, r->s, n_keys, nr);
    mt_cpu_exp_columns(r->s, nr, max, n_keys, nr);
    mt_cpu_column_sum(sum, r->s, n_keys, nr);
    weigh(r, c, s->n_keys, r->s, d_v, false, r->out);
    transpose_out(r, r->out, d_v);
    for (size_t i = 0; i < c->n; i++) {
        size_t of = head + (c->heads ? i : 0), at = row + (c->heads ? 0 : i);
        a->lse[of * a->n + at] = max[i] + logf(sum[i]);
        store_weighed(r, i, 1.0f / sum[i], a->dtype, &a->o, at, of);
    }
}

static void forward_strip(const struct mt_attention *a, const struct span *s, const struct strip *c, size_t head,
                          const struct workspace *r)
{
    struct rows q = {a->dtype, a->q, s->doc + c->q, head, c->n};
    struct mt_cpu_panel queries = strips(&q, true, a->scale, r->isa->nr, r->q);
    if (c->heads)
        queries.ld = a->q.stride;
    r->isa->panel_b(&queries);
    scores(r->isa, c, r->k, r->q, a->q.dim, r->s, r->isa->nr);
    attend_strip(a, s, c, head, r);
}

/* The span of a tile; tiles are numbered through all documents. */
static struct span find_span(const struct mt_attention *a, size_t tile)
{
    size_t doc = 0;
    for (;; doc++) {
        size_t tiles = mt_div_up((size_t)(a->cu_seqlens[doc + 1] - a->cu_seqlens[doc]), TILE);
        if (tile < tiles)
            break;
        tile -= tiles;
    }
    struct span s = document(a, doc);
    return span_of(a, s, s.past + tile * TILE);
}

struct job {
    struct mt_cpu_device *dev;
    const struct mt_attention *a;
    const struct mt_attention_bwd *b;         /* of backward */
    const struct mt_attention_cached *cached; /* with a cache */
};

static void forward_chunk(void *ctx, size_t chunk, int thread)
{
    const struct job *j = ctx;
    const struct mt_attention *a = j->a;
    struct workspace r = workspace_of(j->dev, a, thread);
    struct span s = find_span(a, chunk / a->k.n);
    size_t kv = chunk % a->k.n, group = a->q.n / a->k.n;
    struct rows k = {a->dtype, a->k, s.keys + s.k0, kv, s.n_keys}, v = k;
    v.of = a->v;
    struct mt_cpu_panel keys = strips(&k, true, 1, r.isa->mr, r.k), values = strips(&v, false, 1, r.isa->mr, r.t);
    r.isa->panel_a(&keys);
    r.isa->panel_a(&values);
    for (size_t h = kv * group; h < (kv + 1) * group; h++)
        for (size_t i = 0; i < s.n; i += r.isa->nr) {
            struct strip c = strip_of(a, &r, s.q0 + i, MT_MIN(r.isa->nr, s.n - i), s.k0);
            forward_strip(a, &s, &c, h, &r);
        }
}

void mt_cpu_run_attention(struct mt_cpu_device *d, const struct mt_attention *a)
{
    size_t tiles = 0;
    for (size_t i = 0; i < a->n_docs; i++)
        tiles += mt_div_up((size_t)(a->cu_seqlens[i + 1] - a->cu_seqlens[i]), TILE);
    struct job j = {.dev = d, .a = a};
    mt_pool_run(d->pool, forward_chunk, &j, tiles * a->k.n);
}

/* --- with a cache ------------------------------------------------------------------------------- */

size_t mt_cpu_attention_cached_workspace(const struct mt_device_limits *l, const struct mt_attention_cached *a)
{
    return mt_cpu_attention_workspace(l, &a->of);
}

/* The element where the key, or the value, of a position begins. */
static size_t cached_at(const struct mt_attention_cached *a, size_t doc, size_t position, size_t head, bool value)
{
    size_t keys = a->of.k.n * a->of.k.dim, values = a->of.v.n * a->of.v.dim, row = position % a->block;
    size_t block = (size_t)a->table[doc * a->table_ld + position / a->block % a->table_ld] * mt_cache_block_elems(a);
    return block + (value ? a->block * keys + row * values + head * a->of.v.dim : row * keys + head * a->of.k.dim);
}

static size_t new_tokens(const struct mt_attention *a, size_t doc)
{
    return (size_t)(a->cu_seqlens[doc + 1] - a->cu_seqlens[doc]);
}

/* Adds the keys and values of a document's new tokens. */
static void append_chunk(void *ctx, size_t doc, int)
{
    const struct job *j = ctx;
    const struct mt_attention *a = j->a;
    size_t e = mt_dtype_size(a->dtype);
    for (size_t i = 0; i < new_tokens(a, doc); i++)
        for (size_t h = 0; h < 2 * a->k.n; h++) {
            bool value = h >= a->k.n;
            const struct mt_heads *from = value ? &a->v : &a->k;
            size_t head = value ? h - a->k.n : h, position = (size_t)j->cached->past[doc] + i;
            memcpy((char *)j->cached->cache + cached_at(j->cached, doc, position, head, value) * e,
                   (const char *)from->p + mt_heads_at(from, (size_t)a->cu_seqlens[doc] + i, head) * e, from->dim * e);
        }
}

/*
 * Keys of a head, from position `from` of a strip on, into strips; those before `seen`, which a window hides from all new
 * queries, are zeros: the cache may lack them. They go by way of rows, since blocks end anywhere.
 */
static void pack_keys(const struct mt_attention_cached *a, const struct span *s, size_t doc, size_t head, size_t from,
                        size_t seen, const struct workspace *r)
{
    size_t mr = r->isa->mr, e = mt_dtype_size(a->of.dtype), d = a->of.k.dim, end = s->k0 + s->n_keys;
    for (size_t k = from, n; k < end; k += n) {
        n = MT_MIN((size_t)KEYS, end - k);
        struct rows rows = {a->of.dtype, mt_heads(r->dk, d, 1, d), 0, 0, n};
        for (size_t i = 0; i < n; i++)
            if (k + i < seen)
                memset((char *)r->dk + i * d * e, 0, d * e);
            else
                memcpy((char *)r->dk + i * d * e, (char *)a->cache + cached_at(a, doc, k + i, head, false) * e, d * e);
        struct mt_cpu_panel keys = strips(&rows, true, 1, mr, r->k + (k - s->k0) * d);
        r->isa->panel_a(&keys);
    }
}

/* As pack_keys(), of values. */
static void pack_values(const struct mt_attention_cached *a, const struct span *s, size_t doc, size_t head, size_t from,
                        size_t seen, const struct workspace *r)
{
    size_t mr = r->isa->mr, end = s->k0 + s->n_keys;
    for (size_t i = 0; i < a->of.v.dim && seen > from; i += mr)
        memset(r->t + i * s->n_keys + (from - s->k0) * mr, 0, (seen - from) * mr * sizeof(float));
    for (size_t k = MT_MAX(from, seen), n; k < end; k += n) {
        n = MT_MIN(a->block - k % a->block, end - k);
        struct mt_cpu_panel values = {.dtype = a->of.dtype, .src = a->cache, .first = cached_at(a, doc, k, head, true),
                                      .ld = a->of.v.n * a->of.v.dim, .lanes = a->of.v.dim, .k = n, .factor = 1,
                                      .dst = r->t + (k - s->k0) * mr, .pitch = s->n_keys * mr};
        r->isa->panel_a(&values);
    }
}

/* Whether scores of a document's one new token are made of its keys as the cache has them, which gives the same bits. */
static bool reads_cache(const struct mt_attention_cached *a, size_t doc, const struct workspace *r)
{
    return a->of.dtype == MT_F32 && new_tokens(&a->of, doc) == 1 && a->of.q.n / a->of.k.n <= MT_CPU_GEMM_THIN &&
           a->block % r->isa->lanes == 0 && !first_key(&a->of, (size_t)a->past[doc]);
}

/* Scores of the query's heads, from key 0 on. */
static void score_cache(const struct mt_attention_cached *a, size_t doc, const struct strip *c, size_t head, size_t kv,
                        const struct workspace *r)
{
    size_t d = a->of.q.dim, lanes = r->isa->lanes, nr = r->isa->nr;
    float s[MT_CPU_GEMM_THIN * MT_CPU_GEMM_COLS];
    for (size_t h = 0; h < c->n; h++) {
        const float *q = (const float *)a->of.q.p + mt_heads_at(&a->of.q, (size_t)a->of.cu_seqlens[doc], head + h);
        for (size_t i = 0; i < d; i++)
            r->q[h * d + i] = a->of.scale * q[i];
    }
    memset(r->s, 0, c->to * nr * sizeof(float));
    for (size_t k = 0; k < c->to; k += lanes) {
        r->isa->multiply_thin(c->n, d, r->q, d, (const float *)a->cache + cached_at(a, doc, k, kv, false),
                              a->of.k.n * a->of.k.dim, s);
        for (size_t h = 0; h < c->n; h++)
            for (size_t i = 0; i < MT_MIN(lanes, c->to - k); i++)
                r->s[(k + i) * nr + h] = s[h * lanes + i];
    }
}

/* Tiles of whole documents that have new queries. */
static size_t cached_tiles(const struct mt_attention_cached *a, size_t doc)
{
    size_t first = (size_t)a->past[doc], end = first + new_tokens(&a->of, doc);
    return mt_div_up(end, TILE) - first / TILE;
}

static void cached_chunk(void *ctx, size_t chunk, int thread)
{
    const struct job *j = ctx;
    const struct mt_attention *a = j->a;
    struct workspace r = workspace_of(j->dev, a, thread);
    size_t kv = chunk % a->k.n, tile = chunk / a->k.n, group = a->q.n / a->k.n, nr = r.isa->nr, doc = 0;
    for (size_t n; tile >= (n = cached_tiles(j->cached, doc)); doc++)
        tile -= n;
    size_t past = (size_t)j->cached->past[doc], len = past + new_tokens(a, doc), q0 = (past / TILE + tile) * TILE;
    struct span whole = {.doc = (size_t)a->cu_seqlens[doc] - past, .len = len}; /* of its first token, now past */
    struct span s = span_of(a, whole, q0);
    size_t first = MT_MAX(past, q0) / nr * nr, seen = first_key(a, past);
    size_t from_key = s.k0 + strip_of(a, &r, first, 1, s.k0).from;
    bool in_place = reads_cache(j->cached, doc, &r);
    if (!in_place)
        pack_keys(j->cached, &s, doc, kv, from_key, seen, &r);
    pack_values(j->cached, &s, doc, kv, from_key, seen, &r);
    for (size_t i = first; i < q0 + s.n; i += nr) {
        size_t from = MT_MAX(past, i), n = MT_MIN(i + nr, q0 + s.n) - from;
        struct strip c = strip_of(a, &r, i, 1, s.k0);
        c.q = from;
        c.n = n;
        c.to = from + n - s.k0;
        c.heads = n == 1;
        for (size_t h = kv * group; h < (kv + 1) * group; h += c.heads ? c.n : 1) {
            c.n = c.heads ? MT_MIN(nr, (kv + 1) * group - h) : n;
            if (in_place) {
                score_cache(j->cached, doc, &c, h, kv, &r);
                attend_strip(a, &s, &c, h, &r);
            } else {
                forward_strip(a, &s, &c, h, &r);
            }
        }
    }
}

void mt_cpu_run_attention_cached(struct mt_cpu_device *d, const struct mt_attention_cached *a)
{
    size_t tiles = 0;
    struct job j = {.dev = d, .a = &a->of, .cached = a};
    for (size_t doc = 0; doc < a->of.n_docs; doc++)
        tiles += cached_tiles(a, doc);
    mt_pool_run(d->pool, append_chunk, &j, a->of.n_docs);
    mt_pool_run(d->pool, cached_chunk, &j, tiles * a->of.k.n);
}

/* The row sums of queries that have one key, their own: see above. p and dp begin at the strip's first key. */
static void set_lone(const struct mt_attention *a, const struct strip *c, const float *p, const float *dp, float *delta,
                     size_t nr)
{
    size_t n = a->window == 1 ? c->n : c->q == 0;
    for (size_t j = 0; j < n; j++) {
        size_t key = c->q + j;
        if (key >= c->from && key < c->to)
            delta[j] = p[(key - c->from) * BLOCK + j] * dp[(key - c->from) * nr + j];
    }
}

/* P and dS of a strip of queries with the keys from `key` on; adds their share to dQ, which `first` overwrites. `at` is
 * the strip's first row in the block. */
static void backward_strip(const struct mt_attention *a, const struct strip *c, bool first, size_t key, size_t at,
                           size_t len, const struct workspace *r)
{
    size_t d = a->q.dim, d_v = a->v.dim, nr = r->isa->nr, to = end_of_keys(r->isa, c), n_keys = to - c->from;
    size_t place = (c->from - key) * BLOCK + at;
    float *p = r->s + place, *dp = r->dp + at * KEYS;
    scores(r->isa, c, r->k, r->q + at * d, d, p, BLOCK);
    scores(r->isa, c, r->v, r->dO + at * d_v, d_v, dp, nr);
    if (a->cap > 0)
        mt_cpu_cap_columns_slope(p, r->slope + place, BLOCK, a->cap, n_keys, nr);
    hide(a, c, to, nr, p, BLOCK);
    mt_cpu_exp_columns(p, BLOCK, r->lse + at, n_keys, nr);
    set_lone(a, c, p, dp, r->delta + at, nr);
    mt_cpu_score_gradient(r->ds + place, dp, p, BLOCK, r->delta + at, n_keys, nr);
    if (a->cap > 0)
        mt_cpu_multiply_columns(r->ds + place, dp, r->slope + place, BLOCK, n_keys, nr);
    weigh(r, c, len, dp, d, !first, r->out + at * r->wide);
}

/* Clears P and dS of keys [from, to), in buffers that begin at `key`, for the strip of queries that begins at `at`. */
static void clear_keys(const struct workspace *r, size_t key, size_t from, size_t to, size_t at)
{
    for (size_t i = from; i < to; i++) {
        memset(r->s + (i - key) * BLOCK + at, 0, r->isa->nr * sizeof(float));
        memset(r->ds + (i - key) * BLOCK + at, 0, r->isa->nr * sizeof(float));
    }
}

/* dv or dk[key][width] += sum over n queries from `at` on (whole strips) of s or ds[key][query] dO or q[query][width],
 * for keys [from, to); s and ds begin at `key`. */
static void gather(const struct workspace *r, bool values, size_t key, size_t from, size_t to, size_t at, size_t n)
{
    const struct mt_cpu_gemm_isa *isa = r->isa;
    const float *s = (values ? r->s : r->ds) + (from - key) * BLOCK + at;
    const float *rows = (values ? r->dO_rows : r->q_rows) + at * isa->nr;
    float *out = values ? r->dv : r->dk;
    size_t width = values ? r->width_v : r->width;
    for (size_t i = from; i < to; i += isa->mr, s += isa->mr * BLOCK)
        for (size_t j = 0; j < width; j += isa->nr) {
            float *d = out + i * width + j;
            isa->multiply_rows(n, s, BLOCK, rows + j * BLOCK, d, width, d, width);
        }
}

/* KEYS keys from `key` on, with the strips of a block. */
static void backward_keys(const struct mt_attention *a, const struct strip *strips, size_t n_strips, size_t key,
                          size_t len, const struct workspace *r)
{
    struct strip c[BLOCK];
    size_t first = n_strips, last = 0, nr = r->isa->nr; /* strips that attend to any of the keys */
    for (size_t i = 0; i < n_strips; i++) {
        c[i] = strips[i];
        c[i].from = MT_MAX(c[i].from, key);
        c[i].to = MT_MIN(c[i].to, key + KEYS);
        if (c[i].from >= c[i].to)
            continue;
        backward_strip(a, &c[i], c[i].from == strips[i].from, key, i * nr, len, r);
        first = MT_MIN(first, i);
        last = i;
    }
    if (first == n_strips)
        return;
    /* later strips attend to later keys */
    size_t from = c[first].from, to = end_of_keys(r->isa, &c[last]), at = first * nr;
    for (size_t i = first; i <= last; i++) {
        clear_keys(r, key, from, c[i].from, i * nr);
        clear_keys(r, key, end_of_keys(r->isa, &c[i]), to, i * nr);
    }
    for (int values = 1; values >= 0; values--)
        gather(r, values, key, from, to, at, (last + 1 - first) * nr);
}

/* The queries [q, q + n) of a document, whose keys and values are packed. */
static void backward_block(const struct mt_attention_bwd *b, size_t first, size_t len, size_t q, size_t n, size_t head,
                           const struct workspace *r)
{
    const struct mt_attention *a = &b->fwd;
    size_t d = a->q.dim, nr = r->isa->nr, row = first + q, n_strips = mt_div_up(n, nr);
    struct rows x = {a->dtype, a->q, row, head, n}, o = {a->dtype, a->o, row, head, n}, dO = o;
    dO.of = b->d_o;
    struct mt_cpu_panel panels[] = {strips(&x, true, a->scale, nr, r->q), strips(&x, false, a->scale, nr, r->q_rows),
                                  strips(&dO, true, 1, nr, r->dO), strips(&dO, false, 1, nr, r->dO_rows)};
    for (size_t i = 0; i < MT_ARRAY_LEN(panels); i++) {
        if (!panels[i].trans) { /* queries missing in the last strip count as zeros */
            panels[i].pitch = BLOCK * nr;
            memset(panels[i].dst, 0, BLOCK * (i < 2 ? r->width : r->width_v) * sizeof(float));
        }
        r->isa->panel_b(&panels[i]);
    }
    for (size_t i = 0; i < BLOCK; i++) {
        r->lse[i] = i < n ? a->lse[head * a->n + row + i] : INFINITY;
        r->delta[i] = i < n ? mt_cpu_dot(row_of(&dO, i, r->row), row_of(&o, i, r->out), a->v.dim) : 0;
    }
    struct strip c[BLOCK];
    for (size_t i = 0; i < n_strips; i++)
        c[i] = strip_of(a, r, q + i * nr, MT_MIN(nr, n - i * nr), 0);
    for (size_t key = c[0].from / KEYS * KEYS; key < q + n; key += KEYS)
        backward_keys(a, c, n_strips, key, len, r);
    for (size_t i = 0; i < n; i++) {
        if (i % nr == 0)
            transpose_out(r, r->out + i * r->wide, d);
        store_weighed(r, i % nr, a->scale, a->dtype, &b->dq, row + i, head);
    }
}

/* Gradients of a head's keys, or values: own [len, width], and the sums to which they are added, if there are any. */
static void leave(const struct mt_attention *a, const struct span *s, size_t head, const struct mt_heads *to,
                  const struct mt_heads *sums, const float *own, size_t width)
{
    for (size_t i = 0; i < s->len; i++, own += width) {
        float *sum = sums->p ? (float *)sums->p + mt_heads_at(sums, s->keys + i, head) : NULL;
        for (size_t j = 0; sum && j < to->dim; j++)
            sum[j] += own[j];
        if (i >= s->past)
            mt_cpu_store_row(a->dtype, to->p, mt_heads_at(to, s->doc + i, head), to->dim, sum ? sum : own);
    }
}

static void backward_chunk(void *ctx, size_t chunk, int thread)
{
    const struct job *j = ctx;
    const struct mt_attention_bwd *b = j->b;
    const struct mt_attention *a = &b->fwd;
    struct workspace r = workspace_of(j->dev, a, thread);
    size_t kv = chunk % a->k.n, group = a->q.n / a->k.n;
    const struct span s = document(a, chunk / a->k.n);
    size_t len = s.len;
    struct rows k = {a->dtype, a->k, s.keys, kv, len}, v = k;
    v.of = a->v;
    size_t mr = r.isa->mr;
    struct mt_cpu_panel panels[] = {strips(&k, true, 1, mr, r.k), strips(&v, true, 1, mr, r.v),
                                  strips(&k, false, 1, mr, r.t)};
    for (size_t i = 0; i < MT_ARRAY_LEN(panels); i++)
        r.isa->panel_a(&panels[i]);
    memset(r.dk, 0, (len + mr) * r.width * sizeof(float));
    memset(r.dv, 0, (len + mr) * r.width_v * sizeof(float));
    for (size_t h = kv * group; h < (kv + 1) * group; h++)
        for (size_t q = s.past; q < len; q += BLOCK)
            backward_block(b, s.doc, len, q, MT_MIN((size_t)BLOCK, len - q), h, &r);
    leave(a, &s, kv, &b->dk, &b->dk_sum, r.dk, r.width);
    leave(a, &s, kv, &b->dv, &b->dv_sum, r.dv, r.width_v);
}

void mt_cpu_run_attention_bwd(struct mt_cpu_device *d, const struct mt_attention_bwd *b)
{
    struct job j = {.dev = d, .a = &b->fwd, .b = b};
    mt_pool_run(d->pool, backward_chunk, &j, b->fwd.n_docs * b->fwd.k.n);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"
#include "device/ops/row.h"

static const char *check_heads(const struct mt_attention *a)
{
    MT_OP_NEED(a->q.n && a->k.n && a->q.n % a->k.n == 0);
    MT_OP_NEED(a->q.dim == a->k.dim && a->k.n == a->v.n && a->o.n == a->q.n && a->o.dim == a->v.dim);
    MT_OP_NEED(a->cu_seqlens && a->cu_seqlens_host && a->n_docs);
    MT_OP_NEED(heads_apart(&a->q) && heads_apart(&a->k) && heads_apart(&a->v) && heads_apart(&a->o));
    MT_OP_NEED(a->lse && a->cap >= 0);
    MT_OP_NEED(a->cu_seqlens_host[0] == 0 && (size_t)a->cu_seqlens_host[a->n_docs] == a->n);
    return NULL;
}

/* past: NULL: documents begin here. */
static const char *check_lengths(const struct mt_attention *a, const int32_t *past)
{
    for (size_t i = 0; i < a->n_docs; i++) {
        int32_t before = past ? past[i] : i ? 0 : (int32_t)a->past;
        MT_OP_NEED(before >= 0 && a->cu_seqlens_host[i] < a->cu_seqlens_host[i + 1] &&
                   (size_t)(before + a->cu_seqlens_host[i + 1] - a->cu_seqlens_host[i]) <= a->max_len);
    }
    return NULL;
}

static const char *check_attention(const struct mt_attention *a)
{
    const char *wrong = a->n ? check_heads(a) : NULL;
    if (a->n)
        MT_OP_NEED(a->workspace);
    return wrong || !a->n ? wrong : check_lengths(a, NULL);
}

/* Tables that turn around hold what the window of the first new token sees, and all new ones. */
static const char *check_attention_cached(const struct mt_attention_cached *c)
{
    const struct mt_attention *a = &c->of;
    const char *wrong = a->n ? check_heads(a) : NULL;
    if (wrong || !a->n)
        return wrong;
    MT_OP_NEED(c->cache && c->block && c->table_ld && c->past && c->past_host && c->table && c->table_host);
    wrong = check_lengths(a, c->past_host);
    for (size_t i = 0; i < a->n_docs && !wrong; i++) {
        size_t past = (size_t)c->past_host[i], end = past + (size_t)(a->cu_seqlens_host[i + 1] - a->cu_seqlens_host[i]);
        size_t first = a->window && past + 1 > a->window ? past + 1 - a->window : 0;
        MT_OP_NEED((end - 1) / c->block - first / c->block < c->table_ld);
        for (size_t b = first / c->block; b <= (end - 1) / c->block; b++)
            MT_OP_NEED(c->table_host[i * c->table_ld + b % c->table_ld] >= 0);
    }
    return wrong;
}

static const char *check_attention_bwd(const struct mt_attention_bwd *a)
{
    const char *wrong = check_attention(&a->fwd);
    if (wrong || !a->fwd.n)
        return wrong;
    MT_OP_NEED(heads_apart(&a->d_o) && heads_apart(&a->dq) && heads_apart(&a->dk) && heads_apart(&a->dv));
    MT_OP_NEED(heads_alike(&a->d_o, &a->fwd.o) && heads_alike(&a->dq, &a->fwd.q));
    MT_OP_NEED(heads_alike(&a->dk, &a->fwd.k) && heads_alike(&a->dv, &a->fwd.v));
    MT_OP_NEED(a->dk_sum.p ? a->dv_sum.p && heads_alike(&a->dk_sum, &a->dk) && heads_alike(&a->dv_sum, &a->dv)
                           : !a->fwd.past);
    return NULL;
}

/* Number of pairs of a query and a key that it attends to. */
static double attended_pairs(const struct mt_attention *a)
{
    double sum = 0;
    for (size_t i = 0; i < a->n_docs; i++) {
        double len = a->cu_seqlens_host[i + 1] - a->cu_seqlens_host[i];
        double past = i ? 0 : (double)a->past, w = a->window ? MT_MIN((double)a->window, len + past) : len + past;
        double growing = MT_MAX(w - past, 0); /* queries of which each sees a key more than the one before */
        sum += growing * (2 * past + growing + 1) / 2 + (len - growing) * w;
    }
    return sum;
}

/* dim[1] is twice the mean number of keys that a query attends to: the length plus one, if all documents have the same
 * length and there is no window. */
static void count(const struct mt_attention *a, bool bwd, struct mt_metered *out)
{
    double pairs = attended_pairs(a);
    mt_op_shape(out, a->dtype,
                MT_DIMS(a->n, (uint64_t)(2 * pairs / (double)a->n), a->q.n, a->k.n, a->q.dim, a->v.dim));
    double d = (double)a->q.dim, d_v = (double)a->v.dim;
    out->flops = pairs * (double)a->q.n * (bwd ? 6 * d + 4 * d_v : 2 * d + 2 * d_v); /* five products, or two */
    out->bytes = mt_op_bytes(a->n, a->q.dim + a->v.dim, a->dtype) * (double)(a->q.n + a->k.n) * (bwd ? 2 : 1) +
                 mt_op_bytes(a->past, a->q.dim + a->v.dim, a->dtype) * (double)a->k.n;
}

static void cost_attention(const struct mt_attention *a, struct mt_metered *out)
{
    count(a, false, out);
}

static void cost_attention_bwd(const struct mt_attention_bwd *a, struct mt_metered *out)
{
    count(&a->fwd, true, out);
    if (a->dk_sum.p)
        out->bytes += 2 * mt_op_bytes(a->fwd.past + a->fwd.n, a->fwd.q.dim + a->fwd.v.dim, MT_F32) * (double)a->fwd.k.n;
}

static void cost_attention_cached(const struct mt_attention_cached *c, struct mt_metered *out)
{
    const struct mt_attention *a = &c->of;
    double pairs = 0, width = (double)(a->k.n * (a->q.dim + a->v.dim)), keys = 0;
    for (size_t i = 0; i < a->n_docs; i++) {
        size_t past = (size_t)c->past_host[i], n = (size_t)(a->cu_seqlens_host[i + 1] - a->cu_seqlens_host[i]);
        size_t whole = a->window ? MT_MIN(a->window, past + n) : past + n;
        keys += (double)whole;
        for (size_t k = past + 1; k <= past + n; k++)
            pairs += (double)(a->window ? MT_MIN(a->window, k) : k);
    }
    count(a, false, out);
    out->dim[1] = (uint64_t)(pairs / (double)a->n);
    out->flops = 0; /* what is bound by memory has none */
    out->bytes = mt_op_bytes(a->n, a->q.n * (a->q.dim + a->v.dim), a->dtype) +
                 (keys + (double)a->n) * width * (double)mt_dtype_size(a->dtype);
}

/* The parts of a packed row: queries, keys, values. */
static void split(const char *packed, const struct mt_metered *shape, struct mt_heads part[3])
{
    size_t n_q = (size_t)shape->dim[2], n_kv = (size_t)shape->dim[3], e = mt_dtype_size(shape->dtype), at = 0;
    size_t d = (size_t)shape->dim[4], d_v = (size_t)shape->dim[5], ld = (n_q + n_kv) * d + n_kv * d_v;
    const size_t n[] = {n_q, n_kv, n_kv}, dim[] = {d, d, d_v};
    for (int i = 0; i < 3; i++) {
        part[i] = mt_heads(packed ? packed + at * e : NULL, ld, n[i], dim[i]);
        at += n[i] * dim[i];
    }
}

static size_t packed_elements(const struct mt_attention *a)
{
    return (a->past + a->n) * a->q.ld;
}

/* Arguments whose q, k, v and results have shapes and no memory. Of a length beyond all rows it is a document that goes
 * on. */
static struct mt_attention documents(mt_example *x, const struct mt_metered *shape)
{
    size_t n = (size_t)shape->dim[0], len = MT_MIN(MT_MAX((size_t)shape->dim[1], (size_t)2) - 1, n);
    size_t docs = mt_div_up(n, len);
    size_t past = (size_t)shape->dim[1] > n + 1 ? ((size_t)shape->dim[1] - n - 1) / 2 : 0;
    struct mt_attention a = {.n = n, .past = past, .n_docs = docs, .max_len = len + past, .dtype = shape->dtype,
                             .scale = 0.125f};
    struct mt_heads part[3];
    int32_t *cu = mt_example_host_ints(x, docs + 1, len, 0);
    if (cu)
        cu[docs] = (int32_t)n;
    a.cu_seqlens_host = cu;
    a.cu_seqlens = mt_example_upload(x, cu, docs + 1);
    split(NULL, shape, part);
    a.q = part[0];
    a.k = part[1];
    a.v = part[2];
    a.o = mt_heads(NULL, a.q.n * a.v.dim, a.q.n, a.v.dim);
    a.workspace = mt_example_workspace(x, mt_op_attention_workspace(mt_example_device(x), &a));
    return a;
}

static void set_qkv(struct mt_attention *a, const struct mt_metered *shape, const char *packed)
{
    struct mt_heads part[3];
    split(packed, shape, part);
    a->q = part[0];
    a->q.p = packed ? (char *)a->q.p + a->past * a->q.ld * mt_dtype_size(a->dtype) : NULL;
    a->k = part[1];
    a->v = part[2];
}

static void fill_attention(mt_example *x, const struct mt_metered *shape, struct mt_attention *a)
{
    *a = documents(x, shape);
    set_qkv(a, shape, mt_example_fresh(x, a->dtype, packed_elements(a)));
    a->o.p = mt_example_write(x, a->dtype, a->n * a->o.ld);
    a->lse = mt_example_write(x, MT_F32, a->n * a->q.n);
}

/* A token of each document, all of which but the last block is shared. */
static void fill_attention_cached(mt_example *x, const struct mt_metered *shape, struct mt_attention_cached *c)
{
    enum { BLOCK = 16 };
    size_t n = (size_t)shape->dim[0], len = MT_MAX((size_t)shape->dim[1], (size_t)1), blocks = mt_div_up(len, BLOCK);
    *c = (struct mt_attention_cached){.block = BLOCK, .table_ld = blocks,
                                      .of = {.n = n, .n_docs = n, .max_len = len, .dtype = shape->dtype, .scale = 1}};
    int32_t *table = mt_example_host_ints(x, n * blocks, 1, blocks), *past = mt_example_host_ints(x, n, 0, 0);
    for (size_t i = 0; i < n && table && past; i++) {
        table[(i + 1) * blocks - 1] = (int32_t)(blocks + i);
        past[i] = (int32_t)len - 1;
    }
    c->table = mt_example_upload(x, c->table_host = table, n * blocks);
    c->past = mt_example_upload(x, c->past_host = past, n);
    c->of.cu_seqlens_host = mt_example_host_ints(x, n + 1, 1, 0);
    c->of.cu_seqlens = mt_example_upload(x, c->of.cu_seqlens_host, n + 1);
    set_qkv(&c->of, shape, NULL);
    set_qkv(&c->of, shape, mt_example_fresh(x, shape->dtype, packed_elements(&c->of)));
    c->of.o = mt_heads(NULL, c->of.q.n * c->of.v.dim, c->of.q.n, c->of.v.dim);
    c->of.o.p = mt_example_write(x, shape->dtype, n * c->of.o.ld);
    c->of.lse = mt_example_write(x, MT_F32, n * c->of.q.n);
    c->cache = mt_example_update(x, shape->dtype, (blocks + n) * mt_cache_block_elems(c));
    c->of.workspace = mt_example_workspace(x, mt_op_attention_cached_workspace(mt_example_device(x), c));
}

static void fill_attention_bwd(mt_example *x, const struct mt_metered *shape, struct mt_attention_bwd *b)
{
    struct mt_attention *a = &b->fwd;
    struct mt_heads part[3];
    *b = (struct mt_attention_bwd){.fwd = documents(x, shape)};
    set_qkv(a, shape, mt_example_read(x, a->dtype, packed_elements(a)));
    a->o.p = mt_example_read(x, a->dtype, a->n * a->o.ld);
    a->lse = mt_example_read(x, MT_F32, a->n * a->q.n);
    b->d_o = a->o;
    b->d_o.p = mt_example_fresh(x, a->dtype, a->n * a->o.ld);
    split(mt_example_write(x, a->dtype, a->n * a->q.ld), shape, part);
    b->dq = part[0];
    b->dk = part[1];
    b->dv = part[2];
    if (!a->past)
        return;
    size_t d = a->k.n * a->k.dim, d_v = a->v.n * a->v.dim, rows = a->past + a->n;
    b->dk_sum = mt_heads(mt_example_update(x, MT_F32, rows * d), d, a->k.n, a->k.dim);
    b->dv_sum = mt_heads(mt_example_update(x, MT_F32, rows * d_v), d_v, a->v.n, a->v.dim);
}

MT_OP_ROW(attention, n, .bound = MT_BOUND_ATTENTION,
          .dim = {MT_SIZE_ROWS, MT_SIZE_LENGTH, MT_SIZE_HEADS, MT_SIZE_KV_HEADS, MT_SIZE_HEAD_DIM, MT_SIZE_HEAD_DIM});

MT_OP_ROW(attention_cached, of.n, .bound = MT_BOUND_BYTES, /* with a new token a document; of any length */
          .dim = {MT_SIZE_ROWS, MT_SIZE_HEAD_DIM, MT_SIZE_HEADS, MT_SIZE_KV_HEADS, MT_SIZE_HEAD_DIM, MT_SIZE_HEAD_DIM});

MT_OP_ROW(attention_bwd, fwd.n, .bound = MT_BOUND_ATTENTION_BWD,
          .dim = {MT_SIZE_ROWS, MT_SIZE_LENGTH, MT_SIZE_HEADS, MT_SIZE_KV_HEADS, MT_SIZE_HEAD_DIM, MT_SIZE_HEAD_DIM});

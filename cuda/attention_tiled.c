/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Causal attention, one document and one tile at a time, all heads together: strided-batch matrix products with a
 * softmax kernel between them. The formulas are those of the cpu device (cpu/attention.c); in bf16, probabilities and
 * their gradients are rounded to bf16 before they are multiplied, as in fused kernels. With grouped queries a batch
 * runs over the key heads, once for each query head of a group: so dK and dV are summed in f32, in order. Products that
 * sum nothing over a group are batches over the group instead, once for each key head, where those are fewer.
 *
 * In forward, a tile is some queries with all keys that they attend to. In backward, where log-sum-exps are known, it
 * is 512 queries with some of their keys, and dQ is summed in f32 over the tiles. Tiles depend on the document's length
 * and the heads alone, so a document's bits do not depend on the rest of the batch; their memory is linear in the
 * length (workspace.h). A document that began before has its length with that.
 */
#include "attention.h"
#include "blas.h"
#include "kernels.h"
#include "workspace.h"

struct tile {
    size_t doc, len;      /* the document's first row, modulo 2^64 where it began before; its length */
    size_t keys, past;    /* the row of its first key; its tokens before the others */
    size_t q0, rows;      /* queries [q0, q0 + rows) of the document */
    size_t k0, n_keys;    /* keys [k0, k0 + n_keys) */
    size_t ld;            /* of scores */
    bool first_keys;      /* the first tile of these queries: dQ is written, not added to */
};

static struct tile document(const struct mt_attention *a, size_t doc)
{
    size_t first = (size_t)a->cu_seqlens_host[doc], past = doc ? 0 : a->past;
    struct tile t = {.doc = first - past, .keys = first - past + a->past, .past = past, .q0 = past};
    t.len = (size_t)a->cu_seqlens_host[doc + 1] - t.doc;
    return t;
}

/* The first key of queries from q0 on, rounded down to an alignment that is fast for matrix products. */
static size_t first_key(const struct mt_attention *a, size_t q0)
{
    size_t first = a->window && q0 + 1 > a->window ? q0 + 1 - a->window : 0;
    return first / MT_CUDA_COLUMN_ALIGN * MT_CUDA_COLUMN_ALIGN;
}

static void set_keys(struct tile *t, size_t k0, size_t most)
{
    t->k0 = k0;
    t->n_keys = MT_MIN(t->q0 + t->rows - k0, most);
    t->ld = mt_align_up(t->n_keys, MT_CUDA_COLUMN_ALIGN);
}

/* The beginning of a head of a row. */
static void *at(const struct mt_heads *h, enum mt_dtype t, size_t row, size_t head)
{
    return (char *)h->p + mt_heads_at(h, row, head) * mt_dtype_size(t);
}

/* The same heads from a row on. */
static struct mt_heads from_row(const struct mt_heads *h, enum mt_dtype t, size_t row)
{
    struct mt_heads x = *h;
    x.p = at(h, t, row, 0);
    return x;
}

/* The plane of a head of probabilities. */
static const void *plane_of(const void *p, enum mt_dtype t, size_t head, size_t plane)
{
    return (const char *)p + head * plane * mt_dtype_size(t);
}

static struct mt_cuda_scores scores_of(const struct mt_attention *a, const struct tile *t,
                                       const struct mt_cuda_tiled_buffers *r)
{
    return (struct mt_cuda_scores){
        .rows = t->rows, .n_heads = a->q.n, .n_keys = t->n_keys, .ld = t->ld, .q0 = t->q0,
        .k0 = t->k0, .window = a->window, .dtype = a->dtype, .cap = a->cap, .s = r->s, .p = r->p,
        .lse = a->lse + (t->doc + t->q0), .lse_stride = a->n};
}

/* The first query head and key head of a batch, and from each of its products to the next. */
struct heads {
    size_t q, q_step, kv, kv_step;
};

/* Makes a batch of products, one for each query head in it. */
typedef struct mt_cuda_product (*product_fn)(const struct mt_attention_bwd *b, const struct tile *t,
                                             const struct mt_cuda_tiled_buffers *r, struct heads h);

struct products {
    product_fn make;
    bool sums; /* over the query heads of a group */
    const char *op;
};

/* All query heads, in as few batches as possible: over key heads, or over members of a group, which share K and V. */
static int for_heads(struct mt_cuda_device *d, const struct mt_attention_bwd *b, const struct tile *t,
                     const struct mt_cuda_tiled_buffers *r, struct products f, struct mt_err *err)
{
    size_t n_kv = b->fwd.k.n, group = b->fwd.q.n / n_kv;
    bool by_group = !f.sums && group > n_kv;
    int rc = 0;
    for (size_t i = 0; i < (by_group ? n_kv : group) && !rc; i++) {
        struct heads h = by_group ? (struct heads){i * group, 1, i, 0} : (struct heads){i, group, 0, 1};
        struct mt_cuda_product p = f.make(b, t, r, h);
        p.dtype = b->fwd.dtype;
        p.batch = by_group ? group : n_kv;
        p.c = p.d;
        p.ldc = p.ldd;
        rc = mt_cuda_multiply(d, &p, f.op, err);
    }
    return rc;
}

/* alpha X Y': x is of the tile's queries, y of its keys. */
static struct mt_cuda_product along_keys(enum mt_dtype dtype, const struct tile *t, struct heads h, float alpha,
                                         const struct mt_heads *x, const struct mt_heads *y, float *out)
{
    size_t plane = t->rows * t->ld;
    return (struct mt_cuda_product){
        .m = t->rows, .n = t->n_keys, .k = x->dim, .d_dtype = MT_F32, .trans_b = true, .alpha = alpha,
        .a = at(x, dtype, t->doc + t->q0, h.q), .lda = x->ld, .stride_a = h.q_step * x->stride,
        .b = at(y, dtype, t->keys + t->k0, h.kv), .ldb = y->ld, .stride_b = h.kv_step * y->stride,
        .d = out + h.q * plane, .ldd = t->ld, .stride_d = h.q_step * plane};
}

/* S = scale Q K' */
static struct mt_cuda_product scores(const struct mt_attention_bwd *b, const struct tile *t,
                                     const struct mt_cuda_tiled_buffers *r, struct heads h)
{
    return along_keys(b->fwd.dtype, t, h, b->fwd.scale, &b->fwd.q, &b->fwd.k, r->s);
}

/* O = P V */
static struct mt_cuda_product outputs(const struct mt_attention_bwd *b, const struct tile *t,
                                      const struct mt_cuda_tiled_buffers *r, struct heads h)
{
    const struct mt_attention *a = &b->fwd;
    size_t plane = t->rows * t->ld;
    return (struct mt_cuda_product){
        .m = t->rows, .n = a->v.dim, .k = t->n_keys, .d_dtype = a->dtype, .alpha = 1,
        .a = plane_of(r->p, a->dtype, h.q, plane), .lda = t->ld, .stride_a = h.q_step * plane,
        .b = at(&a->v, a->dtype, t->keys + t->k0, h.kv), .ldb = a->v.ld, .stride_b = h.kv_step * a->v.stride,
        .d = at(&a->o, a->dtype, t->doc + t->q0, h.q), .ldd = a->o.ld, .stride_d = h.q_step * a->o.stride};
}

/* dP = dO V' */
static struct mt_cuda_product probability_gradient(const struct mt_attention_bwd *b,
                                                   const struct tile *t, const struct mt_cuda_tiled_buffers *r,
                                                   struct heads h)
{
    return along_keys(b->fwd.dtype, t, h, 1, &b->d_o, &b->fwd.v, r->dp);
}

/* dV += P' dO, or with dS and Q: dK += scale dS' Q */
static struct mt_cuda_product key_gradient(const struct mt_attention *a, const struct tile *t,
                                           struct heads h, float alpha, const void *p, const struct mt_heads *x,
                                           float *sum)
{
    size_t hd = x->dim, plane = t->rows * t->ld;
    return (struct mt_cuda_product){
        .m = t->n_keys, .n = hd, .k = t->rows, .d_dtype = MT_F32, .trans_a = true, .alpha = alpha,
        .beta = 1, .a = plane_of(p, a->dtype, h.q, plane), .lda = t->ld,
        .stride_a = h.q_step * plane, .b = at(x, a->dtype, t->doc + t->q0, h.q),
        .ldb = x->ld, .stride_b = h.q_step * x->stride, .d = sum + (h.kv * t->len + t->k0) * hd, .ldd = hd,
        .stride_d = h.kv_step * t->len * hd};
}

static struct mt_cuda_product dv_product(const struct mt_attention_bwd *b, const struct tile *t,
                                         const struct mt_cuda_tiled_buffers *r, struct heads h)
{
    return key_gradient(&b->fwd, t, h, 1, r->p, &b->d_o, r->dv);
}

static struct mt_cuda_product dk_product(const struct mt_attention_bwd *b, const struct tile *t,
                                         const struct mt_cuda_tiled_buffers *r, struct heads h)
{
    return key_gradient(&b->fwd, t, h, b->fwd.scale, r->ds, &b->fwd.q, r->dk);
}

/* dQ (+)= scale dS K */
static struct mt_cuda_product dq_product(const struct mt_attention_bwd *b, const struct tile *t,
                                         const struct mt_cuda_tiled_buffers *r, struct heads h)
{
    const struct mt_attention *a = &b->fwd;
    size_t hd = a->q.dim, plane = t->rows * t->ld;
    return (struct mt_cuda_product){
        .m = t->rows, .n = hd, .k = t->n_keys, .d_dtype = MT_F32, .alpha = a->scale,
        .beta = t->first_keys ? 0.0f : 1.0f, .a = plane_of(r->ds, a->dtype, h.q, plane), .lda = t->ld,
        .stride_a = h.q_step * plane, .b = at(&a->k, a->dtype, t->keys + t->k0, h.kv), .ldb = a->k.ld,
        .stride_b = h.kv_step * a->k.stride, .d = r->dq + h.q * t->rows * hd, .ldd = hd,
        .stride_d = h.q_step * t->rows * hd};
}

static int forward_tile(struct mt_cuda_device *d, const struct mt_attention_bwd *b,
                        const struct tile *t, const struct mt_cuda_tiled_buffers *r, struct mt_err *err)
{
    struct mt_cuda_scores s = scores_of(&b->fwd, t, r);
    return for_heads(d, b, t, r, (struct products){scores, false, "attention, scores"}, err)
        ?: mt_cuda_check(d, mt_cuda_softmax(&s, d->streams[MT_STREAM_COMPUTE]), err,
                         "attention: softmax of %zu heads, [%zu, %zu]", s.n_heads, s.rows, s.n_keys)
        ?: for_heads(d, b, t, r, (struct products){outputs, false, "attention, outputs"}, err);
}

int mt_cuda_tiled_attention(struct mt_cuda_device *d, const struct mt_attention *a,
                            struct mt_err *err)
{
    struct mt_cuda_tiled_buffers r = mt_cuda_tiled_buffers_of(a);
    struct mt_attention_bwd b = {.fwd = *a};
    int rc = 0;
    for (size_t doc = 0; doc < a->n_docs && !rc; doc++) {
        struct tile t = document(a, doc);
        size_t rows = mt_cuda_tile_rows(t.len, a->q.n);
        for (; t.q0 < t.len && !rc; t.q0 += t.rows) {
            t.rows = MT_MIN(rows, t.len - t.q0);
            set_keys(&t, first_key(a, t.q0), t.len);
            rc = forward_tile(d, &b, &t, &r, err);
        }
    }
    return rc;
}

static int backward_tile(struct mt_cuda_device *d, const struct mt_attention_bwd *b,
                         const struct tile *t, const struct mt_cuda_tiled_buffers *r, struct mt_err *err)
{
    const struct mt_attention *a = &b->fwd;
    struct mt_cuda_scores s = scores_of(a, t, r);
    s.dp = r->dp;
    s.ds = r->ds;
    s.o = from_row(&a->o, a->dtype, t->doc + t->q0);
    s.d_o = from_row(&b->d_o, a->dtype, t->doc + t->q0);
    return for_heads(d, b, t, r, (struct products){scores, false, "attention_bwd, scores"}, err)
        ?: for_heads(d, b, t, r, (struct products){probability_gradient, false, "attention_bwd, dP"}, err)
        ?: mt_cuda_check(d, mt_cuda_softmax_bwd(&s, d->streams[MT_STREAM_COMPUTE]), err,
                         "attention_bwd: softmax of %zu heads, [%zu, %zu]", s.n_heads, s.rows, s.n_keys)
        ?: for_heads(d, b, t, r, (struct products){dv_product, true, "attention_bwd, dV"}, err)
        ?: for_heads(d, b, t, r, (struct products){dk_product, true, "attention_bwd, dK"}, err)
        ?: for_heads(d, b, t, r, (struct products){dq_product, false, "attention_bwd, dQ"}, err);
}

/* Stores the sums of `rows` rows, from `row` of the batch on, in the caller's dtype and layout; what is added to, or
 * NULL, begins `past` rows before. */
static int store_sums(struct mt_cuda_device *d, const struct mt_attention *a, const struct mt_heads *to, size_t row,
                      const float *sums, size_t rows, struct mt_heads add, size_t past, struct mt_err *err)
{
    struct mt_heads dst = from_row(to, a->dtype, row);
    cudaError_t e = mt_cuda_store_heads(&dst, a->dtype, sums, rows, &add, past, d->streams[MT_STREAM_COMPUTE]);
    return mt_cuda_check(d, e, err, "attention_bwd: storing %zu rows of %zu heads of %zu", rows, dst.n, dst.dim);
}

/* A tile's queries with all of their keys, one tile at a time. */
static int backward_queries(struct mt_cuda_device *d, const struct mt_attention_bwd *b, struct tile *t,
                            const struct mt_cuda_tiled_buffers *r, struct mt_err *err)
{
    const struct mt_attention *a = &b->fwd;
    size_t first = first_key(a, t->q0), most = mt_cuda_tile_keys(a->q.n);
    int rc = 0;
    for (size_t k0 = first; k0 < t->q0 + t->rows && !rc; k0 += most) {
        set_keys(t, k0, most);
        t->first_keys = k0 == first;
        rc = backward_tile(d, b, t, r, err);
    }
    return rc ? rc : store_sums(d, a, &b->dq, t->doc + t->q0, r->dq, t->rows, (struct mt_heads){0}, 0, err);
}

static int backward_document(struct mt_cuda_device *d, const struct mt_attention_bwd *b,
                             const struct mt_cuda_tiled_buffers *r, size_t doc, struct mt_err *err)
{
    const struct mt_attention *a = &b->fwd;
    cudaStream_t stream = d->streams[MT_STREAM_COMPUTE];
    struct tile t = document(a, doc);
    size_t of_head = a->k.n * t.len * sizeof(float);
    cudaError_t e = cudaMemsetAsync(r->dk, 0, of_head * a->k.dim, stream)
                        ?: cudaMemsetAsync(r->dv, 0, of_head * a->v.dim, stream);
    int rc = mt_cuda_check(d, e, err, "attention_bwd: zero of %zu bytes", of_head * (a->k.dim + a->v.dim));
    for (; t.q0 < t.len && !rc; t.q0 += t.rows) {
        t.rows = MT_MIN((size_t)MT_CUDA_TILE_ROWS, t.len - t.q0);
        rc = backward_queries(d, b, &t, r, err);
    }
    struct mt_heads none = {0}, dk = none, dv = none;
    if (b->dk_sum.p) {
        dk = from_row(&b->dk_sum, MT_F32, t.keys);
        dv = from_row(&b->dv_sum, MT_F32, t.keys);
    }
    return rc ?: store_sums(d, a, &b->dk, t.doc + t.past, r->dk, t.len, dk, t.past, err)
              ?: store_sums(d, a, &b->dv, t.doc + t.past, r->dv, t.len, dv, t.past, err);
}

int mt_cuda_tiled_attention_bwd(struct mt_cuda_device *d, const struct mt_attention_bwd *b,
                                struct mt_err *err)
{
    struct mt_cuda_tiled_buffers r = mt_cuda_tiled_buffers_of(&b->fwd);
    int rc = 0;
    for (size_t doc = 0; doc < b->fwd.n_docs && !rc; doc++)
        rc = backward_document(d, b, &r, doc, err);
    return rc;
}

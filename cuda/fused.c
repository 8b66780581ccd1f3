/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Maps the documents of a batch to calls of a fused attention engine (fused.h):
 *   all documents of one length   fixed-length calls on the packed rows in place, if that length is likely to recur:
 *                                 the longest planned, or one that suits the kernels
 *   forward, other lengths        one ragged call
 *   backward, other lengths       one ragged call, if the GPU supports it and its workspace fits; else documents of
 *                                 similar length together, copied to padded rows. Padding is zeros: padded queries have
 *                                 no gradient, and only padded queries attend to padded keys.
 * The deterministic backward of cuDNN stores the gradient of the scores: length^2 times heads times 2 bytes. It is
 * called for as many documents and key heads at once as fit the workspace. Calls that do not fit, that the engine
 * refuses, or that it gets wrong (trial.h) are done by tiles. Everything else follows from the shape. Making a plan
 * takes long (cuDNN 9 compiles kernels for each: tests/cuda/test_fused_support.c prints its engines) and batches
 * differ, so shapes are rounded up, except for fixed-length calls, to keep plans few: empty sequences fill a ragged
 * call, unless the engine gets them wrong. Unlike with tiles, a document's bits depend on the other documents of its
 * batch.
 */
#include "fused.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attempt.h"
#include "attention.h"
#include "base/log.h"
#include "kernels.h"
#include "plans.h"
#include "workspace.h"

enum { MAX_HEAD_DIM = 256 };
_Static_assert((int)MT_FUSED_N_TABLES == (int)MT_CUDA_FUSED_TABLES, "the workspace must hold the tables");

struct mt_cuda_fused {
    const struct mt_fused_engine *engine;
    mt_fused_plans *plans;
    int version;             /* of cuDNN, 91900 for 9.19.0; 0: not known */
    bool notified;           /* the reason for tiles was logged once */
    bool warned;             /* that the version is known to be wrong, too */
    size_t n_fused, n_tiled; /* numbers of calls */
};

int mt_cuda_fused_create(struct mt_cuda_device *d, char *why, size_t why_len)
{
    const struct mt_fused_engine *engine = mt_cuda_fused_engine(why, why_len);
    struct mt_cuda_fused *f = engine ? mt_calloc(1, sizeof(*f)) : NULL;
    if (!f)
        return -1;
    f->engine = engine;
    f->plans = mt_fused_plans_create(engine, d->streams[MT_STREAM_COMPUTE], why, why_len);
    if (!f->plans) {
        free(f);
        return -1;
    }
    char name[48];
    int v[3];
    engine->describe(name, sizeof(name));
    if (sscanf(name, "%*[a-zA-Z ] %d.%d.%d", &v[0], &v[1], &v[2]) == 3)
        f->version = v[0] * 10000 + v[1] * 100 + v[2];
    d->fused = f;
    return 0;
}

void mt_cuda_fused_destroy(struct mt_cuda_device *d)
{
    struct mt_cuda_fused *f = d->fused;
    if (!f)
        return;
    mt_debug("attention: %zu calls fused, %zu by tiles; %zu plans made", f->n_fused, f->n_tiled,
             mt_fused_plans_made(f->plans));
    mt_fused_plans_destroy(&f->plans);
    free(f);
    d->fused = NULL;
}

void mt_cuda_fused_describe(const struct mt_cuda_device *d, char *buf, size_t len)
{
    d->fused->engine->describe(buf, len);
}

static bool heads_fit(const struct mt_heads *h)
{
    return (uintptr_t)h->p % 16 == 0 && h->ld % 8 == 0 && h->stride % 8 == 0 && h->dim % 8 == 0 &&
           h->dim <= MAX_HEAD_DIM;
}

static bool suits(const struct mt_attention *a)
{
    return a->dtype == MT_BF16 && !(a->cap > 0) && heads_fit(&a->q) && heads_fit(&a->k) && heads_fit(&a->v) &&
           heads_fit(&a->o) && (uintptr_t)a->workspace % 16 == 0;
}

static size_t doc_len(const struct mt_attention *a, size_t doc)
{
    return (size_t)(a->cu_seqlens_host[doc + 1] - a->cu_seqlens_host[doc]);
}

static size_t longest(const struct mt_attention *a)
{
    size_t len = 0;
    for (size_t i = 0; i < a->n_docs; i++)
        len = MT_MAX(len, doc_len(a, i));
    return len;
}

/* Whether all documents have one length that suits fixed-length calls better than one ragged call. */
static bool even(const struct mt_attention *a)
{
    size_t len = doc_len(a, 0);
    if (len != MT_MAX(a->most_len, a->max_len) && (a->n_docs == 1 || len % 64))
        return false;
    for (size_t i = 1; i < a->n_docs; i++)
        if (doc_len(a, i) != len)
            return false;
    return true;
}

static struct mt_fused_tensor tensor_of(const struct mt_heads *h)
{
    return (struct mt_fused_tensor){(int64_t)h->ld, (int64_t)h->stride};
}

static struct mt_fused_shape shape_of(const struct mt_attention *a, size_t batch, size_t len)
{
    uint32_t scale;
    memcpy(&scale, &a->scale, sizeof(scale));
    return (struct mt_fused_shape){
        .batch = (int64_t)batch, .n_q = (int64_t)a->q.n, .n_kv = (int64_t)a->k.n,
        .len = (int64_t)len, .dim = (int64_t)a->q.dim, .dim_v = (int64_t)a->v.dim,
        .window = a->window < len ? (int64_t)a->window : 0, .scale_bits = scale,
        .q = tensor_of(&a->q), .k = tensor_of(&a->k), .v = tensor_of(&a->v), .o = tensor_of(&a->o)};
}

static void set_gradients(struct mt_fused_shape *s, const struct mt_attention_bwd *b)
{
    s->dq = tensor_of(&b->dq);
    s->dk = tensor_of(&b->dk);
    s->dv = tensor_of(&b->dv);
}

/* A plan takes GPU memory outside the budget. If that is short, this kind of call is done by tiles from now on: going
 * back to fused attention when memory is free again would change bits. A library may fail for other stated reasons if
 * memory is short, so little free memory counts as well. */
static void note_short_memory(struct mt_cuda_device *d, int plan_rc, const char *why)
{
    char memory[128];
    if (!*mt_cuda_short_of_memory(memory, sizeof(memory), plan_rc == -ENOMEM))
        return;
    mt_warn("using tiled attention for one kind of call from now on: %s%s", why, memory);
    mt_trials_settle(d->trials, d->verdict, MT_TRIAL_TILES);
    d->fused->notified = true;
}

/* Finds the plan and runs it. REFUSED: not supported, or the workspace is too small. */
static enum mt_cuda_outcome run(struct mt_cuda_device *d, const struct mt_cuda_fused_buffers *r,
                        const struct mt_fused_shape *s, struct mt_fused_call *c, struct mt_err *err)
{
    struct mt_cuda_fused *f = d->fused;
    char why[256] = "";
    void *plan;
    size_t bytes;
    int rc = mt_fused_plans_get(f->plans, s, &plan, &bytes, why, sizeof(why));
    if (rc || bytes > r->lib_bytes) {
        if (rc)
            note_short_memory(d, rc, why);
        if (!f->notified)
            mt_info("using tiles for attention%s of %lld documents of %lld, %lld and %lld heads of %lld: %s",
                    s->backward ? "'s backward" : "", (long long)s->batch, (long long)s->len,
                    (long long)s->n_q, (long long)s->n_kv, (long long)s->dim,
                    why[0] ? why : "its workspace would be too large");
        f->notified = true;
        return MT_CUDA_REFUSED;
    }
    c->workspace = r->lib;
    if (!mt_fused_plans_run(f->plans, plan, c, why, sizeof(why)))
        return MT_CUDA_DONE;
    struct mt_err e;
    mt_fail(&e, MT_ERR_DEVICE, -EIO, "GPU %d: attention%s of %lld documents of %lld: %s", d->index,
            s->backward ? "_bwd" : "", (long long)s->batch, (long long)s->len, why);
    mt_cuda_stick(d, &e);
    if (err)
        *err = e;
    return MT_CUDA_FAILED;
}

static enum mt_cuda_outcome launched(struct mt_cuda_device *d, cudaError_t rc, const char *what,
                             struct mt_err *err)
{
    return mt_cuda_check(d, rc, err, "attention: %s", what) ? MT_CUDA_FAILED : MT_CUDA_DONE;
}

static enum mt_cuda_outcome move_stats(struct mt_cuda_device *d, const struct mt_attention *a,
                               const struct mt_cuda_fused_buffers *r, struct mt_docs_stats p, struct mt_err *err)
{
    p.lse = a->lse;
    p.stride = a->n;
    p.stats = r->stats;
    return launched(d, mt_cuda_docs_stats(&p, d->streams[MT_STREAM_COMPUTE]), "log-sum-exps", err);
}

/* Makes the shape ragged and fills its tables. */
static enum mt_cuda_outcome make_ragged(struct mt_cuda_device *d, const struct mt_attention *a,
                                const struct mt_cuda_fused_buffers *r, struct mt_fused_shape *s,
                                struct mt_fused_call *c, struct mt_err *err)
{
    s->ragged = 1;
    struct mt_docs_tables t = {
        .cu_seqlens = a->cu_seqlens, .n_docs = a->n_docs, .batch = (size_t)s->batch, .lens = r->lens,
        .tables = r->tables,
        .multiplier = {s->q.ld, s->k.ld, s->v.ld, s->o.ld, s->n_q, s->dq.ld, s->dk.ld, s->dv.ld}};
    c->lens = r->lens;
    for (int k = 0; k < MT_FUSED_N_TABLES; k++)
        c->offsets[k] = r->tables + (size_t)k * (t.batch + 1);
    return launched(d, mt_cuda_docs_tables(&t, d->streams[MT_STREAM_COMPUTE]), "offsets", err);
}

/* Sequences of a call of all documents. */
static size_t batch_of(const struct mt_attention *a, enum mt_trial_way way)
{
    return way == MT_TRIAL_ROUNDED ? mt_cuda_next_power(a->n_docs) : a->n_docs;
}

static enum mt_cuda_outcome forward(struct mt_cuda_device *d, const struct mt_attention *a, enum mt_trial_way way,
                            struct mt_err *err)
{
    struct mt_cuda_fused_buffers r = mt_cuda_fused_buffers_of(a);
    bool same = way == MT_TRIAL_FIXED;
    size_t len = same ? doc_len(a, 0) : mt_cuda_padded_len(longest(a));
    struct mt_fused_shape s = shape_of(a, batch_of(a, way), len);
    struct mt_fused_call c = {.q = a->q.p, .k = a->k.p, .v = a->v.p, .o = a->o.p, .stats = r.stats};
    enum mt_cuda_outcome rc = same ? MT_CUDA_DONE : make_ragged(d, a, &r, &s, &c, err);
    if (rc == MT_CUDA_DONE)
        rc = run(d, &r, &s, &c, err);
    if (rc == MT_CUDA_DONE)
        rc = move_stats(d, a, &r,
                        (struct mt_docs_stats){.kind = same ? MT_STATS_EVEN : MT_STATS_RAGGED,
                                               .n = a->n, .len = len, .n_heads = a->q.n,
                                               .to_lse = true},
                        err);
    return rc;
}

/* Reduces *batch documents and *kv key heads to as many as the workspace holds at once; false: not even one. */
static bool fit(const struct mt_attention *a, const struct mt_cuda_fused_buffers *r, size_t len, size_t *batch,
                size_t *kv)
{
    size_t group = a->q.n / a->k.n;
    *kv = a->k.n;
    while (mt_cuda_fused_quadratic_bytes(*batch, len, *kv * group) +
               mt_cuda_fused_linear_bytes(*batch * len, *kv * group, a) > r->lib_bytes) {
        if (*batch > 1) {
            *batch /= 2;
        } else if (*kv > 1) {
            do
                --*kv;
            while (a->k.n % *kv);
        } else {
            return false;
        }
    }
    return true;
}

/* The tensors from a row on, with all heads. */
struct rows {
    struct mt_heads q, k, v, o, d_o, dq, dk, dv;
};

static void *head_at(const struct mt_heads *h, size_t head)
{
    return (char *)h->p + mt_heads_at(h, 0, head) * 2;
}

/* A backward call of some key heads, from `kv0` on. */
static struct mt_fused_call heads_from(const struct mt_attention *a, const struct rows *x, size_t kv0,
                                       float *stats)
{
    size_t q0 = kv0 * (a->q.n / a->k.n);
    return (struct mt_fused_call){.q = head_at(&x->q, q0), .k = head_at(&x->k, kv0), .v = head_at(&x->v, kv0),
                                  .o = head_at(&x->o, q0), .d_o = head_at(&x->d_o, q0), .stats = stats,
                                  .dq = head_at(&x->dq, q0), .dk = head_at(&x->dk, kv0), .dv = head_at(&x->dv, kv0)};
}

/* Backward of the documents at rows x, some heads at a time; `stats` describes the source of their log-sum-exps. */
static enum mt_cuda_outcome backward_heads(struct mt_cuda_device *d, const struct mt_attention *a,
                                   const struct mt_cuda_fused_buffers *r, struct mt_fused_shape s,
                                   const struct rows *x, size_t kv, struct mt_docs_stats stats,
                                   struct mt_err *err)
{
    size_t group = a->q.n / a->k.n;
    enum mt_cuda_outcome rc = MT_CUDA_DONE;
    s.backward = 1;
    s.n_kv = (int64_t)kv;
    s.n_q = (int64_t)(kv * group);
    stats.n_heads = kv * group;
    for (size_t kv0 = 0; kv0 < a->k.n && rc == MT_CUDA_DONE; kv0 += kv) {
        struct mt_fused_call c = heads_from(a, x, kv0, r->stats);
        stats.head0 = kv0 * group;
        rc = move_stats(d, a, r, stats, err);
        if (rc == MT_CUDA_DONE)
            rc = run(d, r, &s, &c, err);
    }
    return rc;
}

static struct mt_heads from_row(const struct mt_heads *h, size_t row)
{
    struct mt_heads x = *h;
    x.p = (char *)h->p + row * h->ld * 2;
    return x;
}

static enum mt_cuda_outcome backward_even(struct mt_cuda_device *d, const struct mt_attention_bwd *b,
                                  const struct mt_cuda_fused_buffers *r, struct mt_err *err)
{
    const struct mt_attention *a = &b->fwd;
    size_t len = doc_len(a, 0), batch = a->n_docs, kv;
    enum mt_cuda_outcome rc = MT_CUDA_DONE;
    if (!fit(a, r, len, &batch, &kv))
        return MT_CUDA_REFUSED;
    for (size_t doc = 0; doc < a->n_docs && rc == MT_CUDA_DONE; doc += batch) {
        size_t n = MT_MIN(batch, a->n_docs - doc), row = doc * len;
        struct mt_fused_shape s = shape_of(a, n, len);
        set_gradients(&s, b);
        struct rows x = {.q = from_row(&a->q, row), .k = from_row(&a->k, row), .v = from_row(&a->v, row),
                         .o = from_row(&a->o, row), .d_o = from_row(&b->d_o, row), .dq = from_row(&b->dq, row),
                         .dk = from_row(&b->dk, row), .dv = from_row(&b->dv, row)};
        rc = backward_heads(d, a, r, s, &x, kv,
                            (struct mt_docs_stats){.kind = MT_STATS_EVEN, .n = n * len, .len = len,
                                                   .first_row = row},
                            err);
    }
    return rc;
}

static enum mt_cuda_outcome backward_ragged(struct mt_cuda_device *d, const struct mt_attention_bwd *b,
                                    const struct mt_cuda_fused_buffers *r, size_t batch, struct mt_err *err)
{
    const struct mt_attention *a = &b->fwd;
    size_t len = mt_cuda_padded_len(longest(a)), total = mt_cuda_fused_total(a);
    if (d->sm < 90 || d->sm >= 120 ||
        mt_cuda_fused_quadratic_bytes(batch, len, a->q.n) + mt_cuda_fused_linear_bytes(total, a->q.n, a) >
            r->lib_bytes)
        return MT_CUDA_REFUSED;
    struct mt_fused_shape s = shape_of(a, batch, len);
    struct mt_fused_call c = {.q = a->q.p, .k = a->k.p, .v = a->v.p, .o = a->o.p, .d_o = b->d_o.p,
                              .stats = r->stats, .dq = b->dq.p, .dk = b->dk.p, .dv = b->dv.p};
    s.backward = 1;
    s.total = (int64_t)total;
    set_gradients(&s, b);
    enum mt_cuda_outcome rc = make_ragged(d, a, r, &s, &c, err);
    if (rc == MT_CUDA_DONE)
        rc = move_stats(d, a, r,
                        (struct mt_docs_stats){.kind = MT_STATS_RAGGED, .n = a->n, .n_heads = a->q.n},
                        err);
    return rc == MT_CUDA_DONE ? run(d, r, &s, &c, err) : rc;
}

static cudaError_t move_rows(struct mt_cuda_device *d, const struct mt_docs *docs, size_t len,
                             const struct mt_heads *packed, void *padded, bool back)
{
    struct mt_docs_rows p = {.docs = *docs, .len = len, .packed = *packed, .padded = padded, .back = back};
    return mt_cuda_docs_rows(&p, d->streams[MT_STREAM_COMPUTE]);
}

/* The heads of `like`, side by side in rows without gaps, at *at, which moves behind `tokens` of them. */
static struct mt_heads padded_heads(char **at, size_t tokens, const struct mt_heads *like)
{
    size_t width = like->n * like->dim;
    struct mt_heads h = mt_heads(*at, width, like->n, like->dim);
    *at += tokens * width * 2;
    return h;
}

static struct rows padded_rows(char *at, size_t tokens, const struct mt_attention *a)
{
    return (struct rows){.q = padded_heads(&at, tokens, &a->q), .o = padded_heads(&at, tokens, &a->o),
                         .d_o = padded_heads(&at, tokens, &a->o), .dq = padded_heads(&at, tokens, &a->q),
                         .k = padded_heads(&at, tokens, &a->k), .v = padded_heads(&at, tokens, &a->v),
                         .dk = padded_heads(&at, tokens, &a->k), .dv = padded_heads(&at, tokens, &a->v)};
}

/* A few documents of similar length, by padded copies. */
static enum mt_cuda_outcome backward_copies(struct mt_cuda_device *d, const struct mt_attention_bwd *b,
                                    const struct mt_cuda_fused_buffers *r,
                                    const struct mt_docs *docs, size_t len, size_t kv, struct mt_err *err)
{
    const struct mt_attention *a = &b->fwd;
    struct rows x = padded_rows(r->padded, r->pad_tokens, a);
    const struct mt_heads *in[] = {&a->q, &a->k, &a->v, &a->o, &b->d_o}, *out[] = {&b->dq, &b->dk, &b->dv};
    void *in_copy[] = {x.q.p, x.k.p, x.v.p, x.o.p, x.d_o.p}, *out_copy[] = {x.dq.p, x.dk.p, x.dv.p};
    struct mt_attention padded = *a;
    padded.q = x.q;
    padded.k = x.k;
    padded.v = x.v;
    padded.o = x.o;
    struct mt_fused_shape s = shape_of(&padded, (size_t)docs->n, len);
    set_gradients(&s, &(struct mt_attention_bwd){.dq = x.dq, .dk = x.dk, .dv = x.dv});
    cudaError_t e = cudaSuccess;
    for (size_t i = 0; i < MT_ARRAY_LEN(in) && e == cudaSuccess; i++)
        e = move_rows(d, docs, len, in[i], in_copy[i], false);
    enum mt_cuda_outcome rc = launched(d, e, "padded copies", err);
    if (rc == MT_CUDA_DONE)
        rc = backward_heads(d, a, r, s, &x, kv,
                            (struct mt_docs_stats){.kind = MT_STATS_PADDED, .docs = *docs, .len = len},
                            err);
    for (size_t i = 0; i < MT_ARRAY_LEN(out) && rc == MT_CUDA_DONE && e == cudaSuccess; i++)
        e = move_rows(d, docs, len, out[i], out_copy[i], true);
    return rc == MT_CUDA_DONE ? launched(d, e, "copies back", err) : rc;
}

/* All documents of padded length `len`, a power of two of them at a time. */
static enum mt_cuda_outcome backward_class(struct mt_cuda_device *d, const struct mt_attention_bwd *b,
                                   const struct mt_cuda_fused_buffers *r, size_t len, struct mt_err *err)
{
    const struct mt_attention *a = &b->fwd;
    size_t left = 0, most = MT_MIN(r->pad_tokens / len, (size_t)MT_DOCS_MAX), kv;
    enum mt_cuda_outcome rc = most ? MT_CUDA_DONE : MT_CUDA_REFUSED;
    for (size_t i = 0; i < a->n_docs; i++)
        left += mt_cuda_padded_len(doc_len(a, i)) == len;
    for (size_t doc = 0; left && rc == MT_CUDA_DONE;) {
        size_t batch = mt_cuda_next_power(MT_MIN(left, most) + 1) / 2;
        if (!fit(a, r, len, &batch, &kv))
            return MT_CUDA_REFUSED;
        struct mt_docs docs = {0};
        for (; (size_t)docs.n < batch; doc++)
            if (mt_cuda_padded_len(doc_len(a, doc)) == len) {
                docs.first[docs.n] = a->cu_seqlens_host[doc];
                docs.rows[docs.n++] = (int32_t)doc_len(a, doc);
            }
        left -= batch;
        rc = backward_copies(d, b, r, &docs, len, kv, err);
    }
    return rc;
}

static enum mt_cuda_outcome backward_padded(struct mt_cuda_device *d, const struct mt_attention_bwd *b,
                                    const struct mt_cuda_fused_buffers *r, struct mt_err *err)
{
    const struct mt_attention *a = &b->fwd;
    enum mt_cuda_outcome rc = MT_CUDA_DONE;
    for (size_t len = mt_cuda_padded_len(longest(a)), next; len && rc == MT_CUDA_DONE; len = next) {
        rc = backward_class(d, b, r, len, err);
        next = 0; /* the next shorter padded length of any document */
        for (size_t i = 0; i < a->n_docs; i++) {
            size_t l = mt_cuda_padded_len(doc_len(a, i));
            if (l < len)
                next = MT_MAX(next, l);
        }
    }
    return rc;
}

/* --- ways of a call ------------------------------------------------------------------------------- */

static enum mt_cuda_outcome go(struct mt_cuda_device *d, const struct mt_cuda_call *c, enum mt_trial_way way,
                               struct mt_err *err)
{
    struct mt_cuda_fused_buffers r = mt_cuda_fused_buffers_of(c->a);
    if (!c->b)
        return forward(d, c->a, way, err);
    switch (way) {
    case MT_TRIAL_FIXED:
        return backward_even(d, c->b, &r, err);
    case MT_TRIAL_RAGGED:
    case MT_TRIAL_ROUNDED:
        return backward_ragged(d, c->b, &r, batch_of(c->a, way), err);
    default:
        return backward_padded(d, c->b, &r, err);
    }
}

static enum mt_cuda_outcome attempt(struct mt_cuda_device *d, const struct mt_cuda_call *c, enum mt_trial_way way,
                                    struct mt_err *err)
{
    const char *why = mt_fused_known_wrong(d->fused->version, d->sm, c);
    if (!why)
        return mt_cuda_attempt(d, c, way, go, err);
    if (!d->fused->warned)
        mt_warn("%s is not used for some attention: %s; a newer version may be correct", d->trials->engine, why);
    d->fused->warned = true;
    d->verdict = NULL;
    return MT_CUDA_REFUSED;
}

static enum mt_cuda_outcome fused(struct mt_cuda_device *d, const struct mt_cuda_call *c, struct mt_err *err)
{
    if (even(c->a))
        return attempt(d, c, MT_TRIAL_FIXED, err);
    bool fill = mt_cuda_next_power(c->a->n_docs) > c->a->n_docs;
    enum mt_cuda_outcome rc = attempt(d, c, fill ? MT_TRIAL_ROUNDED : MT_TRIAL_RAGGED, err);
    if (rc == MT_CUDA_REFUSED && fill && mt_trials_is(d->trials, d->verdict, MT_TRIAL_TILES))
        rc = attempt(d, c, MT_TRIAL_RAGGED, err); /* more plans, but nothing is empty */
    return rc == MT_CUDA_REFUSED && c->b ? attempt(d, c, MT_TRIAL_COPIES, err) : rc;
}

static bool takes(const struct mt_cuda_call *c)
{
    const struct mt_attention_bwd *b = c->b;
    return suits(c->a) && (!b || (heads_fit(&b->d_o) && b->d_o.ld == c->a->o.ld && b->d_o.stride == c->a->o.stride &&
                                  heads_fit(&b->dq) && heads_fit(&b->dk) && heads_fit(&b->dv)));
}

enum mt_cuda_outcome mt_cuda_fused_attend(struct mt_cuda_device *d, const struct mt_cuda_call *c, struct mt_err *err)
{
    if (!d->fused)
        return MT_CUDA_REFUSED;
    enum mt_cuda_outcome rc = takes(c) ? fused(d, c, err) : MT_CUDA_REFUSED;
    d->fused->n_fused += rc == MT_CUDA_DONE;
    d->fused->n_tiled += rc == MT_CUDA_REFUSED;
    return rc;
}

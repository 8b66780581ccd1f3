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

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "base/log.h"
#include "documents.h"
#include "plans.h"
#include "trial.h"
#include "workspace.h"

enum { MAX_HEAD_DIM = 256 };
_Static_assert((int)MT_FUSED_N_TABLES == (int)MT_CUDA_FUSED_TABLES, "the workspace must hold the tables");

struct mt_cuda_fused {
    const struct mt_fused_engine *engine;
    mt_fused_plans *plans;
    struct mt_trials trials;
    enum mt_trial_verdict *verdict; /* on the kind of the current call; NULL: the kind is not tried */
    bool notified;                  /* the reason for tiles was logged once */
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
    engine->describe(name, sizeof(name));
    snprintf(f->trials.engine, sizeof(f->trials.engine), "%s, sm_%d", name, d->sm);
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

static bool rows_fit(const void *p, size_t ld)
{
    return (uintptr_t)p % 16 == 0 && ld % 8 == 0;
}

static bool suits(const struct mt_attention *a)
{
    return a->dtype == MT_BF16 && a->head_dim % 8 == 0 && a->head_dim <= MAX_HEAD_DIM &&
           rows_fit(a->q, a->ld_q) && rows_fit(a->k, a->ld_k) && rows_fit(a->v, a->ld_v) &&
           rows_fit(a->o, a->ld_o) && (uintptr_t)a->workspace % 16 == 0;
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

static struct mt_fused_shape shape_of(const struct mt_attention *a, size_t batch, size_t len)
{
    uint32_t scale;
    memcpy(&scale, &a->scale, sizeof(scale));
    return (struct mt_fused_shape){
        .batch = (int64_t)batch, .n_q = (int64_t)a->n_q, .n_kv = (int64_t)a->n_kv,
        .len = (int64_t)len, .head_dim = (int64_t)a->head_dim,
        .window = a->window < len ? (int64_t)a->window : 0, .scale_bits = scale,
        .ld_q = (int64_t)a->ld_q, .ld_k = (int64_t)a->ld_k, .ld_v = (int64_t)a->ld_v,
        .ld_o = (int64_t)a->ld_o};
}

enum outcome { DONE, REFUSED, FAILED };

/* A plan takes GPU memory outside the budget. If that is short, this kind of call is done by tiles from now on: going
 * back to fused attention when memory is free again would change bits. A library may fail for other stated reasons if
 * memory is short, so little free memory counts as well. */
static void note_short_memory(struct mt_cuda_fused *f, int plan_rc, const char *why)
{
    char memory[128];
    if (!*mt_cuda_short_of_memory(memory, sizeof(memory), plan_rc == -ENOMEM))
        return;
    mt_warn("using tiled attention for one kind of call from now on: %s%s", why, memory);
    if (f->verdict)
        *f->verdict = MT_TRIAL_TILES;
    f->notified = true;
}

/* Finds the plan and runs it. REFUSED: not supported, or the workspace is too small. */
static enum outcome run(struct mt_cuda_device *d, const struct mt_cuda_fused_buffers *r,
                        const struct mt_fused_shape *s, struct mt_fused_call *c, struct mt_err *err)
{
    struct mt_cuda_fused *f = d->fused;
    char why[256] = "";
    void *plan;
    size_t bytes;
    int rc = mt_fused_plans_get(f->plans, s, &plan, &bytes, why, sizeof(why));
    if (rc || bytes > r->lib_bytes) {
        if (rc)
            note_short_memory(f, rc, why);
        if (!f->notified)
            mt_info("using tiles for attention%s of %lld documents of %lld, %lld and %lld heads of %lld: %s",
                    s->backward ? "'s backward" : "", (long long)s->batch, (long long)s->len,
                    (long long)s->n_q, (long long)s->n_kv, (long long)s->head_dim,
                    why[0] ? why : "its workspace would be too large");
        f->notified = true;
        return REFUSED;
    }
    c->workspace = r->lib;
    if (!mt_fused_plans_run(f->plans, plan, c, why, sizeof(why)))
        return DONE;
    struct mt_err e;
    mt_fail(&e, MT_ERR_DEVICE, -EIO, "GPU %d: attention%s of %lld documents of %lld: %s", d->index,
            s->backward ? "_bwd" : "", (long long)s->batch, (long long)s->len, why);
    mt_cuda_stick(d, &e);
    if (err)
        *err = e;
    return FAILED;
}

static enum outcome launched(struct mt_cuda_device *d, cudaError_t rc, const char *what,
                             struct mt_err *err)
{
    return mt_cuda_check(d, rc, err, "attention: %s", what) ? FAILED : DONE;
}

static enum outcome move_stats(struct mt_cuda_device *d, const struct mt_attention *a,
                               const struct mt_cuda_fused_buffers *r, struct mt_docs_stats p, struct mt_err *err)
{
    p.lse = a->lse;
    p.stride = a->n;
    p.stats = r->stats;
    return launched(d, mt_cuda_docs_stats(&p, d->streams[MT_STREAM_COMPUTE]), "log-sum-exps", err);
}

/* Makes the shape ragged and fills its tables. */
static enum outcome make_ragged(struct mt_cuda_device *d, const struct mt_attention *a,
                                const struct mt_cuda_fused_buffers *r, struct mt_fused_shape *s,
                                struct mt_fused_call *c, struct mt_err *err)
{
    s->ragged = 1;
    struct mt_docs_tables t = {
        .cu_seqlens = a->cu_seqlens, .n_docs = a->n_docs, .batch = (size_t)s->batch, .lens = r->lens,
        .tables = r->tables,
        .multiplier = {s->ld_q, s->ld_k, s->ld_v, s->ld_o, s->n_q, s->ld_dq, s->ld_dk, s->ld_dv}};
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

static enum outcome forward(struct mt_cuda_device *d, const struct mt_attention *a, enum mt_trial_way way,
                            struct mt_err *err)
{
    struct mt_cuda_fused_buffers r = mt_cuda_fused_buffers_of(a);
    bool same = way == MT_TRIAL_FIXED;
    size_t len = same ? doc_len(a, 0) : mt_cuda_padded_len(longest(a));
    struct mt_fused_shape s = shape_of(a, batch_of(a, way), len);
    struct mt_fused_call c = {.q = a->q, .k = a->k, .v = a->v, .o = a->o, .stats = r.stats};
    enum outcome rc = same ? DONE : make_ragged(d, a, &r, &s, &c, err);
    if (rc == DONE)
        rc = run(d, &r, &s, &c, err);
    if (rc == DONE)
        rc = move_stats(d, a, &r,
                        (struct mt_docs_stats){.kind = same ? MT_STATS_EVEN : MT_STATS_RAGGED,
                                               .n = a->n, .len = len, .n_heads = a->n_q,
                                               .to_lse = true},
                        err);
    return rc;
}

/* Reduces *batch documents and *kv key heads to as many as the workspace holds at once; false: not even one. */
static bool fit(const struct mt_attention *a, const struct mt_cuda_fused_buffers *r, size_t len, size_t *batch,
                size_t *kv)
{
    size_t group = a->n_q / a->n_kv;
    *kv = a->n_kv;
    while (mt_cuda_fused_quadratic_bytes(*batch, len, *kv * group) +
               mt_cuda_fused_linear_bytes(*batch * len, *kv * group, a->head_dim) > r->lib_bytes) {
        if (*batch > 1) {
            *batch /= 2;
        } else if (*kv > 1) {
            do
                --*kv;
            while (a->n_kv % *kv);
        } else {
            return false;
        }
    }
    return true;
}

/* First rows of the tensors, with all heads. In backward a call takes `kv` key heads from `kv0` on. */
struct rows {
    const char *q, *k, *v, *o, *d_o;
    char *dq, *dk, *dv;
};

static struct mt_fused_call heads_from(const struct mt_attention *a, const struct rows *x, size_t kv0,
                                       float *stats)
{
    size_t at_q = kv0 * (a->n_q / a->n_kv) * a->head_dim * 2, at_kv = kv0 * a->head_dim * 2;
    return (struct mt_fused_call){.q = x->q + at_q, .k = x->k + at_kv, .v = x->v + at_kv,
                                  .o = (void *)(uintptr_t)(x->o + at_q), .d_o = x->d_o + at_q,
                                  .stats = stats, .dq = x->dq + at_q, .dk = x->dk + at_kv,
                                  .dv = x->dv + at_kv};
}

/* Backward of the documents at rows x, some heads at a time; `stats` describes the source of their log-sum-exps. */
static enum outcome backward_heads(struct mt_cuda_device *d, const struct mt_attention *a,
                                   const struct mt_cuda_fused_buffers *r, struct mt_fused_shape s,
                                   const struct rows *x, size_t kv, struct mt_docs_stats stats,
                                   struct mt_err *err)
{
    size_t group = a->n_q / a->n_kv;
    enum outcome rc = DONE;
    s.backward = 1;
    s.n_kv = (int64_t)kv;
    s.n_q = (int64_t)(kv * group);
    stats.n_heads = kv * group;
    for (size_t kv0 = 0; kv0 < a->n_kv && rc == DONE; kv0 += kv) {
        struct mt_fused_call c = heads_from(a, x, kv0, r->stats);
        stats.head0 = kv0 * group;
        rc = move_stats(d, a, r, stats, err);
        if (rc == DONE)
            rc = run(d, r, &s, &c, err);
    }
    return rc;
}

static char *row_at(const void *base, size_t row, size_t ld)
{
    return (char *)(uintptr_t)base + row * ld * 2;
}

static enum outcome backward_even(struct mt_cuda_device *d, const struct mt_attention_bwd *b,
                                  const struct mt_cuda_fused_buffers *r, struct mt_err *err)
{
    const struct mt_attention *a = &b->fwd;
    size_t len = doc_len(a, 0), batch = a->n_docs, kv;
    enum outcome rc = DONE;
    if (!fit(a, r, len, &batch, &kv))
        return REFUSED;
    for (size_t doc = 0; doc < a->n_docs && rc == DONE; doc += batch) {
        size_t n = MT_MIN(batch, a->n_docs - doc), row = doc * len;
        struct mt_fused_shape s = shape_of(a, n, len);
        s.ld_dq = (int64_t)b->ld_dq;
        s.ld_dk = (int64_t)b->ld_dk;
        s.ld_dv = (int64_t)b->ld_dv;
        struct rows x = {.q = row_at(a->q, row, a->ld_q), .k = row_at(a->k, row, a->ld_k),
                         .v = row_at(a->v, row, a->ld_v), .o = row_at(a->o, row, a->ld_o),
                         .d_o = row_at(b->d_o, row, a->ld_o), .dq = row_at(b->dq, row, b->ld_dq),
                         .dk = row_at(b->dk, row, b->ld_dk), .dv = row_at(b->dv, row, b->ld_dv)};
        rc = backward_heads(d, a, r, s, &x, kv,
                            (struct mt_docs_stats){.kind = MT_STATS_EVEN, .n = n * len, .len = len,
                                                   .first_row = row},
                            err);
    }
    return rc;
}

static enum outcome backward_ragged(struct mt_cuda_device *d, const struct mt_attention_bwd *b,
                                    const struct mt_cuda_fused_buffers *r, size_t batch, struct mt_err *err)
{
    const struct mt_attention *a = &b->fwd;
    size_t len = mt_cuda_padded_len(longest(a)), total = mt_cuda_fused_total(a);
    if (d->sm < 90 || d->sm >= 120 ||
        mt_cuda_fused_quadratic_bytes(batch, len, a->n_q) +
                mt_cuda_fused_linear_bytes(total, a->n_q, a->head_dim) > r->lib_bytes)
        return REFUSED;
    struct mt_fused_shape s = shape_of(a, batch, len);
    struct mt_fused_call c = {.q = a->q, .k = a->k, .v = a->v, .o = a->o, .d_o = b->d_o,
                              .stats = r->stats, .dq = b->dq, .dk = b->dk, .dv = b->dv};
    s.backward = 1;
    s.total = (int64_t)total;
    s.ld_dq = (int64_t)b->ld_dq;
    s.ld_dk = (int64_t)b->ld_dk;
    s.ld_dv = (int64_t)b->ld_dv;
    enum outcome rc = make_ragged(d, a, r, &s, &c, err);
    if (rc == DONE)
        rc = move_stats(d, a, r,
                        (struct mt_docs_stats){.kind = MT_STATS_RAGGED, .n = a->n, .n_heads = a->n_q},
                        err);
    return rc == DONE ? run(d, r, &s, &c, err) : rc;
}

static cudaError_t move_rows(struct mt_cuda_device *d, const struct mt_docs *docs, size_t len,
                             size_t width, size_t ld, const void *packed, void *padded, bool back)
{
    struct mt_docs_rows p = {.docs = *docs, .len = len, .width = width, .ld = ld,
                             .packed = (void *)(uintptr_t)packed, .padded = padded, .back = back};
    return mt_cuda_docs_rows(&p, d->streams[MT_STREAM_COMPUTE]);
}

/* A few documents of similar length, by padded copies. */
static enum outcome backward_copies(struct mt_cuda_device *d, const struct mt_attention_bwd *b,
                                    const struct mt_cuda_fused_buffers *r,
                                    const struct mt_docs *docs, size_t len, size_t kv, struct mt_err *err)
{
    const struct mt_attention *a = &b->fwd;
    size_t wq = a->n_q * a->head_dim, wk = a->n_kv * a->head_dim, n = (size_t)docs->n;
    size_t big = r->pad_tokens * wq * 2, small = r->pad_tokens * wk * 2;
    char *p = r->padded, *kvs = p + 4 * big;
    struct rows x = {.q = p, .o = p + big, .d_o = p + 2 * big, .dq = p + 3 * big, .k = kvs,
                     .v = kvs + small, .dk = kvs + 2 * small, .dv = kvs + 3 * small};
    struct mt_fused_shape s = shape_of(a, n, len);
    s.ld_q = s.ld_o = s.ld_dq = (int64_t)wq;
    s.ld_k = s.ld_v = s.ld_dk = s.ld_dv = (int64_t)wk;
    cudaError_t e = move_rows(d, docs, len, wq, a->ld_q, a->q, p, false);
    if (e == cudaSuccess)
        e = move_rows(d, docs, len, wk, a->ld_k, a->k, kvs, false);
    if (e == cudaSuccess)
        e = move_rows(d, docs, len, wk, a->ld_v, a->v, kvs + small, false);
    if (e == cudaSuccess)
        e = move_rows(d, docs, len, wq, a->ld_o, a->o, p + big, false);
    if (e == cudaSuccess)
        e = move_rows(d, docs, len, wq, a->ld_o, b->d_o, p + 2 * big, false);
    enum outcome rc = launched(d, e, "padded copies", err);
    if (rc == DONE)
        rc = backward_heads(d, a, r, s, &x, kv,
                            (struct mt_docs_stats){.kind = MT_STATS_PADDED, .docs = *docs, .len = len},
                            err);
    if (rc != DONE)
        return rc;
    e = move_rows(d, docs, len, wq, b->ld_dq, b->dq, x.dq, true);
    if (e == cudaSuccess)
        e = move_rows(d, docs, len, wk, b->ld_dk, b->dk, x.dk, true);
    if (e == cudaSuccess)
        e = move_rows(d, docs, len, wk, b->ld_dv, b->dv, x.dv, true);
    return launched(d, e, "copies back", err);
}

/* All documents of padded length `len`, a power of two of them at a time. */
static enum outcome backward_class(struct mt_cuda_device *d, const struct mt_attention_bwd *b,
                                   const struct mt_cuda_fused_buffers *r, size_t len, struct mt_err *err)
{
    const struct mt_attention *a = &b->fwd;
    size_t left = 0, most = MT_MIN(r->pad_tokens / len, (size_t)MT_DOCS_MAX), kv;
    enum outcome rc = most ? DONE : REFUSED;
    for (size_t i = 0; i < a->n_docs; i++)
        left += mt_cuda_padded_len(doc_len(a, i)) == len;
    for (size_t doc = 0; left && rc == DONE;) {
        size_t batch = mt_cuda_next_power(MT_MIN(left, most) + 1) / 2;
        if (!fit(a, r, len, &batch, &kv))
            return REFUSED;
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

static enum outcome backward_padded(struct mt_cuda_device *d, const struct mt_attention_bwd *b,
                                    const struct mt_cuda_fused_buffers *r, struct mt_err *err)
{
    const struct mt_attention *a = &b->fwd;
    enum outcome rc = DONE;
    for (size_t len = mt_cuda_padded_len(longest(a)), next; len && rc == DONE; len = next) {
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

/* --- attempts and their trials --------------------------------------------------------------------- */

/* A call of attention, or, if `b` is not NULL, of its backward. */
struct call {
    const struct mt_attention *a;
    const struct mt_attention_bwd *b;
};

static enum outcome go(struct mt_cuda_device *d, const struct call *c, enum mt_trial_way way, struct mt_err *err)
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

/* The tensors to compare. Gradients that are tiny beside the others are dominated by rounding, hence the floor. */
static struct mt_trial results_of(const struct call *c)
{
    const struct mt_attention *a = c->a;
    const struct mt_attention_bwd *b = c->b;
    size_t wq = a->n_q * a->head_dim, wk = a->n_kv * a->head_dim;
    if (!b)
        return (struct mt_trial){
            .tensor = {{"o", a->o, a->dtype, a->n, wq, a->ld_o, 0, false},
                       {"the log-sum-exp", a->lse, MT_F32, a->n_q, a->n, a->n, sqrt((double)(a->n_q * a->n)), false}},
            .n = 2};
    return (struct mt_trial){.tensor = {{"dv", b->dv, a->dtype, a->n, wk, b->ld_dv, 0.05, true},
                                        {"dk", b->dk, a->dtype, a->n, wk, b->ld_dk, 0.05, true},
                                        {"dq", b->dq, a->dtype, a->n, wq, b->ld_dq, 0.05, true}},
                             .n = 3};
}

static int run_tiles(struct mt_cuda_device *d, const struct call *c, struct mt_err *err)
{
    return c->b ? mt_cuda_tiled_attention_bwd(d, c->b, err) : mt_cuda_tiled_attention(d, c->a, err);
}

/* Compares the engine's result of the call with that of tiles. */
static enum outcome compare(struct mt_cuda_device *d, const struct call *c, const struct mt_trial_kind *k,
                            struct mt_err *err)
{
    enum mt_trial_verdict *verdict = d->fused->verdict;
    struct mt_trial t = results_of(c);
    char why[128] = "";
    int rc = mt_trial_keep(d, &t, err);
    if (!rc)
        rc = run_tiles(d, c, err);
    if (!rc)
        rc = mt_trial_judge(d, &t, verdict, why, sizeof(why), err);
    bool wrong = !rc && *verdict == MT_TRIAL_TILES;
    if (wrong)
        mt_warn("%s: attention%s with heads of %d%s%s is wrong: %s. Such calls are done in another way from now on, which is "
                "slower; another version of the library may be correct", d->fused->trials.engine,
                k->backward ? "'s backward" : "", k->head_dim, k->window ? ", a window" : "",
                k->way == MT_TRIAL_ROUNDED ? ", empty sequences" : "", why);
    else if (!rc)
        rc = mt_trial_restore(d, &t, err);
    mt_trial_finish(&t);
    return rc ? FAILED : wrong ? REFUSED : DONE;
}

static enum outcome attempt(struct mt_cuda_device *d, const struct call *c, enum mt_trial_way way, struct mt_err *err)
{
    const struct mt_attention *a = c->a;
    struct mt_cuda_fused *f = d->fused;
    struct mt_trial_kind k = {.backward = c->b, .window = a->window && a->window < a->max_len, .way = way,
                              .head_dim = (int)a->head_dim};
    f->verdict = mt_trials_find(&f->trials, &k);
    if (f->verdict && *f->verdict == MT_TRIAL_TILES)
        return REFUSED;
    enum outcome rc = go(d, c, way, err);
    return rc == DONE && f->verdict && *f->verdict == MT_TRIAL_OPEN ? compare(d, c, &k, err) : rc;
}

static enum outcome fused(struct mt_cuda_device *d, const struct call *c, struct mt_err *err)
{
    if (even(c->a))
        return attempt(d, c, MT_TRIAL_FIXED, err);
    bool fill = mt_cuda_next_power(c->a->n_docs) > c->a->n_docs;
    enum outcome rc = attempt(d, c, fill ? MT_TRIAL_ROUNDED : MT_TRIAL_RAGGED, err);
    if (rc == REFUSED && fill && d->fused->verdict && *d->fused->verdict == MT_TRIAL_TILES)
        rc = attempt(d, c, MT_TRIAL_RAGGED, err); /* more plans, but nothing is empty */
    return rc == REFUSED && c->b ? attempt(d, c, MT_TRIAL_COPIES, err) : rc;
}

void mt_cuda_fused_findings(struct mt_cuda_device *d, struct mt_str *out)
{
    if (d->fused)
        mt_trials_print(&d->fused->trials, out);
}

bool mt_cuda_fused_adopt(struct mt_cuda_device *d, const char *text)
{
    return d->fused && mt_trials_read(&d->fused->trials, text);
}

static int count(struct mt_cuda_fused *f, enum outcome rc, bool *done)
{
    *done = rc == DONE;
    f->n_fused += rc == DONE;
    f->n_tiled += rc == REFUSED;
    return rc == FAILED ? -EIO : 0;
}

int mt_cuda_fused_attention(struct mt_cuda_device *d, const struct mt_attention *a, bool *done,
                            struct mt_err *err)
{
    *done = false;
    if (!d->fused)
        return 0;
    return count(d->fused, suits(a) ? fused(d, &(struct call){a, NULL}, err) : REFUSED, done);
}

int mt_cuda_fused_attention_bwd(struct mt_cuda_device *d, const struct mt_attention_bwd *b,
                                bool *done, struct mt_err *err)
{
    *done = false;
    if (!d->fused)
        return 0;
    bool ok = suits(&b->fwd) && rows_fit(b->d_o, b->fwd.ld_o) && rows_fit(b->dq, b->ld_dq) &&
              rows_fit(b->dk, b->ld_dk) && rows_fit(b->dv, b->ld_dv);
    return count(d->fused, ok ? fused(d, &(struct call){&b->fwd, b}, err) : REFUSED, done);
}

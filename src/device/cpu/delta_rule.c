/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gated delta rule in chunks of C tokens (Yang et al. 2024, section 3.3). With G the sums of g within the chunk,
 * D = diag(e^G), E = diag(e^(G_C - G)), X_ij = e^(G_i - G_j) for j <= i, B = diag(beta) and S the state before it:
 *
 *   A = tril(B (K K^T * X), -1);  (I + A) [U | W] = B [V | D K];  V' = U - W S;  P = tril(Q K^T * X)
 *   O = D Q S + P V';  S <- e^G_C S + (E K)^T V'
 *
 * Backward takes the chunks in reverse. dS is the gradient of the state after the chunk:
 *
 *   dV' = P^T dO + E K dS;  dP = tril(dO V'^T);  dW = -dV' S^T;  (I + A)^T [Y | Z] = [dV' | dW]
 *   dA = -tril([Y | Z] [U | W]^T, -1);  N = B (dA * X);  dV = B Y
 *   dQ = (dP * X) K + D dO S^T;  dK = (dP * X)^T Q + E V' dS^T + D B Z + N K + N^T K
 *   dbeta = rowsum(Y * V) + rowsum(Z * D K) + rowsum(dA * K K^T * X)
 *   dG = rowsum(M) - colsum(M) + rowsum(D Q * dO S^T) + rowsum(Z * B D K) - R,  M = dP * P + dA * A,
 *        R = rowsum(E V' dS^T * K);  dG_C += sum(R) + e^G_C <S, dS>;  dg = reverse sums of dG
 *   dS <- e^G_C dS + (D Q)^T dO - W^T dV'
 *
 * G and the sums of dG are in double: where decay is strong they cancel. The states before chunks are made again: those
 * of a segment of chunks are kept at a time, and one for each segment.
 *
 * Plain rules have neither A nor W: V' = U = B V, and the terms with A, W, Z and N are not there.
 *
 * A job is a document and value heads of one key head, in order, so that dq and dk need no atomics; those of several
 * jobs are added afterwards (mt_delta_jobs()).
 */
#include <math.h>
#include <string.h>

#include "device/carve.h"
#include "device/cpu/cpu.h"
#include "device/cpu/delta_products.h"
#include "device/cpu/vecmath.h"

enum { C = MT_DELTA_CHUNK, SEGMENT = 64 };

/* A thread's part of the workspace. Rows are padded to whole vectors, with zeros. */
struct work {
    const struct mt_cpu_products *by;
    size_t dk, dv, wk, wv, wide; /* of a head; padded; wide: wv + wk */
    size_t heads, most_chunks;   /* most value heads of a job; chunks of the longest document */
    size_t key, first, n_heads;  /* of the job: its key head, its first value head, their number */
    bool plain;
    size_t rows;                 /* of the chunk */
    size_t m, c;                 /* of products: C, or with what is carried of the chunk alone; c: whole vectors */
    size_t old;                  /* of the chunk's rows, those that are kept from before, and where */
    const char *before;
    struct mt_delta_kept at;
    float *q, *k, *kt, *rq, *rk; /* [C, wk] of the chunk, normalised; [wk, C] k transposed; [C] factors */
    float *kk, *qk;              /* [C, C] K K^T, Q K^T */
    float *v, *uw, *vn, *x, *a, *p; /* [C, wv]; [C, wide] U | W; [C, wv] V'; [C, C] X, A, P */
    float *dO, *vt, *st, *t;     /* [C, wv]; [wide, C] a transpose; [wv, wk] a state's; [C, wide] a product */
    float *dp, *da, *yz, *dq, *dk_; /* [C, C] twice; [C, wide] Y | Z; [C, wk] twice */
    float *state, *ds;           /* [heads][dk, wv] */
    float *kept, *starts;        /* [SEGMENT][heads][dk, wv]; [segments] of the same */
    float *beta, *decay, *end;   /* [C] beta; D; E */
    double *sum, *dsum;          /* [C] G; dG */
};

static size_t lay_out(struct work *w, char *base, const struct mt_delta_rule *a)
{
    w->dk = a->k.dim;
    w->dv = a->v.dim;
    w->wk = mt_align_up(w->dk, LANES);
    w->wv = mt_align_up(w->dv, LANES);
    w->wide = w->wk + w->wv;
    w->heads = mt_delta_jobs(a).heads;
    w->plain = a->plain;
    w->most_chunks = mt_div_up(MT_MIN(a->max_len, a->n), C);
    size_t f = sizeof(float), one = w->heads * w->wk * w->wv;
    struct mt_carve c = {base, 0};
    struct {
        void *p;
        size_t n;
    } parts[] = {
        {&w->q, C * w->wk * f}, {&w->k, C * w->wk * f}, {&w->kt, C * w->wk * f}, {&w->rq, C * f}, {&w->rk, C * f},
        {&w->kk, C * C * f}, {&w->qk, C * C * f}, {&w->v, C * w->wv * f}, {&w->uw, C * w->wide * f},
        {&w->vn, C * w->wv * f}, {&w->x, C * C * f}, {&w->a, C * C * f}, {&w->p, C * C * f}, {&w->dO, C * w->wv * f},
        {&w->vt, C * w->wide * f}, {&w->st, w->wk * w->wv * f}, {&w->t, C * w->wide * f}, {&w->dp, C * C * f},
        {&w->da, C * C * f}, {&w->yz, C * w->wide * f}, {&w->dq, C * w->wk * f}, {&w->dk_, C * w->wk * f},
        {&w->state, one * f}, {&w->ds, one * f}, {&w->kept, MT_MIN(w->most_chunks, (size_t)SEGMENT) * one * f},
        {&w->starts, mt_div_up(w->most_chunks, SEGMENT) * one * f}, {&w->beta, C * f}, {&w->decay, C * f},
        {&w->end, C * f}, {&w->sum, C * sizeof(double)}, {&w->dsum, C * sizeof(double)}};
    for (size_t i = 0; i < MT_ARRAY_LEN(parts); i++) {
        void *p = mt_carve(&c, parts[i].n, 64);
        memcpy(parts[i].p, &p, sizeof(p));
    }
    return c.used;
}

size_t mt_cpu_delta_rule_workspace(const struct mt_device_limits *l, const struct mt_delta_rule *a)
{
    struct work w;
    return (size_t)l->n_threads * lay_out(&w, NULL, a) + 2 * mt_delta_partial_floats(a) * sizeof(float) + 128;
}

static void multiply(const struct work *w, const struct product *x)
{
    w->by->multiply(x);
}

/* --- a chunk --------------------------------------------------------------------------------------- */

/* Rows of a head as f32, where there are zeros. */
static void load_rows(float *dst, size_t wide, enum mt_dtype t, const struct mt_heads *h, size_t row, size_t head,
                      size_t n)
{
    for (size_t i = 0; i < n; i++)
        mt_cpu_load_row(dst + i * wide, t, h->p, mt_heads_at(h, row + i, head), h->dim);
}

static void store_rows(const float *src, size_t wide, enum mt_dtype t, const struct mt_heads *h, size_t row,
                       size_t head, size_t n)
{
    for (size_t i = 0; i < n; i++)
        mt_cpu_store_row(t, h->p, mt_heads_at(h, row + i, head), h->dim, src + i * wide);
}

/* Keys or values of the chunk, padded with zeros; some may be kept from before. row: the first of the others. */
static void load_both(const struct work *w, const struct mt_delta_rule *a, bool keys, size_t row, size_t head)
{
    const struct mt_heads *h = keys ? &a->k : &a->v;
    float *dst = keys ? w->k : w->v;
    size_t wide = keys ? w->wk : w->wv;
    memset(dst, 0, w->c * wide * sizeof(float));
    if (w->old) {
        struct mt_heads kept = mt_heads(w->before + (keys ? w->at.k : w->at.v), h->n * h->dim, h->n, h->dim);
        load_rows(dst, wide, a->dtype, &kept, 0, head, w->old);
    }
    load_rows(dst + w->old * wide, wide, a->dtype, h, row, head, w->rows - w->old);
}

/* Element of beta or g of the chunk's row i. */
static float scalar(const struct work *w, const struct mt_delta_rule *a, const float *all, size_t at, size_t row,
                    size_t i, size_t head)
{
    const float *from = i < w->old ? (const float *)(w->before + at) : all + row * a->v.n;
    return from[(i < w->old ? i : i - w->old) * a->v.n + head];
}

/* Queries or keys of unit length; the factors to `rstd`. */
static void normalise(float *x, float *rstd, size_t rows, size_t wide, float eps)
{
    for (size_t i = 0; i < rows; i++) {
        rstd[i] = 1.0f / sqrtf((float)dot(x + i * wide, x + i * wide, wide) + eps);
        scale_row(x + i * wide, x + i * wide, rstd[i], wide);
    }
}

/* What value heads share. */
static void load_keys(struct work *w, const struct mt_delta_rule *a, size_t row, size_t rows)
{
    w->rows = rows;
    w->m = a->carried.after ? rows : C;
    w->c = mt_align_up(w->m, LANES);
    memset(w->q, 0, w->c * w->wk * sizeof(float)); /* also of old rows, which have no results */
    load_rows(w->q + w->old * w->wk, w->wk, a->dtype, &a->q, row, w->key, rows - w->old);
    load_both(w, a, true, row, w->key);
    if (!w->plain) {
        normalise(w->q, w->rq, rows, w->wk, a->eps);
        normalise(w->k, w->rk, rows, w->wk, a->eps);
    }
    for (size_t i = 0; i < rows; i++)
        scale_row(w->q + i * w->wk, w->q + i * w->wk, a->scale, w->wk);
    transpose_rows(w->kt, C, w->k, w->wk, w->c, w->wk);
    if (!w->plain)
        multiply(w, &(struct product){w->m, w->c, w->wk, w->k, w->wk, 1, w->kt, C, w->kk, C, 1, .half = true});
    multiply(w, &(struct product){w->m, w->c, w->wk, w->q, w->wk, 1, w->kt, C, w->qk, C, 1, .half = true});
}

/* G, D, E and X of a value head. */
static void decays(struct work *w, const struct mt_delta_rule *a, size_t row, size_t head)
{
    double sum = 0;
    for (size_t i = 0; i < w->rows; i++) {
        sum += (double)scalar(w, a, a->g, w->at.g, row, i, head);
        w->sum[i] = sum;
        w->beta[i] = scalar(w, a, a->beta, w->at.beta, row, i, head);
        w->decay[i] = mt_expf((float)sum);
    }
    memset(w->x, 0, w->c * C * sizeof(float));
    for (size_t i = 0; i < w->rows; i++) {
        w->end[i] = mt_expf((float)(sum - w->sum[i]));
        for (size_t j = 0; j <= i; j++)
            w->x[i * C + j] = mt_expf((float)(w->sum[i] - w->sum[j]));
    }
}

/* Diagonal times rows, for the next product. */
static void scaled_rows(const struct work *w, float *y, const float *x, const float *by, size_t wide)
{
    memset(y, 0, w->c * wide * sizeof(float));
    for (size_t i = 0; i < w->rows; i++)
        scale_row(y + i * wide, x + i * wide, by[i], wide);
}

/* A, then U | W and V' of a value head whose state before the chunk is s. */
static void correct(struct work *w, const float *s)
{
    memset(w->a, 0, w->c * C * sizeof(float));
    memset(w->uw, 0, w->c * w->wide * sizeof(float));
    for (size_t i = 0; i < w->rows; i++) {
        float *uw = w->uw + i * w->wide;
        for (size_t j = 0; j < i; j++)
            w->a[i * C + j] = w->beta[i] * w->kk[i * C + j] * w->x[i * C + j];
        scale_row(uw, w->v + i * w->wv, w->beta[i], w->wv);
        scale_row(uw + w->wv, w->k + i * w->wk, w->beta[i] * w->decay[i], w->wk);
    }
    w->by->substitute(&(struct substitution){w->rows, w->wide, w->a, C, w->uw, w->wide});
    for (size_t i = 0; i < w->c; i++)
        memcpy(w->vn + i * w->wv, w->uw + i * w->wide, w->wv * sizeof(float));
    multiply(w, &(struct product){w->m, w->wv, w->dk, w->uw + w->wv, w->wide, 1, s, w->wv, w->vn, w->wv, -1, true});
}

/* P, then V' of a value head whose state before the chunk is s. */
static void solve(struct work *w, const struct mt_delta_rule *a, size_t row, size_t head, const float *s)
{
    decays(w, a, row, head);
    load_both(w, a, false, row, head);
    memset(w->p, 0, w->c * C * sizeof(float));
    for (size_t i = 0; i < w->rows; i++)
        for (size_t j = 0; j <= i; j++)
            w->p[i * C + j] = w->qk[i * C + j] * w->x[i * C + j];
    if (w->plain)
        scaled_rows(w, w->vn, w->v, w->beta, w->wv);
    else
        correct(w, s);
}

/* S after the chunk, in place. */
static void step_state(struct work *w, float *s)
{
    float all = w->decay[w->rows - 1];
    for (size_t i = 0; i < w->m; i++)
        scale_row(w->t + i * w->wk, w->k + i * w->wk, i < w->rows ? w->end[i] : 0, w->wk);
    scale_row(s, s, all, w->wk * w->wv);
    multiply(w, &(struct product){w->wk, w->wv, w->m, w->t, 1, w->wk, w->vn, w->wv, s, w->wv, 1, true});
}

/* --- forward --------------------------------------------------------------------------------------- */

struct job {
    const struct mt_cpu_products *by;
    const struct mt_delta_rule *a;
    const struct mt_delta_rule_bwd *b;
    size_t bytes; /* of a thread */
};

/* Sums of dq, and after them of dk: [jobs of a key head][n][key heads][dk]. */
static float *partials_of(const struct mt_delta_rule *a)
{
    return (float *)mt_align_up((uintptr_t)a->workspace, (uintptr_t)64);
}

/* The work of a job, [document][key head][job of the key head]. */
static struct work work_of(const struct job *j, size_t i, int thread)
{
    const struct mt_delta_rule *a = j->a;
    struct mt_delta_jobs jobs = mt_delta_jobs(a);
    struct work w = {.by = j->by};
    float *partials = partials_of(a);
    uintptr_t base = mt_align_up((uintptr_t)(partials + 2 * mt_delta_partial_floats(a)), (uintptr_t)64);
    lay_out(&w, (char *)base + (size_t)thread * j->bytes, a);
    size_t all = a->v.n / a->k.n, from = i % jobs.of_key * jobs.heads;
    w.key = i / jobs.of_key % a->k.n;
    w.first = w.key * all + from;
    w.n_heads = MT_MIN(jobs.heads, all - from);
    return w;
}

static size_t n_jobs(const struct mt_delta_rule *a)
{
    return a->n_docs * a->k.n * mt_delta_jobs(a).of_key;
}

static float skip_of(const struct mt_delta_rule *a, size_t head)
{
    float tmp;
    return *mt_cpu_row_f32(a->dtype, a->skip, head, 1, &tmp);
}

/* y += skip x, of the chunk's rows */
static void add_skip(const struct work *w, const struct mt_delta_rule *a, size_t head, float *y, const float *x)
{
    for (size_t i = 0; a->skip && i < w->rows; i++)
        add_row(y + i * w->wv, x + i * w->wv, skip_of(a, head), w->wv);
}

static size_t state_floats(const struct work *w)
{
    return w->wk * w->wv;
}

static void forward_chunk(struct work *w, const struct mt_delta_rule *a, size_t row, size_t rows)
{
    load_keys(w, a, row, rows);
    for (size_t i = 0; i < w->n_heads; i++) {
        size_t h = w->first + i;
        float *s = w->state + i * state_floats(w);
        solve(w, a, row, h, s);
        scaled_rows(w, w->t, w->q, w->decay, w->wk);
        multiply(w, &(struct product){w->m, w->wv, w->dk, w->t, w->wk, 1, s, w->wv, w->dO, w->wv, 1, false});
        multiply(w, &(struct product){w->m, w->wv, w->m, w->p, C, 1, w->vn, w->wv, w->dO, w->wv, 1, true,
                                      .lower = true});
        add_skip(w, a, h, w->dO, w->v);
        store_rows(w->dO + w->old * w->wv, w->wv, a->dtype, &a->o, row, h, rows - w->old);
        if (!a->carried.after || rows == C)
            step_state(w, s);
    }
}

/* States of the job's heads, or their gradients: what a document begins with; NULL: zeros. */
static void take_over(const struct work *w, float *own, const float *from)
{
    memset(own, 0, w->heads * state_floats(w) * sizeof(float));
    for (size_t i = 0; from && i < w->n_heads * w->dk; i++)
        memcpy(own + i / w->dk * state_floats(w) + i % w->dk * w->wv, from + (w->first * w->dk + i) * w->dv,
               w->dv * sizeof(float));
}

/* The same: what it leaves; NULL: nowhere. */
static void leave(const struct work *w, const float *own, float *to)
{
    for (size_t i = 0; to && i < w->n_heads * w->dk; i++)
        memcpy(to + (w->first * w->dk + i) * w->dv, own + i / w->dk * state_floats(w) + i % w->dk * w->wv,
               w->dv * sizeof(float));
}

/* The states that a document begins with, and rows that are kept. */
static void begin_states(struct work *w, const struct mt_delta_rule *a, size_t doc)
{
    const struct mt_carried *x = &a->carried;
    const void *from = doc ? NULL : a->handed.from;
    if (x->after && x->past[doc]) {
        w->old = (size_t)x->past[doc] % C;
        from = w->before = (const char *)x->before + (size_t)x->place[doc] * x->ld_bytes;
        w->at = mt_delta_kept(a);
    }
    take_over(w, w->state, from);
}

static void leave_states(const struct work *w, const struct mt_delta_rule *a, size_t doc)
{
    const struct mt_carried *x = &a->carried;
    void *handed = doc + 1 == a->n_docs ? a->handed.to : NULL;
    leave(w, w->state, x->after ? (void *)((char *)x->after + (size_t)x->place[doc] * x->ld_bytes) : handed);
}

static void forward_job(void *ctx, size_t i, int thread)
{
    const struct job *j = ctx;
    const struct mt_delta_rule *a = j->a;
    struct work w = work_of(j, i, thread);
    size_t doc = i / (n_jobs(a) / a->n_docs), begin = (size_t)a->cu_seqlens[doc], end = (size_t)a->cu_seqlens[doc + 1];
    begin_states(&w, a, doc);
    for (size_t row = begin, some; row < end; row += some, w.old = 0) {
        some = MT_MIN(C - w.old, end - row);
        forward_chunk(&w, a, row, w.old + some);
    }
    leave_states(&w, a, doc);
}

static void keep_row(char *to, const struct mt_heads *h, size_t row, size_t e)
{
    for (size_t i = 0; i < h->n; i++)
        memcpy(to + i * h->dim * e, (const char *)h->p + mt_heads_at(h, row, i) * e, h->dim * e);
}

/* The rows of a document's last chunk that is not whole. */
static void keep_job(void *ctx, size_t doc, int)
{
    const struct mt_delta_rule *a = ((const struct job *)ctx)->a;
    const struct mt_carried *x = &a->carried;
    const struct mt_delta_kept at = mt_delta_kept(a);
    size_t place = (size_t)x->place[doc] * x->ld_bytes, e = mt_dtype_size(a->dtype);
    size_t end = (size_t)a->cu_seqlens[doc + 1];
    size_t n = end - (size_t)a->cu_seqlens[doc], rows = ((size_t)x->past[doc] + n) % C, old = rows - MT_MIN(rows, n);
    char *to = (char *)x->after + place;
    const char *from = (const char *)x->before + place;
    if (from != to && old) /* the same chunk goes on */
        memcpy(to + at.k, from + at.k, at.bytes - at.k);
    for (size_t i = old, heads = a->v.n; i < rows; i++) {
        size_t row = end - rows + i;
        keep_row(to + at.k + i * a->k.n * a->k.dim * e, &a->k, row, e);
        keep_row(to + at.v + i * heads * a->v.dim * e, &a->v, row, e);
        memcpy((float *)(to + at.beta) + i * heads, a->beta + row * heads, heads * sizeof(float));
        memcpy((float *)(to + at.g) + i * heads, a->g + row * heads, heads * sizeof(float));
    }
}

static struct job job_of(struct mt_cpu_device *d, const struct mt_delta_rule *a, const struct mt_delta_rule_bwd *b)
{
    struct work w;
    return (struct job){mt_cpu_products(d->gemm), a, b, lay_out(&w, NULL, a)};
}

void mt_cpu_run_delta_rule(struct mt_cpu_device *d, const struct mt_delta_rule *a)
{
    struct job j = job_of(d, a, NULL);
    mt_pool_run(d->pool, forward_job, &j, n_jobs(a));
    if (a->carried.after)
        mt_pool_run(d->pool, keep_job, &j, a->n_docs);
}

/* --- backward -------------------------------------------------------------------------------------- */

/* States before the chunks [first, end) of a document, the first of which is w->state, to w->kept (NULL: not kept);
 * w->state becomes that after them. */
static void make_states(struct work *w, const struct mt_delta_rule *a, size_t begin, size_t end, float *kept)
{
    size_t one = w->heads * state_floats(w);
    for (size_t row = begin; row < end; row += C) {
        if (kept)
            memcpy(kept + (row - begin) / C * one, w->state, one * sizeof(float));
        if (kept && row + C >= end)
            return;
        load_keys(w, a, row, MT_MIN((size_t)C, end - row));
        for (size_t i = 0; i < w->n_heads; i++) {
            solve(w, a, row, w->first + i, w->state + i * state_floats(w));
            step_state(w, w->state + i * state_floats(w));
        }
    }
}

/* (I + A)^T [Y | Z] = [dV' | dW] */
static void solve_transposed(struct work *w)
{
    for (size_t i = w->rows; i-- > 0;)
        for (size_t j = i + 1; j < w->rows; j++)
            add_row(w->yz + i * w->wide, w->yz + j * w->wide, -w->a[j * C + i], w->wide);
}

/* dV', dP, and what of dQ, dK, dW and dG comes of them. */
static void outputs_backward(struct work *w, const float *s, const float *ds)
{
    size_t wv = w->wv, wk = w->wk, wide = w->wide;
    transpose_rows(w->vt, C, w->vn, wv, C, wv);
    multiply(w, &(struct product){C, C, wv, w->dO, wv, 1, w->vt, C, w->dp, C, 1, .half = true});
    scaled_rows(w, w->t, w->k, w->end, wk);
    multiply(w, &(struct product){C, wv, C, w->p, 1, C, w->dO, wv, w->yz, wide, 1, .upper = true});
    multiply(w, &(struct product){C, wv, w->dk, w->t, wk, 1, ds, wv, w->yz, wide, 1, true});
    transpose_rows(w->st, wk, s, wv, wk, wv);
    if (!w->plain)
        multiply(w, &(struct product){C, wk, wv, w->yz, wide, 1, w->st, wk, w->yz + wv, wide, -1, false}); /* dW */
    multiply(w, &(struct product){C, wk, wv, w->dO, wv, 1, w->st, wk, w->t, wk, 1, false}); /* dO S^T */
    for (size_t i = 0; i < w->rows; i++) {
        w->dsum[i] = (double)w->decay[i] * dot(w->q + i * wk, w->t + i * wk, wk);
        add_row(w->dq + i * wk, w->t + i * wk, w->decay[i], wk);
    }
    transpose_rows(w->st, wk, ds, wv, wk, wv);
    multiply(w, &(struct product){C, wk, wv, w->vn, wv, 1, w->st, wk, w->t, wk, 1, false}); /* V' dS^T */
    double all = 0;
    for (size_t i = 0; i < w->rows; i++) {
        double r = (double)w->end[i] * dot(w->k + i * wk, w->t + i * wk, wk);
        w->dsum[i] -= r;
        all += r;
        add_row(w->dk_ + i * wk, w->t + i * wk, w->end[i], wk);
    }
    w->dsum[w->rows - 1] += all + (double)w->decay[w->rows - 1] * dot(s, ds, wk * wv);
}

/* dA, masked to its triangle; dP becomes dP * X, dA N; their part of dG and dbeta. */
static void scores_backward(struct work *w, double *dbeta)
{
    if (!w->plain) {
        transpose_rows(w->vt, C, w->uw, w->wide, C, w->wide);
        multiply(w, &(struct product){C, C, w->wide, w->yz, w->wide, 1, w->vt, C, w->da, C, -1, .half = true});
    }
    for (size_t i = 0; i < C; i++)
        for (size_t j = 0; j < C; j++) {
            size_t at = i * C + j;
            float x = w->x[at], dp = j <= i && i < w->rows ? w->dp[at] : 0, da = 0;
            double m = (double)dp * (double)w->p[at];
            if (!w->plain) {
                da = j < i && i < w->rows ? w->da[at] : 0;
                m += (double)da * (double)w->a[at];
                w->da[at] = i < w->rows ? w->beta[i] * da * x : 0;
            }
            if (i < w->rows && j <= i) {
                w->dsum[i] += m;
                w->dsum[j] -= m;
                dbeta[i] += w->plain ? 0 : (double)da * (double)(w->kk[at] * x);
            }
            w->dp[at] = dp * x;
        }
}

/* What A and W add to dK, dG and dbeta. */
static void correction_backward(struct work *w, double *dbeta)
{
    size_t wv = w->wv, wk = w->wk;
    multiply(w, &(struct product){C, wk, C, w->da, C, 1, w->k, wk, w->dk_, wk, 1, true, .lower = true});
    multiply(w, &(struct product){C, wk, C, w->da, 1, C, w->k, wk, w->dk_, wk, 1, true, .upper = true});
    for (size_t i = 0; i < w->rows; i++) {
        const float *z = w->yz + i * w->wide + wv;
        double along = dot(z, w->k + i * wk, wk) * (double)w->decay[i];
        add_row(w->dk_ + i * wk, z, w->decay[i] * w->beta[i], wk);
        dbeta[i] += dot(w->yz + i * w->wide, w->v + i * wv, wv) + along;
        w->dsum[i] += along * (double)w->beta[i];
    }
}

/* dv, and what there is once a row. */
static void store_head(struct work *w, const struct mt_delta_rule_bwd *b, size_t row, size_t h, const double *dbeta)
{
    const struct mt_delta_rule *a = &b->fwd;
    size_t wv = w->wv, heads = a->v.n;
    double sum = 0;
    for (size_t i = 0; i < w->rows; i++)
        scale_row(w->t + i * wv, w->yz + i * w->wide, w->beta[i], wv);
    add_skip(w, a, h, w->t, w->dO);
    store_rows(w->t, wv, a->dtype, &b->dv, row, h, w->rows);
    for (size_t i = w->rows; i-- > 0;) {
        sum += w->dsum[i];
        b->dg[(row + i) * heads + h] = (float)sum;
        b->dbeta[(row + i) * heads + h] = (float)dbeta[i];
        if (a->skip)
            b->dskip[(row + i) * heads + h] = (float)dot(w->dO + i * wv, w->v + i * wv, wv);
    }
}

static void backward_head(struct work *w, const struct mt_delta_rule_bwd *b, size_t row, size_t h, const float *s,
                          float *ds)
{
    const struct mt_delta_rule *a = &b->fwd;
    size_t wv = w->wv, wk = w->wk, wide = w->wide;
    double dbeta[C] = {0};
    solve(w, a, row, h, s);
    memset(w->dO, 0, C * wv * sizeof(float));
    load_rows(w->dO, wv, a->dtype, &b->d_o, row, h, w->rows);
    outputs_backward(w, s, ds);
    /* dS before what it is made of is overwritten: e^G_C dS + (D Q)^T dO - W^T dV' */
    scale_row(ds, ds, w->decay[w->rows - 1], wk * wv);
    scaled_rows(w, w->t, w->q, w->decay, wk);
    multiply(w, &(struct product){wk, wv, C, w->t, 1, wk, w->dO, wv, ds, wv, 1, true});
    if (!w->plain) {
        multiply(w, &(struct product){wk, wv, C, w->uw + wv, 1, wide, w->yz, wide, ds, wv, -1, true});
        solve_transposed(w);
    }
    scores_backward(w, dbeta);
    multiply(w, &(struct product){C, wk, C, w->dp, C, 1, w->k, wk, w->dq, wk, 1, true, .lower = true});
    multiply(w, &(struct product){C, wk, C, w->dp, 1, C, w->q, wk, w->dk_, wk, 1, true, .upper = true});
    if (!w->plain)
        correction_backward(w, dbeta);
    for (size_t i = 0; w->plain && i < w->rows; i++)
        dbeta[i] = dot(w->yz + i * wide, w->v + i * wv, wv);
    store_head(w, b, row, h, dbeta);
}

/* Through x = r x': d' = r (d - x (x . d)), where x is of unit length but for eps. */
static void normalise_backward(float *d, const float *x, const float *rstd, float scale, size_t rows, size_t wide)
{
    for (size_t i = 0; i < rows; i++) {
        float *di = d + i * wide, by = rstd[i] * scale;
        float along = (float)dot(x + i * wide, di, wide) / (scale * scale);
        add_row(di, x + i * wide, -along, wide);
        scale_row(di, di, by, wide);
    }
}

/* Rows of dq or dk: as they are, or if key heads have several jobs to this one's sums. */
static void store_keys(const struct work *w, const struct mt_delta_rule *a, size_t row, const float *d, float *partial,
                       const struct mt_heads *to)
{
    size_t job = (w->first - w->key * (a->v.n / a->k.n)) / w->heads;
    struct mt_heads sums = mt_heads(partial + job * a->n * a->k.n * w->dk, a->k.n * w->dk, a->k.n, w->dk);
    bool apart = mt_delta_partial_floats(a) > 0;
    store_rows(d, w->wk, apart ? MT_F32 : a->dtype, apart ? &sums : to, row, w->key, w->rows);
}

static void backward_chunk(struct work *w, const struct mt_delta_rule_bwd *b, size_t row, size_t rows,
                           const float *states)
{
    const struct mt_delta_rule *a = &b->fwd;
    float *partials = partials_of(a);
    load_keys(w, a, row, rows);
    memset(w->dq, 0, C * w->wk * sizeof(float));
    memset(w->dk_, 0, C * w->wk * sizeof(float));
    for (size_t i = 0; i < w->n_heads; i++)
        backward_head(w, b, row, w->first + i, states + i * state_floats(w), w->ds + i * state_floats(w));
    if (!w->plain) {
        normalise_backward(w->dq, w->q, w->rq, a->scale, rows, w->wk);
        normalise_backward(w->dk_, w->k, w->rk, 1, rows, w->wk);
    }
    for (size_t i = 0; w->plain && i < rows; i++)
        scale_row(w->dq + i * w->wk, w->dq + i * w->wk, a->scale, w->wk);
    store_keys(w, a, row, w->dq, partials, &b->dq);
    store_keys(w, a, row, w->dk_, partials + mt_delta_partial_floats(a), &b->dk);
}

static void backward_job(void *ctx, size_t i, int thread)
{
    const struct job *j = ctx;
    const struct mt_delta_rule *a = j->a;
    struct work w = work_of(j, i, thread);
    size_t doc = i / (n_jobs(a) / a->n_docs), one = w.heads * state_floats(&w);
    size_t begin = (size_t)a->cu_seqlens[doc], end = (size_t)a->cu_seqlens[doc + 1];
    enum { LONG = SEGMENT * C };
    size_t segments = mt_div_up(end - begin, (size_t)LONG);
    begin_states(&w, a, doc);
    for (size_t k = 0; k < segments; k++) {
        memcpy(w.starts + k * one, w.state, one * sizeof(float));
        if (k + 1 < segments)
            make_states(&w, a, begin + k * LONG, begin + (k + 1) * LONG, NULL);
    }
    take_over(&w, w.ds, doc + 1 == a->n_docs ? j->b->handed.from : NULL);
    for (size_t k = segments; k-- > 0;) {
        size_t from = begin + k * LONG, to = MT_MIN(end, from + LONG);
        memcpy(w.state, w.starts + k * one, one * sizeof(float));
        make_states(&w, a, from, to, w.kept);
        for (size_t n = mt_div_up(to - from, (size_t)C); n-- > 0;)
            backward_chunk(&w, j->b, from + n * C, MT_MIN((size_t)C, to - from - n * C), w.kept + n * one);
    }
    leave(&w, w.ds, doc ? NULL : j->b->handed.to);
}

/* A head of a row: the sums of its jobs, in order. */
static void add_partials(const struct mt_delta_rule *a, const float *partial, const struct mt_heads *to, size_t row,
                         size_t head)
{
    size_t one = a->n * a->k.n * to->dim, from = (row * a->k.n + head) * to->dim, at = mt_heads_at(to, row, head);
    float tmp[LANES * 64];
    for (size_t c = 0; c < to->dim; c += MT_ARRAY_LEN(tmp)) {
        size_t some = MT_MIN(MT_ARRAY_LEN(tmp), to->dim - c);
        float *sum = mt_cpu_row_place(a->dtype, to->p, at + c, tmp);
        memcpy(sum, partial + from + c, some * sizeof(float));
        for (size_t k = 1; k < mt_delta_jobs(a).of_key; k++)
            add_row(sum, partial + k * one + from + c, 1, some);
        mt_cpu_store_row(a->dtype, to->p, at + c, some, sum);
    }
}

/* C rows of dq and dk. */
static void add_job(void *ctx, size_t i, int)
{
    const struct mt_delta_rule_bwd *b = ((const struct job *)ctx)->b;
    const struct mt_delta_rule *a = &b->fwd;
    const float *partials = partials_of(a);
    for (size_t row = i * C; row < MT_MIN((i + 1) * C, a->n); row++)
        for (size_t head = 0; head < a->k.n; head++) {
            add_partials(a, partials, &b->dq, row, head);
            add_partials(a, partials + mt_delta_partial_floats(a), &b->dk, row, head);
        }
}

void mt_cpu_run_delta_rule_bwd(struct mt_cpu_device *d, const struct mt_delta_rule_bwd *b)
{
    struct job j = job_of(d, &b->fwd, b);
    mt_pool_run(d->pool, backward_job, &j, n_jobs(&b->fwd));
    if (mt_delta_partial_floats(&b->fwd))
        mt_pool_run(d->pool, add_job, &j, mt_div_up(b->fwd.n, (size_t)C));
}

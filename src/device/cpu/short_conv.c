/* SPDX-License-Identifier: Apache-2.0 */
/*
 * y[t] = silu(s[t]), s[t] = bias + sum over j of w[j] x[t - taps + 1 + j] within the document. Backward, with ds = dy
 * silu'(s):
 *
 *   dx[t] = sum over j of w[j] ds[t + taps - 1 - j],   dw[j] = sum over t of ds[t] x[t - taps + 1 + j],
 *   dbias = sum over t of ds[t]
 *
 * A chunk is a block of rows of a piece of the channels; s is made again in backward. dw is summed over a block's rows,
 * then over blocks in order; so is dbias, a row after w's.
 */
#include <string.h>

#include "device/cpu/cpu.h"
#include "device/cpu/vecmath.h"

enum { PIECE = 64, ROWS = 512, TILE = 64 };

struct job {
    const struct mt_short_conv *a;
    const struct mt_short_conv_bwd *b;
    size_t pieces; /* of a head */
};

/* One piece of the channels: w[j] and the bias of each. */
struct piece {
    size_t head, first, n;
    float w[MT_CONV_MAX_TAPS][PIECE], bias[PIECE];
};

static struct piece piece_of(const struct job *j, size_t i)
{
    const struct mt_short_conv *a = j->a;
    struct piece p = {.head = i / j->pieces, .first = i % j->pieces * PIECE};
    float tmp[PIECE * MT_CONV_MAX_TAPS];
    p.n = MT_MIN((size_t)PIECE, a->x.dim - p.first);
    const float *w = mt_cpu_row_f32(a->dtype, a->w, (p.head * a->x.dim + p.first) * a->taps, p.n * a->taps, tmp);
    for (size_t c = 0; c < p.n; c++)
        for (size_t k = 0; k < a->taps; k++)
            p.w[k][c] = w[c * a->taps + k];
    if (a->bias)
        mt_cpu_load_row(p.bias, a->dtype, a->bias, p.head * a->x.dim + p.first, p.n);
    return p;
}

/* The document of a row. */
static size_t doc_of(const struct mt_short_conv *a, size_t row)
{
    size_t lo = 0, hi = a->n_docs;
    while (hi - lo > 1) {
        size_t mid = (lo + hi) / 2;
        *((size_t)a->cu_seqlens[mid] <= row ? &lo : &hi) = mid;
    }
    return lo;
}

MT_HOT static void multiply_add(float *restrict y, const float *restrict w, const float *restrict x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] += w[i] * x[i];
}

MT_HOT static void silu(float *y, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = y[i] * mt_sigmoidf(y[i]);
}

/* s = dy silu'(s) */
MT_HOT static void silu_slope(float *restrict s, const float *restrict dy, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float e = mt_sigmoidf(s[i]);
        s[i] = dy[i] * (e * (1.0f + s[i] * (1.0f - e)));
    }
}

/* x of the piece `back` rows before the document's row i, at *at; NULL: there is none. */
static const void *earlier(const struct mt_short_conv *a, const struct piece *p, size_t doc, size_t i, size_t back,
                           size_t *at)
{
    const struct mt_carried *c = &a->carried;
    *at = mt_heads_at(&a->x, (size_t)a->cu_seqlens[doc] + i - back, p->head) + p->first;
    if (i >= back)
        return a->x.p;
    *at = ((a->taps - 1 + i - back) * a->x.n + p->head) * a->x.dim + p->first;
    if (!c->after)
        return doc ? NULL : a->handed.from;
    if (i + (size_t)c->past[doc] < back)
        return NULL;
    return (const char *)c->before + (size_t)c->place[doc] * c->ld_bytes;
}

/* s of a document's row. */
static void sum_row(const struct mt_short_conv *a, const struct piece *p, size_t row, size_t doc, float *s)
{
    float tmp[PIECE];
    memcpy(s, p->bias, PIECE * sizeof(*s)); /* zeros without one */
    for (size_t k = 0; k < a->taps; k++) {
        size_t at;
        const void *x = earlier(a, p, doc, row - (size_t)a->cu_seqlens[doc], a->taps - 1 - k, &at);
        if (x)
            multiply_add(s, p->w[k], mt_cpu_row_f32(a->dtype, x, at, p->n, tmp), p->n);
    }
}

/* The last rows of a document, or of the one that is handed on, to where its next tokens find them: no row is
 * overwritten before it is read. */
static void leave_chunk(void *ctx, size_t chunk, int)
{
    const struct job *j = ctx;
    const struct mt_short_conv *a = j->a;
    size_t per = a->x.n * j->pieces, e = mt_dtype_size(a->dtype), from;
    size_t doc = a->carried.after ? chunk / per : a->n_docs - 1;
    size_t rows = (size_t)(a->cu_seqlens[doc + 1] - a->cu_seqlens[doc]);
    struct piece p = {.head = chunk % per / j->pieces, .first = chunk % per % j->pieces * PIECE};
    p.n = MT_MIN((size_t)PIECE, a->x.dim - p.first);
    for (size_t k = 0; k + 1 < a->taps; k++) {
        char *to = a->handed.to;
        if (a->carried.after)
            to = (char *)a->carried.after + (size_t)a->carried.place[doc] * a->carried.ld_bytes;
        const void *x = earlier(a, &p, doc, rows, a->taps - 1 - k, &from);
        to += ((k * a->x.n + p.head) * a->x.dim + p.first) * e;
        if (x)
            memmove(to, (const char *)x + from * e, p.n * e);
        else
            memset(to, 0, p.n * e);
    }
}

static void forward_chunk(void *ctx, size_t chunk, int)
{
    const struct job *j = ctx;
    const struct mt_short_conv *a = j->a;
    size_t per = a->x.n * j->pieces, first = chunk / per * ROWS, end = MT_MIN(a->n, first + ROWS);
    struct piece p = piece_of(j, chunk % per);
    size_t doc = doc_of(a, first);
    float s[PIECE];
    for (size_t r = first; r < end; r++) {
        while (r >= (size_t)a->cu_seqlens[doc + 1])
            doc++;
        sum_row(a, &p, r, doc, s);
        silu(s, p.n);
        mt_cpu_store_row(a->dtype, a->y.p, mt_heads_at(&a->y, r, p.head) + p.first, p.n, s);
    }
}

void mt_cpu_run_short_conv(struct mt_cpu_device *d, const struct mt_short_conv *a)
{
    struct job j = {.a = a, .pieces = mt_div_up(a->x.dim, PIECE)};
    mt_pool_run(d->pool, forward_chunk, &j, mt_div_up(a->n, ROWS) * a->x.n * j.pieces);
    if (a->carried.after || a->handed.to)
        mt_pool_run(d->pool, leave_chunk, &j, (a->carried.after ? a->n_docs : 1) * a->x.n * j.pieces);
}

size_t mt_cpu_short_conv_bwd_workspace(const struct mt_device_limits *, const struct mt_short_conv_bwd *b)
{
    return mt_div_up(b->fwd.n, ROWS) * b->fwd.x.n * b->fwd.x.dim * (b->fwd.taps + 1) * sizeof(float);
}

/* Of what backward hands on, the piece's channels in row i. */
static size_t handed_at(const struct mt_short_conv *a, const struct piece *p, size_t i)
{
    return (i * a->x.n + p->head) * a->x.dim + p->first;
}

/* ds of a row; after the last one of its rows in the next piece. */
static void slope_row(const struct mt_short_conv_bwd *b, const struct piece *p, size_t row, size_t doc, float *ds)
{
    float tmp[PIECE];
    if (row >= b->fwd.n) {
        const float *next = b->handed.from;
        for (size_t c = 0; c < p->n; c++)
            ds[c] = next ? next[handed_at(&b->fwd, p, row - b->fwd.n) + c] : 0;
        return;
    }
    sum_row(&b->fwd, p, row, doc, ds);
    size_t at = mt_heads_at(&b->dy, row, p->head) + p->first;
    silu_slope(ds, mt_cpu_row_f32(b->fwd.dtype, b->dy.p, at, p->n, tmp), p->n);
}

/* What ds of a row adds to dw, [tap][channel], and after the taps to dbias. */
static void add_weight_gradient(const struct mt_short_conv *a, const struct piece *p, size_t row, size_t doc,
                                const float *ds, float dw[][PIECE])
{
    float tmp[PIECE];
    for (size_t c = 0; c < p->n; c++)
        dw[a->taps][c] += ds[c];
    for (size_t k = 0; k < a->taps; k++) {
        size_t at;
        const void *x = earlier(a, p, doc, row - (size_t)a->cu_seqlens[doc], a->taps - 1 - k, &at);
        if (x)
            multiply_add(dw[k], ds, mt_cpu_row_f32(a->dtype, x, at, p->n, tmp), p->n);
    }
}

/* Whether the document has the row, here or in the next piece. */
static bool has_row(const struct mt_short_conv_bwd *b, size_t doc, size_t row)
{
    return row < (size_t)b->fwd.cu_seqlens[doc + 1] || (b->handed.from && doc + 1 == b->fwd.n_docs);
}

/* ds of the first rows, for the piece before. */
static void hand_on(const struct mt_short_conv_bwd *b, const struct piece *p, float ds[][PIECE])
{
    float *to = b->handed.to;
    for (size_t i = 0; i + 1 < b->fwd.taps; i++)
        for (size_t c = 0; c < p->n; c++)
            to[handed_at(&b->fwd, p, i) + c] = has_row(b, 0, i) ? ds[i][c] : 0;
}

/* Rows [first, end), whose ds and that of the rows after them are in `ds`. */
static void backward_tile(const struct mt_short_conv_bwd *b, const struct piece *p, size_t first, size_t end,
                          float ds[][PIECE], float dw[][PIECE])
{
    const struct mt_short_conv *a = &b->fwd;
    size_t doc = doc_of(a, first);
    for (size_t r = first, d = doc; r < end + a->taps - 1; r++) {
        while (r < a->n && r >= (size_t)a->cu_seqlens[d + 1])
            d++;
        slope_row(b, p, r, d, ds[r - first]);
        if ((b->dw || b->dbias) && r < end)
            add_weight_gradient(a, p, r, d, ds[r - first], dw);
    }
    if (!first && b->handed.to)
        hand_on(b, p, ds);
    for (size_t r = first; r < end; r++) {
        float dx[PIECE] = {0};
        while (r >= (size_t)a->cu_seqlens[doc + 1])
            doc++;
        for (size_t k = 0; k < a->taps; k++)
            if (has_row(b, doc, r + a->taps - 1 - k))
                multiply_add(dx, p->w[k], ds[r - first + a->taps - 1 - k], p->n);
        mt_cpu_store_row(a->dtype, b->dx.p, mt_heads_at(&b->dx, r, p->head) + p->first, p->n, dx);
    }
}

static float *bias_partials(const struct mt_short_conv_bwd *b)
{
    return (float *)b->workspace + mt_div_up(b->fwd.n, ROWS) * b->fwd.x.n * b->fwd.x.dim * b->fwd.taps;
}

static void backward_chunk(void *ctx, size_t chunk, int)
{
    const struct job *j = ctx;
    const struct mt_short_conv *a = j->a;
    size_t per = a->x.n * j->pieces, block = chunk / per, first = block * ROWS, end = MT_MIN(a->n, first + ROWS);
    struct piece p = piece_of(j, chunk % per);
    float ds[TILE + MT_CONV_MAX_TAPS][PIECE], dw[MT_CONV_MAX_TAPS + 1][PIECE] = {{0}};
    for (size_t r = first; r < end; r += TILE)
        backward_tile(j->b, &p, r, MT_MIN(end, r + TILE), ds, dw);
    if (!j->b->dw && !j->b->dbias)
        return;
    size_t channels = a->x.n * a->x.dim, at = block * channels + p.head * a->x.dim + p.first;
    float *to = (float *)j->b->workspace + at * a->taps, *bias = bias_partials(j->b) + at;
    for (size_t c = 0; c < p.n; c++) {
        for (size_t k = 0; k < a->taps; k++)
            to[c * a->taps + k] = dw[k][c];
        bias[c] = dw[a->taps][c];
    }
}

void mt_cpu_run_short_conv_bwd(struct mt_cpu_device *d, const struct mt_short_conv_bwd *b)
{
    const struct mt_short_conv *a = &b->fwd;
    struct job j = {a, b, mt_div_up(a->x.dim, PIECE)};
    size_t blocks = mt_div_up(a->n, ROWS);
    mt_pool_run(d->pool, backward_chunk, &j, blocks * a->x.n * j.pieces);
    if (b->dw)
        mt_cpu_fold(d, b->dw, b->workspace, blocks, a->x.n * a->x.dim * a->taps);
    if (b->dbias)
        mt_cpu_fold(d, b->dbias, bias_partials(b), blocks, a->x.n * a->x.dim);
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The largest log-probabilities of each loss row, for students to learn from; and tokens drawn by logits. Logits go to
 * the host by parts of a piece, 4 bytes each, a part while the one before is looked through, which costs little beside
 * the pass of a model that does not fit the device. The largest are found there, and tokens are drawn, with the same
 * bits whatever the device is.
 */
#include <math.h>

#include "base/mem.h"
#include "model/state.h"

enum { BLOCK = 64 };

static size_t rows_of_part(const struct mt_model_params *p)
{
    return MT_MIN(p->logits_piece ? p->logits_piece : p->logits_chunk, (size_t)MT_DRAWN_TOGETHER);
}

/* Of two parts. */
static size_t logits_bytes(const struct mt_model_params *p)
{
    return 2 * rows_of_part(p) * (size_t)p->layout->cfg.vocab * sizeof(float);
}

size_t mt_model_top_bytes(const struct mt_model_params *p)
{
    size_t rows = p->max_micro * p->max_tokens;
    return logits_bytes(p) + rows * (sizeof(struct mt_top_piece) + p->top * sizeof(struct mt_top) + sizeof(float));
}

int mt_model_top_create(mt_model *m, struct mt_err *err)
{
    size_t rows = m->p.max_micro * m->p.max_tokens;
    void *logits = NULL;
    m->top_pieces = mt_arrays_add(&m->arrays, rows, sizeof(*m->top_pieces));
    m->top = mt_arrays_add(&m->arrays, rows * m->p.top, sizeof(*m->top));
    m->top_rest = mt_arrays_add(&m->arrays, rows, sizeof(*m->top_rest));
    if (m->arrays.failed)
        return mt_fail_nomem(err, "the largest logits", rows * m->p.top * sizeof(*m->top));
    int rc = mt_event_create(m->dev, &m->logits_ready, err) ?: mt_host_alloc(&logits, logits_bytes(&m->p), "logits", err);
    m->top_logits = logits;
    for (int i = 0; i < 2 && !rc; i++)
        rc = mt_event_create(m->dev, &m->part_copied[i], err) ?: mt_event_create(m->dev, &m->part_read[i], err);
    return rc ?: mt_device_register_host(m->dev, logits, logits_bytes(&m->p), err);
}

void mt_model_top_destroy(mt_model *m)
{
    if (m->top_logits)
        mt_device_unregister_host(m->dev, m->top_logits);
    mt_host_free(m->top_logits, m->top_logits ? logits_bytes(&m->p) : 0);
    mt_event_destroy(&m->logits_ready);
    for (int i = 0; i < 2; i++) {
        mt_event_destroy(&m->part_copied[i]);
        mt_event_destroy(&m->part_read[i]);
    }
}

/* Of two equal values the first is the larger. */
static bool is_less(const struct mt_top *a, const struct mt_top *b)
{
    return a->logp < b->logp || (a->logp == b->logp && a->id > b->id);
}

/* A heap with its least value at the front. */
static void sift(struct mt_top *heap, size_t n, size_t i)
{
    for (size_t least = i;; i = least) {
        for (size_t child = 2 * i + 1; child < 2 * i + 3 && child < n; child++)
            if (is_less(&heap[child], &heap[least]))
                least = child;
        if (least == i)
            return;
        struct mt_top t = heap[i];
        heap[i] = heap[least];
        heap[least] = t;
    }
}

static bool any_above(const float *x, size_t n, float least)
{
    int any = 0;
    for (size_t i = 0; i < n; i++)
        any |= x[i] > least;
    return any;
}

static int falling(const void *a, const void *b)
{
    return is_less(a, b) ? 1 : -1;
}

static void find(const float *x, size_t n, size_t k, struct mt_top *out)
{
    for (size_t i = 0; i < k; i++)
        out[i] = (struct mt_top){(uint32_t)i, x[i]};
    for (size_t i = k / 2; i-- > 0;)
        sift(out, k, i);
    for (size_t at = k; at < n; at += BLOCK) {
        size_t end = MT_MIN(at + BLOCK, n);
        if (!any_above(x + at, end - at, out[0].logp))
            continue;
        for (size_t i = at; i < end; i++)
            if (x[i] > out[0].logp) {
                out[0] = (struct mt_top){(uint32_t)i, x[i]};
                sift(out, k, 0);
            }
    }
    qsort(out, k, sizeof(*out), falling);
}

static int32_t *host_targets(const mt_model *m, size_t mb)
{
    return mt_inputs_on_host(m, mb).targets;
}

/* On a thread of the device: a row's loss is log-sum-exp less its target's logit, so that log-sum-exp is known. */
static void find_rows(void *ctx)
{
    const struct mt_top_piece *p = ctx;
    mt_model *m = p->m;
    size_t vocab = (size_t)m->layout->cfg.vocab, k = m->p.top;
    const int32_t *targets = host_targets(m, p->mb);
    const float *loss = mt_model_stats_loss(m, m->stats_host, p->mb) + p->first;
    for (size_t r = 0; r < p->rows; r++) {
        const float *x = p->logits + r * vocab;
        size_t row = mt_model_loss_at(m, p->mb) + p->first + r;
        struct mt_top *top = m->top + row * k;
        double lse = (double)x[targets[p->first + r]] + (double)loss[r], sum = 0;
        find(x, vocab, k, top);
        for (size_t i = 0; i < k; i++) {
            top[i].logp = (float)((double)top[i].logp - lse);
            sum += exp((double)top[i].logp);
        }
        m->top_rest[row] = (float)fmax(1 - sum, 0);
    }
}

static void draw_rows(void *ctx)
{
    const struct mt_top_piece *p = ctx;
    const struct mt_draw *d = p->m->draw;
    d->draw(d->ctx, p->mb, p->first, p->rows, p->logits, host_targets(p->m, p->mb) + p->first);
}

/* Part i, from row `at` of the piece on: copies its logits once part i - 2 has been read, then calls fn. */
static int part_rows(mt_model *m, struct mt_top_piece *p, size_t i, size_t at, void (*fn)(void *ctx),
                     struct mt_err *err)
{
    size_t width = (size_t)m->layout->cfg.vocab * sizeof(float), ld = mt_model_logits_ld(m->layout);
    const struct mt_copy copy = {p->logits, width, (const float *)m->logits + at * ld, ld * sizeof(float), width,
                                 p->rows};
    return mt_event_wait(m->dev, m->part_read[i % 2], MT_STREAM_D2H, err)
        ?: mt_device_copy(m->dev, MT_STREAM_D2H, &copy, err)
        ?: mt_event_record(m->dev, m->part_copied[i % 2], MT_STREAM_D2H, err)
        ?: mt_event_wait(m->dev, m->part_copied[i % 2], MT_STREAM_COMPUTE, err)
        ?: mt_device_call(m->dev, fn, p, err)
        ?: mt_event_record(m->dev, m->part_read[i % 2], MT_STREAM_COMPUTE, err);
}

/* fn for each part of the piece of `rows` rows that begins at loss row `first`. */
static int each_part(mt_model *m, size_t mb, size_t first, size_t rows, void (*fn)(void *ctx), struct mt_err *err)
{
    size_t part = rows_of_part(&m->p);
    int rc = mt_event_record(m->dev, m->logits_ready, MT_STREAM_COMPUTE, err)
          ?: mt_event_wait(m->dev, m->logits_ready, MT_STREAM_D2H, err);
    for (size_t i = 0, at = 0; at < rows && !rc; i++, at += part) {
        struct mt_top_piece *p = m->top_pieces + mt_model_loss_at(m, mb) + first + at;
        float *logits = m->top_logits + i % 2 * part * (size_t)m->layout->cfg.vocab;
        *p = (struct mt_top_piece){m, mb, first + at, MT_MIN(part, rows - at), logits};
        rc = part_rows(m, p, i, at, fn, err);
    }
    return rc;
}

int mt_model_top_rows(mt_model *m, size_t mb, size_t first, size_t rows, struct mt_err *err)
{
    float *loss = mt_model_stats_loss(m, m->stats_host, mb) + first;
    int rc = mt_model_copy(m, loss, mt_model_stats_loss(m, m->stats_dev, mb) + first, rows * sizeof(float), err);
    return rc ?: each_part(m, mb, first, rows, find_rows, err);
}

int mt_model_draw_rows(mt_model *m, size_t mb, size_t first, size_t rows, struct mt_err *err)
{
    const int32_t *from = host_targets(m, mb) + first;
    return each_part(m, mb, first, rows, draw_rows, err)
        ?: mt_model_copy(m, m->inputs[mb].targets + first, from, rows * sizeof(*from), err);
}

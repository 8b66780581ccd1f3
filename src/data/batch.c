/* SPDX-License-Identifier: Apache-2.0 */
#include "data/batch.h"

#include <string.h>

#include "base/mem.h"

int mt_batch_init(struct mt_batch *b, size_t cap_tokens, size_t cap_docs, struct mt_err *err)
{
    *b = (struct mt_batch){.cap_tokens = cap_tokens, .cap_docs = cap_docs};
    int32_t **of_tokens[] = {&b->ids,     &b->positions,  &b->loss_rows, &b->targets,
                             &b->run_ids, &b->run_starts, &b->order,     &b->scratch};
    int32_t **of_docs[] = {&b->cu_seqlens, &b->sample, &b->answer_rows, &b->doc_rows};
    for (size_t i = 0; i < MT_ARRAY_LEN(of_tokens); i++)
        *of_tokens[i] = mt_arrays_add(&b->arrays, cap_tokens + 1, sizeof(int32_t));
    for (size_t i = 0; i < MT_ARRAY_LEN(of_docs); i++)
        *of_docs[i] = mt_arrays_add(&b->arrays, cap_docs + 1, sizeof(int32_t));
    b->role = mt_arrays_add(&b->arrays, cap_docs + 1, 1);
    if (!b->arrays.failed)
        return 0;
    mt_batch_finish(b);
    return mt_fail_nomem(err, "a micro-batch", cap_tokens * 8 * sizeof(int32_t));
}

int mt_batch_init_top(struct mt_batch *b, size_t n_top, struct mt_err *err)
{
    b->n_top = n_top;
    b->top = mt_arrays_add(&b->arrays, b->cap_tokens * n_top, sizeof(*b->top));
    b->rest = mt_arrays_add(&b->arrays, b->cap_tokens, sizeof(*b->rest));
    return b->top && b->rest ? 0 : mt_fail_nomem(err, "a teacher's tokens", b->cap_tokens * n_top * sizeof(*b->top));
}

int mt_batch_init_rollouts(struct mt_batch *b, struct mt_err *err)
{
    b->values = mt_arrays_add(&b->arrays, b->cap_tokens, sizeof(*b->values));
    b->rollout = mt_arrays_add(&b->arrays, b->cap_docs, sizeof(*b->rollout));
    return b->values && b->rollout ? 0 : mt_fail_nomem(err, "values of rollouts", b->cap_tokens * sizeof(*b->values));
}

int mt_batch_init_cache(struct mt_batch *b, const struct mt_cache_shape *cache, struct mt_err *err)
{
    b->cache = *cache;
    b->past = mt_arrays_add(&b->arrays, b->cap_docs, sizeof(*b->past));
    for (int i = 0; i < MT_N_CACHE_KINDS; i++)
        b->table[i] = mt_arrays_add(&b->arrays, b->cap_docs * cache->ld[i] + 1, sizeof(int32_t));
    return b->arrays.failed ? mt_fail_nomem(err, "a micro-batch", b->cap_docs * cache->ld[0] * 4) : 0;
}

void mt_batch_finish(struct mt_batch *b)
{
    mt_arrays_finish(&b->arrays);
    *b = (struct mt_batch){0};
}

void mt_batch_clear(struct mt_batch *b)
{
    b->n_tokens = b->n_docs = b->max_doc_len = b->n_loss = b->n_runs = 0;
    b->row_before = b->doc_before = b->doc_after = b->n_padding = 0;
}

int mt_batch_add(struct mt_batch *b, const uint32_t *ids, const uint8_t *trained, size_t n,
                 int32_t sample, struct mt_err *err)
{
    return mt_batch_add_as(b, &(struct mt_doc){.sample = sample}, ids, trained, n, err);
}

int mt_batch_add_as(struct mt_batch *b, const struct mt_doc *as, const uint32_t *ids, const uint8_t *trained, size_t n,
                    struct mt_err *err)
{
    if (n > b->cap_tokens - b->n_tokens || b->n_docs == b->cap_docs)
        return mt_fail(err, MT_ERR_RUNTIME, -ENOSPC,
                       "a document of %zu tokens does not fit a micro-batch of %zu", n,
                       b->cap_tokens);
    size_t first = b->n_tokens;
    int32_t answer = (int32_t)b->n_loss;
    for (size_t i = 0; i < n; i++) {
        b->ids[first + i] = (int32_t)ids[i];
        b->positions[first + i] = (int32_t)i;
        if (i + 1 < n && (!trained || trained[i + 1])) {
            b->loss_rows[b->n_loss] = (int32_t)(first + i);
            b->targets[b->n_loss++] = (int32_t)ids[i + 1];
            answer += i + 1 < as->answer;
        }
    }
    b->sample[b->n_docs] = as->sample;
    b->role[b->n_docs] = (uint8_t)as->role;
    b->answer_rows[b->n_docs] = answer;
    b->doc_rows[b->n_docs + 1] = (int32_t)b->n_loss;
    b->n_tokens += n;
    b->cu_seqlens[++b->n_docs] = (int32_t)b->n_tokens;
    b->max_doc_len = MT_MAX(b->max_doc_len, n);
    return 0;
}

int mt_batch_go_on(struct mt_batch *b, size_t past, const uint32_t *ids, size_t n, size_t draws, struct mt_err *err)
{
    size_t first = b->n_tokens, rows = b->n_loss;
    int rc = mt_batch_add(b, ids, NULL, n, 0, err);
    if (rc)
        return rc;
    for (size_t i = first; i < b->n_tokens; i++)
        b->positions[i] += (int32_t)past;
    b->n_loss = rows + draws;
    for (size_t i = 0; i < draws; i++) {
        b->loss_rows[rows + i] = (int32_t)(b->n_tokens - draws + i);
        b->targets[rows + i] = 0;
    }
    b->doc_rows[b->n_docs] = (int32_t)b->n_loss;
    b->max_doc_len = MT_MAX(b->max_doc_len, past + n);
    if (b->past)
        b->past[b->n_docs - 1] = (int32_t)past;
    return 0;
}

void mt_batch_pad(struct mt_batch *b, size_t n)
{
    for (; b->n_tokens < n; b->n_tokens++, b->n_padding++) {
        b->ids[b->n_tokens] = b->ids[b->n_tokens - 1];
        b->positions[b->n_tokens] = b->positions[b->n_tokens - 1] + 1;
    }
    size_t len = b->n_tokens - (size_t)b->cu_seqlens[b->n_docs - 1];
    b->cu_seqlens[b->n_docs] = (int32_t)b->n_tokens;
    b->max_doc_len = MT_MAX(b->max_doc_len, len);
}

void mt_batch_cut(struct mt_batch *chunk, const struct mt_batch *row, size_t from, size_t to)
{
    size_t doc = 0, loss = 0, end_of_row = row->n_tokens - row->n_padding;
    mt_batch_clear(chunk);
    chunk->n_tokens = to - from;
    chunk->n_padding = to - MT_MAX(from, MT_MIN(to, end_of_row));
    memcpy(chunk->ids, row->ids + from, chunk->n_tokens * sizeof(*chunk->ids));
    memcpy(chunk->positions, row->positions + from, chunk->n_tokens * sizeof(*chunk->positions));
    while ((size_t)row->cu_seqlens[doc + 1] <= from)
        doc++;
    while (loss < row->n_loss && (size_t)row->loss_rows[loss] < from)
        loss++;
    chunk->row_before = from;
    chunk->doc_before = from - (size_t)row->cu_seqlens[doc];
    chunk->n_top = row->n_top;
    chunk->top = row->top ? row->top + loss * row->n_top : NULL;
    chunk->rest = row->rest ? row->rest + loss : NULL;
    for (; doc < row->n_docs && (size_t)row->cu_seqlens[doc] < to; doc++) {
        size_t end = MT_MIN((size_t)row->cu_seqlens[doc + 1], to), d = chunk->n_docs++;
        chunk->sample[d] = row->sample[doc];
        for (; loss < row->n_loss && (size_t)row->loss_rows[loss] < end; loss++, chunk->n_loss++) {
            chunk->loss_rows[chunk->n_loss] = row->loss_rows[loss] - (int32_t)from;
            chunk->targets[chunk->n_loss] = row->targets[loss];
        }
        chunk->doc_rows[d + 1] = (int32_t)chunk->n_loss;
        chunk->cu_seqlens[d + 1] = (int32_t)(end - from);
        chunk->max_doc_len = MT_MAX(chunk->max_doc_len, end - (size_t)row->cu_seqlens[doc]);
        chunk->doc_after = (size_t)row->cu_seqlens[doc + 1] - end;
    }
}

/* Stable radix sort of token indices by id, 11 bits at a time. */
static void sort_by_id(struct mt_batch *b)
{
    enum { BITS = 11, BUCKETS = 1 << BITS };
    size_t count[BUCKETS];
    int32_t *from = b->order, *to = b->scratch;
    for (size_t i = 0; i < b->n_tokens; i++)
        from[i] = (int32_t)i;
    for (int shift = 0; shift < 33; shift += BITS) {
        memset(count, 0, sizeof(count));
        for (size_t i = 0; i < b->n_tokens; i++)
            count[((uint32_t)b->ids[i] >> shift) % BUCKETS]++;
        for (size_t k = 0, at = 0; k < BUCKETS; k++) {
            size_t c = count[k];
            count[k] = at;
            at += c;
        }
        for (size_t i = 0; i < b->n_tokens; i++)
            to[count[((uint32_t)b->ids[from[i]] >> shift) % BUCKETS]++] = from[i];
        int32_t *t = from;
        from = to;
        to = t;
        if (shift + BITS >= 32)
            break;
    }
    if (from != b->order)
        memcpy(b->order, from, b->n_tokens * sizeof(int32_t));
}

void mt_batch_seal(struct mt_batch *b)
{
    sort_by_id(b);
    b->n_runs = 0;
    for (size_t i = 0; i < b->n_tokens; i++) {
        int32_t id = b->ids[b->order[i]];
        if (!i || id != b->run_ids[b->n_runs - 1]) {
            b->run_ids[b->n_runs] = id;
            b->run_starts[b->n_runs++] = (int32_t)i;
        }
    }
    b->run_starts[b->n_runs] = (int32_t)b->n_tokens;
}

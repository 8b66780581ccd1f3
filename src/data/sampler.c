/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows are packed best-fit decreasing, a window of samples at a time; rows of earlier windows stay open. This packs
 * nearly as well as sorting all samples, in bounded time. Open rows are kept in lists by free tokens; a bitmap over
 * these lengths finds the tightest fit.
 *
 * Files of different weights are packed separately, in groups; each group's rows are one range.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/philox.h"
#include "data/dataset.h"
#include "data/teacher.h"

enum { WINDOW = 8192, STREAM_ORDER = 1, STREAM_GROUP = 16, STREAM_EPOCH = 1000 };

static const uint64_t STREAM_MIX = UINT64_C(1) << 60;

/* Samples of the same weight: a range of the list of samples, packed into a range of rows. */
struct group {
    double weight;
    uint64_t first, n_samples;
    uint64_t first_row, n_rows;
    uint64_t n_visits; /* visits of its rows in an epoch */
};

struct tokens {
    uint32_t *ids;
    uint8_t *trained;
};

struct mt_sampler {
    struct mt_sampler_params p;
    struct mt_sampler_stats stats;
    uint64_t n_samples, n_tokens;
    uint64_t from_step, from_rows; /* so many rows come before that step */
    struct mt_arrays arrays; /* what follows */
    uint32_t *list;       /* samples by group; NULL if there is one group */
    struct group *groups;
    size_t n_groups;
    uint64_t *row_start;  /* items of row r: [row_start[r], row_start[r + 1]) */
    uint32_t *items;
    struct tokens own;               /* the current sample's */
    union mt_rollout_values *values; /* of rollouts, those of the current sample */
    struct tokens other, joined; /* if answers are mismatched: of the item that lends its own; prompt and answer */
};

struct filler {
    mt_sampler *s;
    const struct group *g;
    uint32_t *row_of, *next;       /* row of the sample at each place of the order; next row in a row's list */
    uint32_t *head;                /* by free tokens: first row of the list, or NONE */
    uint64_t *bitmap;
    struct item {
        uint64_t place;
        size_t len;
    } *window; /* [WINDOW] */
};

static const uint32_t NONE = UINT32_MAX;

/* The sample at a place of a group's order. */
static uint64_t sample_at(const mt_sampler *s, const struct group *g, uint64_t place)
{
    uint64_t stream = g == s->groups ? STREAM_ORDER : STREAM_GROUP + (uint64_t)(g - s->groups);
    uint64_t i = place - g->first;
    if (s->p.shuffle)
        i = mt_permute(i, g->n_samples, s->p.seed, stream);
    i += g->first;
    if (s->list)
        return s->list[i];
    return s->p.split ? s->p.split->samples[i] : i;
}

static int longest_first(const void *a, const void *b)
{
    const struct item *x = a, *y = b;
    if (x->len != y->len)
        return x->len > y->len ? -1 : 1;
    return (x->place > y->place) - (x->place < y->place);
}

static void push_row(struct filler *k, uint32_t row, size_t n_free)
{
    k->next[row] = k->head[n_free];
    k->head[n_free] = row;
    k->bitmap[n_free / 64] |= UINT64_C(1) << (n_free % 64);
}

/* Takes the row with the fewest free tokens that suffice, or opens one; *n_free: its free tokens. */
static uint32_t take_row(struct filler *k, size_t len, size_t *n_free)
{
    size_t words = k->s->p.seq_len / 64 + 1;
    uint64_t bits = k->bitmap[len / 64] & (~UINT64_C(0) << (len % 64));
    for (size_t w = len / 64; w < words; bits = ++w < words ? k->bitmap[w] : 0) {
        if (!bits)
            continue;
        *n_free = w * 64 + (size_t)__builtin_ctzll(bits);
        uint32_t row = k->head[*n_free];
        k->head[*n_free] = k->next[row];
        if (k->head[*n_free] == NONE)
            k->bitmap[w] &= ~(UINT64_C(1) << (*n_free % 64));
        return row;
    }
    *n_free = k->s->p.seq_len;
    return (uint32_t)k->s->stats.n_rows++;
}

static uint64_t listed(const mt_sampler *s, uint64_t i)
{
    return s->p.split ? s->p.split->samples[i] : i;
}

/* The place of a sample in the list of all. */
static uint64_t place_of(const mt_sampler *s, uint64_t sample)
{
    uint64_t lo = 0, hi = s->p.split ? s->n_samples : 0;
    if (!s->p.split)
        return sample;
    while (hi - lo > 1) {
        uint64_t mid = (lo + hi) / 2;
        *(s->p.split->samples[mid] <= sample ? &lo : &hi) = mid;
    }
    return lo;
}

/* The item whose answer a prompt is mismatched with: the one before it in its block; for a block's first, its last. */
static uint64_t lender_of(const mt_sampler *s, uint64_t sample)
{
    uint64_t n = s->p.micro_batch > 1 ? s->p.micro_batch : s->n_samples, i = place_of(s, sample), first = i / n * n;
    uint64_t end = MT_MIN(first + n, s->n_samples);
    if (end - first == 1 && first)
        return listed(s, first - 1);
    return listed(s, i > first ? i - 1 : end - 1);
}

/* An answer within its item's tokens; first: of those that are trained. */
struct span {
    size_t from, first, to;
};

/* Finds the answers of an item; returns their number. */
static size_t find_answers(const mt_sampler *s, uint64_t item, const uint8_t *trained, size_t n, struct span out[2])
{
    const size_t bounds[] = {0, mt_dataset_chosen(s->p.data, item), n};
    size_t k = 0;
    for (int side = 0; side < 2; side++) {
        struct span a = {bounds[side], bounds[side], bounds[side + 1]};
        while (a.first < a.to && !trained[a.first])
            a.first++;
        if (a.from < a.to)
            out[k++] = a;
    }
    return k;
}

/* Of prompt and lent answer: at most `room`, and nothing if not even one token of the answer has room. */
static size_t mismatched_len(const struct span *own, const struct span *lent, size_t room)
{
    size_t prompt = own->first - own->from, len = prompt + lent->to - lent->first;
    len = MT_MIN(len, room);
    return len > prompt && prompt ? len : 0;
}

/* Tokens that an item takes of a row: its own, and those of mismatched answers. */
static size_t item_len(mt_sampler *s, uint64_t item)
{
    size_t n = mt_dataset_sample(s->p.data, item, NULL, s->p.mismatch ? s->own.trained : NULL), len = n;
    if (!s->p.mismatch || n > s->p.seq_len)
        return n;
    struct span own[2], lent[2];
    uint64_t from = lender_of(s, item);
    size_t n_own = find_answers(s, item, s->own.trained, n, own);
    size_t n_from = mt_dataset_sample(s->p.data, from, NULL, s->other.trained);
    size_t n_lent = find_answers(s, from, s->other.trained, n_from, lent);
    for (size_t i = 0; i < n_own; i++)
        len += mismatched_len(&own[i], &lent[MT_MIN(i, n_lent - 1)], s->p.seq_len - len);
    return len;
}

static int fill_window(struct filler *k, uint64_t first, size_t n, struct mt_err *err)
{
    mt_sampler *s = k->s;
    for (size_t i = 0; i < n; i++) {
        size_t len = item_len(s, sample_at(s, k->g, first + i));
        if (len > s->p.seq_len)
            return mt_fail(err, MT_ERR_INPUT, -E2BIG, "a sample of %zu tokens does not fit rows of %zu", len,
                           s->p.seq_len);
        k->window[i] = (struct item){first + i, len};
        s->n_tokens += len;
    }
    if (s->p.packing)
        qsort(k->window, n, sizeof(k->window[0]), longest_first);
    for (size_t i = 0; i < n; i++) {
        size_t n_free = s->p.seq_len, len = k->window[i].len;
        uint32_t row = s->p.packing ? take_row(k, len, &n_free) : (uint32_t)s->stats.n_rows++;
        k->row_of[k->window[i].place] = row;
        if (s->p.packing && n_free - len > 1) /* a sample of one token trains nothing */
            push_row(k, row, n_free - len);
    }
    return 0;
}

static int collect_rows(mt_sampler *s, const uint32_t *row_of, struct mt_err *err)
{
    s->row_start = mt_arrays_add(&s->arrays, s->stats.n_rows + 2, sizeof(*s->row_start));
    s->items = mt_arrays_add(&s->arrays, s->n_samples, sizeof(*s->items));
    if (s->arrays.failed)
        return mt_fail_nomem(err, "packed rows", s->n_samples * 12);
    for (uint64_t i = 0; i < s->n_samples; i++)
        s->row_start[row_of[i] + 2]++;
    for (uint64_t r = 0; r < s->stats.n_rows; r++) {
        s->stats.max_docs_per_row = MT_MAX(s->stats.max_docs_per_row, s->row_start[r + 2]);
        s->row_start[r + 2] += s->row_start[r + 1];
    }
    s->stats.max_docs_per_row *= mt_dataset_stats(s->p.data)->answers ? s->p.mismatch ? 4 : 2 : 1;
    for (size_t k = 0; k < s->n_groups; k++) {
        const struct group *g = &s->groups[k];
        for (uint64_t i = g->first; i < g->first + g->n_samples; i++)
            s->items[s->row_start[row_of[i] + 1]++] = (uint32_t)sample_at(s, g, i);
    }
    return 0;
}

/* Packs a group into rows, after the rows of the groups before it. */
static int fill_group(struct filler *k, struct group *g, struct mt_err *err)
{
    mt_sampler *s = k->s;
    int rc = 0;
    for (size_t i = 0; i <= s->p.seq_len; i++)
        k->head[i] = NONE;
    memset(k->bitmap, 0, (s->p.seq_len / 64 + 1) * sizeof(*k->bitmap));
    k->g = g;
    g->first_row = s->stats.n_rows;
    for (uint64_t at = 0; at < g->n_samples && !rc; at += WINDOW)
        rc = fill_window(k, g->first + at, (size_t)MT_MIN((uint64_t)WINDOW, g->n_samples - at), err);
    g->n_rows = s->stats.n_rows - g->first_row;
    g->n_visits = MT_MAX((uint64_t)llround(g->weight * (double)g->n_rows), (uint64_t)1);
    s->stats.rows_per_epoch += g->n_visits;
    s->stats.epochs_per_pass = MT_MAX(s->stats.epochs_per_pass, mt_div_up(g->n_rows, g->n_visits));
    return rc;
}

static int pack(mt_sampler *s, struct mt_err *err)
{
    MT_CLOSED_BY(mt_arrays_finish) struct mt_arrays a = {NULL};
    struct filler k = {
        .s = s,
        .window = mt_arrays_add(&a, WINDOW, sizeof(*k.window)),
        .row_of = mt_arrays_add(&a, s->n_samples, sizeof(*k.row_of)),
        .next = mt_arrays_add(&a, s->n_samples, sizeof(*k.next)),
        .head = mt_arrays_add(&a, s->p.seq_len + 1, sizeof(*k.head)),
        .bitmap = mt_arrays_add(&a, s->p.seq_len / 64 + 1, sizeof(*k.bitmap)),
    };
    int rc = a.failed ? mt_fail_nomem(err, "packing", s->n_samples * 8) : 0;
    for (size_t i = 0; i < s->n_groups && !rc; i++)
        rc = fill_group(&k, &s->groups[i], err);
    return rc ?: collect_rows(s, k.row_of, err);
}

/* The group of a weight; adds it if it is new. There are at most as many groups as files. */
static struct group *group_of(mt_sampler *s, double weight)
{
    for (size_t i = 0; i < s->n_groups; i++)
        if (s->groups[i].weight == weight)
            return &s->groups[i];
    s->groups[s->n_groups] = (struct group){.weight = weight};
    return &s->groups[s->n_groups++];
}

/* Sorts the samples into groups by the weight of their file; samples and files are in ascending order. */
static int make_groups(mt_sampler *s, struct mt_err *err)
{
    size_t n_sources = mt_dataset_n_sources(s->p.data);
    const struct mt_data_source *src;
    s->groups = mt_arrays_add(&s->arrays, n_sources, sizeof(*s->groups));
    if (!s->groups)
        return mt_fail_nomem(err, "the sampler", n_sources * sizeof(*s->groups));
    for (int pass = 0; pass < 2; pass++) { /* counts, then fills */
        uint64_t i = 0, at = 0;
        if (pass && s->n_groups == 1)
            break;
        if (pass && !(s->list = mt_arrays_add(&s->arrays, s->n_samples, sizeof(*s->list))))
            return mt_fail_nomem(err, "the sampler", s->n_samples * sizeof(*s->list));
        for (size_t g = 0; pass && g < s->n_groups; g++) {
            s->groups[g].first = at;
            at += s->groups[g].n_samples;
            s->groups[g].n_samples = 0;
        }
        for (size_t k = 0; k < n_sources; k++) {
            src = mt_dataset_source(s->p.data, k);
            struct group *g = group_of(s, s->p.weighted ? src->weight : 1);
            for (; i < s->n_samples && listed(s, i) < src->first + src->stats.n_samples; i++) {
                if (pass)
                    s->list[g->first + g->n_samples] = (uint32_t)listed(s, i);
                g->n_samples++;
            }
        }
    }
    for (size_t g = 0; g < s->n_groups;) /* a file may have no sample on this side of the split */
        if (s->groups[g].n_samples)
            g++;
        else
            memmove(&s->groups[g], &s->groups[g + 1], (--s->n_groups - g) * sizeof(*s->groups));
    return 0;
}

static struct tokens new_tokens(mt_sampler *s)
{
    return (struct tokens){mt_arrays_add(&s->arrays, s->p.seq_len, sizeof(uint32_t)),
                           mt_arrays_add(&s->arrays, s->p.seq_len, 1)};
}

/* A micro-batch, or a row of chunks, for what the data have. */
static int init_batch(struct mt_batch *b, const mt_sampler *s, size_t tokens, size_t docs, struct mt_err *err)
{
    int rc = mt_batch_init(b, tokens, docs, err);
    if (!rc && s->p.teacher)
        rc = mt_batch_init_top(b, mt_teacher_top(s->p.teacher), err);
    return !rc && s->values ? mt_batch_init_rollouts(b, err) : rc;
}

static void fill_stats(mt_sampler *s)
{
    const struct mt_dataset_stats *d = mt_dataset_stats(s->p.data);
    struct mt_sampler_stats *of = &s->stats;
    of->steps_per_epoch = mt_div_up(of->rows_per_epoch, s->p.rows_per_step);
    of->efficiency = (double)s->n_tokens / ((double)of->n_rows * (double)s->p.seq_len);
    of->n_answers = d->answers ? (size_t)d->n_samples * (s->p.mismatch ? 4 : 2) : 0;
}

int mt_sampler_create(mt_sampler **out, const struct mt_sampler_params *p, struct mt_err *err)
{
    MT_CLOSED_BY(mt_sampler_destroy) mt_sampler *s = NULL;
    int rc = MT_NEW(&s, 1, "the sampler", err);
    if (rc)
        return rc;
    s->p = *p;
    s->n_samples = p->split ? p->split->n : mt_dataset_stats(p->data)->n_samples;
    s->own = new_tokens(s);
    s->other = new_tokens(s);
    s->joined = new_tokens(s);
    if (mt_dataset_rollout(p->data, 0))
        s->values = mt_arrays_add(&s->arrays, p->seq_len, sizeof(*s->values));
    rc = s->arrays.failed ? mt_fail_nomem(err, "the sampler", p->seq_len) : make_groups(s, err) ?: pack(s, err);
    if (!rc) {
        fill_stats(s);
        *out = MT_GIVE(s);
    }
    return rc;
}

void mt_sampler_destroy(mt_sampler **s)
{
    if (*s)
        mt_arrays_finish(&(*s)->arrays);
    free(*s);
    *s = NULL;
}

const struct mt_sampler_stats *mt_sampler_stats(const mt_sampler *s)
{
    return &s->stats;
}

/* Of steps from the beginning of an epoch. */
static uint64_t rows_of(const mt_sampler *s, uint64_t steps)
{
    uint64_t per_epoch = s->stats.steps_per_epoch;
    return steps / per_epoch * s->stats.rows_per_epoch + steps % per_epoch * s->p.rows_per_step;
}

void mt_sampler_go_on(mt_sampler *s, uint64_t step, uint64_t rows)
{
    s->from_step = step;
    s->from_rows = rows;
}

uint64_t mt_sampler_rows_before(const mt_sampler *s, uint64_t step)
{
    if (step < s->from_step)
        return rows_of(s, step);
    uint64_t left = s->stats.rows_per_epoch - s->from_rows % s->stats.rows_per_epoch, n = step - s->from_step;
    uint64_t first = mt_div_up(left, s->p.rows_per_step); /* steps to the end of the epoch */
    return s->from_rows + (n < first ? n * s->p.rows_per_step : left + rows_of(s, n - first));
}

uint64_t mt_sampler_step_at(const mt_sampler *s, uint64_t rows)
{
    const uint64_t epoch = s->stats.rows_per_epoch, each = s->p.rows_per_step;
    uint64_t left = epoch - s->from_rows % epoch, n = rows - MT_MIN(rows, s->from_rows);
    if (n <= left)
        return s->from_step + mt_div_up(n, each);
    n -= left;
    return s->from_step + mt_div_up(left, each) + n / epoch * s->stats.steps_per_epoch + mt_div_up(n % epoch, each);
}

int mt_step_data_init(struct mt_step_data *sd, const mt_sampler *s, struct mt_err *err)
{
    size_t chunks = MT_MAX(s->p.chunks, (size_t)1), rows = mt_div_up(s->p.rows_per_step, s->p.micro_batch);
    size_t tokens = s->p.micro_batch * s->p.seq_len, part = mt_div_up(tokens, chunks);
    size_t docs = s->p.micro_batch * s->stats.max_docs_per_row;
    *sd = (struct mt_step_data){.cap = rows * chunks, .chunks = chunks};
    sd->micro = mt_calloc(sd->cap, sizeof(*sd->micro));
    sd->row = chunks > 1 ? mt_calloc(rows, sizeof(*sd->row)) : NULL;
    bool ok = sd->micro && (sd->row || chunks == 1);
    int rc = ok ? 0 : mt_fail_nomem(err, "a step's data", sd->cap * sizeof(*sd->micro));
    for (size_t i = 0; i < rows && !rc; i++)
        rc = init_batch(sd->row ? &sd->row[i] : &sd->micro[i], s, tokens, MT_MIN(docs, tokens), err);
    for (size_t i = 0; i < sd->cap && sd->row && !rc; i++)
        rc = mt_batch_init(&sd->micro[i], part, MT_MIN(docs, part), err);
    if (rc)
        mt_step_data_finish(sd);
    return rc;
}

void mt_step_data_finish(struct mt_step_data *sd)
{
    for (size_t i = 0; sd->micro && i < sd->cap; i++)
        mt_batch_finish(&sd->micro[i]);
    for (size_t i = 0; sd->row && i < sd->cap / sd->chunks; i++)
        mt_batch_finish(&sd->row[i]);
    free(sd->micro);
    free(sd->row);
    *sd = (struct mt_step_data){0};
}

/* An answer of an item, as a document; with the prompt trained, too, if the chosen ones' are to be. */
static int add_answer(mt_sampler *s, const struct mt_doc *as, size_t from, size_t to, struct mt_batch *b,
                      struct mt_err *err)
{
    struct mt_doc doc = *as;
    uint8_t *trained = s->own.trained + from;
    if (from == to)
        return 0;
    while (doc.answer < to - from && !trained[doc.answer])
        doc.answer++;
    if (s->p.train_prompts && doc.role == MT_DOC_CHOSEN)
        memset(trained, 1, doc.answer);
    return mt_batch_add_as(b, &doc, s->own.ids + from, trained, to - from, err);
}

static int add_answers(mt_sampler *s, uint32_t item, size_t n, struct mt_batch *b, struct mt_err *err)
{
    size_t chosen = mt_dataset_chosen(s->p.data, item);
    int rc = add_answer(s, &(struct mt_doc){(int32_t)(2 * item), MT_DOC_CHOSEN, 0}, 0, chosen, b, err);
    return rc ? rc : add_answer(s, &(struct mt_doc){(int32_t)(2 * item + 1), MT_DOC_REJECTED, 0}, chosen, n, b, err);
}

/* A prompt with another item's answer, as document `number`, in at most *room tokens. */
static int add_mismatched(mt_sampler *s, const struct span *own, const struct span *lent, int32_t number, size_t *room,
                          struct mt_batch *b, struct mt_err *err)
{
    size_t prompt = own->first - own->from, len = mismatched_len(own, lent, *room);
    if (!len)
        return 0;
    *room -= len;
    memcpy(s->joined.ids, s->own.ids + own->from, prompt * sizeof(*s->own.ids));
    memset(s->joined.trained, 0, prompt);
    memcpy(s->joined.ids + prompt, s->other.ids + lent->first, (len - prompt) * sizeof(*s->own.ids));
    memcpy(s->joined.trained + prompt, s->other.trained + lent->first, len - prompt);
    struct mt_doc doc = {number, MT_DOC_MISMATCHED, prompt};
    return mt_batch_add_as(b, &doc, s->joined.ids, s->joined.trained, len, err);
}

/* After the answers of an item of n tokens, which are in s->own.ids. */
static int add_mismatches(mt_sampler *s, uint32_t item, const struct span *own, size_t n_own, size_t n,
                          struct mt_batch *b, struct mt_err *err)
{
    struct span lent[2];
    uint64_t from = lender_of(s, item);
    size_t n_from, room = s->p.seq_len - n;
    int rc = mt_dataset_read(s->p.data, from, s->other.ids, s->other.trained, &n_from, err);
    size_t n_lent = rc ? 0 : find_answers(s, from, s->other.trained, n_from, lent);
    for (size_t i = 0; i < n_own && !rc; i++) {
        uint64_t number = 2 * (mt_dataset_stats(s->p.data)->n_samples + item) + i;
        rc = add_mismatched(s, &own[i], &lent[MT_MIN(i, n_lent - 1)], (int32_t)number, &room, b, err);
    }
    return rc;
}

static int add_item(mt_sampler *s, uint32_t item, size_t n, struct mt_batch *b, struct mt_err *err)
{
    struct span own[2];
    /* before prompts may become trained */
    size_t n_own = s->p.mismatch ? find_answers(s, item, s->own.trained, n, own) : 0;
    int rc = add_answers(s, item, n, b, err);
    return rc || !s->p.mismatch ? rc : add_mismatches(s, item, own, n_own, n, b, err);
}

/* Of the document that was added last. */
static int add_values(mt_sampler *s, uint32_t item, struct mt_batch *b, struct mt_err *err)
{
    size_t d = b->n_docs - 1;
    int rc = mt_dataset_read_values(s->p.data, item, s->values, err);
    for (int32_t i = b->doc_rows[d]; i < b->doc_rows[d + 1] && !rc; i++)
        b->values[i] = s->values[b->loss_rows[i] - b->cu_seqlens[d] + 1];
    b->rollout[d] = *mt_dataset_rollout(s->p.data, item);
    return rc;
}

static int add_row(mt_sampler *s, uint64_t row, struct mt_batch *b, struct mt_err *err)
{
    int rc = 0;
    for (uint64_t i = s->row_start[row]; i < s->row_start[row + 1] && !rc; i++) {
        size_t n;
        rc = mt_dataset_read(s->p.data, s->items[i], s->own.ids, s->own.trained, &n, err);
        if (!rc && mt_dataset_stats(s->p.data)->answers)
            rc = add_item(s, s->items[i], n, b, err);
        else if (!rc)
            rc = mt_batch_add(b, s->own.ids, s->own.trained, n, (int32_t)s->items[i], err);
        if (!rc && s->values)
            rc = add_values(s, s->items[i], b, err);
    }
    return rc;
}

/* The row of the i-th visit of an epoch. */
static uint64_t row_at(const mt_sampler *s, uint64_t epoch, uint64_t i)
{
    if (s->p.shuffle && s->n_groups > 1) /* mixes the rows of all groups */
        i = mt_permute(i, s->stats.rows_per_epoch, s->p.seed, STREAM_MIX + epoch);
    const struct group *g = s->groups;
    while (i >= g->n_visits)
        i -= g++->n_visits;
    uint64_t turn = epoch * g->n_visits + i, pass = turn / g->n_rows, at = turn % g->n_rows;
    uint64_t stream = STREAM_EPOCH + pass + ((uint64_t)(g - s->groups) << 40);
    return g->first_row + (s->p.shuffle ? mt_permute(at, g->n_rows, s->p.seed, stream) : at);
}

/* A row in chunks of the same number of tokens, or one more; none is empty. */
static int add_chunks(mt_sampler *s, uint64_t row, struct mt_step_data *out, struct mt_err *err)
{
    size_t chunks = s->p.chunks;
    struct mt_batch *whole = &out->row[out->n / chunks];
    mt_batch_clear(whole);
    int rc = add_row(s, row, whole, err);
    if (!rc && s->p.teacher)
        rc = mt_teacher_fill(s->p.teacher, whole, err);
    if (!rc)
        mt_batch_pad(whole, chunks);
    for (size_t i = 0; i < chunks && !rc; i++) {
        struct mt_batch *b = &out->micro[out->n++];
        mt_batch_cut(b, whole, whole->n_tokens * i / chunks, whole->n_tokens * (i + 1) / chunks);
        mt_batch_seal(b);
        out->n_tokens += b->n_tokens - b->n_padding;
        out->n_loss += b->n_loss;
    }
    return rc;
}

int mt_sampler_fill(mt_sampler *s, uint64_t step, struct mt_step_data *out, struct mt_err *err)
{
    const uint64_t all = s->stats.rows_per_epoch;
    uint64_t at = mt_sampler_rows_before(s, step), epoch = at / all, first = at % all;
    uint64_t end = MT_MIN(first + s->p.rows_per_step, all);
    out->n = out->n_tokens = out->n_loss = 0;
    out->step = step;
    for (uint64_t r = first; r < end && s->p.chunks > 1; r++) {
        int rc = add_chunks(s, row_at(s, epoch, r), out, err);
        if (rc)
            return rc;
    }
    for (uint64_t r = first; r < end && s->p.chunks <= 1;) {
        struct mt_batch *b = &out->micro[out->n++];
        int rc = 0;
        mt_batch_clear(b);
        for (size_t k = 0; k < s->p.micro_batch && r < end && !rc; k++, r++)
            rc = add_row(s, row_at(s, epoch, r), b, err);
        mt_batch_seal(b);
        if (!rc && s->p.teacher)
            rc = mt_teacher_fill(s->p.teacher, b, err);
        if (rc)
            return rc;
        out->n_tokens += b->n_tokens;
        out->n_loss += b->n_loss;
    }
    return 0;
}

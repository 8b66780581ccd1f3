/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mem.h"
#include "data/shard.h"
#include "settings/settings.h"

/** A token that a teacher thinks likely; id MT_NO_TOKEN, logp -inf: the model has no such token. */
struct mt_top {
    uint32_t id;
    float logp;
};
#define MT_NO_TOKEN UINT32_MAX

/** A rollout to its objective; NaN: not known. */
struct mt_rollout {
    double advantage; /* NaN: its tokens have their own */
    double reward, deviation; /* its own, and that of its group's rewards */
    bool truncated, left_out, dropped; /* cut off; its tokens weigh nothing; nor does its reward count */
    int noise; /* which of mt_mezo_variants() has sampled it; -1: the weights as they are */
};

/** What a document is to an objective. */
enum mt_doc_role { MT_DOC_PLAIN, MT_DOC_CHOSEN, MT_DOC_REJECTED, MT_DOC_MISMATCHED };

/**
 * One micro-batch in host memory: documents one after the other, without padding. Capacities are fixed by
 * mt_batch_init(). Targets are shifted here: token i predicts token i + 1 of its document, and the last
 * token of a document predicts nothing.
 */
struct mt_batch {
    size_t cap_tokens, cap_docs;
    struct mt_arrays arrays; /* all that is not borrowed */
    size_t n_tokens, n_docs, max_doc_len;
    size_t row_before, doc_before, doc_after; /* of a chunk: tokens of its row before it, of its first document before
                              it, from which positions and max_doc_len count, and of its last document after it */
    size_t n_padding;      /* of the last tokens, those of mt_batch_pad(): no count of tokens has them */
    int learner;           /* whose: an index of the run's learners; 0 unless it says so */
    size_t n_loss;         /* rows with a target */
    int32_t *ids;          /* [n_tokens] */
    int32_t *positions;    /* [n_tokens] from 0 in each document */
    int32_t *cu_seqlens;   /* [n_docs + 1] */
    int32_t *loss_rows;    /* [n_loss] ascending token indices */
    int32_t *targets;      /* [n_loss] */
    int32_t *sample;       /* [n_docs] index of the sample in the data set, for per-sample losses; of answers 2i and
                              2i + 1 are the chosen and the rejected one of sample i, and behind those of all n samples
                              2 (n + i) and 2 (n + i) + 1 the mismatched answers to its prompt */
    uint8_t *role;         /* [n_docs] enum mt_doc_role; of a pair, the rejected answer follows the chosen one */
    int32_t *doc_rows;     /* [n_docs + 1] first loss row of each document, and n_loss */
    int32_t *answer_rows;  /* [n_docs] first loss row of its answer: later than that of the document if its prompt is
                              trained, too */
    size_t n_runs;         /* tokens sorted by id, for the embedding's backward */
    int32_t *run_ids;      /* [n_runs] */
    int32_t *run_starts;   /* [n_runs + 1] */
    int32_t *order;        /* [n_tokens] */
    int32_t *scratch;      /* for the sort */
    size_t n_top;          /* tokens of a teacher for each loss row; 0: there is no teacher */
    struct mt_top *top;    /* [n_loss, n_top] its likeliest, falling */
    double *rest;          /* [n_loss] probability of all others together */
    union mt_rollout_values *values; /* of rollouts: [n_loss] of the targets; NULL: the data are others */
    struct mt_rollout *rollout;      /* [n_docs] */
    struct mt_cache_shape cache; /* of generation; slots 0: none. Then documents go on: */
    int32_t *past;         /* [n_docs] tokens of the document that the cache has; positions count from there, and
                              max_doc_len is with them */
    int32_t *table[MT_N_CACHE_KINDS]; /* [n_docs, cache.ld] blocks of the document: that of token i is i / block % ld */
};

int mt_batch_init(struct mt_batch *b, size_t cap_tokens, size_t cap_docs, struct mt_err *err);
/** Makes room for a teacher's tokens: 8 n_top + 8 bytes of each token. */
int mt_batch_init_top(struct mt_batch *b, size_t n_top, struct mt_err *err);
/** Makes room for values of rollouts: 16 bytes of each token. */
int mt_batch_init_rollouts(struct mt_batch *b, struct mt_err *err);
void mt_batch_finish(struct mt_batch *b);
void mt_batch_clear(struct mt_batch *b);
/** Appends a document; trained[i] != 0: token i is a target, so the row of the token before it has a loss; NULL: all
 * are. -ENOSPC: it does not fit. */
int mt_batch_add(struct mt_batch *b, const uint32_t *ids, const uint8_t *trained, size_t n,
                 int32_t sample, struct mt_err *err);
/** What a document is to the objective. */
struct mt_doc {
    int32_t sample;
    enum mt_doc_role role;
    size_t answer; /* tokens before its answer */
};
int mt_batch_add_as(struct mt_batch *b, const struct mt_doc *as, const uint32_t *ids, const uint8_t *trained, size_t n,
                    struct mt_err *err);
/** Makes *chunk of tokens [from, to) of a micro-batch of one row, which stays: a teacher's tokens are the row's own, and
 * roles, answers and rollouts are of the row alone. */
void mt_batch_cut(struct mt_batch *chunk, const struct mt_batch *row, size_t from, size_t to);
/** Lengthens the last document to n tokens of the micro-batch, by tokens that nothing depends on. */
void mt_batch_pad(struct mt_batch *b, size_t n);
/** Makes room for what documents with a cache have. */
int mt_batch_init_cache(struct mt_batch *b, const struct mt_cache_shape *cache, struct mt_err *err);
/** Appends the next tokens of a text, of which there are `past` before; the tokens after the last `draws` of them are to
 * be drawn, as targets of loss rows. The caller sets table[][] of the document, if there is a cache. */
int mt_batch_go_on(struct mt_batch *b, size_t past, const uint32_t *ids, size_t n, size_t draws, struct mt_err *err);
/** Sorts the tokens by id (stable); call when all documents are added. */
void mt_batch_seal(struct mt_batch *b);

/** The micro-batches of one optimizer step. */
struct mt_step_data {
    struct mt_batch *micro; /* [cap] */
    size_t cap, n;          /* n: micro-batches of this step, fewer in the last step of an epoch */
    struct mt_batch *row;   /* [cap / chunks] of which micro-batches are chunks, in order; NULL: they have whole rows */
    size_t chunks;
    uint64_t step;          /* number of the step, from 0 */
    size_t n_tokens, n_loss; /* sums over the n micro-batches, without padding */
};
/** Micro-batches of what mt_step_whole() has. */
static inline size_t mt_step_chunks(const struct mt_step_data *d)
{
    return d->row ? d->chunks : 1;
}
/** The *n batches where the step's documents are whole: its rows, or the micro-batches. */
static inline const struct mt_batch *mt_step_whole(const struct mt_step_data *d, size_t *n)
{
    *n = d->n / mt_step_chunks(d);
    return d->row ? d->row : d->micro;
}

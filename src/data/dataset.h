/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "config/config.h"
#include "data/batch.h"
#include "data/notes.h"

/** The byte tokenizer: ids 0-255 are the bytes, then these. */
enum { MT_BYTE_BOS = 256, MT_BYTE_EOS = 257, MT_BYTE_PAD = 258, MT_BYTE_VOCAB = 259 };

struct mt_dataset_params {
    const struct mt_cfg_list *files; /* of `key` */
    enum mt_cfg_format format;
    const char *tokenizer;           /* "byte", or "model": the tokenizer of model_dir */
    enum mt_cfg_overlong overlong;
    size_t seq_len;
    size_t vocab;                    /* of the model: a larger id is an error */
    const char *cache_dir;           /* of token shards; created if missing */
    const char *model_dir;           /* NULL if the data need no tokenizer */
    const char *template_;           /* chat template: "model", a built-in name, a file; NULL = "model" */
    enum mt_cfg_train_on train_on;
    int n_processes;                 /* that make tokens; 0 means 1 */
    struct mt_cfg_amount max_untrained; /* samples, or a share of all, that may have no trained token */
    size_t max_samples; /* of each file; 0: all */
    const struct mt_cfg_list *columns; /* data.columns; NULL: none */
    const char *key; /* that names the files, for messages: "data.eval", say; NULL: data.train */
    const struct mt_policy_keys *policy; /* what advantages of rollouts follow from */
    bool prepared_only; /* -ENOENT where the cache lacks a shard, instead of making it */
};

/**
 * A tokenised data set: memory-mapped token shards, one for each file (made when missing or stale), and a view of
 * their samples in which none is longer than seq_len. Immutable once opened: any thread may read.
 */
typedef struct mt_dataset mt_dataset;

struct mt_dataset_stats {
    uint64_t n_samples, n_tokens, n_trained, max_len; /* n_trained: tokens that get a loss */
    uint64_t n_overlong, n_dropped, n_truncated, n_split; /* whole samples */
    uint64_t n_untrained; /* samples left out, as none of their tokens has a loss */
    uint64_t longest;     /* tokens of the longest sample, before it is cut */
    uint64_t n_equal;     /* pairs left out, as their answers are equal */
    bool answers;         /* a sample is an item: a chosen and a rejected answer, or a rated one (shard.h) */
    bool rollouts;        /* samples have rewards or advantages (mt_batch.values) */
    bool from_cache;
    const char *format; /* the format detected; "mixed" if files differ */
};

/** A file of the data set: its samples are [first, first + stats.n_samples). */
struct mt_data_source {
    const char *path;
    double weight; /* how often an epoch visits each sample */
    uint64_t first;
    struct mt_dataset_stats stats;
};

int mt_dataset_open(mt_dataset **out, const struct mt_dataset_params *p, struct mt_err *err);
void mt_dataset_destroy(mt_dataset **d);
const struct mt_dataset_stats *mt_dataset_stats(const mt_dataset *d);
/** What was noticed of its samples. It has been logged. */
const struct mt_notes *mt_dataset_notes(const mt_dataset *d);
size_t mt_dataset_n_sources(const mt_dataset *d);
const struct mt_data_source *mt_dataset_source(const mt_dataset *d, size_t i);
/** XXH3 of tokens, loss masks and options: kept in checkpoints, compared on resume. d NULL: 0. */
uint64_t mt_dataset_hash(const mt_dataset *d);
/** Tokens of a sample (borrowed) and, into `trained` (caller's, seq_len bytes, may be NULL), its mask. */
size_t mt_dataset_sample(const mt_dataset *d, uint64_t i, const uint32_t **ids, uint8_t *trained);
/** Of answers: tokens of the chosen one, which comes first; the rest are the rejected one's. */
size_t mt_dataset_chosen(const mt_dataset *d, uint64_t i);
/** XXH3 of a sample's tokens and mask; of answers, of the chosen one or of the other one. By it results for a sample are
 * found again, wherever it lies. */
uint64_t mt_dataset_sample_hash(const mt_dataset *d, uint64_t i, bool chosen);
/** Copies a sample to `ids` and `trained` (the caller's, of seq_len elements); *n: its tokens. For training: fails if
 * the token cache can no longer be read, where a mapping would end the process. */
int mt_dataset_read(const mt_dataset *d, uint64_t i, uint32_t *ids, uint8_t *trained, size_t *n, struct mt_err *err);
/** Of rollouts that were opened with a policy: what sample i is to its objective; else NULL. */
const struct mt_rollout *mt_dataset_rollout(const mt_dataset *d, uint64_t i);
/** Reads the values of its tokens to values[seq_len]. */
int mt_dataset_read_values(const mt_dataset *d, uint64_t i, union mt_rollout_values *values, struct mt_err *err);
/** The place that a sample comes from, "data.jsonl:12"; returns buf. */
const char *mt_dataset_place(const mt_dataset *d, uint64_t i, char *buf, size_t len);

/** One side of a split: samples are held out by a hash of their tokens, so that the choice is the same in every run. */
struct mt_split {
    uint32_t *samples; /* ascending */
    uint64_t n;
    size_t cap;
};
/** `eval` is "" (none), "N" samples or "R%"; fills both sides. */
int mt_dataset_split(const mt_dataset *d, const char *eval, struct mt_split *train,
                     struct mt_split *held_out, struct mt_err *err);
void mt_split_finish(struct mt_split *s);

struct mt_sampler_params {
    const mt_dataset *data;
    const struct mt_split *split; /* NULL: all samples; borrowed */
    size_t seq_len;
    size_t rows_per_step;  /* sequences of one optimizer step */
    size_t micro_batch;    /* sequences of one micro-batch; the last one of a step may have fewer */
    bool packing, shuffle; /* packing: best fit decreasing in a window; else one sample a row */
    uint64_t seed;
    bool weighted; /* visit samples as often as the weights of their files say; else once an epoch */
    bool train_prompts; /* of preferences: prompts of chosen answers have loss rows, too */
    bool mismatch;      /* of preferences: beside each answer a document of its prompt and another item's answer */
    struct mt_teacher *teacher; /* whose tokens loss rows have (mt_batch.top); NULL: none; borrowed */
    size_t chunks;      /* of a row, equal ones, each a micro-batch, if micro_batch is 1; 0 or 1: rows are whole */
};

/**
 * Decides which rows each step has. Rows (one or more samples, at most seq_len tokens in all) are made once, in a
 * fixed order; each epoch visits them in another counter-based permutation, so that any step is found in O(1) and a
 * resume needs nothing but the step's number; with other rows_per_step than before, also the number of rows
 * (mt_sampler_go_on()).
 *
 * Weights: files of the same weight w are packed together. An epoch visits round(w R) of their R rows, pass after pass,
 * each pass in another order, so that no row is visited twice before all are visited once.
 *
 * Mismatched answers (MT_DOC_MISMATCHED): answers move on by one item within blocks of micro_batch items in the order
 * of the data, as in TRL's KTO; with a micro-batch of one, within all items. So an item has the same one in every epoch.
 * It lies in the item's row, after its own answers, and is cut to what the row has room for.
 */
typedef struct mt_sampler mt_sampler;

int mt_sampler_create(mt_sampler **out, const struct mt_sampler_params *p, struct mt_err *err);
void mt_sampler_destroy(mt_sampler **s);
/** What rows are made of the samples. */
struct mt_sampler_stats {
    uint64_t n_rows;
    uint64_t rows_per_epoch;  /* that an epoch visits: n_rows, unless weights say otherwise */
    uint64_t steps_per_epoch;
    uint64_t epochs_per_pass; /* epochs, from the first one on, that visit each row; 1 unless a weight is below 1 */
    double efficiency;        /* tokens in rows / (rows * seq_len) */
    size_t max_docs_per_row;  /* most documents in a row: a micro-batch needs a capacity of micro_batch times that */
    size_t n_answers;         /* by mt_batch.sample, mismatched ones included; 0: the data have none */
};
const struct mt_sampler_stats *mt_sampler_stats(const mt_sampler *s);
/** Rows, of all epochs, before a step. */
uint64_t mt_sampler_rows_before(const mt_sampler *s, uint64_t step);
/** The first step that begins at or after so many rows, no earlier than the one that mt_sampler_go_on() names. */
uint64_t mt_sampler_step_at(const mt_sampler *s, uint64_t rows);
/** From `step` on, steps have the rows that follow on the first `rows`: those before had other numbers of rows. */
void mt_sampler_go_on(mt_sampler *s, uint64_t step, uint64_t rows);
/** Allocates buffers for a step; release them with mt_step_data_finish(). */
int mt_step_data_init(struct mt_step_data *sd, const mt_sampler *s, struct mt_err *err);
void mt_step_data_finish(struct mt_step_data *sd);
/** Fills the micro-batches of step `step` (from 0, over all epochs). The last step of an epoch is smaller if its rows
 * are not a multiple of rows_per_step. */
int mt_sampler_fill(mt_sampler *s, uint64_t step, struct mt_step_data *out, struct mt_err *err);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/json.h"
#include "config/config.h"
#include "data/shard.h"

/**
 * Builds samples of a shard without the data helper: of token ids, and of text or pairs of strings with the byte
 * tokenizer. samples.h reads files into one.
 */
struct mt_sample_reader {
    enum mt_cfg_format format; /* AUTO until the first sample decides */
    bool bytes;                /* the byte tokenizer */
    size_t vocab;              /* of the model: a larger id is an error */
    const struct mt_cfg_list *columns; /* of mt_source_file */
    size_t max_samples;                /* no more than these are read; 0: all */
    struct mt_shard_writer *out;
    struct mt_shard_header header; /* counts and format, for mt_shard_writer_commit() */
    uint32_t *ids;                 /* of the current sample */
    uint8_t *mask;
    union mt_rollout_values *values; /* of a rollout */
    size_t n, cap_ids, cap_mask, cap_values;
};
/** Adds a token to the sample that is being read. */
int mt_sample_push(struct mt_sample_reader *r, uint32_t id, bool trained, struct mt_err *err);
/** Adds the bytes of a string as tokens. */
int mt_sample_push_bytes(struct mt_sample_reader *r, const char *text, size_t len, bool trained, struct mt_err *err);
/** Adds a prompt and an answer with the tokens that begin and end a text; the answer and the end are trained. */
int mt_sample_push_text(struct mt_sample_reader *r, const char *prompt, size_t len, const char *answer,
                        struct mt_err *err);
/** Adds an array of token ids, the sample's member `name`; NULL is an error. */
int mt_sample_push_ids(struct mt_sample_reader *r, const cJSON *ids, const char *name, bool trained, const char *where,
                       struct mt_err *err);
/** Counts a sample of n tokens of which `trained` are. false: none is, and it is counted as left out. */
bool mt_sample_counts(struct mt_sample_reader *r, size_t n, uint64_t trained, const char *where);
/** Ends the sample that is being read, a rollout with its values. Without a trained token it is left out. */
int mt_sample_end(struct mt_sample_reader *r, const char *where, uint64_t place, struct mt_err *err);
/** Strings need the byte tokenizer here, and a vocabulary that has it. */
int mt_sample_needs_bytes(struct mt_sample_reader *r, const char *where, struct mt_err *err);
/** Adds a place to a list of at most three, truncated to the size of the buffer. */
void mt_note_place(char *list, size_t size, const char *where);

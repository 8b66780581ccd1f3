/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_DATA_SAMPLES_H
#define MT_DATA_SAMPLES_H

#include "config/config.h"
#include "data/shard.h"

/**
 * What turns a file into samples of a shard without the data helper: token ids, and text and pairs of
 * strings as bytes.
 */
struct mt_sample_reader {
    enum mt_cfg_format format; /* detected by the first sample, AUTO before that */
    bool bytes;                /* the byte tokenizer */
    size_t vocab;              /* of the model: a larger id is an error */
    struct mt_shard_writer *out;
    struct mt_shard_header header; /* counts and format, for mt_shard_writer_commit() */
    uint32_t *ids;                 /* the sample under way */
    uint8_t *mask;
    size_t n, cap_ids, cap_mask;
};

/** Reads one file: .jsonl (an object a line), .json (an array), anything else: plain text. */
int mt_samples_read_file(struct mt_sample_reader *r, const char *path, struct mt_err *err);
void mt_samples_finish(struct mt_sample_reader *r);
const char *mt_format_name(enum mt_cfg_format f);
/** Adds a place to a list of at most three, truncated where the buffer is full. */
void mt_note_place(char *list, size_t size, const char *where);

#endif

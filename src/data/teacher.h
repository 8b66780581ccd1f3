/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "data/dataset.h"

/**
 * The likeliest tokens of a teacher for each trained token of a data set: a file beside it, made by
 * `megatrain score --top`. Little-endian: struct mt_teacher_header; for each sample its hash
 * (mt_dataset_sample_hash()), its first row, its number of rows and the XXH3 of these rows, 8 bytes each; then rows:
 * `top` times a token and its log-probability, falling, and the probability of all other tokens together.
 */
#define MT_TEACHER_MAGIC "MTTOPK2"
struct mt_teacher_header {
    char magic[8];
    uint32_t top, vocab;
    uint64_t n_samples, n_rows;
    uint64_t key;       /* of what it was made by; 0 once it is complete */
    uint64_t tokenizer; /* hash of the tokenizer's tokens and ids; 0: not known */
    uint64_t entries;   /* XXH3 of the samples' part, once complete */
    uint64_t sum;       /* XXH3 of the header up to here */
};

/** Bytes of a trained token, and of the file. */
size_t mt_teacher_row_bytes(size_t top);
uint64_t mt_teacher_bytes(uint64_t n_samples, uint64_t n_rows, size_t top);

/** Writes one. Rows may come in any order; a file of the same key that is not complete is gone on with. */
typedef struct mt_teacher_out mt_teacher_out;
struct mt_teacher_params {
    const char *path;
    const mt_dataset *data;
    size_t top, vocab;
    uint64_t tokenizer; /* as in the header */
    uint64_t key;
    bool goes_on; /* some of its rows are said to be there: without a file of the key, -ENOENT */
};
int mt_teacher_create(mt_teacher_out **out, const struct mt_teacher_params *p, struct mt_err *err);
/** All rows of a sample: token[n, top], rest[n]. */
int mt_teacher_write(mt_teacher_out *t, uint64_t sample, const struct mt_top *token, const float *rest, size_t n,
                     struct mt_err *err);
/** What was written is on the drive. */
int mt_teacher_sync(mt_teacher_out *t, struct mt_err *err);
/** Marks it complete, and closes it in any case. */
int mt_teacher_close(mt_teacher_out **t, bool complete, struct mt_err *err);

/** A teacher of a data set's samples. One thread at a time may read it. */
typedef struct mt_teacher mt_teacher;
/**
 * -EINVAL: the file is damaged, incomplete, of another tokenizer, or has fewer tokens than `top`; -ENODATA: it is of
 * other data. Teacher and model may have tables of different lengths, as padding makes them, if both are known to have
 * the same tokenizer: tokens beyond the model's own count among all others.
 */
int mt_teacher_open(mt_teacher **out, const struct mt_teacher_params *p, struct mt_err *err);
void mt_teacher_close_read(mt_teacher **t);
/** Tokens of a row: `top` as it was opened. */
size_t mt_teacher_top(const mt_teacher *t);
/** Reads top and rest of the batch's loss rows. -EIO: the file is damaged, has shrunk or cannot be read; where, is in
 * the message. */
int mt_teacher_fill(mt_teacher *t, struct mt_batch *b, struct mt_err *err);

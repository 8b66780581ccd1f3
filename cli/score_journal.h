/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/err.h"

/** A trained token of a sample. */
struct score_token {
    float loss;      /* -log p */
    int32_t correct; /* whether it was the likeliest token */
};

/** A scored sample: tokens [first, first + n) of the journal. */
struct score_sample {
    size_t first, n;
    bool done;
};

/**
 * What `score` has computed, in memory and in a file, so that a call that was killed loses a step at most: a header,
 * then a block for each step, of its samples' numbers, lengths and tokens, with a checksum. A block that is not whole is cut
 * off. Zeroed, it may be closed.
 */
struct score_journal {
    FILE *f;
    const char *path; /* borrowed */
    struct score_sample *sample; /* [n_samples] */
    size_t n_samples;
    struct score_token *token;
    size_t n_tokens, cap_tokens;
};

/** Opens or creates the file and takes in what it holds. key: of model, data and options; -EEXIST: the file is of
 * others. */
int score_journal_open(struct score_journal *j, const char *path, uint64_t key, size_t n_samples, struct mt_err *err);
/** A step's samples, one after the other: their numbers, their numbers of tokens, and their tokens. Written and synced. */
struct score_block {
    uint32_t n_samples, n_tokens;
    const uint32_t *sample, *length;
    const struct score_token *token;
};
int score_journal_add(struct score_journal *j, const struct score_block *b, struct mt_err *err);
void score_journal_close(struct score_journal *j);

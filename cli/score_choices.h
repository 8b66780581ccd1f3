/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "data/dataset.h"
#include "score_journal.h"

/** A sample as one of several completions of a prompt: the choices of a question, or drawn samples. */
struct score_choice {
    size_t question; /* number of the prompt */
    bool best;       /* the likeliest of its prompt's completions; of equal ones the first */
    bool best_mean;  /* the same by log-probability per token */
};

/** Samples of one record (requests of lm-evaluation-harness) are a question's. Where each record is one sample,
 * neighbouring ones whose tokens before the first trained one are equal have one prompt. *out: by sample; the caller
 * frees it. What is not done is the best of nothing. */
int score_choices_find(struct score_choice **out, const mt_dataset *d, const struct score_journal *j,
                       struct mt_err *err);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "data/dataset.h"

/** What `data stats` tells of answers with a preference. Lengths are trained tokens, without those of the prompt. */
struct cli_pairs {
    uint64_t n;          /* pairs */
    uint64_t n_equal;    /* pairs left out, as their answers are equal */
    uint64_t n_longer, n_ties; /* pairs whose chosen answer is longer; whose answers are equally long */
    uint64_t n_reversed; /* pairs whose answers another pair has the other way round */
    uint64_t n_good, n_bad;              /* answers: chosen or rated good; rejected or rated bad */
    uint64_t good_tokens, bad_tokens;    /* of these */
};

/** Counts; all 0 if the data have no answers. */
int cli_pairs_count(const mt_dataset *d, struct cli_pairs *out, struct mt_err *err);
void cli_pairs_print(const struct cli_pairs *p);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdio.h>

#include "base/json.h"
#include "machine/measure.h"
#include "train/setup.h"

/**
 * The speed of a shared machine changes from second to second. To separate this from errors of predictions, the
 * operations of a step are timed by themselves between the steps of a run, and each step is predicted with the times
 * right before and after it. The file has a line with the operations, then one line between any two steps:
 *
 *     {"ops": ["gemm_nt.f32.0.512x512x192:...", ...]}
 *     {"step": 3, "seconds": [0.000171, ...]}
 *
 * With train.blocks, each block has both, after the one before.
 */
struct cli_rates {
    FILE *file; /* NULL: not requested */
    mt_turns *turns;
    double *rounds;  /* seconds of the [n] operations in each round */
    double *seconds; /* [n] their means, in the same allocation */
    size_t n;
    int rc;
    struct mt_err err;
};

/**
 * Opens the file, and measures and writes the times before the next step. more: the file has earlier blocks of the run,
 * after which come this one's operations and lines.
 */
int cli_rates_open(struct cli_rates *r, const struct mt_setup *s, const char *path, uint64_t step, bool more,
                   struct mt_err *err);
/** Measures and writes the times after a step, if requested; cli_rates_close() returns the first error. */
void cli_rates_step(struct cli_rates *r, uint64_t step);
/** Closes the file; returns the first error since it was opened. Accepts a zeroed struct. */
int cli_rates_close(struct cli_rates *r, struct mt_err *err);

/** The contents of the file; one with several blocks is refused. */
struct rates_log {
    struct mt_metered *ops;
    size_t n_ops;
    cJSON *lines; /* owned */
};
int rates_log_read(struct rates_log *out, const char *path, struct mt_err *err);
void rates_log_finish(struct rates_log *l);
/** The list of times right after the step, at least [n_ops], or NULL. */
const cJSON *rates_log_after(const struct rates_log *l, int step);

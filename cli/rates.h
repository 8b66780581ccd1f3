/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLI_RATES_H
#define CLI_RATES_H

#include <stdio.h>

#include "machine/measure.h"
#include "train/setup.h"

/**
 * A machine that others share is faster in one second and slower in the next. To tell that from what is wrong with the
 * predictions, a step's operations are timed on their own between the steps of a run, and each step is predicted with
 * what was measured right before and right after it. A line for the operations, then one between any two steps:
 *
 *     {"ops": ["gemm_nt.f32.0.512x512x192:...", ...]}
 *     {"step": 3, "seconds": [0.000171, ...]}
 */
struct cli_rates {
    FILE *file; /* NULL: not wanted */
    mt_turns *turns;
    double *sum, *one; /* [n] */
    size_t n;
    int rc;
    struct mt_err err;
};

/** Opens the file and writes what is measured before the first step. */
int cli_rates_open(struct cli_rates *r, const struct mt_setup *s, const char *path, struct mt_err *err);
/** Writes what is measured right after the step, where that is wanted; cli_rates_close() tells what went wrong. */
void cli_rates_step(struct cli_rates *r, uint64_t step);
/** What went wrong on the way, if anything. Accepts what was never opened. */
int cli_rates_close(struct cli_rates *r, struct mt_err *err);

/** The file, read. */
struct rates_log {
    struct mt_metered *ops;
    size_t n_ops, n_lines, cap_lines;
    struct rates_line {
        int step;
        double *seconds; /* [n_ops] */
    } *lines;
};
int rates_log_read(struct rates_log *out, const char *path, struct mt_err *err);
void rates_log_finish(struct rates_log *l);
/** Those measured right after the step, or NULL. */
const double *rates_log_after(const struct rates_log *l, int step);

#endif

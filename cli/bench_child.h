/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLI_BENCH_CHILD_H
#define CLI_BENCH_CHILD_H

#include "sweep/sweep.h"

/** One run of a sweep's job in a child process, so that a crash is a row of the table and not the end of the sweep. */
struct bench_child {
    const char *ini, *dir, *log; /* configuration; the run's folder; the file for its output */
    const char *steps;           /* most steps, or NULL */
    const char *rates;           /* file for rates between its steps, or NULL */
    int warmup_steps;            /* first steps that are not measured */
};
/**
 * Runs it and fills *r: status ("ok", "does not fit", "exit N", "signal N"), peak memory and, if it is ok, the medians
 * over its measured steps. *interrupted: it was asked to stop. A failure of the job is its status, not an error.
 */
int bench_child_run(struct mt_sweep_run *r, const struct bench_child *c, bool *interrupted, struct mt_err *err);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "sweep/sweep.h"

/** One run of a sweep's job, or of several on one base, in a child process, so that a crash is a row of the table and
 * not the end of the sweep. */
struct bench_child {
    const char (*ini)[3200], (*dir)[3300]; /* [n] configurations; the runs' folders, which n > 1 configurations name */
    size_t n;
    const char *log;             /* file for its output */
    const char *steps;           /* most steps, or NULL */
    const char *rates;           /* file for rates between its steps, or NULL */
    int warmup_steps, all_steps; /* first steps that are not measured; with them */
};
/**
 * Runs it and fills r[n]: status ("ok", "does not fit", "exit N", "signal N"), peak memory and, if it is ok, the
 * medians over its measured steps. *interrupted: it was asked to stop. A failure of the job is its status, not an
 * error. Of several, one whose training fails leaves the others "ok"; any other failure is that of all.
 */
int bench_child_run(struct mt_sweep_run *r, const struct bench_child *c, bool *interrupted, struct mt_err *err);

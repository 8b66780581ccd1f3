/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "plan_print.h"
#include "sweep/sweep.h"

/** Files of measurements taken with a run. */
struct bench_measured {
    char machine[3200]; /* a profile taken right before the run */
    char rates[3200];   /* times of operations between its steps (rates.h) */
    char metrics[3400]; /* metrics.jsonl of the run */
};

/**
 * Predicts each step of a run after the first `skip`, for the view's choice: with the profile, and the times of the
 * operations right before and after the step. Sets run->predicted and run->ratio; 0 if a measurement is missing.
 */
int bench_predict_steps(struct mt_sweep_run *run, const struct plan_view *v, const struct bench_measured *m, int skip,
                        struct mt_err *err);

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLI_BENCH_PREDICT_H
#define CLI_BENCH_PREDICT_H

#include "plan_print.h"
#include "sweep/sweep.h"

/** What was measured of the machine beside a run. */
struct bench_measured {
    char machine[3200]; /* a profile, of right before the run */
    char rates[3200];   /* operations between its steps (rates.h) */
    char metrics[3400]; /* the run's own */
};

/**
 * Predicts each step of a run, but the first `skip`, for the view's choice: with the profile, and the operations as they
 * were right before and after the step. Fills run->predicted and run->ratio; 0 where something was not measured.
 */
int bench_predict_steps(struct mt_sweep_run *run, const struct plan_view *v, const struct bench_measured *m, int skip,
                        struct mt_err *err);

#endif

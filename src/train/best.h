/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "train/control.h"

/** Which evaluation is the best: eval.best_by, a measure's name, which mt_resolve_numerics() has accepted. */

/** What an evaluation is compared by; NaN: it was not measured. */
double mt_best_value(const char *by, const struct mt_eval_report *r);
/** Whether value is better than `best` so far (NaN: there is none); never, if it is not finite. */
bool mt_best_is_better(const char *by, double value, double best);
/** As a run begins or goes on: what was the best by another measure, or on other data, counts no more, and is not kept.
 * data: mt_inputs_eval_hash(). */
void mt_best_begin(struct mt_train_state *st, const char *by, uint64_t data);

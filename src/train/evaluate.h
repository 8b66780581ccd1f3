/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "train/control.h"

/**
 * Evaluates a learner on data.eval, then on eval.sets. The engine must be flushed.
 * control: hears of requests after each step of it (mt_train_heed()); NULL: nobody asks.
 * reference: log-probabilities of data.eval under the reference, by sample; NULL: without.
 * *unread: on failure, whether the data could not be read or there was no memory for them, which says nothing of the
 * engine.
 */
int mt_evaluate(struct mt_session *s, size_t learner, struct mt_train_control *control, const double *reference,
                struct mt_eval_report *out, bool *unread, struct mt_err *err);

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_TRAIN_REFERENCE_H
#define MT_TRAIN_REFERENCE_H

#include "checkpoint/state.h"
#include "train/session.h"

/**
 * Log-probabilities of all answers under the model as it is before the first step: by the program that evaluates, over
 * the very micro-batches of the steps, so that the first step finds no difference in any bit. They are part of the
 * training state, since later the weights that they are of may be gone.
 *
 * Sets a learner's st->reference, unless it is there already (of the checkpoint that the run goes on from) or the objective needs
 * none. First the training data, by mt_batch.sample, then the evaluation's. -ECANCELED: interrupted.
 */
int mt_reference_make(struct mt_session *s, size_t learner, struct mt_train_state *st, struct mt_err *err);
/** Of the training data; NULL: none. */
const double *mt_reference_of_training(const struct mt_train_state *st);
/** Of the evaluation's; NULL: none. */
const double *mt_reference_of_evaluation(const struct mt_session *s, size_t learner, const struct mt_train_state *st);

#endif

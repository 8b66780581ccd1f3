/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "checkpoint/state.h"
#include "train/session.h"

/**
 * Log-probabilities of all answers under the reference (preference.reference), by the program that evaluates, over the
 * very micro-batches of the steps. Of the model as it is before the first step they are so equal to the first step's own in
 * every bit. They are part of the training state, since later the weights that they are of may be gone.
 *
 * A learner's st->reference: first the training data, by mt_batch.sample, then the evaluation's. It stays as it is if it
 * is there already (of the checkpoint that the run goes on from), or if the objective needs none; NaN where no step of
 * the run had the answer. A run that is longer than its checkpoint's, or evaluates on other data, needs more of them:
 * they are computed from what the run began with, on the way, and have the bits that they would have had.
 */

/** Before the session starts, whose memory it uses: of a file, another model or an adapter; and what a checkpoint lacks
 * of the start, from model.path. Fails if that is no longer what the run began with. */
int mt_reference_take(const struct mt_setup *setup, size_t learner, struct mt_train_state *st, struct mt_err *err);
/** Of the start; checks that the state has a reference if it needs one. -ECANCELED: interrupted. */
int mt_reference_make(struct mt_session *s, size_t learner, struct mt_train_state *st, struct mt_err *err);
/** That of the evaluation's data in st->reference; NULL: none. */
const double *mt_reference_of_evaluation(const struct mt_session *s, size_t learner, const struct mt_train_state *st);

/* For the two files of this interface. */

/** Answers of training and evaluation. */
size_t mt_reference_count(const struct mt_inputs *in);
bool mt_reference_is_start(const struct mt_inputs *in);
/** Whether the steps that are left, or evaluations, have an answer that the state has nothing of. Forgets what is of
 * other data than the run's. */
int mt_reference_lacks(const struct mt_inputs *in, struct mt_train_state *st, bool *lacks, struct mt_err *err);
/** [n] NaN; the caller's to free. NULL: no memory. */
double *mt_reference_new(size_t n, struct mt_err *err);
/** Runs a learner of a session on the steps of `in`, which may be another model's, from `first` on;
 * of[mt_reference_count()]: NaN where nothing is known yet. */
int mt_reference_fill(struct mt_session *s, size_t learner, const struct mt_inputs *in, uint64_t first, double *of,
                      struct mt_err *err);
/** Whether the first step's answers have what is known of them; MT_ERR_CHECKPOINT: the model is another one. */
int mt_reference_compare(struct mt_session *s, const struct mt_inputs *in, const double *known, struct mt_err *err);
/** Takes over of[mt_reference_count()] if rc is 0, else frees it; returns the error. */
int mt_reference_set(const struct mt_inputs *in, struct mt_train_state *st, double *of, int rc, struct mt_err *err);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "data/loader.h"
#include "train/metrics.h"
#include "train/saves.h"

/* For train.c: what a learner does by itself, of which a run has one or several. */

enum { MT_TRACED_STEP = 3 };

/* A learner's way through its data. */
struct mt_loop {
    const struct mt_train_params *p;
    struct mt_session *s;
    const struct mt_setup *setup;
    const struct mt_inputs *in;
    struct mt_train_state *st;
    struct mt_metrics *metrics;
    mt_loader *loader;
    struct mt_saves saves;
    uint64_t first_step;
    char bad_tensor[128]; /* of the last step that was skipped */
    double step_seconds; /* of a step, smoothed */
    bool evaluated;      /* at this step */
    bool sound;          /* what failed left the state as it was: data, a computation, an evaluation */
    bool live;           /* it has not ended or failed */
    int rc;              /* why it failed */
    struct mt_err err;
    enum mt_train_end end; /* why it ended */
};

/** What is asked of it. */
struct mt_train_asked *mt_loop_asked(const struct mt_loop *l);
/** Evaluates the state as it is, unless that was done. Data that cannot be read, or no memory, end the run before its
 * first step alone: later there is something to lose. -ECANCELED: it is to end. */
int mt_loop_evaluate(struct mt_loop *l, struct mt_err *err);
/** mt_eval_report.merged_share, after the pending update. */
int mt_loop_merged_share(const struct mt_loop *l, double *share, struct mt_err *err);
/** The data of the next step, and their rate. */
int mt_loop_next_data(struct mt_loop *l, struct mt_learner_step *of, struct mt_err *err);
/** The step has been made. Fails if too many in a row were skipped. */
int mt_loop_end_step(struct mt_loop *l, const struct mt_learner_step *of, const struct mt_step_result *result,
                     double seconds, struct mt_err *err);
/** Fails if it has ended without an update of its own: that has trained nothing, which is no success, and is not
 * saved. Of a run in rounds all rounds count, and the last one alone fails: train.max_skips may pass over a round. */
int mt_loop_check_trained(const struct mt_loop *l, struct mt_err *err);

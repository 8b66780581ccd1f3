/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/model.h"
#include "objective/objective.h"
#include "optim/optimizer.h"
#include "settings/settings.h"

/**
 * A learner: by which rule the weights of one result change. An engine has as many as a run has results; tensors
 * (mt_tensor.learner) and micro-batches (mt_batch.learner) name theirs by index. A learner knows no device: lane.h.
 */

/** The update of a learner's last step, until it is made. */
struct mt_pending {
    bool any;
    double lr;
    uint64_t t;
    uint64_t step;          /* of a zeroth-order optimizer: whose noise it follows, */
    struct mt_along along;  /* and how far; the stream is a tensor's */
};
#define MT_CLIP_SKIP (-1.0f) /* the gradient is not finite: there is no update */

struct mt_learner {
    struct mt_numerics numerics; /* its objective, optimizer's keys, rounding, clipping and seed; else equal for all */
    double keys[MT_OPTIMIZER_SLOTS]; /* of its optimizer, in the optimizer's order */
    struct mt_pending pending;
    struct mt_pending own; /* the update of the step under way, of blocks that are updated under backward */
    float *clip; /* [n_units] factor of the newest gradient, or MT_CLIP_SKIP: the same in a block */
    uint64_t updates; /* made so far */
    uint64_t t0;      /* of them before the optimizer's states were new */
    const struct mt_tensor *_Atomic bad; /* an update made weights of it not finite: the learner's state is lost */
    size_t first_micro; /* its micro-batches of the step under way begin there, one list of them for each variant */
    const struct mt_batch *micro; /* all learners' */
    const struct mt_step_data *data; /* of the step under way, and what its objective knows of it */
    struct mt_objective_step objective;
};

/** With which rate the update of a step is made. */
void mt_learner_decide(struct mt_learner *l, double lr);
/** What its micro-batches of the step have in common. data NULL: it takes no part. `l` must outlive the step. */
struct mt_model_learner mt_learner_of_model(struct mt_learner *l, const struct mt_step_data *data,
                                            const double *reference);
/** How the objective of a learner's numerics weighs rows. */
enum mt_row_weights mt_learner_row_weights(const struct mt_numerics *n);

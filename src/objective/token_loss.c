/* SPDX-License-Identifier: Apache-2.0 */
/* The mean of the token losses: fine-tuning and pre-training as usual. */
#include "objective/objective.h"

static void measure(const struct mt_objective_step *, const struct mt_micro_losses *m, struct mt_measure *sum)
{
    for (size_t i = 0; i < m->batch->n_loss; i++)
        sum->sum += (double)m->loss[i];
    sum->n += (double)m->batch->n_loss;
}

extern const struct mt_objective mt_token_loss;
const struct mt_objective mt_token_loss = {.name = "cross_entropy", .title = "cross-entropy", .n_measures = 1,
                                           .measures = {"loss"}, .measure = measure};

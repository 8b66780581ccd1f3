/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/learner.h"

void mt_learner_decide(struct mt_learner *l, double lr, float clip)
{
    l->pending = (struct mt_pending){true, lr, clip, l->updates + 1};
}

void mt_learner_retire(struct mt_learner *l)
{
    l->updates += l->pending.any;
    l->pending.any = false;
}

struct mt_model_learner mt_learner_of_model(const struct mt_learner *l, uint64_t step, size_t n_loss)
{
    return (struct mt_model_learner){.loss_scale = n_loss ? (float)(1.0 / (double)n_loss) : 0,
                                     .step = step, .seed = l->numerics.seed};
}

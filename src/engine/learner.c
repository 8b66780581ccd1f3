/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/learner.h"

void mt_learner_decide(struct mt_learner *l, double lr)
{
    l->pending = (struct mt_pending){.any = true, .lr = lr, .t = l->updates + 1};
}

enum mt_row_weights mt_learner_row_weights(const struct mt_numerics *n)
{
    const struct mt_objective *o = mt_objective_of(n);
    if (!mt_objective_is_late(n))
        return o->weights ? MT_ROWS_WEIGHED : MT_ROWS_ALIKE;
    return o->weights && mt_row_chunks(n) > 1 ? MT_ROWS_WEIGHED_BY_ROW : MT_ROWS_WEIGHED_LATE;
}

static void weigh(void *ctx, size_t mb, const struct mt_row_values *of)
{
    const struct mt_learner *l = ctx;
    const struct mt_objective *o = l->objective.objective;
    size_t n, chunks = mt_step_chunks(l->data);
    const struct mt_batch *whole = mt_step_whole(l->data, &n);
    if (o->learn)
        o->learn(&l->objective, &l->micro[mb], of->loss, of->few, of->weight);
    else
        o->weights(&l->objective, &whole[(mb - l->first_micro) / chunks], of->loss, of->weight);
}

static void choose(void *ctx, size_t mb, int32_t *ids)
{
    const struct mt_learner *l = ctx;
    l->objective.objective->choose(&l->objective, &l->micro[mb], ids);
}

struct mt_model_learner mt_learner_of_model(struct mt_learner *l, const struct mt_step_data *data,
                                            const double *reference)
{
    if (!data)
        return (struct mt_model_learner){.seed = l->numerics.seed};
    l->data = data;
    l->objective = mt_objective_begin(&l->numerics, data, reference);
    return (struct mt_model_learner){
        .rows = mt_learner_row_weights(&l->numerics),
        .loss_scale = data->n_loss ? (float)(1.0 / (double)data->n_loss) : 0,
        .weigh = weigh,
        .weigh_ctx = l,
        .choose = l->objective.objective->choose ? choose : NULL,
        .step = data->step,
        .seed = l->numerics.seed,
        .update = l->updates + l->pending.any + 1 - l->t0,
    };
}

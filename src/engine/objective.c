/* SPDX-License-Identifier: Apache-2.0 */
/* What learners minimize, as far as the whole engine is concerned. */
#include "base/mem.h"
#include "engine/state.h"

bool mt_engine_weighs(const struct mt_engine_params *p, enum mt_row_weights how)
{
    bool any = mt_learner_row_weights(&p->numerics) >= how;
    for (size_t i = 0; i < p->n_learners; i++)
        any |= mt_learner_row_weights(&p->learner[i]) >= how;
    return p->train && any;
}

size_t mt_engine_few(const struct mt_engine_params *p)
{
    size_t most = mt_objective_few(&p->numerics);
    for (size_t i = 0; i < p->n_learners; i++)
        most = MT_MAX(most, mt_objective_few(&p->learner[i]));
    return p->train ? most : 0;
}

size_t mt_engine_top_bytes(const struct mt_engine_params *p, const struct mt_model_params *mp)
{
    size_t few = mt_engine_few(p), rows = p->max_micro * p->max_tokens, bytes = 0;
    if (few) /* of this step and the next */
        bytes += 2 * rows * ((few - MT_FEW_BESIDE) * sizeof(struct mt_top) + sizeof(double));
    if (p->top || p->draws) /* of the models with the head, and of who asks */
        bytes += (mt_engine_by_data(p) ? mt_engine_n_lanes(p) : 1) * mt_model_top_bytes(mp) +
                 rows * (p->top * sizeof(struct mt_top) + sizeof(float));
    return bytes;
}

static void add(const mt_engine *e, const struct mt_objective_step *s, size_t first, const struct mt_step_data *data,
                struct mt_measure *sum)
{
    const bool teacher = s->objective->teacher;
    size_t n = data->n, chunks = teacher ? 1 : mt_step_chunks(data);
    const struct mt_batch *b = teacher ? data->micro : mt_step_whole(data, &n);
    for (size_t i = 0, mb = first; i < n; i++, mb += chunks) {
        const mt_model *m = mt_engine_model_for(e, e->b.layout->n_units - 1, mb);
        struct mt_micro_losses of = {.batch = &b[i]};
        if (!s->objective->by_rewards) {
            const struct mt_micro_stats found = mt_model_micro_stats(m, mb);
            of = (struct mt_micro_losses){&b[i], found.loss, found.correct, found.few, found.entropy};
        }
        s->objective->measure(s, &of, sum);
    }
}

void mt_engine_measure(const mt_engine *e, const struct mt_learner *l, const struct mt_step_data *data,
                       struct mt_measure *sum)
{
    add(e, &l->objective, l->first_micro, data, sum);
    if (l->objective.objective->finish)
        l->objective.objective->finish(&l->objective, sum);
}

void mt_engine_measure_eval(const mt_engine *e, const struct mt_learner *l, const struct mt_step_data *data,
                            struct mt_eval_result *res)
{
    const struct mt_objective_step s = mt_objective_begin(&l->numerics, data, res->reference);
    if ((!s.objective->reference || s.reference) && !s.objective->teacher)
        add(e, &s, 0, data, res->measures);
}

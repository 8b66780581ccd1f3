/* SPDX-License-Identifier: Apache-2.0 */
/* What learners minimize, as far as the whole engine is concerned. */
#include "base/mem.h"
#include "engine/engine_priv.h"

bool mt_engine_weighs_rows(const struct mt_engine_params *p)
{
    bool any = mt_learner_row_weights(&p->numerics) != MT_ROWS_ALIKE;
    for (size_t i = 0; i < p->n_learners; i++)
        any |= mt_learner_row_weights(&p->learner[i]) != MT_ROWS_ALIKE;
    return p->train && any;
}

size_t mt_engine_few(const struct mt_engine_params *p)
{
    size_t most = mt_objective_few(&p->numerics);
    for (size_t i = 0; i < p->n_learners; i++)
        most = MT_MAX(most, mt_objective_few(&p->learner[i]));
    return p->train ? most : 0;
}

static void add(const mt_engine *e, const struct mt_objective_step *s, size_t first, const struct mt_step_data *data,
                struct mt_measure *sum)
{
    const mt_model *m = mt_engine_model_of(e, e->b.layout->n_units - 1);
    for (size_t i = 0; i < data->n; i++) {
        const struct mt_micro_losses of = {&data->micro[i], mt_model_losses(m, first + i),
                                           mt_model_correct(m, first + i), mt_model_few_values(m, first + i)};
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

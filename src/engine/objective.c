/* SPDX-License-Identifier: Apache-2.0 */
/* What learners minimize, as far as the whole engine is concerned. */
#include "engine/engine_priv.h"

bool mt_engine_weighs_rows(const struct mt_engine_params *p)
{
    bool any = mt_learner_row_weights(&p->numerics) != MT_ROWS_ALIKE;
    for (size_t i = 0; i < p->n_learners; i++)
        any |= mt_learner_row_weights(&p->learner[i]) != MT_ROWS_ALIKE;
    return p->train && any;
}

void mt_engine_measure(const mt_engine *e, const struct mt_learner *l, size_t first, const struct mt_step_data *data,
                       struct mt_measure *sum)
{
    const mt_model *m = mt_engine_model_of(e, e->b.layout->n_units - 1);
    const struct mt_objective_step s = mt_learner_objective(l, data);
    for (size_t i = 0; i < data->n; i++) {
        const struct mt_micro_losses of = {&data->micro[i], mt_model_losses(m, first + i),
                                           mt_model_correct(m, first + i)};
        s.objective->measure(&s, &of, sum);
    }
}

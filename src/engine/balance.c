/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loss that balances experts is of the whole step: of the rows that all lanes of all hosts have sent to each expert
 * and of the probabilities that routers gave to each. Backward needs only the rows, which are whole numbers; sums of
 * probabilities are added group by group, so that neither depends on where groups are.
 */
#include "device/ops.h"
#include "engine/state.h"

static mt_model *model_of(const mt_engine *e, size_t group)
{
    return mt_engine_model_on(e, (size_t)mt_group_lane(&e->plan.program, group));
}

static bool is_here(const mt_engine *e, size_t group)
{
    const struct mt_program_params *p = &e->plan.program;
    return mt_program_host_of(p, mt_group_lane(p, group)) == p->host;
}

void mt_engine_balance(const mt_engine *e, const struct mt_instr *in)
{
    int64_t rows[MT_MAX_EXPERTS] = {0};
    for (size_t group = 0; group < mt_groups_in_use(e->plan.program.groups, e->n_micro); group++) {
        if (is_here(e, group)) {
            mt_model_add_routed(model_of(e, group), group, rows);
            continue;
        }
        const int64_t *other = mt_hosts_routed(e, group);
        for (int64_t i = 0; i < e->p.layout->cfg.moe.n_experts; i++)
            rows[i] += other[i];
    }
    mt_model_set_routed(e->lane[in->lane].b.model, rows);
}

double mt_engine_aux_loss(const mt_engine *e)
{
    int64_t rows[MT_MAX_EXPERTS] = {0};
    double probabilities[MT_MAX_EXPERTS] = {0};
    if (e->p.numerics.router_aux_loss <= 0)
        return 0;
    for (size_t group = 0; group < mt_groups_in_use(e->plan.program.groups, e->n_micro); group++) {
        mt_model_add_routed(model_of(e, group), group, rows);
        mt_model_add_probabilities(model_of(e, group), group, probabilities);
    }
    return mt_model_aux_loss(mt_engine_inputs(e), rows, probabilities);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Makes a program: a draft, placed on the device, then staged for drives, then shared out to hosts. */
#include "schedule/build.h"

/* Each lane adds up what all lanes count: it waits for the newest lists of the others. */
static void await_lists(struct mt_program *p)
{
    int32_t lists[MT_MAX_LANES];
    for (int lane = 0; lane < p->n_lanes; lane++)
        lists[lane] = MT_NO_WAIT;
    for (size_t i = 0; i < p->n_instrs; i++) {
        struct mt_instr *in = &p->instrs[i];
        if (mt_instr_makes_lists(in))
            lists[in->lane] = (int32_t)i;
        for (int lane = 0; lane < p->n_lanes && in->op == MT_OP_BALANCE; lane++)
            if (lane != in->lane)
                in->wait[mt_queue_number(lane, MT_Q_COMPUTE)] = lists[lane];
    }
}

int mt_program_build(struct mt_program *out, const struct mt_program_params *params,
                     struct mt_err *err)
{
    struct mt_draft d;
    int rc = mt_draft_write(&d, params, err);
    if (rc)
        return rc;
    rc = mt_draft_place(out, &d, err);
    mt_program_finish(&d.prog);
    if (rc)
        return rc;
    if (out->balances)
        await_lists(out);
    if (mt_program_uses_disk(params) || mt_program_has_ring(params))
        rc = mt_program_stage(out, params, err);
    if (!rc && mt_program_hosts(params) > 1)
        rc = mt_program_take_part(out, params, err);
    if (!rc)
        rc = mt_program_prune_waits(out, err);
    if (rc)
        mt_program_finish(out);
    return rc;
}

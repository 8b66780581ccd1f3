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

int mt_program_place(struct mt_program *out, const struct mt_program_params *params, struct mt_err *err)
{
    struct mt_draft d;
    int rc = mt_draft_write(&d, params, err);
    if (rc)
        return rc;
    rc = mt_draft_place(out, &d, err);
    mt_program_finish(&d.prog);
    if (!rc && out->balances)
        await_lists(out);
    return rc;
}

unsigned mt_program_placed_for(const struct mt_program_params *p)
{
    return (unsigned)mt_program_gathers(p) | (unsigned)p->spill_disk << 1;
}

/* Whether it is the host pool of objects on their way to the disk. */
static bool is_of_spills(int pool)
{
    bool any = false;
    for (int i = 0; i < MT_N_POOLS; i++)
        any |= mt_pools[i].spilled == (enum mt_pool_id)pool;
    return any;
}

/* As many host buffers as there are now: the device's are placed. Of spills each host of the whole step has its own. */
static void size_host_pools(struct mt_program *p, const struct mt_program_params *params)
{
    for (int lane = 0; lane < p->n_lanes; lane++) {
        size_t bytes[MT_N_POOLS];
        mt_program_buffer_bytes(params, lane, bytes);
        for (int i = 0; i < MT_N_POOLS; i++) {
            int each = bytes[i] && !lane ? params->n_buffers[0][i] : 0;
            int hosts = is_of_spills(i) ? mt_program_hosts(params) : 1;
            if (!mt_pools[i].device)
                p->pool[lane][i] = (struct mt_pool_shape){each * hosts, bytes[i]};
        }
    }
}

int mt_program_complete(struct mt_program *p, const struct mt_program_params *params, struct mt_err *err)
{
    int rc = mt_program_check_pools(params, err);
    size_host_pools(p, params);
    if (!rc && (mt_program_uses_disk(params) || mt_program_has_ring(params)))
        rc = mt_program_stage(p, params, err);
    if (!rc && mt_program_hosts(params) > 1)
        rc = mt_program_take_part(p, params, err);
    rc = rc ?: mt_program_prune_waits(p, err);
    if (rc)
        mt_program_finish(p);
    return rc;
}

int mt_program_build(struct mt_program *out, const struct mt_program_params *params,
                     struct mt_err *err)
{
    return mt_program_place(out, params, err) ?: mt_program_complete(out, params, err);
}

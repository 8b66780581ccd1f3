/* SPDX-License-Identifier: Apache-2.0 */
/* Programs ready to run, with their events: built and checked once per mode and number of micro-batches. */
#include <stdlib.h>

#include "base/mem.h"
#include "engine/state.h"

static void destroy_runnable(struct mt_runnable *r)
{
    for (size_t i = 0; r->done && i < r->prog.n_instrs; i++) {
        mt_event_destroy(&r->done[i]);
        mt_event_destroy(&r->before[i]);
        mt_event_destroy(&r->after[i]);
    }
    for (int lane = 0; lane < MT_MAX_LANES; lane++) {
        mt_event_destroy(&r->start[lane]);
        mt_event_destroy(&r->end[lane]);
    }
    mt_event_destroy(&r->turn);
    mt_arrays_finish(&r->arrays);
    mt_exec_trace_destroy(r);
    mt_program_finish(&r->prog);
    free(r);
}

void mt_runnable_destroy_all(mt_engine *e)
{
    while (e->programs) {
        struct mt_runnable *r = e->programs;
        e->programs = r->next;
        destroy_runnable(r);
    }
}

static int list_queues(struct mt_runnable *r, struct mt_err *err)
{
    size_t n = r->prog.n_instrs, first = 0;
    int32_t *positions = mt_arrays_add(&r->arrays, n, sizeof(*positions));
    r->ended = mt_arrays_add(&r->arrays, n, sizeof(*r->ended));
    if (r->arrays.failed)
        return mt_fail_nomem(err, "a step program", n * sizeof(*positions));
    for (int q = 0; q < mt_n_queues(r->prog.n_lanes); q++) {
        struct mt_queue_list *list = &r->queue[q];
        list->at = positions + first;
        for (size_t i = 0; i < n; i++)
            if (mt_instr_queue(&r->prog.instrs[i]) == q)
                list->at[list->n++] = (int32_t)i;
        first += list->n;
    }
    return 0;
}

/* The step's own events: lanes without operations have none. */
static int create_times(mt_engine *e, struct mt_runnable *r, struct mt_err *err)
{
    int rc = 0;
    for (int lane = 0; lane < r->prog.n_lanes && !rc; lane++) {
        mt_device *dev = e->lane[lane].b.dev;
        if (!r->queue[mt_queue_number(lane, MT_Q_COMPUTE)].n)
            continue;
        rc = mt_event_create(dev, &r->start[lane], err) ?: mt_event_create(dev, &r->end[lane], err);
    }
    for (size_t i = r->prog.n_instrs; i-- > 0 && !rc && !r->turn;)
        if (mt_opcodes[r->prog.instrs[i].op].ends_forward)
            rc = mt_event_create(mt_lane_of(e->lane, &r->prog.instrs[i])->b.dev, &r->turn, err);
    return rc;
}

static int create_events(mt_engine *e, struct mt_runnable *r, struct mt_err *err)
{
    size_t n = r->prog.n_instrs;
    r->done = mt_arrays_add(&r->arrays, 3 * n, sizeof(*r->done));
    if (!r->done)
        return mt_fail_nomem(err, "events", 3 * n * sizeof(*r->done));
    r->before = r->done + n;
    r->after = r->before + n;
    if (!mt_runnable_uses_device(r))
        return 0;
    int rc = create_times(e, r, err);
    for (size_t i = 0; !rc && i < n; i++) {
        const struct mt_instr *in = &r->prog.instrs[i];
        mt_device *dev = mt_lane_of(e->lane, in)->b.dev;
        if (in->signals && mt_queues[in->queue].device)
            rc = mt_event_create(dev, &r->done[i], err);
        if (!rc && in->queue == MT_Q_COMPUTE && in->wait[mt_queue_number(in->lane, MT_Q_H2D)] >= 0)
            rc = mt_event_create(dev, &r->before[i], err)
              ?: mt_event_create(dev, &r->after[i], err);
        if (mt_opcodes[in->op].ends_forward)
            r->turn_at = i;
    }
    return rc;
}

/* Spilled objects are read by the run that wrote them, so each program has its own sums. */
static int alloc_sums(const mt_engine *e, struct mt_runnable *r, struct mt_err *err)
{
    size_t n = r->prog.n_objects, n_sums = 0;
    if (!r->prog.disk_spill_bytes || !e->p.placement.nvme_checksums)
        return 0;
    size_t block = mt_disk_block(e->p.disk);
    r->spilled = mt_arrays_add(&r->arrays, n, sizeof(*r->spilled));
    if (!r->spilled)
        return mt_fail_nomem(err, "sums of spilled activations", n * sizeof(*r->spilled));
    for (size_t i = 0; i < n; i++) {
        const struct mt_object *o = &r->prog.objects[i];
        if (o->kind != MT_OBJ_SPILLED || o->spill < 0)
            continue;
        r->spilled[i] = (struct mt_disk_sums){.offset = e->b.disk_spill_at + (uint64_t)o->spill, .bytes = o->bytes,
                                              .block = block, .what = "activations", .unit = (size_t)o->unit};
        n_sums += mt_disk_sums_n(o->bytes, 0, block);
    }
    uint64_t *at = mt_arrays_add(&r->arrays, n_sums, sizeof(*at));
    if (!at)
        return mt_fail_nomem(err, "sums of spilled activations", n_sums * sizeof(*at));
    for (size_t i = 0; i < n; i++) {
        r->spilled[i].sum = at;
        at += mt_disk_sums_n(r->spilled[i].bytes, 0, block);
    }
    return 0;
}

/* The program of this host, of those of all hosts, which are checked together. All must build the same ones. */
static int build_for_hosts(struct mt_program *out, const mt_engine *e, struct mt_program_params *params,
                           struct mt_err *err)
{
    struct mt_program all[MT_MAX_LANES] = {{.instrs = NULL}};
    const struct mt_program *each[MT_MAX_LANES] = {NULL};
    int n = mt_program_hosts(params), own = params->host, rc = 0;
    uint64_t hash = 0;
    for (int i = 0; i < n && !rc; i++) {
        params->host = i;
        each[i] = &all[i];
        rc = mt_program_build(&all[i], params, err);
        hash = rc || n == 1 ? 0 : mt_program_hash(&all[i], hash);
    }
    rc = rc ?: mt_program_check_hosts(each, n, err);
    if (!rc && n > 1 && params->mode != MT_MODE_UPDATE)
        rc = mt_hosts_agree(e, hash, "the program of a step", err);
    for (int i = 0; i < n; i++)
        if (rc || i != own)
            mt_program_finish(&all[i]);
    if (!rc)
        *out = all[own];
    return rc;
}

int mt_runnable_get(struct mt_runnable **out, mt_engine *e, enum mt_program_mode mode,
                    size_t n_micro, struct mt_err *err)
{
    for (struct mt_runnable *r = e->programs; r; r = r->next)
        if (r->mode == mode && r->prog.n_micro == n_micro) {
            *out = r;
            return 0;
        }
    struct mt_runnable *r = mt_calloc(1, sizeof(*r));
    if (!r)
        return mt_fail_nomem(err, "a step program", sizeof(*r));
    struct mt_program_params params = e->plan.program;
    params.mode = mode;
    params.n_micro = n_micro;
    if (mt_engine_variants(&e->p))
        params.groups.of = n_micro;
    r->mode = mode;
    int rc = build_for_hosts(&r->prog, e, &params, err);
    e->torn |= rc && params.owned;
    /* of several hosts a smaller step may need the home of a sum more (schedule/hosts.c) */
    if (!rc && params.n_hosts > 1 && r->prog.spill_bytes > e->plan.spill_bytes && !e->p.cache.slots)
        rc = mt_host_memory_grow_spill(e, r->prog.spill_bytes, err);
    if (!rc && (r->prog.spill_bytes > e->plan.spill_bytes ||
                r->prog.disk_spill_bytes > e->plan.disk_spill_bytes))
        rc = mt_fail(err, MT_ERR_RUNTIME, -ENOSPC,
                     "a step of %zu micro-batches spills %zu bytes, %zu to disk; planned were %zu and "
                     "%llu",
                     n_micro, r->prog.spill_bytes, r->prog.disk_spill_bytes, e->plan.spill_bytes,
                     (unsigned long long)e->plan.disk_spill_bytes);
    rc = rc ?: list_queues(r, err)
            ?: create_events(e, r, err)
            ?: alloc_sums(e, r, err);
    if (rc) {
        destroy_runnable(r);
        return rc;
    }
    r->next = e->programs;
    e->programs = r;
    *out = r;
    return 0;
}

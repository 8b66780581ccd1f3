/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The second placer: host memory between the device and the disk. It takes the loads, stores and updates of the placed
 * program in order, gives each a buffer in the staging pools, and adds the disk reads and writes needed because buffers
 * are few. As on the device, the content that is needed last is evicted first (Belady 1966). So a load reads from host
 * memory what is still there, even while it is being written to the disk, and a spilled object is written only if its
 * buffer is needed before its next use.
 *
 *   updates    planes that only updates use pass through a ring in pieces: read -> Adam -> write. Planes that
 *              loads need too are staged whole: Adam works in the staging buffer, and the unit's load
 *              reads the new weights from there while they are being written to the disk.
 *   gradients  are stored to staging and written from there to their plane. Or they stay there until their update,
 *              which follows under backward: then they have no plane, and their buffers are a ring.
 *   spills     boundaries, their gradients and records: staging is a cache in front of the disk.
 *
 * A read or write may be late in the program and still start early: as soon as its waits are over.
 */
#include <stdlib.h>

#include "base/mem.h"
#include "schedule/stage.h"

/* A unit's update comes before the first load of the unit so many units before it: early enough that states are read
 * ahead of forward, late enough that forward's spills are not queued after all updates. */
enum { UPDATES_AHEAD = 1 };

static size_t piece_bytes(const struct mt_stager *s, size_t unit, size_t piece)
{
    return mt_div_up(mt_stage_piece_elems(s, unit, piece), s->params->piece_align) * s->params->units[unit].state_bytes;
}

/* --- objects --------------------------------------------------------------------------------- */

static int add_object(struct mt_stager *s, const struct mt_object *o)
{
    struct mt_program *g = s->out;
    if (!mt_grow(&g->objects, &g->cap_objects, g->n_objects + 1, sizeof(*g->objects))) {
        s->failed = true;
        return MT_STAGE_NONE;
    }
    g->objects[g->n_objects] = *o;
    return (int)g->n_objects++;
}

static int add_unit_object(struct mt_stager *s, enum mt_object_kind kind, size_t unit, size_t piece, size_t bytes)
{
    return add_object(s, &(struct mt_object){.kind = kind, .pool = mt_program_pool(s->params, kind, unit),
                                             .unit = (int32_t)unit, .piece = (int32_t)piece, .bytes = bytes,
                                             .spill = -1});
}

static void add_unit_objects(struct mt_stager *s, size_t unit, bool updated)
{
    const struct mt_unit_shape *u = &s->params->units[unit];
    if (u->staged_bytes)
        s->unit_staged[unit] =
            add_unit_object(s, MT_OBJ_STAGED, unit, 0, u->staged_bytes);
    if (u->grad_on_disk)
        s->unit_grad[unit] = add_unit_object(s, MT_OBJ_GRAD_OUT, unit, 0,
                                             mt_align_up(u->update_elems * s->params->grad_bytes, 4096));
    if (u->grad_in_ring && s->params->mode == MT_MODE_TRAIN)
        s->unit_grad[unit] = add_unit_object(s, MT_OBJ_GRAD_RING, unit, 0,
                                             mt_align_up(u->update_elems * s->params->grad_bytes, 4096));
    for (size_t p = 0; updated && u->state_bytes && p < mt_stage_n_pieces(s, unit); p++) {
        int o = add_unit_object(s, MT_OBJ_STATE, unit, p, piece_bytes(s, unit, p));
        if (!p)
            s->unit_state[unit] = o;
    }
}

/* A host copy for each object that is stored to spill space on the disk. */
static void add_spilled(struct mt_stager *s)
{
    for (const struct mt_instr *in = s->old->instrs; in < s->old->instrs + s->old->n_instrs; in++) {
        int o = in->operand[0].object;
        if (in->op != MT_OP_STORE || mt_instr_returns(s->out, in) || s->out->objects[o].spill >= 0 ||
            s->spilled[o] != MT_STAGE_NONE)
            continue;
        struct mt_object copy = s->out->objects[o];
        copy.kind = MT_OBJ_SPILLED;
        copy.parts = 0;
        copy.resident = false;
        copy.lane = in->lane;
        copy.pool = mt_pools[copy.pool].spilled;
        copy.bytes = mt_align_up(copy.bytes, 4096);
        s->spilled[o] = add_object(s, &copy);
    }
}

/* --- the order of steps, and when each object is used next ------------------------------------- */

static void add_step(struct mt_stager *s, int old, int unit)
{
    s->steps[s->n_steps++] = (struct mt_stage_step){old, unit, MT_STAGE_NEVER};
}

static bool is_pending(const struct mt_program *p, size_t i)
{
    return i < p->n_instrs && p->instrs[i].op == MT_OP_UPDATE && !p->instrs[i].own;
}

static void write_steps(struct mt_stager *s)
{
    const struct mt_program *p = s->old;
    bool disk = mt_program_uses_disk(s->params); /* else pending updates are made as they are */
    size_t next = 0; /* next update, as a position in the old program, which begins with the updates */
    for (size_t i = 0; i < p->n_instrs; i++) {
        const struct mt_instr *in = &p->instrs[i];
        if (disk && in->op == MT_OP_UPDATE && !in->own)
            continue;
        bool load = in->op == MT_OP_LOAD && mt_object_is_of_planes(&p->objects[in->operand[0].object]);
        for (; disk && (load || in->own) && is_pending(p, next) &&
               (in->own || p->instrs[next].unit <= in->unit + UPDATES_AHEAD);
             next++)
            add_step(s, MT_STAGE_NONE, p->instrs[next].unit);
        add_step(s, (int)i, in->unit);
    }
    for (; disk && is_pending(p, next); next++)
        add_step(s, MT_STAGE_NONE, p->instrs[next].unit);
}

static bool find_next_uses(struct mt_stager *s)
{
    int *next = mt_arrays_add(&s->arrays, s->out->n_objects, sizeof(int));
    if (!next)
        return false;
    for (size_t o = 0; o < s->out->n_objects; o++)
        next[o] = MT_STAGE_NEVER;
    for (size_t i = s->n_steps; i-- > 0;) {
        bool made;
        int o = mt_stage_object_of(s, &s->steps[i], &made);
        if (o == MT_STAGE_NONE)
            continue;
        s->steps[i].next_use = next[o];
        next[o] = made ? MT_STAGE_NEVER : (int)i;
    }
    return true;
}

static void walk(struct mt_stager *s)
{
    for (size_t i = 0; i < s->n_steps && !s->failed; i++) {
        const struct mt_stage_step *t = &s->steps[i];
        bool made;
        int object = mt_stage_object_of(s, t, &made);
        /* while a step is placed, its own object is in use and must not be evicted */
        if (object != MT_STAGE_NONE)
            s->staged[object].next_use = (int)i;
        if (mt_stage_is_own(s, t)) {
            mt_stage_emit_update(s, t);
        } else if (t->old != MT_STAGE_NONE) {
            mt_stage_emit_old(s, t);
        } else {
            s->map[s->unit_update[t->unit]] = mt_stage_emit_update(s, t);
        }
        if (object != MT_STAGE_NONE)
            s->staged[object].next_use = t->next_use;
    }
}

/* --- set-up ---------------------------------------------------------------------------------- */

static bool alloc_lists(struct mt_stager *s)
{
    size_t n = s->old->n_instrs, units = s->old->n_units, objects = s->old->n_objects;
    s->map = mt_arrays_add(&s->arrays, n, sizeof(*s->map));
    s->steps = mt_arrays_add(&s->arrays, n + units, sizeof(*s->steps));
    s->unit_staged = mt_arrays_add(&s->arrays, 4 * units + objects, sizeof(int));
    if (s->arrays.failed)
        return false;
    s->unit_grad = s->unit_staged + units;
    s->unit_state = s->unit_grad + units;
    s->unit_update = s->unit_state + units;
    s->spilled = s->unit_update + units;
    for (size_t i = 0; i < 4 * units + objects; i++)
        s->unit_staged[i] = MT_STAGE_NONE;
    for (int i = 0; i < MT_N_POOLS; i++) {
        int k, count = mt_pools[i].device ? 0 : s->out->pool[0][i].n;
        s->buffers[i] = mt_arrays_add(&s->arrays, (size_t)count, sizeof(struct mt_stage_buffer));
        if (!s->buffers[i])
            return false;
        for (k = 0; k < count; k++)
            s->buffers[i][k] = (struct mt_stage_buffer){.object = MT_STAGE_NONE, .touched = MT_NO_WAITS};
    }
    return true;
}

static bool add_objects(struct mt_stager *s)
{
    for (size_t i = 0; is_pending(s->old, i); i++)
        s->unit_update[s->old->instrs[i].unit] = (int)i;
    for (size_t u = 0; u < s->old->n_units; u++)
        add_unit_objects(s, u, s->unit_update[u] != MT_STAGE_NONE ||
                                   (s->params->units[u].grad_in_ring && s->params->mode == MT_MODE_TRAIN));
    if (s->params->spill_disk)
        add_spilled(s);
    s->staged = mt_arrays_add(&s->arrays, s->out->n_objects, sizeof(*s->staged));
    for (size_t o = 0; s->staged && o < s->out->n_objects; o++)
        s->staged[o] = (struct mt_staged){
            .buffer = MT_STAGE_NONE, .next_use = MT_STAGE_NEVER, .made = MT_NO_WAITS, .home = MT_NO_WAIT};
    return s->staged && !s->failed;
}

static int check_pools(const struct mt_stager *s, struct mt_err *err)
{
    for (const struct mt_object *x = s->out->objects; x < s->out->objects + s->out->n_objects; x++) {
        if (!mt_pools[x->pool].device && s->out->pool[0][x->pool].n < 1)
            return mt_fail(err, MT_ERR_NO_FIT, -ENOSPC, "0 buffers of pool \"%s\" are too few",
                           mt_pools[x->pool].name);
    }
    return 0;
}

int mt_program_stage(struct mt_program *p, const struct mt_program_params *params, struct mt_err *err)
{
    struct mt_program old = *p; /* owns the instructions; the objects stay with p */
    struct mt_stager s = {.params = params, .old = &old, .out = p, .lists = MT_NO_WAIT, .too_few = MT_NO_POOL};
    s.n_queues = mt_n_queues(p->n_lanes);
    int rc = 0;
    p->instrs = NULL;
    p->n_instrs = p->cap_instrs = 0;
    p->piece_elems = params->piece_elems;
    bool ok = alloc_lists(&s) && add_objects(&s);
    if (ok)
        rc = check_pools(&s, err);
    if (ok && !rc) {
        old.objects = p->objects;
        write_steps(&s);
        ok = find_next_uses(&s);
    }
    if (ok && !rc)
        walk(&s);
    if (s.too_few != MT_NO_POOL)
        rc = mt_fail(err, MT_ERR_NO_FIT, -ENOSPC, "%d buffers of pool \"%s\" are too few for the gradients of a block",
                     p->pool[0][s.too_few].n, mt_pools[s.too_few].name);
    if (!ok || s.failed)
        rc = mt_fail_nomem(err, "a step program", old.n_instrs * sizeof(struct mt_instr));
    free(old.instrs);
    mt_arrays_finish(&s.arrays);
    return rc;
}

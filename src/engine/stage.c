/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The second placer: puts host memory between the device and the disk. The placed program says in which
 * order loads, stores and updates come; this walk gives each its buffer in the staging pools, and adds the
 * reads and writes that follow from there being too few. As on the device, the content that is needed last
 * leaves first (Belady 1966), so a load takes what is still in host memory, also while it is being written,
 * and nothing is written that host memory can hold until it is needed.
 *
 *   updates    planes that only updates use go through a ring in pieces: read -> Adam -> write. Planes that
 *              loads need too are staged whole: Adam works in the staging buffer, and the unit's load
 *              takes the new weights from there while they are on their way to the disk.
 *   gradients  leave the device into staging and go on to their plane.
 *   spills     boundaries, their gradients and records: staging is a cache in front of the disk.
 *
 * A read or write may stand late in the program and still start early: its queue comes to it as soon as
 * what it waits for is done.
 */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/build.h"

/* An update is put before the first load of the unit that many units below it: far enough that reads of
 * states run ahead of forward, near enough that spills of forward are not queued behind all of them. */
enum { UPDATES_AHEAD = 1, NEVER = INT_MAX, NONE = -1 };

/* One step of the walk: an instruction of the placed program, or the update of a unit. */
struct step {
    int old, unit; /* old NONE: the update */
    int next_use;  /* step at which its staged object is read next; NEVER where not, or where it is made anew */
};

struct buffer {
    int object;                    /* of the new program, or NONE */
    int32_t touched[MT_N_QUEUES];  /* newest instruction of each queue that uses the buffer */
};

struct staged {
    int buffer, next_use;
    bool dirty;
    struct mt_instr made; /* its `wait` is what a reader must wait for */
    int32_t home;         /* WRITE that brought the newest content to the disk */
};

struct stager {
    const struct mt_program_params *params;
    const struct mt_program *old;
    struct mt_program *out;
    int32_t *map;      /* old position -> new */
    struct step *steps;
    size_t n_steps;
    int *unit_staged, *unit_grad, *unit_state; /* objects by unit (state: the first piece's), or NONE */
    int *spilled;      /* by old object, or NONE */
    struct staged *staged; /* by object of the new program */
    struct buffer *buffers[MT_N_POOLS];
    size_t next_piece; /* buffer of the ring */
    bool failed;
};

static size_t n_pieces(const struct stager *s, size_t unit)
{
    const struct mt_unit_shape *u = &s->params->units[unit];
    return u->state_elem_bytes ? mt_div_up(u->grad_elems, s->params->piece_elems) : 1;
}

static size_t piece_elems(const struct stager *s, size_t unit, size_t piece)
{
    const struct mt_unit_shape *u = &s->params->units[unit];
    if (!u->state_elem_bytes)
        return u->grad_elems;
    return MT_MIN(s->params->piece_elems, u->grad_elems - piece * s->params->piece_elems);
}

static size_t on_disk(size_t elems, size_t elem_bytes)
{
    return mt_align_up(elems, MT_PIECE_ALIGN) * elem_bytes;
}

/* --- objects --------------------------------------------------------------------------------- */

static int add_object(struct stager *s, enum mt_object_kind kind, int pool, int unit, int mb,
                      size_t bytes)
{
    struct mt_program *g = s->out;
    if (!mt_grow(&g->objects, &g->cap_objects, g->n_objects + 1, sizeof(*g->objects))) {
        s->failed = true;
        return NONE;
    }
    g->objects[g->n_objects] = (struct mt_object){
        .kind = kind, .pool = pool, .unit = unit, .mb = mb, .bytes = bytes, .spill = -1};
    return (int)g->n_objects++;
}

static void add_unit_objects(struct stager *s, size_t unit, bool updated)
{
    const struct mt_unit_shape *u = &s->params->units[unit];
    int c = mt_program_pool_class(s->params, unit);
    if (u->staged_elem_bytes)
        s->unit_staged[unit] = add_object(s, MT_OBJ_STAGED, MT_POOL_STAGED + c, (int)unit, 0,
                                          on_disk(u->grad_elems, u->staged_elem_bytes));
    if (u->grad_on_disk)
        s->unit_grad[unit] = add_object(s, MT_OBJ_GRAD_OUT, MT_POOL_GRAD_OUT + c, (int)unit, 0,
                                        mt_align_up(u->grad_elems * s->params->grad_bytes, 4096));
    for (size_t p = 0; updated && u->state_elem_bytes && p < n_pieces(s, unit); p++) {
        int o = add_object(s, MT_OBJ_STATE, MT_POOL_STATE, (int)unit, (int)p,
                           on_disk(piece_elems(s, unit, p), u->state_elem_bytes));
        if (!p)
            s->unit_state[unit] = o;
    }
}

/* A host copy for each object that is ever stored. */
static void add_spilled(struct stager *s)
{
    for (size_t i = 0; i < s->old->n_instrs; i++) {
        const struct mt_instr *in = &s->old->instrs[i];
        int o = in->operand[0].object;
        if (in->op != MT_OP_STORE || s->out->objects[o].spill >= 0 || s->spilled[o] != NONE)
            continue;
        struct mt_object d = s->out->objects[o];
        s->spilled[o] = add_object(s, MT_OBJ_SPILLED,
                                   d.kind == MT_OBJ_RECORD ? MT_POOL_SPILLED_RECORD : MT_POOL_SPILLED,
                                   d.unit, d.mb, mt_align_up(d.bytes, 4096));
    }
}

/* --- the order of steps, and who is needed when ------------------------------------------------ */

static void add_step(struct stager *s, int old, int unit)
{
    s->steps[s->n_steps++] = (struct step){old, unit, NEVER};
}

static void write_steps(struct stager *s)
{
    const struct mt_program *p = s->old;
    size_t next = 0; /* update to come, as a position in the old program: they stand first there */
    for (size_t i = 0; i < p->n_instrs; i++) {
        const struct mt_instr *in = &p->instrs[i];
        if (in->op == MT_OP_ADAM)
            continue;
        if (in->op == MT_OP_LOAD && p->objects[in->operand[0].object].kind == MT_OBJ_WEIGHTS)
            for (; next < p->n_instrs && p->instrs[next].op == MT_OP_ADAM &&
                   p->instrs[next].unit <= in->unit + UPDATES_AHEAD;
                 next++)
                add_step(s, NONE, p->instrs[next].unit);
        add_step(s, (int)i, in->unit);
    }
    for (; next < p->n_instrs && p->instrs[next].op == MT_OP_ADAM; next++)
        add_step(s, NONE, p->instrs[next].unit);
}

/* The staged object of a step, or NONE; *made: the step makes its content anew. */
static int object_of(const struct stager *s, const struct step *t, bool *made)
{
    *made = false;
    if (t->old == NONE)
        return s->unit_staged[t->unit];
    const struct mt_instr *in = &s->old->instrs[t->old];
    int o = in->operand[0].object;
    switch (in->op) {
    case MT_OP_LOAD:
        return s->out->objects[o].kind == MT_OBJ_WEIGHTS ? s->unit_staged[t->unit] : s->spilled[o];
    case MT_OP_STORE:
        *made = true;
        return s->spilled[o];
    case MT_OP_STORE_GRAD:
        *made = true;
        return s->unit_grad[t->unit];
    default:
        return NONE;
    }
}

static bool find_next_uses(struct stager *s)
{
    int *next = mt_calloc(s->out->n_objects, sizeof(int));
    if (!next)
        return false;
    for (size_t o = 0; o < s->out->n_objects; o++)
        next[o] = NEVER;
    for (size_t i = s->n_steps; i-- > 0;) {
        bool made;
        int o = object_of(s, &s->steps[i], &made);
        if (o == NONE)
            continue;
        s->steps[i].next_use = next[o];
        next[o] = made ? NEVER : (int)i;
    }
    free(next);
    return true;
}

/* --- emitting -------------------------------------------------------------------------------- */

static struct mt_instr make_instr(enum mt_opcode op, enum mt_queue q, int unit, int mb)
{
    return (struct mt_instr){.op = op, .queue = q, .unit = unit, .mb = (int16_t)mb, .wait = MT_NO_WAITS};
}

static void need(struct mt_instr *in, const int32_t wait[MT_N_QUEUES])
{
    for (int q = 0; q < MT_N_QUEUES; q++)
        if (q != in->queue)
            in->wait[q] = MT_MAX(in->wait[q], wait[q]);
}

/* What comes after instruction `at` of queue `q`. */
static void need_one(struct mt_instr *in, int q, int32_t at)
{
    if (q != in->queue)
        in->wait[q] = MT_MAX(in->wait[q], at);
}

static struct buffer *buffer_of(struct stager *s, int object)
{
    return &s->buffers[s->out->objects[object].pool][s->staged[object].buffer];
}

static int32_t emit(struct stager *s, const struct mt_instr *in)
{
    struct mt_program *g = s->out;
    if (!mt_grow(&g->instrs, &g->cap_instrs, g->n_instrs + 1, sizeof(*g->instrs))) {
        s->failed = true;
        return 0;
    }
    g->instrs[g->n_instrs] = *in;
    for (int k = 0; k < in->n_operands; k++) {
        int pool = g->objects[in->operand[k].object].pool;
        if (pool >= MT_N_DEVICE_POOLS)
            s->buffers[pool][in->operand[k].buffer].touched[in->queue] = (int32_t)g->n_instrs;
    }
    return (int32_t)g->n_instrs++;
}

static void add_operand(struct stager *s, struct mt_instr *in, int object, enum mt_access access)
{
    in->operand[in->n_operands++] =
        (struct mt_operand){object, (int16_t)s->staged[object].buffer, (uint8_t)access};
}

/* The content of a staged object is what instruction `at` of queue `q` leaves there. */
static void set_made(struct stager *s, int object, int q, int32_t at)
{
    struct staged *t = &s->staged[object];
    t->made = make_instr(MT_OP_READ, MT_Q_DISK_READ, 0, 0);
    t->made.wait[q] = at;
}

static int64_t spill_home(struct stager *s, int object)
{
    struct mt_object *o = &s->out->objects[object];
    if (o->kind == MT_OBJ_SPILLED && o->spill < 0) {
        o->spill = (int64_t)s->out->disk_spill_bytes;
        s->out->disk_spill_bytes += o->bytes;
    }
    return o->spill;
}

static void write_home(struct stager *s, int object, bool update)
{
    struct staged *t = &s->staged[object];
    const struct mt_object *o = &s->out->objects[object];
    spill_home(s, object);
    struct mt_instr in = make_instr(MT_OP_WRITE, MT_Q_DISK_WRITE, o->unit, o->mb);
    in.update = update;
    in.bytes = o->bytes;
    if (o->kind == MT_OBJ_STATE)
        in.bytes = o->bytes / s->params->units[o->unit].state_elem_bytes *
                   s->params->units[o->unit].state_elem_bytes_written;
    add_operand(s, &in, object, MT_READ);
    need(&in, t->made.wait);
    t->home = emit(s, &in);
    t->dirty = false;
}

/* Frees a buffer of the object's pool for it; what it holds goes home where it is wanted again. */
static void take_buffer(struct stager *s, int object)
{
    int pool = s->out->objects[object].pool, best = 0, best_next = NONE;
    for (int i = 0; i < s->out->pool[pool].n; i++) {
        const struct buffer *b = &s->buffers[pool][i];
        int next = b->object == NONE ? NEVER : s->staged[b->object].next_use;
        int32_t age = MT_MAX(b->touched[MT_Q_H2D], b->touched[MT_Q_DISK_WRITE]);
        const struct buffer *old = &s->buffers[pool][best];
        int32_t best_age = MT_MAX(old->touched[MT_Q_H2D], old->touched[MT_Q_DISK_WRITE]);
        if (next > best_next || (next == best_next && age < best_age)) {
            best = i;
            best_next = next;
        }
    }
    struct buffer *b = &s->buffers[pool][best];
    if (b->object != NONE) {
        struct staged *t = &s->staged[b->object];
        if (t->dirty && t->next_use != NEVER)
            write_home(s, b->object, false);
        t->buffer = NONE;
    }
    b->object = object;
    s->staged[object].buffer = best;
}

/* Brings the object into a buffer from its home, where it is not in one. */
static void make_resident(struct stager *s, int object, bool update)
{
    struct staged *t = &s->staged[object];
    const struct mt_object *o = &s->out->objects[object];
    if (t->buffer != NONE)
        return;
    take_buffer(s, object);
    struct mt_instr in = make_instr(MT_OP_READ, MT_Q_DISK_READ, o->unit, o->mb);
    in.update = update;
    in.bytes = o->bytes;
    add_operand(s, &in, object, MT_WRITE);
    need(&in, buffer_of(s, object)->touched);
    need_one(&in, MT_Q_DISK_WRITE, t->home);
    set_made(s, object, MT_Q_DISK_READ, emit(s, &in));
}

/* Room for a content that the next instruction makes: a buffer of its own where it has none. */
static void make_room(struct stager *s, int object)
{
    if (s->staged[object].buffer == NONE)
        take_buffer(s, object);
}

static void emit_piece(struct stager *s, size_t unit, size_t piece, int hw)
{
    int state = s->unit_state[unit];
    struct mt_instr adam = make_instr(MT_OP_ADAM, MT_Q_HOST, (int)unit, (int)piece);
    adam.update = true;
    adam.elems = piece_elems(s, unit, piece);
    if (state != NONE) {
        state += (int)piece;
        /* a ring: each buffer in turn, not whichever is free first */
        int at = (int)(s->next_piece++ % (size_t)s->out->pool[MT_POOL_STATE].n);
        s->staged[state].buffer = at;
        s->buffers[MT_POOL_STATE][at].object = state;
        struct mt_instr in = make_instr(MT_OP_READ, MT_Q_DISK_READ, (int)unit, (int)piece);
        in.update = true;
        in.bytes = s->out->objects[state].bytes;
        add_operand(s, &in, state, MT_WRITE);
        need(&in, s->buffers[MT_POOL_STATE][at].touched);
        need_one(&adam, MT_Q_DISK_READ, emit(s, &in));
        add_operand(s, &adam, state, MT_UPDATE);
    }
    if (hw != NONE) {
        need(&adam, s->staged[hw].made.wait);
        need(&adam, buffer_of(s, hw)->touched);
        add_operand(s, &adam, hw, MT_UPDATE);
    }
    int32_t done = emit(s, &adam);
    if (state != NONE) {
        set_made(s, state, MT_Q_HOST, done);
        write_home(s, state, true);
    }
    if (hw != NONE)
        set_made(s, hw, MT_Q_HOST, done);
}

static int32_t emit_update(struct stager *s, const struct step *t)
{
    size_t unit = (size_t)t->unit;
    int hw = s->unit_staged[unit];
    if (hw != NONE)
        make_resident(s, hw, true);
    for (size_t p = 0; p < n_pieces(s, unit); p++)
        emit_piece(s, unit, p, hw);
    int32_t last = NONE; /* the queue is in order: the newest update is the unit's last piece */
    for (size_t i = s->out->n_instrs; i-- > 0 && last == NONE;)
        if (s->out->instrs[i].op == MT_OP_ADAM)
            last = (int32_t)i;
    if (hw != NONE)
        write_home(s, hw, true);
    return last;
}

static void emit_old(struct stager *s, const struct step *t)
{
    struct mt_instr in = s->old->instrs[t->old];
    bool made;
    int object = object_of(s, t, &made);
    if (object != NONE && !made)
        make_resident(s, object, false);
    else if (object != NONE)
        make_room(s, object);
    for (int q = 0; q < MT_N_QUEUES; q++)
        in.wait[q] = in.wait[q] >= 0 ? s->map[in.wait[q]] : MT_NO_WAIT;
    if (object != NONE) {
        add_operand(s, &in, object, made ? MT_WRITE : MT_READ);
        need(&in, made ? buffer_of(s, object)->touched : s->staged[object].made.wait);
    }
    int32_t at = s->map[t->old] = emit(s, &in);
    if (object != NONE && made) {
        set_made(s, object, in.queue, at);
        s->staged[object].dirty = true;
        s->staged[object].home = MT_NO_WAIT;
        if (in.op == MT_OP_STORE_GRAD)
            write_home(s, object, false);
    }
}

static void walk(struct stager *s)
{
    for (size_t i = 0; i < s->n_steps && !s->failed; i++) {
        const struct step *t = &s->steps[i];
        bool made;
        int object = object_of(s, t, &made);
        /* while the step itself is placed its own object is what is needed soonest */
        if (object != NONE)
            s->staged[object].next_use = (int)i;
        if (t->old != NONE) {
            emit_old(s, t);
        } else {
            int32_t last = emit_update(s, t);
            for (size_t k = 0; k < s->old->n_instrs && s->old->instrs[k].op == MT_OP_ADAM; k++)
                if (s->old->instrs[k].unit == t->unit)
                    s->map[k] = last;
        }
        if (object != NONE)
            s->staged[object].next_use = t->next_use;
    }
}

/* --- set-up ---------------------------------------------------------------------------------- */

static bool alloc_lists(struct stager *s)
{
    size_t n = s->old->n_instrs, units = s->old->n_units, objects = s->old->n_objects;
    s->map = mt_calloc(n, sizeof(*s->map));
    s->steps = mt_calloc(n + units, sizeof(*s->steps));
    s->unit_staged = mt_calloc(3 * units + objects, sizeof(int));
    if (!s->map || !s->steps || !s->unit_staged)
        return false;
    s->unit_grad = s->unit_staged + units;
    s->unit_state = s->unit_grad + units;
    s->spilled = s->unit_state + units;
    for (size_t i = 0; i < 3 * units + objects; i++)
        s->unit_staged[i] = NONE;
    for (int i = MT_N_DEVICE_POOLS; i < MT_N_POOLS; i++) {
        int k, count = s->out->pool[i].n;
        s->buffers[i] = mt_calloc((size_t)count, sizeof(struct buffer));
        if (!s->buffers[i])
            return false;
        for (k = 0; k < count; k++)
            s->buffers[i][k] = (struct buffer){.object = NONE, .touched = MT_NO_WAITS};
    }
    return true;
}

static bool add_objects(struct stager *s)
{
    for (size_t u = 0; u < s->old->n_units; u++) {
        bool updated = false;
        for (size_t i = 0; i < s->old->n_instrs && s->old->instrs[i].op == MT_OP_ADAM && !updated; i++)
            updated = (size_t)s->old->instrs[i].unit == u;
        add_unit_objects(s, u, updated);
    }
    if (s->params->spill_disk)
        add_spilled(s);
    s->staged = mt_calloc(s->out->n_objects, sizeof(*s->staged));
    for (size_t o = 0; s->staged && o < s->out->n_objects; o++) {
        s->staged[o] = (struct staged){.buffer = NONE, .next_use = NEVER, .home = MT_NO_WAIT};
        s->staged[o].made = make_instr(MT_OP_READ, MT_Q_DISK_READ, 0, 0);
    }
    return s->staged && !s->failed;
}

static int check_pools(const struct stager *s, struct mt_err *err)
{
    for (size_t o = 0; o < s->out->n_objects; o++) {
        const struct mt_object *x = &s->out->objects[o];
        if (x->pool >= MT_N_DEVICE_POOLS && s->out->pool[x->pool].n < 1)
            return mt_fail(err, MT_ERR_NO_FIT, -ENOSPC, "0 buffers of pool \"%s\" are too few",
                           mt_pool_id_name((enum mt_pool_id)x->pool));
    }
    return 0;
}

int mt_program_stage(struct mt_program *p, const struct mt_program_params *params, struct mt_err *err)
{
    struct mt_program old = *p; /* its instructions; the objects stay p's */
    struct stager s = {.params = params, .old = &old, .out = p};
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
    if (!ok || s.failed)
        rc = mt_fail_nomem(err, "a step program", old.n_instrs * sizeof(struct mt_instr));
    free(old.instrs);
    free(s.map);
    free(s.steps);
    free(s.unit_staged);
    free(s.staged);
    for (int i = 0; i < MT_N_POOLS; i++)
        free(s.buffers[i]);
    return rc;
}

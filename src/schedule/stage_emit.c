/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The staging pools during the walk: which object is in which buffer, what its readers must wait for, and the disk
 * reads and writes needed because buffers are few.
 */
#include "base/mem.h"
#include "schedule/stage.h"

static struct mt_instr transfer(enum mt_opcode op, const struct mt_object *o)
{
    struct mt_instr in = mt_instr_make(op, (size_t)o->unit, (size_t)o->mb);
    in.piece = o->piece;
    in.bytes = o->bytes;
    return in;
}

static void need(const struct mt_stager *s, struct mt_instr *in, const int32_t wait[MT_MAX_QUEUES])
{
    int own = mt_instr_queue(in);
    for (int q = 0; q < s->n_queues; q++)
        if (q != own)
            in->wait[q] = MT_MAX(in->wait[q], wait[q]);
}

/* Makes the instruction wait for instruction `at` of queue number `q`. */
static void need_one(struct mt_instr *in, int q, int32_t at)
{
    if (q != mt_instr_queue(in))
        in->wait[q] = MT_MAX(in->wait[q], at);
}

static struct mt_stage_buffer *buffer_of(struct mt_stager *s, int object)
{
    return &s->buffers[s->out->objects[object].pool][s->staged[object].buffer];
}

static int32_t emit(struct mt_stager *s, const struct mt_instr *in)
{
    struct mt_program *g = s->out;
    if (!mt_grow(&g->instrs, &g->cap_instrs, g->n_instrs + 1, sizeof(*g->instrs))) {
        s->failed = true;
        return 0;
    }
    g->instrs[g->n_instrs] = *in;
    for (int k = 0; k < in->n_operands; k++) {
        int pool = g->objects[in->operand[k].object].pool;
        if (!mt_pools[pool].device)
            s->buffers[pool][in->operand[k].buffer].touched[mt_instr_queue(in)] = (int32_t)g->n_instrs;
    }
    return (int32_t)g->n_instrs++;
}

static void add_operand(struct mt_stager *s, struct mt_instr *in, int object, enum mt_access access)
{
    in->operand[in->n_operands++] =
        (struct mt_operand){object, (int16_t)s->staged[object].buffer, (uint8_t)access, MT_ROLE_NONE};
}

/* Instruction `at` of queue number `q` wrote the content of a staged object: its readers wait for that. */
static void set_made(struct mt_stager *s, int object, int q, int32_t at)
{
    struct mt_staged *t = &s->staged[object];
    for (int i = 0; i < s->n_queues; i++)
        t->made[i] = i == q ? at : MT_NO_WAIT;
}

static void write_home(struct mt_stager *s, int object, bool update)
{
    struct mt_staged *t = &s->staged[object];
    struct mt_object *o = &s->out->objects[object];
    if (mt_kinds[o->kind].home == MT_HOME_SPILL && o->spill < 0)
        mt_program_add_home(s->out, o);
    struct mt_instr in = transfer(MT_OP_WRITE, o);
    in.update = update;
    if (o->kind == MT_OBJ_STATE)
        in.bytes = o->bytes / s->params->units[o->unit].state_bytes * s->params->units[o->unit].state_bytes_written;
    else if (o->kind == MT_OBJ_STAGED)
        in.bytes = s->params->units[o->unit].staged_bytes_written;
    add_operand(s, &in, object, MT_READ);
    need(s, &in, t->made);
    t->home = emit(s, &in);
    t->dirty = false;
}

/* The newest copy to a device, or write, of what the buffer has. */
static int32_t age_of(const struct mt_stager *s, const struct mt_stage_buffer *b)
{
    int32_t age = b->touched[MT_Q_DISK_WRITE];
    for (int lane = 0; lane < s->out->n_lanes; lane++)
        age = MT_MAX(age, b->touched[mt_queue_number(lane, MT_Q_H2D)]);
    return age;
}

/* Gives the object a buffer of its pool; writes what is in it to the disk if that is dirty and used again. */
static void take_buffer(struct mt_stager *s, int object)
{
    const struct mt_object *o = &s->out->objects[object];
    const bool own = o->kind == MT_OBJ_SPILLED; /* each host has as many of its own */
    int pool = o->pool, n = s->out->pool[0][pool].n / (own ? mt_program_hosts(s->params) : 1);
    int first = own ? n * mt_program_host_of(s->params, o->lane) : 0, best = first, best_next = MT_STAGE_NONE;
    int32_t best_age = age_of(s, &s->buffers[pool][first]);
    for (int i = first; i < first + n; i++) {
        const struct mt_stage_buffer *b = &s->buffers[pool][i];
        int next = b->object == MT_STAGE_NONE ? MT_STAGE_NEVER : s->staged[b->object].next_use;
        if (next < best_next)
            continue;
        int32_t age = age_of(s, b);
        if (next > best_next || age < best_age) {
            best = i;
            best_next = next;
            best_age = age;
        }
    }
    struct mt_stage_buffer *b = &s->buffers[pool][best];
    if (b->object != MT_STAGE_NONE) {
        struct mt_staged *t = &s->staged[b->object];
        if (t->dirty && t->next_use != MT_STAGE_NEVER)
            write_home(s, b->object, false);
        t->buffer = MT_STAGE_NONE;
    }
    b->object = object;
    s->staged[object].buffer = best;
}

/* Reads the object into a buffer for instruction `user`, unless it is in one. */
static void make_resident(struct mt_stager *s, int object, const struct mt_instr *user)
{
    struct mt_staged *t = &s->staged[object];
    const struct mt_object *o = &s->out->objects[object];
    if (t->buffer != MT_STAGE_NONE)
        return;
    take_buffer(s, object);
    struct mt_instr in = transfer(MT_OP_READ, o);
    in.update = user->update;
    in.once = user->once;
    in.lane = user->lane;
    if (o->kind == MT_OBJ_STAGED && s->params->units[o->unit].staged_bytes_read)
        in.bytes = s->params->units[o->unit].staged_bytes_read;
    add_operand(s, &in, object, MT_WRITE);
    need(s, &in, buffer_of(s, object)->touched);
    need_one(&in, MT_Q_DISK_WRITE, t->home);
    /* only if no other load uses what is read */
    in.if_rows = user->if_rows && s->params->mode == MT_MODE_LOGITS;
    if (in.if_rows)
        need_one(&in, mt_queue_number(in.lane, MT_Q_COMPUTE), s->lists);
    set_made(s, object, MT_Q_DISK_READ, emit(s, &in));
}

/* Gives an object that the next instruction overwrites a buffer, unless it has one. */
static void ensure_buffer(struct mt_stager *s, int object)
{
    if (s->staged[object].buffer == MT_STAGE_NONE)
        take_buffer(s, object);
}

/* Gradients that have no plane use their buffers in order: each is free when the update of what it had is written. */
static void take_ring_buffer(struct mt_stager *s, int object)
{
    enum mt_pool_id pool = s->out->objects[object].pool;
    int at = (int)(s->next_grad[pool]++ % (size_t)s->out->pool[0][pool].n);
    struct mt_stage_buffer *b = &s->buffers[pool][at];
    if (b->object != MT_STAGE_NONE && s->staged[b->object].kept)
        s->too_few = pool;
    b->object = object;
    s->staged[object].buffer = at;
    s->staged[object].kept = true;
}

/* A piece of an update; *what: the instruction, without operands. */
static void emit_piece(struct mt_stager *s, const struct mt_instr *what, size_t piece, int hw)
{
    size_t unit = (size_t)what->unit;
    int state = s->unit_state[unit], grad = what->own ? s->unit_grad[unit] : MT_STAGE_NONE;
    struct mt_instr update = *what;
    update.piece = (int32_t)piece;
    update.decides &= !piece;
    update.elems = mt_stage_piece_elems(s, unit, piece);
    if (state != MT_STAGE_NONE) {
        state += (int)piece;
        /* a ring: buffers are used in order, not whichever is free first */
        const struct mt_object *o = &s->out->objects[state];
        int at = (int)(s->next_piece++ % (size_t)s->out->pool[0][o->pool].n);
        s->staged[state].buffer = at;
        s->buffers[o->pool][at].object = state;
        struct mt_instr in = transfer(MT_OP_READ, o);
        in.update = what->update;
        add_operand(s, &in, state, MT_WRITE);
        need(s, &in, s->buffers[o->pool][at].touched);
        need_one(&update, MT_Q_DISK_READ, emit(s, &in));
        add_operand(s, &update, state, MT_UPDATE);
    }
    if (hw != MT_STAGE_NONE) {
        need(s, &update, s->staged[hw].made);
        need(s, &update, buffer_of(s, hw)->touched);
        add_operand(s, &update, hw, MT_UPDATE);
    }
    if (grad != MT_STAGE_NONE) {
        need(s, &update, s->staged[grad].made);
        add_operand(s, &update, grad, MT_READ);
    }
    int32_t done = emit(s, &update);
    if (state != MT_STAGE_NONE) {
        set_made(s, state, MT_Q_HOST, done);
        write_home(s, state, what->update);
    }
    if (hw != MT_STAGE_NONE)
        set_made(s, hw, MT_Q_HOST, done);
}

/* From positions in the placed program to those in the new one. */
static void map_waits(const struct mt_stager *s, struct mt_instr *in)
{
    for (int q = 0; q < s->n_queues; q++)
        in->wait[q] = in->wait[q] >= 0 ? s->map[in->wait[q]] : MT_NO_WAIT;
}

int32_t mt_stage_emit_update(struct mt_stager *s, const struct mt_stage_step *t)
{
    size_t unit = (size_t)t->unit;
    int hw = mt_stage_updated(s, unit);
    struct mt_instr what = mt_instr_make(MT_OP_UPDATE, unit, 0);
    if (mt_stage_is_own(s, t)) {
        what = s->old->instrs[t->old];
        map_waits(s, &what);
    }
    what.update = !what.own;
    if (hw != MT_STAGE_NONE)
        make_resident(s, hw, &what);
    for (size_t p = 0; p < mt_stage_n_pieces(s, unit); p++)
        emit_piece(s, &what, p, hw);
    if (what.own)
        s->staged[s->unit_grad[unit]].kept = false;
    int32_t last = MT_STAGE_NONE; /* the newest update in the program */
    for (size_t i = s->out->n_instrs; i-- > 0 && last == MT_STAGE_NONE;)
        if (s->out->instrs[i].op == MT_OP_UPDATE)
            last = (int32_t)i;
    if (hw != MT_STAGE_NONE)
        write_home(s, hw, what.update);
    return last;
}

void mt_stage_emit_old(struct mt_stager *s, const struct mt_stage_step *t)
{
    struct mt_instr in = s->old->instrs[t->old];
    bool made;
    int object = mt_stage_object_of(s, t, &made);
    if (object != MT_STAGE_NONE && !made)
        make_resident(s, object, &in);
    else if (object != MT_STAGE_NONE && in.op == MT_OP_STORE_GRAD && s->params->units[in.unit].grad_in_ring)
        take_ring_buffer(s, object);
    else if (object != MT_STAGE_NONE)
        ensure_buffer(s, object);
    map_waits(s, &in);
    if (object != MT_STAGE_NONE) {
        add_operand(s, &in, object, made ? MT_WRITE : MT_READ);
        need(s, &in, made ? buffer_of(s, object)->touched : s->staged[object].made);
    }
    int32_t at = s->map[t->old] = emit(s, &in);
    if (in.op == MT_OP_FORWARD && s->params->units[in.unit].makes_lists)
        s->lists = at;
    if (object != MT_STAGE_NONE && made) {
        set_made(s, object, mt_instr_queue(&in), at);
        s->staged[object].dirty = !s->staged[object].kept;
        s->staged[object].home = MT_NO_WAIT;
        if (in.op == MT_OP_STORE_GRAD && !s->staged[object].kept)
            write_home(s, object, false);
    }
}

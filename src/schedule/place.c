/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gives objects buffers, in one pass over the draft. When a pool is full, the content whose next use is farthest away
 * is evicted (Belady 1966: the future is known, so the number of loads is minimal). From this rule alone follow the
 * ring of weight slots, that the last layers stay on the device from forward to backward, and that boundaries and
 * records are stored and loaded again only if they do not fit.
 *
 * A content that will be evicted is stored right after its last write, not when its buffer is needed. A load starts as
 * soon as its buffer is free, so the H2D queue is ordered by that moment (the load's release) and not by use. Every
 * load's release precedes its use, so the queues cannot deadlock.
 *
 * Each lane has buffers of its own, and an object may be in a buffer of several. What another lane will read is stored
 * right after its last write, as if it were to be evicted, and loaded there from its home.
 */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "schedule/placed.h"

enum { NEVER = INT_MAX, NONE = MT_NO_ENTRY, BLOCK = 64 };

static void raise_key(struct mt_copy_key *k, struct mt_copy_key other)
{
    if (mt_compare_keys(k, &other) < 0)
        *k = other;
}

struct buffer {
    int object;       /* whose content it has, or NONE */
    struct mt_copy_key store; /* newest store that reads it */
    bool pinned;
};

/* An object on a lane. */
struct copy {
    int buffer;     /* that has its content, or NONE */
    int next_use;   /* draft position of the lane's next use, unless another lane writes it before */
    struct mt_copy_key load;   /* newest load, until a compute entry waits for it */
    struct mt_copy_key loaded_by; /* newest load, which reads its home */
    bool loaded;    /* at least once */
};

struct object_state {
    int last_write; /* compute entry */
    int lane;       /* that made its newest content */
    bool dirty;     /* not yet stored since its last write */
    struct mt_copy_key store; /* newest store to its home */
    int store_lane;
    int gathered;     /* host entry that wrote its home, or NONE */
};

/* Of BLOCK buffers the one to pick: the largest `until`, of those the least `used`, of those the first. */
struct best {
    int until, used, at;
    bool known; /* neither has changed since */
};

/* What a lane has. */
struct lane {
    struct buffer *buffers[MT_N_POOLS];
    int *until[MT_N_POOLS];    /* of each buffer: draft position of its content's next use; NEVER: free; NONE: stays */
    int *used[MT_N_POOLS];     /* of each buffer: newest compute entry that uses it; where until ends */
    struct best *best[MT_N_POOLS]; /* [buffers / BLOCK] */
    int n_touched[MT_N_POOLS]; /* buffers used so far: the first so many */
    int first_load_release;    /* of the newest first load of weights, or of what is gathered */
    int last_compute;          /* newest compute entry */
};

struct placer {
    const struct mt_program_params *params;
    struct mt_program *draft;
    int n_lanes;
    struct lane lane[MT_MAX_LANES];
    struct object_state *objects;
    struct copy *copies;    /* [n_objects, n_lanes] */
    int *first_compute;     /* [n_units] compute entry of the unit's first instruction, or NONE */
    int *update;            /* [n_units] host entry of the unit's update, or NONE */
    int *ahead;             /* [n_units] the unit two before it on its lane, with several the one before it; or NONE */
    struct mt_copy_key *left; /* [n_units] its STORE_GRAD */
    int *next_use; /* [draft instr * MT_MAX_OPERANDS + operand] */
    bool *leaves;  /* the same: another lane reads what is written */
    struct mt_placed_queues q;
    bool failed;
};

static struct copy *copy_on(const struct placer *p, int object, int lane)
{
    return &p->copies[(size_t)object * (size_t)p->n_lanes + (size_t)lane];
}

static struct buffer *buffer_at(struct placer *p, int lane, int pool, int buffer)
{
    return &p->lane[lane].buffers[pool][buffer];
}

static int used_at(const struct placer *p, int lane, int pool, int buffer)
{
    return p->lane[lane].used[pool][buffer];
}

static void note_used(struct placer *p, int lane, int pool, int buffer, int compute)
{
    p->lane[lane].used[pool][buffer] = compute;
    p->lane[lane].best[pool][buffer / BLOCK].known = false;
}

static struct mt_placed *push(struct placer *p, struct mt_placed_list *list, const struct mt_instr *in)
{
    if (!mt_grow(&list->e, &list->cap, list->n + 2, sizeof(*list->e))) {
        p->failed = true;
        list->n = 0; /* keeps later accesses in bounds; the result is discarded */
        if (!list->e)
            return NULL;
    }
    struct mt_placed *e = &list->e[list->n++];
    *e = (struct mt_placed){.in = *in, .key = MT_NO_KEY, .load = MT_NO_KEY, .store = MT_NO_KEY,
                            .compute = NONE, .host = NONE, .others = NONE};
    return e;
}

static struct mt_placed *push_compute(struct placer *p, const struct mt_instr *in)
{
    struct mt_placed *e = push(p, &p->q.compute, in);
    p->lane[in->lane].last_compute = (int)p->q.compute.n - 1;
    return e;
}

/* Makes the entry wait for a copy of another lane. */
static void await_other(struct placer *p, struct mt_placed *e, int lane, enum mt_queue kind, struct mt_copy_key key)
{
    struct mt_placed_queues *q = &p->q;
    if (key.id == NONE || lane == e->in.lane)
        return;
    if (!mt_grow(&q->wait, &q->cap_waits, q->n_waits + 1, sizeof(*q->wait))) {
        p->failed = true;
        return;
    }
    q->wait[q->n_waits] = (struct mt_placed_wait){key, mt_queue_number(lane, kind), e->others};
    e->others = (int)q->n_waits++;
}

static void add_operand(struct mt_instr *in, int object, int buffer, enum mt_access access)
{
    in->operand[in->n_operands++] =
        (struct mt_operand){object, (int16_t)buffer, (uint8_t)access, MT_ROLE_NONE};
}

/* An instruction of a lane uses an object: notes its next uses, and of a write that the others' copies are old. */
static void find_next_use(struct placer *p, size_t i, int k, int *next)
{
    const struct mt_instr *in = &p->draft->instrs[i];
    const struct mt_operand *op = &in->operand[k];
    int *of = &next[(size_t)op->object * (size_t)p->n_lanes];
    size_t at = i * MT_MAX_OPERANDS + (size_t)k;
    p->next_use[at] = of[in->lane];
    for (int lane = 0; op->access & MT_WRITE && lane < p->n_lanes; lane++) {
        if (lane == in->lane)
            continue;
        p->leaves[at] |= of[lane] != NEVER;
        of[lane] = NEVER;
    }
    of[in->lane] = (int)i;
}

static bool find_next_uses(struct placer *p)
{
    struct mt_program *d = p->draft;
    size_t n = d->n_objects * (size_t)p->n_lanes;
    int *next = mt_calloc(n, sizeof(int));
    p->next_use = mt_calloc(d->n_instrs * MT_MAX_OPERANDS, sizeof(int));
    p->leaves = mt_calloc(d->n_instrs * MT_MAX_OPERANDS, sizeof(bool));
    bool ok = next && p->next_use && p->leaves;
    for (size_t o = 0; ok && o < n; o++)
        next[o] = NEVER;
    for (size_t i = d->n_instrs; ok && i-- > 0;)
        for (int k = 0; k < d->instrs[i].n_operands; k++)
            find_next_use(p, i, k, next);
    free(next);
    return ok;
}

/* Call after a change of what the buffer has, or of its next use. */
static void note_until(struct placer *p, int lane, int pool, int buffer)
{
    const struct buffer *b = buffer_at(p, lane, pool, buffer);
    bool stays = b->pinned || (b->object != NONE && p->draft->objects[b->object].resident);
    p->lane[lane].until[pool][buffer] =
        stays ? NONE : b->object == NONE ? NEVER : copy_on(p, b->object, lane)->next_use;
    p->lane[lane].best[pool][buffer / BLOCK].known = false;
}

static void emit_poison(struct placer *p, int lane, int pool, int buffer)
{
    const struct buffer *b = buffer_at(p, lane, pool, buffer);
    int used = used_at(p, lane, pool, buffer);
    if (!p->params->poison || used == NONE || !mt_pools[pool].poisonable || b->object == NONE)
        return;
    struct mt_instr in = mt_instr_make(MT_OP_POISON, (size_t)p->draft->objects[b->object].unit, 0);
    in.lane = (uint8_t)lane;
    add_operand(&in, b->object, buffer, MT_WRITE);
    struct mt_placed *e = push(p, &p->q.poisons, &in);
    if (e) {
        e->compute = used;
        e->store = b->store;
    }
}

/* Frees a buffer whose content is not needed in it any more. */
static void empty_buffer(struct placer *p, int lane, int pool, int buffer)
{
    struct buffer *b = buffer_at(p, lane, pool, buffer);
    emit_poison(p, lane, pool, buffer);
    copy_on(p, b->object, lane)->buffer = NONE;
    b->object = NONE;
    note_until(p, lane, pool, buffer);
}

static void take_home(struct placer *p, struct mt_object *o)
{
    bool staged = p->params->spill_disk && mt_pools[o->pool].spilled != MT_NO_POOL; /* then stage.c chooses its home */
    if (o->spill >= 0 || staged)
        return;
    o->spill = (int64_t)p->draft->spill_bytes;
    p->draft->spill_bytes += mt_align_up(o->bytes, 4096);
}

/* After what other lanes do with the old content of its home. */
static void emit_store(struct placer *p, int object)
{
    struct object_state *s = &p->objects[object];
    struct mt_object *o = &p->draft->objects[object];
    struct mt_instr in = mt_instr_make(MT_OP_STORE, (size_t)o->unit, (size_t)o->mb);
    int buffer = copy_on(p, object, s->lane)->buffer;
    in.lane = (uint8_t)s->lane;
    add_operand(&in, object, buffer, MT_READ);
    in.bytes = o->bytes;
    take_home(p, o);
    struct mt_placed *e = push(p, &p->q.stores, &in);
    if (!e)
        return;
    e->compute = s->last_write;
    e->key = (struct mt_copy_key){s->last_write, s->last_write, (int)p->q.stores.n};
    await_other(p, e, s->store_lane, MT_Q_D2H, s->store);
    for (int lane = 0; lane < p->n_lanes; lane++)
        await_other(p, e, lane, MT_Q_H2D, copy_on(p, object, lane)->loaded_by);
    s->store = e->key;
    s->store_lane = s->lane;
    s->dirty = false;
    raise_key(&buffer_at(p, s->lane, o->pool, buffer)->store, e->key);
}

static struct best best_of(const int *until, const int *used, int begin, int end)
{
    struct best b = {.until = NONE, .used = INT_MAX, .at = begin, .known = true};
    for (int i = begin; i < end; i++)
        b.until = MT_MAX(b.until, until[i]);
    for (int i = begin; i < end; i++)
        b.used = MT_MIN(b.used, until[i] == b.until ? used[i] : INT_MAX);
    while (until[b.at] != b.until || used[b.at] != b.used)
        b.at++;
    return b;
}

/* The buffer that is needed last, and of several the one that was used first. A plan spends much of its time here, and
 * a step of thousands of micro-batches has thousands of buffers: only blocks that changed are looked through. */
static int pick_last(struct placer *p, int lane, int pool)
{
    struct lane *l = &p->lane[lane];
    const int n = p->draft->pool[lane][pool].n;
    struct best best = {.until = NONE, .at = NONE};
    for (int i = 0; i < n; i += BLOCK) {
        struct best *b = &l->best[pool][i / BLOCK];
        if (!b->known)
            *b = best_of(l->until[pool], l->used[pool], i, MT_MIN(i + BLOCK, n));
        if (b->until > best.until || (b->until == best.until && b->until != NONE && b->used < best.used))
            best = *b;
    }
    return best.at;
}

/* The same of those last used by compute entry `newest` or before; NONE: there is none. */
static int pick_of(struct placer *p, int lane, int pool, int newest)
{
    const struct lane *l = &p->lane[lane];
    const int *until = l->until[pool], *used = l->used[pool], n = p->draft->pool[lane][pool].n;
    int best = NONE, last = NONE;
    for (int i = 0; i < n; i++)
        last = used[i] <= newest ? MT_MAX(last, until[i]) : last;
    for (int i = 0; i < n && last != NONE; i++)
        if (until[i] == last && used[i] <= newest && (best == NONE || used[i] < used[best]))
            best = i;
    return best;
}

/*
 * With several lanes, what a micro-batch hands over leaves its buffer at once, and the next one's input would wait for
 * that copy: buffers of the lane's last few operations are left alone if there are others. So a few go round, where one
 * would be enough.
 */
static int pick_buffer(struct placer *p, int lane, int pool)
{
    enum { FEW = 3 };
    struct lane *l = &p->lane[lane];
    bool hands_over = pool == MT_POOL_BOUNDARY || (pool >= MT_POOL_RECORD && pool <= MT_POOL_RECORD_LAST);
    int best = NONE;
    if (l->n_touched[pool] < p->draft->pool[lane][pool].n)
        return l->n_touched[pool]++;
    if (p->n_lanes > 1 && hands_over)
        best = pick_of(p, lane, pool, (int)p->q.compute.n - 1 - FEW * p->n_lanes);
    return best != NONE ? best : pick_last(p, lane, pool);
}

/* Gives the object a buffer of its pool on the lane; evicts what is in it. */
static int take_buffer(struct placer *p, int object, int lane, struct mt_err *err)
{
    int pool = p->draft->objects[object].pool, at = pick_buffer(p, lane, pool);
    if (at == NONE)
        return mt_fail(err, MT_ERR_NO_FIT, -ENOSPC,
                       "%d buffers of pool \"%s\" are too few for one instruction",
                       p->draft->pool[lane][pool].n, mt_pools[pool].name);
    struct buffer *b = buffer_at(p, lane, pool, at);
    if (b->object != NONE) {
        if (p->objects[b->object].dirty)
            emit_store(p, b->object);
        empty_buffer(p, lane, pool, at);
    }
    b->object = object;
    b->pinned = true;
    note_until(p, lane, pool, at);
    copy_on(p, object, lane)->buffer = at;
    return 0;
}

/* Compute entry of the lists of the layer that the unit's experts belong to; NONE: it has no experts. */
static int lists_of(const struct placer *p, int unit)
{
    if (!p->params->units[unit].follows_lists)
        return NONE;
    while (unit && !p->params->units[unit].makes_lists)
        unit--;
    return p->first_compute[unit];
}

/*
 * A load of experts that comes after the lists is skipped if none of them has rows. A step has so many rows that nearly
 * all of them do, so its loads come as early as they can; logits of one text have few, and their loads wait.
 */
static void await_lists(const struct placer *p, struct mt_placed *load)
{
    int lists = lists_of(p, load->in.unit);
    if (lists != NONE && p->params->mode == MT_MODE_LOGITS) {
        load->compute = MT_MAX(load->compute, lists);
        load->key.release = MT_MAX(load->key.release, lists);
    }
    load->in.if_rows = lists != NONE && load->compute >= lists;
}

static size_t load_bytes(const struct placer *p, const struct mt_object *o)
{
    const struct mt_unit_shape *u = &p->params->units[o->unit];
    return o->kind == MT_OBJ_WEIGHTS ? u->link_bytes : o->kind == MT_OBJ_ADAPTERS ? u->adapter_link_bytes : o->bytes;
}

/* Is the object decoded or joined after each load? */
static bool is_joined(const struct placer *p, const struct mt_object *o)
{
    bool prepared = o->kind == MT_OBJ_WEIGHTS && p->params->units[o->unit].prepared;
    return mt_object_is_of_planes(o) && (p->params->join || prepared);
}

/* Queues a load, after host entry `host` (NONE: after none). */
static void push_load(struct placer *p, struct mt_instr *in, int object, int host)
{
    struct object_state *s = &p->objects[object];
    struct copy *c = copy_on(p, object, in->lane);
    const struct mt_object *o = &p->draft->objects[object];
    struct buffer *b = buffer_at(p, in->lane, o->pool, c->buffer);
    struct lane *l = &p->lane[in->lane];
    bool weights = mt_object_is_of_planes(o);
    struct mt_placed *e = push(p, &p->q.loads, in);
    if (!e)
        return;
    const int used = used_at(p, in->lane, o->pool, c->buffer);
    e->compute = used;
    e->store = b->store;
    if (s->store_lane == in->lane) {
        e->compute = MT_MAX(e->compute, s->store.release);
        raise_key(&e->store, s->store);
    }
    await_other(p, e, s->store_lane, MT_Q_D2H, s->store);
    e->key = (struct mt_copy_key){MT_MAX(used, s->store.release), (int)p->q.compute.n, (int)p->q.loads.n};
    /* A load of weights waits for their update and delays all later copies in its queue. So it is queued no earlier
     * than two of the lane's units ahead, even if its buffer is free (the head's is from the start). With several
     * lanes the updates of all others' units come between, and it is one unit ahead. */
    int ahead = weights ? p->ahead[o->unit] : NONE;
    if (ahead != NONE && p->first_compute[ahead] != NONE)
        e->key.release = MT_MAX(e->key.release, p->first_compute[ahead] - 1);
    e->host = host;
    /* The host's instructions run one after the other. If the first load of a later unit (the head, whose buffer is
     * free from the start) were queued before those of earlier units, these would wait for the later unit's update. */
    if (e->host != NONE && !c->loaded)
        l->first_load_release = e->key.release = MT_MAX(e->key.release, l->first_load_release);
    if (o->kind == MT_OBJ_WEIGHTS)
        await_lists(p, e);
    c->load = c->loaded_by = e->key;
    in->if_rows = e->in.if_rows;
}

/* The load of weights in the parts in which they are updated, whose host entries are next to each other. */
static void push_parts(struct placer *p, const struct mt_instr *whole, int object, size_t part)
{
    const struct mt_unit_shape *u = &p->params->units[whole->unit];
    int n = (int)mt_div_up(u->update_elems, part);
    size_t left = whole->bytes;
    for (int k = 0; k < n; k++) {
        struct mt_instr in = *whole;
        in.piece = k;
        in.first = (size_t)k * part;
        in.elems = MT_MIN(part, u->update_elems - in.first);
        in.bytes = k + 1 < n ? MT_MIN(left, whole->bytes / u->update_elems * in.elems) : left;
        left -= in.bytes;
        push_load(p, &in, object, p->update[whole->unit] - (n - 1) + k);
    }
}

static void emit_load(struct placer *p, int object, int lane)
{
    struct copy *c = copy_on(p, object, lane);
    const struct mt_object *o = &p->draft->objects[object];
    struct mt_instr in = mt_instr_make(MT_OP_LOAD, (size_t)o->unit, (size_t)o->mb);
    bool weights = o->kind == MT_OBJ_WEIGHTS, of_planes = mt_object_is_of_planes(o);
    in.lane = (uint8_t)lane;
    add_operand(&in, object, c->buffer, MT_WRITE);
    in.once = o->resident && !p->params->units[o->unit].trainable;
    in.bytes = load_bytes(p, o);
    size_t part = weights ? mt_program_part_elems(p->params, (size_t)o->unit) : 0;
    if (weights && !c->loaded && p->update[o->unit] != NONE && part < p->params->units[o->unit].update_elems)
        push_parts(p, &in, object, part);
    else
        push_load(p, &in, object, of_planes ? p->update[o->unit] : p->objects[object].gathered);
    c->loaded = true;
    if (is_joined(p, o)) {
        struct mt_instr join = mt_instr_make(MT_OP_JOIN, (size_t)o->unit, 0);
        join.lane = in.lane;
        add_operand(&join, object, c->buffer, MT_UPDATE);
        join.once = in.once;
        join.if_rows = in.if_rows;
        struct mt_placed *j = push_compute(p, &join);
        if (!j)
            return;
        j->load = c->load;
        c->load = MT_NO_KEY;
        note_used(p, lane, o->pool, c->buffer, (int)p->q.compute.n - 1);
    }
}

static int make_resident(struct placer *p, const struct mt_instr *draft, struct mt_err *err)
{
    int rc = 0, lane = draft->lane;
    bool fresh[MT_MAX_OPERANDS] = {false};
    for (int k = 0; k < draft->n_operands; k++) {
        int o = draft->operand[k].object, at = copy_on(p, o, lane)->buffer, pool = p->draft->objects[o].pool;
        if (at == NONE)
            continue;
        buffer_at(p, lane, pool, at)->pinned = true;
        note_until(p, lane, pool, at);
    }
    for (int k = 0; k < draft->n_operands && !rc; k++) {
        fresh[k] = copy_on(p, draft->operand[k].object, lane)->buffer == NONE;
        if (fresh[k])
            rc = take_buffer(p, draft->operand[k].object, lane, err);
    }
    /* rows are gathered before the weights used with them are updated */
    for (int gathered = 1; gathered >= 0; gathered--)
        for (int k = 0; k < draft->n_operands && !rc; k++) {
            int o = draft->operand[k].object;
            bool first = p->draft->objects[o].resident && !copy_on(p, o, lane)->loaded;
            bool loads = (fresh[k] || first) && (draft->operand[k].access & MT_READ);
            if (loads && gathered == (p->objects[o].gathered != NONE))
                emit_load(p, o, lane);
        }
    return rc;
}

static void release_operands(struct placer *p, const struct mt_instr *in, size_t i)
{
    for (int k = 0; k < in->n_operands; k++) {
        int o = in->operand[k].object, pool = p->draft->objects[o].pool;
        struct copy *c = copy_on(p, o, in->lane);
        buffer_at(p, in->lane, pool, c->buffer)->pinned = false;
        c->next_use = p->next_use[i * MT_MAX_OPERANDS + (size_t)k];
        note_until(p, in->lane, pool, c->buffer);
        if (c->next_use == NEVER && !p->draft->objects[o].resident)
            empty_buffer(p, in->lane, pool, c->buffer);
    }
}

/* Compute entry `at` writes the object; `leaves`: another lane reads it next. */
static void note_write(struct placer *p, int object, int lane, int at, bool leaves)
{
    struct object_state *s = &p->objects[object];
    s->dirty = true;
    s->lane = lane;
    s->last_write = at;
    if (leaves)
        emit_store(p, object);
}

static int place_compute(struct placer *p, size_t i, struct mt_err *err)
{
    struct mt_instr in = p->draft->instrs[i];
    int rc = make_resident(p, &in, err);
    if (rc)
        return rc;
    struct mt_placed *e = push_compute(p, &in);
    if (!e)
        return 0;
    int at = (int)p->q.compute.n - 1;
    if (p->first_compute[in.unit] == NONE)
        p->first_compute[in.unit] = at;
    for (int k = 0; k < in.n_operands; k++) {
        int o = in.operand[k].object;
        struct copy *c = copy_on(p, o, in.lane);
        struct buffer *b = buffer_at(p, in.lane, p->draft->objects[o].pool, c->buffer);
        e->in.operand[k].buffer = (int16_t)c->buffer;
        raise_key(&e->load, c->load);
        c->load = MT_NO_KEY;
        note_used(p, in.lane, p->draft->objects[o].pool, c->buffer, at);
        if (in.operand[k].access & MT_WRITE) {
            raise_key(&e->store, b->store); /* the newest store that reads the old content */
            note_write(p, o, in.lane, at, p->leaves[i * MT_MAX_OPERANDS + (size_t)k]);
        }
    }
    release_operands(p, &in, i);
    return 0;
}

/* An update, or a GATHER, which writes its operand's home: the operand gets a buffer when it is used. */
static void place_host(struct placer *p, size_t i)
{
    struct mt_instr in = p->draft->instrs[i];
    int at = (int)p->q.host.n;
    if (in.op == MT_OP_UPDATE)
        p->update[in.unit] = at;
    for (int k = 0; k < in.n_operands; k++) {
        struct mt_object *o = &p->draft->objects[in.operand[k].object];
        take_home(p, o);
        p->objects[in.operand[k].object].gathered = at;
        in.bytes += o->bytes;
    }
    push(p, &p->q.host, &in);
}

/* An update with gradients of this step: after those of its whole block have left the device. */
static void place_own_update(struct placer *p, size_t i)
{
    const struct mt_instr *in = &p->draft->instrs[i];
    struct mt_placed *e = push(p, &p->q.updates, in);
    if (!e)
        return;
    e->key = (struct mt_copy_key){NONE, NONE, (int)p->q.updates.n};
    for (int u = in->block; u < in->block_end; u++) {
        e->key.release = MT_MAX(e->key.release, p->left[u].release);
        if (p->params->units[u].lane_back == e->in.lane)
            raise_key(&e->store, p->left[u]);
        else
            await_other(p, e, p->params->units[u].lane_back, MT_Q_D2H, p->left[u]);
    }
}

/* A STORE_GRAD or STATS of the draft: released by its lane's compute entry before it. */
static void place_store(struct placer *p, size_t i)
{
    struct mt_instr in = p->draft->instrs[i];
    struct mt_placed *e = push(p, &p->q.stores, &in);
    if (!e)
        return;
    e->compute = p->lane[in.lane].last_compute;
    e->host = in.op == MT_OP_STORE_GRAD ? p->update[in.unit] : NONE; /* which reads the plane */
    e->key = (struct mt_copy_key){e->compute, e->compute, (int)p->q.stores.n};
    if (in.op == MT_OP_STORE_GRAD)
        p->left[in.unit] = e->key;
    for (int k = 0; k < in.n_operands; k++) {
        int o = in.operand[k].object, buffer = copy_on(p, o, in.lane)->buffer;
        struct buffer *b = buffer_at(p, in.lane, p->draft->objects[o].pool, buffer);
        e->in.operand[k].buffer = (int16_t)buffer;
        raise_key(&b->store, e->key);
    }
    release_operands(p, &in, i);
}

/* Gives objects that live for the run their buffers: the first ones of the pool, in order, in every program. */
static int place_residents(struct placer *p, struct mt_err *err)
{
    for (size_t o = 0; o < p->draft->n_objects; o++) {
        enum mt_pool_id pool = p->draft->objects[o].pool;
        int lane = p->draft->objects[o].lane, n = p->draft->pool[lane][pool].n;
        if (!p->draft->objects[o].resident)
            continue;
        int at = p->lane[lane].n_touched[pool]++;
        if (at >= n)
            return mt_fail(err, MT_ERR_NO_FIT, -ENOSPC, "%d buffers of pool \"%s\" are too few for what stays in it",
                           n, mt_pools[pool].name);
        copy_on(p, (int)o, lane)->buffer = at;
        buffer_at(p, lane, pool, at)->object = (int)o;
        note_until(p, lane, pool, at);
    }
    return 0;
}

static int check_pools(const struct mt_program_params *p, struct mt_err *err)
{
    for (int lane = 0; lane < mt_program_lanes(p); lane++)
        for (int i = 0; i < MT_N_POOLS; i++)
            if (p->n_buffers[lane][i] > MT_MAX_BUFFERS)
                return mt_fail(err, MT_ERR_NO_FIT, -EINVAL, "%d buffers of pool \"%s\" are more than the limit of %d",
                               p->n_buffers[lane][i], mt_pools[i].name, MT_MAX_BUFFERS);
    return 0;
}

static bool alloc_lane(struct placer *p, int lane)
{
    struct lane *l = &p->lane[lane];
    size_t bytes[MT_N_POOLS];
    mt_program_buffer_bytes(p->params, lane, bytes);
    l->first_load_release = l->last_compute = NONE;
    for (int i = 0; i < MT_N_POOLS; i++) {
        int n = bytes[i] && (mt_pools[i].device || !lane) ? p->params->n_buffers[lane][i] : 0;
        p->draft->pool[lane][i] = (struct mt_pool_shape){n, bytes[i]};
        l->buffers[i] = mt_calloc((size_t)n, sizeof(struct buffer));
        l->until[i] = mt_calloc(2 * (size_t)n, sizeof(int));
        l->best[i] = mt_calloc(mt_div_up((size_t)n, BLOCK), sizeof(struct best));
        if (!l->buffers[i] || !l->until[i] || !l->best[i])
            return false;
        l->used[i] = l->until[i] + n;
        for (int k = 0; k < n; k++) {
            l->buffers[i][k] = (struct buffer){.object = NONE, .store = MT_NO_KEY};
            l->until[i][k] = NEVER;
            l->used[i][k] = NONE;
        }
    }
    return true;
}

/* The lists by unit. */
static bool alloc_units(struct placer *p)
{
    size_t n = p->draft->n_units;
    int before[MT_MAX_LANES][2];
    p->first_compute = mt_calloc(3 * n, sizeof(int));
    p->left = mt_calloc(n, sizeof(*p->left));
    if (!p->first_compute || !p->left)
        return false;
    p->update = p->first_compute + n;
    p->ahead = p->update + n;
    memset(before, 0xff, sizeof(before)); /* NONE */
    for (size_t u = 0; u < n; u++) {
        int *of = before[p->params->units[u].lane];
        p->first_compute[u] = p->update[u] = NONE;
        p->left[u] = MT_NO_KEY;
        p->ahead[u] = of[p->n_lanes > 1 ? 0 : 1];
        of[1] = of[0];
        of[0] = (int)u;
    }
    return true;
}

static bool alloc_objects(struct placer *p)
{
    size_t n = p->draft->n_objects, copies = n * (size_t)p->n_lanes;
    p->objects = mt_calloc(n, sizeof(*p->objects));
    p->copies = mt_calloc(copies, sizeof(*p->copies));
    if (!p->objects || !p->copies)
        return false;
    for (size_t o = 0; o < n; o++)
        p->objects[o] = (struct object_state){.last_write = NONE, .store = MT_NO_KEY, .gathered = NONE};
    for (size_t i = 0; i < copies; i++)
        p->copies[i] =
            (struct copy){.buffer = NONE, .next_use = NEVER, .load = MT_NO_KEY, .loaded_by = MT_NO_KEY};
    return true;
}

static bool alloc_placer(struct placer *p)
{
    bool ok = alloc_objects(p) && alloc_units(p) && find_next_uses(p);
    for (int lane = 0; lane < p->n_lanes && ok; lane++)
        ok = alloc_lane(p, lane);
    return ok;
}

static void free_placer(struct placer *p)
{
    struct mt_placed_list *list[] = {&p->q.compute, &p->q.loads, &p->q.stores, &p->q.poisons, &p->q.host,
                                    &p->q.updates};
    for (size_t i = 0; i < MT_ARRAY_LEN(list); i++)
        free(list[i]->e);
    free(p->q.wait);
    for (int lane = 0; lane < p->n_lanes; lane++)
        for (int i = 0; i < MT_N_POOLS; i++) {
            free(p->lane[lane].buffers[i]);
            free(p->lane[lane].until[i]);
            free(p->lane[lane].best[i]);
        }
    free(p->objects);
    free(p->copies);
    free(p->next_use);
    free(p->leaves);
    free(p->first_compute);
    free(p->left);
}

static int place_all(struct placer *p, struct mt_err *err)
{
    int rc = place_residents(p, err);
    for (size_t i = 0; !rc && i < p->draft->n_instrs; i++) {
        const struct mt_instr *in = &p->draft->instrs[i];
        if (in->own)
            place_own_update(p, i);
        else if (in->queue == MT_Q_HOST)
            place_host(p, i);
        else if (in->queue == MT_Q_COMPUTE)
            rc = place_compute(p, i, err);
        else
            place_store(p, i);
    }
    if (!rc && p->failed)
        rc = mt_fail_nomem(err, "a step program", p->draft->n_instrs * sizeof(struct mt_placed));
    return rc;
}

int mt_draft_place(struct mt_program *out, struct mt_draft *d, struct mt_err *err)
{
    struct placer p = {.params = d->params, .draft = &d->prog, .n_lanes = d->prog.n_lanes};
    int rc = check_pools(d->params, err);
    if (!rc)
        rc = alloc_placer(&p) ? place_all(&p, err)
                              : mt_fail_nomem(err, "a step program", d->prog.n_instrs * sizeof(int));
    if (!rc)
        rc = mt_placed_merge(out, &d->prog, &p.q, err);
    free_placer(&p);
    return rc;
}

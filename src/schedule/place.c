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

#include "base/mem.h"
#include "schedule/placer.h"

enum { NEVER = MT_PLACE_NEVER, NONE = MT_NO_ENTRY, BLOCK = MT_PLACE_BLOCK };

static void raise_key(struct mt_copy_key *k, struct mt_copy_key other)
{
    if (mt_compare_keys(k, &other) < 0)
        *k = other;
}

static struct mt_place_copy *copy_on(const struct mt_placer *p, int object, int lane)
{
    return &p->copies[(size_t)object * (size_t)p->n_lanes + (size_t)lane];
}

static struct mt_place_buffer *buffer_at(struct mt_placer *p, int lane, int pool, int buffer)
{
    return &p->lane[lane].buffers[pool][buffer];
}

static int used_at(const struct mt_placer *p, int lane, int pool, int buffer)
{
    return p->lane[lane].used[pool][buffer];
}

static void note_used(struct mt_placer *p, int lane, int pool, int buffer, int compute)
{
    p->lane[lane].used[pool][buffer] = compute;
    p->lane[lane].best[pool][buffer / BLOCK].known = false;
}

/* Adds an instruction to the draft's; returns its number. */
static int make_instr(struct mt_placer *p, const struct mt_instr *in)
{
    struct mt_placed_queues *q = &p->q;
    if (!mt_grow(&q->made, &q->cap_made, q->n_made + 1, sizeof(*q->made))) {
        p->failed = true;
        return 0;
    }
    q->made[q->n_made] = *in;
    return (int)(p->draft->n_instrs + q->n_made++);
}

static struct mt_placed *push(struct mt_placer *p, struct mt_placed_list *list, int instr)
{
    if (!mt_grow(&list->e, &list->cap, list->n + 2, sizeof(*list->e))) {
        p->failed = true;
        list->n = 0; /* keeps later accesses in bounds; the result is discarded */
        if (!list->e)
            return NULL;
    }
    struct mt_placed *e = &list->e[list->n++];
    *e = (struct mt_placed){.instr = instr, .key = MT_NO_KEY, .load = MT_NO_KEY, .store = MT_NO_KEY,
                            .compute = NONE, .host = NONE, .others = NONE};
    return e;
}

static struct mt_placed *push_compute(struct mt_placer *p, int lane, int instr)
{
    struct mt_placed *e = push(p, &p->q.compute, instr);
    p->lane[lane].last_compute = (int)p->q.compute.n - 1;
    return e;
}

/* Makes the entry wait for a copy of another lane. */
static void await_other(struct mt_placer *p, struct mt_placed *e, int lane, enum mt_queue kind, struct mt_copy_key key)
{
    struct mt_placed_queues *q = &p->q;
    if (key.id == NONE || lane == mt_placed_instr(p->draft, q, e)->lane)
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

/* Call after a change of what the buffer has, or of its next use. */
static void note_until(struct mt_placer *p, int lane, int pool, int buffer)
{
    const struct mt_place_buffer *b = buffer_at(p, lane, pool, buffer);
    bool stays = b->pinned || (b->object != NONE && p->draft->objects[b->object].resident);
    p->lane[lane].until[pool][buffer] =
        stays ? NONE : b->object == NONE ? NEVER : copy_on(p, b->object, lane)->next_use;
    p->lane[lane].best[pool][buffer / BLOCK].known = false;
}

static void emit_poison(struct mt_placer *p, int lane, int pool, int buffer)
{
    const struct mt_place_buffer *b = buffer_at(p, lane, pool, buffer);
    int used = used_at(p, lane, pool, buffer);
    if (!p->params->poison || used == NONE || !mt_pools[pool].poisonable || b->object == NONE)
        return;
    struct mt_instr in = mt_instr_make(MT_OP_POISON, (size_t)p->draft->objects[b->object].unit, 0);
    in.lane = (uint8_t)lane;
    add_operand(&in, b->object, buffer, MT_WRITE);
    struct mt_placed *e = push(p, &p->q.poisons, make_instr(p, &in));
    if (e) {
        e->compute = used;
        e->store = b->store;
    }
}

/* Frees a buffer whose content is not needed in it any more. */
static void empty_buffer(struct mt_placer *p, int lane, int pool, int buffer)
{
    struct mt_place_buffer *b = buffer_at(p, lane, pool, buffer);
    emit_poison(p, lane, pool, buffer);
    copy_on(p, b->object, lane)->buffer = NONE;
    b->object = NONE;
    note_until(p, lane, pool, buffer);
}

static void take_home(struct mt_placer *p, struct mt_object *o)
{
    bool staged = p->params->spill_disk && mt_pools[o->pool].spilled != MT_NO_POOL; /* then stage.c chooses its home */
    if (o->spill >= 0 || staged || mt_kinds[o->kind].home == MT_HOME_PLANE)
        return;
    mt_program_add_home(p->draft, o);
}

/* After what other lanes do with the old content of its home. */
static void emit_store(struct mt_placer *p, int object)
{
    struct mt_place_object *s = &p->objects[object];
    struct mt_object *o = &p->draft->objects[object];
    struct mt_instr in = mt_instr_make(MT_OP_STORE, (size_t)o->unit, (size_t)o->mb);
    int buffer = copy_on(p, object, s->lane)->buffer;
    in.lane = (uint8_t)s->lane;
    add_operand(&in, object, buffer, MT_READ);
    in.bytes = o->bytes;
    take_home(p, o);
    struct mt_placed *e = push(p, &p->q.stores, make_instr(p, &in));
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

/* Gives the object a buffer of its pool on the lane; evicts what is in it. */
static int take_buffer(struct mt_placer *p, int object, int lane, struct mt_err *err)
{
    int pool = p->draft->objects[object].pool, at = mt_placer_pick(p, lane, pool);
    if (at == NONE)
        return mt_fail(err, MT_ERR_NO_FIT, -ENOSPC,
                       "%d buffers of pool \"%s\" are too few for one instruction",
                       p->draft->pool[lane][pool].n, mt_pools[pool].name);
    struct mt_place_buffer *b = buffer_at(p, lane, pool, at);
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

/* Compute entry of the lists of the layer that the unit's experts belong to; NONE: it has no experts, or those of
 * several layers, with lists each. */
static int lists_of(const struct mt_placer *p, int unit)
{
    if (!p->params->units[unit].follows_lists || p->params->units[unit].shared)
        return NONE;
    while (unit && !p->params->units[unit].makes_lists)
        unit--;
    return p->first_compute[unit];
}

/*
 * A load of experts that comes after the lists is skipped if none of them has rows. A step has so many rows that nearly
 * all of them do, so its loads come as early as they can; logits of one text have few, and their loads wait.
 */
static void await_lists(const struct mt_placer *p, struct mt_placed *load)
{
    struct mt_instr *in = mt_placed_instr(p->draft, &p->q, load);
    int lists = lists_of(p, in->unit);
    if (lists != NONE && p->params->mode == MT_MODE_LOGITS) {
        load->compute = MT_MAX(load->compute, lists);
        load->key.release = MT_MAX(load->key.release, lists);
    }
    bool known = mt_groups_in_use(p->params->groups, p->params->n_micro) == 1; /* else other groups' lists may come later */
    /* a direction is made by the weights of all experts, with rows or without */
    bool directs = p->params->mode == MT_MODE_TRAIN && p->params->units[in->unit].moment_bytes;
    in->if_rows = known && !directs && lists != NONE && load->compute >= lists;
}

static size_t load_bytes(const struct mt_placer *p, const struct mt_object *o)
{
    const struct mt_unit_shape *u = &p->params->units[o->unit];
    return o->kind == MT_OBJ_WEIGHTS ? u->link_bytes : o->kind == MT_OBJ_ADAPTERS ? u->adapter_link_bytes : o->bytes;
}

/* Is the object decoded, joined or perturbed after each load? */
static bool is_joined(const struct mt_placer *p, const struct mt_object *o)
{
    const struct mt_unit_shape *u = &p->params->units[o->unit];
    bool prepared = (o->kind == MT_OBJ_WEIGHTS && u->prepared) || u->noisy;
    return mt_object_is_of_planes(o) && (p->params->join || prepared);
}

/* Queues a load, after host entry `host` (NONE: after none). */
static void push_load(struct mt_placer *p, struct mt_instr *in, int object, int host)
{
    struct mt_place_object *s = &p->objects[object];
    struct mt_place_copy *c = copy_on(p, object, in->lane);
    const struct mt_object *o = &p->draft->objects[object];
    struct mt_place_buffer *b = buffer_at(p, in->lane, o->pool, c->buffer);
    struct mt_place_lane *l = &p->lane[in->lane];
    bool weights = mt_object_is_of_planes(o);
    struct mt_placed *e = push(p, &p->q.loads, make_instr(p, in));
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
     * lanes the updates of all others' units come between, and it is one unit ahead; where boundaries come from other
     * lanes, which would wait behind it, with half of that unit's micro-batches left. */
    int ahead = weights ? p->ahead[o->unit] : NONE;
    const int *since = host != NONE && p->n_lanes > 1 && !p->params->by_data ? p->half_computed : p->first_compute;
    if (ahead != NONE && since[ahead] != NONE)
        e->key.release = MT_MAX(e->key.release, since[ahead] - 1);
    e->host = host;
    /* The host's instructions run one after the other. If the first load of a later unit (the head, whose buffer is
     * free from the start) were queued before those of earlier units, these would wait for the later unit's update. */
    if (e->host != NONE && !c->loaded)
        l->first_load_release = e->key.release = MT_MAX(e->key.release, l->first_load_release);
    if (o->kind == MT_OBJ_WEIGHTS)
        await_lists(p, e);
    c->load = c->loaded_by = e->key;
    in->if_rows = mt_placed_instr(p->draft, &p->q, e)->if_rows;
}

/* The load of weights in the parts in which they are updated, whose host entries are next to each other. */
static void push_parts(struct mt_placer *p, const struct mt_instr *whole, int object, size_t part)
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

static void emit_load(struct mt_placer *p, int object, int lane)
{
    struct mt_place_copy *c = copy_on(p, object, lane);
    const struct mt_object *o = &p->draft->objects[object];
    struct mt_instr in = mt_instr_make(MT_OP_LOAD, (size_t)o->unit, (size_t)o->mb);
    bool weights = o->kind == MT_OBJ_WEIGHTS, of_planes = mt_object_is_of_planes(o);
    in.lane = (uint8_t)lane;
    add_operand(&in, object, c->buffer, MT_WRITE);
    in.once = o->resident && (weights || mt_kinds[o->kind].returns || !p->params->units[o->unit].trainable);
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
        struct mt_placed *j = push_compute(p, lane, make_instr(p, &join));
        if (!j)
            return;
        j->load = c->load;
        c->load = MT_NO_KEY;
        note_used(p, lane, o->pool, c->buffer, (int)p->q.compute.n - 1);
    }
}

static int make_resident(struct mt_placer *p, const struct mt_instr *draft, struct mt_err *err)
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

static void release_operands(struct mt_placer *p, const struct mt_instr *in, size_t i)
{
    for (int k = 0; k < in->n_operands; k++) {
        int o = in->operand[k].object, pool = p->draft->objects[o].pool;
        struct mt_place_copy *c = copy_on(p, o, in->lane);
        buffer_at(p, in->lane, pool, c->buffer)->pinned = false;
        c->next_use = p->next_use[i * MT_MAX_OPERANDS + (size_t)k];
        note_until(p, in->lane, pool, c->buffer);
        if (c->next_use == NEVER && !p->draft->objects[o].resident)
            empty_buffer(p, in->lane, pool, c->buffer);
    }
}

/* Compute entry `at` writes the object; `leaves`: another lane reads it next. */
static void note_write(struct mt_placer *p, int object, int lane, int at, bool leaves)
{
    struct mt_place_object *s = &p->objects[object];
    s->dirty = true;
    s->lane = lane;
    s->last_write = at;
    if (leaves)
        emit_store(p, object);
}

static int place_compute(struct mt_placer *p, size_t i, struct mt_err *err)
{
    struct mt_instr *in = &p->draft->instrs[i];
    int rc = make_resident(p, in, err);
    if (rc)
        return rc;
    struct mt_placed *e = push_compute(p, in->lane, (int)i);
    if (!e)
        return 0;
    int at = (int)p->q.compute.n - 1;
    if (p->first_compute[in->unit] == NONE)
        p->first_compute[in->unit] = at;
    if (p->half_computed[in->unit] == NONE && 2 * (size_t)in->mb >= p->params->n_micro)
        p->half_computed[in->unit] = at;
    for (int k = 0; k < in->n_operands; k++) {
        int o = in->operand[k].object;
        struct mt_place_copy *c = copy_on(p, o, in->lane);
        struct mt_place_buffer *b = buffer_at(p, in->lane, p->draft->objects[o].pool, c->buffer);
        in->operand[k].buffer = (int16_t)c->buffer;
        raise_key(&e->load, c->load);
        c->load = MT_NO_KEY;
        note_used(p, in->lane, p->draft->objects[o].pool, c->buffer, at);
        if (in->operand[k].access & MT_WRITE) {
            raise_key(&e->store, b->store); /* the newest store that reads the old content */
            bool returns = mt_kinds[p->draft->objects[o].kind].returns && !p->draft->objects[o].resident;
            note_write(p, o, in->lane, at, returns || p->leaves[i * MT_MAX_OPERANDS + (size_t)k]);
        }
    }
    release_operands(p, in, i);
    return 0;
}

/* An update, or a GATHER, which writes its operand's home: the operand gets a buffer when it is used. */
static void place_host(struct mt_placer *p, size_t i)
{
    struct mt_instr *in = &p->draft->instrs[i];
    int at = (int)p->q.host.n;
    if (in->op == MT_OP_UPDATE)
        p->update[in->unit] = at;
    for (int k = 0; k < in->n_operands; k++) {
        struct mt_object *o = &p->draft->objects[in->operand[k].object];
        take_home(p, o);
        p->objects[in->operand[k].object].gathered = at;
        in->bytes += o->bytes;
    }
    push(p, &p->q.host, (int)i);
}

/* An update with gradients of this step: after those of its whole block have left the device. */
static void place_own_update(struct mt_placer *p, size_t i)
{
    const struct mt_instr *in = &p->draft->instrs[i];
    struct mt_placed *e = push(p, &p->q.updates, (int)i);
    if (!e)
        return;
    e->key = (struct mt_copy_key){NONE, NONE, (int)p->q.updates.n};
    for (int u = in->block; u < in->block_end; u++) {
        e->key.release = MT_MAX(e->key.release, p->left[u].release);
        if (p->params->units[u].lane_back == in->lane)
            raise_key(&e->store, p->left[u]);
        else
            await_other(p, e, p->params->units[u].lane_back, MT_Q_D2H, p->left[u]);
    }
}

/* A STORE_GRAD or STATS of the draft: released by its lane's compute entry before it. */
static void place_store(struct mt_placer *p, size_t i)
{
    struct mt_instr *in = &p->draft->instrs[i];
    struct mt_placed *e = push(p, &p->q.stores, (int)i);
    if (!e)
        return;
    e->compute = p->lane[in->lane].last_compute;
    e->host = in->op == MT_OP_STORE_GRAD ? p->update[in->unit] : NONE; /* which reads the plane */
    e->key = (struct mt_copy_key){e->compute, e->compute, (int)p->q.stores.n};
    if (in->op == MT_OP_STORE_GRAD)
        p->left[in->unit] = e->key;
    for (int k = 0; k < in->n_operands; k++) {
        int o = in->operand[k].object, buffer = copy_on(p, o, in->lane)->buffer;
        struct mt_place_buffer *b = buffer_at(p, in->lane, p->draft->objects[o].pool, buffer);
        in->operand[k].buffer = (int16_t)buffer;
        raise_key(&b->store, e->key);
    }
    release_operands(p, in, i);
}

/* Gives objects that live for the run their buffers: the first ones of the pool, in order, in every program. */
static int place_residents(struct mt_placer *p, struct mt_err *err)
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

int mt_program_check_pools(const struct mt_program_params *p, struct mt_err *err)
{
    for (int lane = 0; lane < mt_program_lanes(p); lane++)
        for (int i = 0; i < MT_N_POOLS; i++) {
            int most = MT_MAX_BUFFERS / (mt_pools[i].device ? 1 : mt_program_hosts(p));
            if (p->n_buffers[lane][i] > most)
                return mt_fail(err, MT_ERR_NO_FIT, -EINVAL, "%d buffers of pool \"%s\" are more than the limit of %d",
                               p->n_buffers[lane][i], mt_pools[i].name, most);
        }
    return 0;
}

static int place_all(struct mt_placer *p, struct mt_err *err)
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
    struct mt_placer p = {.params = d->params, .draft = &d->prog, .n_lanes = d->prog.n_lanes};
    int rc = mt_program_check_pools(d->params, err);
    if (!rc)
        rc = mt_placer_alloc(&p) ? place_all(&p, err)
                              : mt_fail_nomem(err, "a step program", d->prog.n_instrs * sizeof(int));
    rc = rc ?: mt_placed_merge(out, &d->prog, &p.q, err);
    mt_placer_free(&p);
    return rc;
}

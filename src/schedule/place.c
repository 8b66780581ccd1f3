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
 */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>

#include "base/mem.h"
#include "schedule/placed.h"

enum { NEVER = INT_MAX, NONE = MT_NO_ENTRY };

static void raise_key(struct mt_copy_key *k, struct mt_copy_key other)
{
    if (mt_compare_keys(k, &other) < 0)
        *k = other;
}

struct buffer {
    int object;       /* whose content it has, or NONE */
    int last_compute; /* newest compute entry that uses it */
    struct mt_copy_key store; /* newest store that reads it */
    bool pinned;
};

struct object_state {
    int buffer;     /* that has its content, or NONE */
    int next_use;   /* draft position */
    int last_write; /* compute entry */
    bool dirty;     /* not yet stored since its last write */
    struct mt_copy_key store; /* newest store to its home */
    struct mt_copy_key load;  /* newest load, until a compute entry waits for it */
    int gathered;     /* host entry that wrote its home, or NONE */
    bool loaded;      /* at least once */
};

struct placer {
    const struct mt_program_params *params;
    struct mt_program *draft;
    struct buffer *buffers[MT_N_POOLS];
    int *until[MT_N_POOLS];     /* of each buffer: draft position of its content's next use; NEVER: free; NONE: stays */
    int n_touched[MT_N_POOLS]; /* buffers used so far: the first so many */
    struct object_state *objects;
    int first_load_release; /* of the newest first load of weights, or of what is gathered */
    int *first_compute;     /* [n_units] compute entry of the unit's first instruction, or NONE */
    int *update;            /* [n_units] host entry of the unit's update, or NONE */
    int *next_use; /* [draft instr * MT_MAX_OPERANDS + operand] */
    struct mt_placed_queues q;
    bool failed;
};

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
                            .compute = NONE, .host = NONE};
    return e;
}

static void add_operand(struct mt_instr *in, int object, int buffer, enum mt_access access)
{
    in->operand[in->n_operands++] =
        (struct mt_operand){object, (int16_t)buffer, (uint8_t)access, MT_ROLE_NONE};
}

static bool find_next_uses(struct placer *p)
{
    struct mt_program *d = p->draft;
    int *next = mt_calloc(d->n_objects, sizeof(int));
    p->next_use = mt_calloc(d->n_instrs * MT_MAX_OPERANDS, sizeof(int));
    if (!next || !p->next_use) {
        free(next);
        return false;
    }
    for (size_t o = 0; o < d->n_objects; o++)
        next[o] = NEVER;
    for (size_t i = d->n_instrs; i-- > 0;)
        for (int k = 0; k < d->instrs[i].n_operands; k++) {
            int o = d->instrs[i].operand[k].object;
            p->next_use[i * MT_MAX_OPERANDS + (size_t)k] = next[o];
            next[o] = (int)i;
        }
    free(next);
    return true;
}

/* Call after a change of what the buffer has, or of its next use. */
static void note_until(struct placer *p, int pool, int buffer)
{
    const struct buffer *b = &p->buffers[pool][buffer];
    bool stays = b->pinned || (b->object != NONE && p->draft->objects[b->object].resident);
    p->until[pool][buffer] = stays ? NONE : b->object == NONE ? NEVER : p->objects[b->object].next_use;
}

static void emit_poison(struct placer *p, int pool, int buffer)
{
    struct buffer *b = &p->buffers[pool][buffer];
    if (!p->params->poison || b->last_compute == NONE || !mt_pools[pool].poisonable || b->object == NONE)
        return;
    struct mt_instr in = mt_instr_make(MT_OP_POISON, (size_t)p->draft->objects[b->object].unit, 0);
    add_operand(&in, b->object, buffer, MT_WRITE);
    struct mt_placed *e = push(p, &p->q.poisons, &in);
    if (e) {
        e->compute = b->last_compute;
        e->store = b->store;
    }
}

/* Frees a buffer whose content is not needed in it any more. */
static void empty_buffer(struct placer *p, int pool, int buffer)
{
    struct buffer *b = &p->buffers[pool][buffer];
    emit_poison(p, pool, buffer);
    p->objects[b->object].buffer = NONE;
    b->object = NONE;
    note_until(p, pool, buffer);
}

static void take_home(struct placer *p, struct mt_object *o)
{
    bool staged = p->params->spill_disk && mt_pools[o->pool].spilled != MT_NO_POOL; /* then stage.c chooses its home */
    if (o->spill >= 0 || staged)
        return;
    o->spill = (int64_t)p->draft->spill_bytes;
    p->draft->spill_bytes += mt_align_up(o->bytes, 4096);
}

static void emit_store(struct placer *p, int object)
{
    struct object_state *s = &p->objects[object];
    struct mt_object *o = &p->draft->objects[object];
    struct mt_instr in = mt_instr_make(MT_OP_STORE, (size_t)o->unit, (size_t)o->mb);
    add_operand(&in, object, s->buffer, MT_READ);
    in.bytes = o->bytes;
    take_home(p, o);
    struct mt_placed *e = push(p, &p->q.stores, &in);
    if (!e)
        return;
    e->compute = s->last_write;
    e->key = (struct mt_copy_key){s->last_write, s->last_write, (int)p->q.stores.n};
    s->store = e->key;
    s->dirty = false;
    raise_key(&p->buffers[o->pool][s->buffer].store, e->key);
}

/* The buffer that is needed last, and of several the one that was used first. */
static int pick_buffer(struct placer *p, int pool)
{
    const struct buffer *b = p->buffers[pool];
    const int *until = p->until[pool], n = p->draft->pool[pool].n;
    int best = NONE, last = NONE;
    if (p->n_touched[pool] < n)
        return p->n_touched[pool]++;
    for (int i = 0; i < n; i++)
        last = MT_MAX(last, until[i]);
    for (int i = 0; i < n && last != NONE; i++)
        if (until[i] == last && (best == NONE || b[i].last_compute < b[best].last_compute))
            best = i;
    return best;
}

/* Gives the object a buffer of its pool; evicts what is in it. */
static int take_buffer(struct placer *p, int object, struct mt_err *err)
{
    int pool = p->draft->objects[object].pool, at = pick_buffer(p, pool);
    if (at == NONE)
        return mt_fail(err, MT_ERR_NO_FIT, -ENOSPC,
                       "%d buffers of pool \"%s\" are too few for one instruction",
                       p->draft->pool[pool].n, mt_pools[pool].name);
    struct buffer *b = &p->buffers[pool][at];
    if (b->object != NONE) {
        if (p->objects[b->object].dirty)
            emit_store(p, b->object);
        empty_buffer(p, pool, at);
    }
    b->object = object;
    b->pinned = true;
    note_until(p, pool, at);
    p->objects[object].buffer = at;
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
    const struct mt_object *o = &p->draft->objects[object];
    struct buffer *b = &p->buffers[o->pool][s->buffer];
    bool weights = mt_object_is_of_planes(o);
    struct mt_placed *e = push(p, &p->q.loads, in);
    if (!e)
        return;
    e->compute = MT_MAX(b->last_compute, s->store.release);
    e->store = b->store;
    raise_key(&e->store, s->store);
    e->key = (struct mt_copy_key){e->compute, (int)p->q.compute.n, (int)p->q.loads.n};
    /* A load of weights waits for their update and delays all later copies in its queue. So it is queued no
     * earlier than two units ahead, even if its buffer is free (the head's is from the start). */
    if (weights && o->unit >= 2 && p->first_compute[o->unit - 2] != NONE)
        e->key.release = MT_MAX(e->key.release, p->first_compute[o->unit - 2] - 1);
    e->host = host;
    /* The host's instructions run one after the other. If the first load of a later unit (the head, whose buffer is
     * free from the start) were queued before those of earlier units, these would wait for the later unit's update. */
    if (e->host != NONE && !s->loaded)
        p->first_load_release = e->key.release = MT_MAX(e->key.release, p->first_load_release);
    if (o->kind == MT_OBJ_WEIGHTS)
        await_lists(p, e);
    s->load = e->key;
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

static void emit_load(struct placer *p, int object)
{
    struct object_state *s = &p->objects[object];
    const struct mt_object *o = &p->draft->objects[object];
    struct buffer *b = &p->buffers[o->pool][s->buffer];
    struct mt_instr in = mt_instr_make(MT_OP_LOAD, (size_t)o->unit, (size_t)o->mb);
    bool weights = o->kind == MT_OBJ_WEIGHTS, of_planes = mt_object_is_of_planes(o);
    add_operand(&in, object, s->buffer, MT_WRITE);
    in.once = o->resident && !p->params->units[o->unit].trainable;
    in.bytes = load_bytes(p, o);
    size_t part = weights ? mt_program_part_elems(p->params, (size_t)o->unit) : 0;
    if (weights && !s->loaded && p->update[o->unit] != NONE && part < p->params->units[o->unit].update_elems)
        push_parts(p, &in, object, part);
    else
        push_load(p, &in, object, of_planes ? p->update[o->unit] : s->gathered);
    s->loaded = true;
    if (is_joined(p, o)) {
        struct mt_instr join = mt_instr_make(MT_OP_JOIN, (size_t)o->unit, 0);
        add_operand(&join, object, s->buffer, MT_UPDATE);
        join.once = in.once;
        join.if_rows = in.if_rows;
        struct mt_placed *j = push(p, &p->q.compute, &join);
        if (!j)
            return;
        j->load = s->load;
        s->load = MT_NO_KEY;
        b->last_compute = (int)p->q.compute.n - 1;
    }
}

static int make_resident(struct placer *p, const struct mt_instr *draft, struct mt_err *err)
{
    int rc = 0;
    bool fresh[MT_MAX_OPERANDS] = {false};
    for (int k = 0; k < draft->n_operands; k++) {
        int o = draft->operand[k].object, at = p->objects[o].buffer, pool = p->draft->objects[o].pool;
        if (at == NONE)
            continue;
        p->buffers[pool][at].pinned = true;
        note_until(p, pool, at);
    }
    for (int k = 0; k < draft->n_operands && !rc; k++) {
        fresh[k] = p->objects[draft->operand[k].object].buffer == NONE;
        if (fresh[k])
            rc = take_buffer(p, draft->operand[k].object, err);
    }
    /* rows are gathered before the weights used with them are updated */
    for (int gathered = 1; gathered >= 0; gathered--)
        for (int k = 0; k < draft->n_operands && !rc; k++) {
            int o = draft->operand[k].object;
            bool first = p->draft->objects[o].resident && !p->objects[o].loaded;
            bool loads = (fresh[k] || first) && (draft->operand[k].access & MT_READ);
            if (loads && gathered == (p->objects[o].gathered != NONE))
                emit_load(p, o);
        }
    return rc;
}

static void release_operands(struct placer *p, const struct mt_instr *in, size_t i)
{
    for (int k = 0; k < in->n_operands; k++) {
        int o = in->operand[k].object, pool = p->draft->objects[o].pool;
        struct object_state *s = &p->objects[o];
        p->buffers[pool][s->buffer].pinned = false;
        s->next_use = p->next_use[i * MT_MAX_OPERANDS + (size_t)k];
        note_until(p, pool, s->buffer);
        if (s->next_use == NEVER && !p->draft->objects[o].resident)
            empty_buffer(p, pool, s->buffer);
    }
}

static int place_compute(struct placer *p, size_t i, struct mt_err *err)
{
    struct mt_instr in = p->draft->instrs[i];
    int rc = make_resident(p, &in, err);
    if (rc)
        return rc;
    struct mt_placed *e = push(p, &p->q.compute, &in);
    if (!e)
        return 0;
    int at = (int)p->q.compute.n - 1;
    if (p->first_compute[in.unit] == NONE)
        p->first_compute[in.unit] = at;
    for (int k = 0; k < in.n_operands; k++) {
        int o = in.operand[k].object;
        struct object_state *s = &p->objects[o];
        struct buffer *b = &p->buffers[p->draft->objects[o].pool][s->buffer];
        e->in.operand[k].buffer = (int16_t)s->buffer;
        raise_key(&e->load, s->load);
        s->load = MT_NO_KEY;
        if (in.operand[k].access & MT_WRITE) {
            raise_key(&e->store, b->store); /* the newest store that reads the old content */
            s->dirty = true;
            s->last_write = at;
        }
        b->last_compute = at;
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
        struct object_state *s = &p->objects[in.operand[k].object];
        take_home(p, o);
        s->gathered = at;
        s->next_use = p->next_use[i * MT_MAX_OPERANDS + (size_t)k];
        if (s->buffer != NONE)
            note_until(p, o->pool, s->buffer);
        in.bytes += o->bytes;
    }
    push(p, &p->q.host, &in);
}

/* A STORE_GRAD of the draft: released by the compute entry before it. */
static void place_store(struct placer *p, size_t i)
{
    struct mt_instr in = p->draft->instrs[i];
    struct mt_placed *e = push(p, &p->q.stores, &in);
    if (!e)
        return;
    e->compute = (int)p->q.compute.n - 1;
    e->host = in.op == MT_OP_STORE_GRAD ? p->update[in.unit] : NONE; /* which reads the plane */
    e->key = (struct mt_copy_key){e->compute, e->compute, (int)p->q.stores.n};
    for (int k = 0; k < in.n_operands; k++) {
        int o = in.operand[k].object;
        struct buffer *b = &p->buffers[p->draft->objects[o].pool][p->objects[o].buffer];
        e->in.operand[k].buffer = (int16_t)p->objects[o].buffer;
        raise_key(&b->store, e->key);
    }
    release_operands(p, &in, i);
}

/* Gives objects that live for the run their buffers: the first ones of the pool, in order, in every program. */
static int place_residents(struct placer *p, struct mt_err *err)
{
    for (size_t o = 0; o < p->draft->n_objects; o++) {
        enum mt_pool_id pool = p->draft->objects[o].pool;
        if (!p->draft->objects[o].resident)
            continue;
        int at = p->n_touched[pool]++;
        if (at >= p->draft->pool[pool].n)
            return mt_fail(err, MT_ERR_NO_FIT, -ENOSPC, "%d buffers of pool \"%s\" are too few for what stays in it",
                           p->draft->pool[pool].n, mt_pools[pool].name);
        p->objects[o].buffer = at;
        p->buffers[pool][at].object = (int)o;
        note_until(p, pool, at);
    }
    return 0;
}

static int check_pools(const struct mt_program_params *p, struct mt_err *err)
{
    for (int i = 0; i < MT_N_POOLS; i++)
        if (p->n_buffers[i] > MT_MAX_BUFFERS)
            return mt_fail(err, MT_ERR_NO_FIT, -EINVAL, "%d buffers of pool \"%s\" are more than the limit of %d",
                           p->n_buffers[i], mt_pools[i].name, MT_MAX_BUFFERS);
    return 0;
}

static bool alloc_placer(struct placer *p)
{
    struct mt_program *d = p->draft;
    size_t bytes[MT_N_POOLS];
    mt_program_buffer_bytes(p->params, bytes);
    for (int i = 0; i < MT_N_POOLS; i++) {
        int n = bytes[i] ? p->params->n_buffers[i] : 0;
        d->pool[i] = (struct mt_pool_shape){n, bytes[i]};
        p->buffers[i] = mt_calloc((size_t)n, sizeof(struct buffer));
        for (int k = 0; p->buffers[i] && k < n; k++)
            p->buffers[i][k] =
                (struct buffer){.object = NONE, .last_compute = NONE, .store = MT_NO_KEY};
        p->until[i] = mt_calloc((size_t)n, sizeof(int));
        for (int k = 0; p->until[i] && k < n; k++)
            p->until[i][k] = NEVER;
        if (!p->buffers[i] || !p->until[i])
            return false;
    }
    p->objects = mt_calloc(d->n_objects, sizeof(*p->objects));
    for (size_t o = 0; p->objects && o < d->n_objects; o++)
        p->objects[o] = (struct object_state){.buffer = NONE, .next_use = NEVER, .last_write = NONE,
                                              .store = MT_NO_KEY, .load = MT_NO_KEY, .gathered = NONE};
    p->first_compute = mt_calloc(d->n_units, sizeof(int));
    p->update = mt_calloc(d->n_units, sizeof(int));
    for (size_t u = 0; p->first_compute && p->update && u < d->n_units; u++)
        p->first_compute[u] = p->update[u] = NONE;
    return p->objects && p->first_compute && p->update && find_next_uses(p);
}

static void free_placer(struct placer *p)
{
    struct mt_placed_list *list[] = {&p->q.compute, &p->q.loads, &p->q.stores, &p->q.poisons, &p->q.host};
    for (size_t i = 0; i < MT_ARRAY_LEN(list); i++)
        free(list[i]->e);
    for (int i = 0; i < MT_N_POOLS; i++) {
        free(p->buffers[i]);
        free(p->until[i]);
    }
    free(p->objects);
    free(p->next_use);
    free(p->first_compute);
    free(p->update);
}

static int place_all(struct placer *p, struct mt_err *err)
{
    int rc = place_residents(p, err);
    for (size_t i = 0; !rc && i < p->draft->n_instrs; i++) {
        const struct mt_instr *in = &p->draft->instrs[i];
        if (in->queue == MT_Q_HOST)
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
    struct placer p = {.params = d->params, .draft = &d->prog, .first_load_release = NONE};
    int rc = check_pools(d->params, err);
    if (!rc)
        rc = alloc_placer(&p) ? place_all(&p, err)
                              : mt_fail_nomem(err, "a step program", d->prog.n_instrs * sizeof(int));
    if (!rc)
        rc = mt_placed_merge(out, &d->prog, &p.q, err);
    free_placer(&p);
    return rc;
}

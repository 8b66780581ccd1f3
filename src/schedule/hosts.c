/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shares a step out to hosts. The program that comes in is of all hosts' lanes, as if they were in one process; a
 * host takes the instructions of its own lanes, and of the host's queue the updates of the units that it owns: those
 * whose gradient its lanes cast. Three things cross: a sum of groups that a lane of another host adds up (PASS, from
 * home to home); the weights of a unit after its update (RENEW, from the planes of its owner to those of all others);
 * and the rows of experts in a group, which each BALANCE adds up (COUNTS). Each follows the instruction that makes its
 * content: a store, an update, or the group's last lists.
 *
 * Or nobody owns units, and every host updates all. Then no weights cross, but what a lane leaves in planes: gradients
 * as cast, and states that its direction has changed (SHARE, from the planes of one host to those of all others).
 *
 * All hosts list these messages in the order of the whole program, and each starts its own of them in that order, many
 * under way at once. So no two hosts wait for each other: of all instructions that have not ended, the first of the
 * whole program can always go on.
 */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/sum64.h"
#include "schedule/build.h"

enum { NONE = -1 };

struct part {
    const struct mt_program_params *params;
    const struct mt_program *whole;
    struct mt_program *out;
    struct mt_arrays arrays; /* what follows, but s->out's */
    int first, end;   /* its lanes */
    uint16_t *to;     /* by instruction of the whole: hosts that its content goes to */
    bool *idle;       /* by instruction of the whole: a READ of what no instruction here uses */
    struct newest {   /* of a queue of the whole: what is here */
        int32_t own, told; /* its newest instruction; the newest message with what one of another host makes */
    } *upto;          /* by instruction of the whole: of its queue, at or before it */
    struct newest last[MT_MAX_QUEUES]; /* so far */
    int32_t *host_use; /* by unit: the newest instruction of the host's queue */
    int32_t (*home_use)[MT_MAX_QUEUES]; /* by object: the newest instruction here, by queue, that uses its home */
    size_t buffer[MT_N_POOLS + 1]; /* number of the first buffer of each host pool; and how many there are */
    int32_t *sent;    /* by that number: the newest message from there */
};

static bool is_device(const struct mt_instr *in)
{
    return mt_queues[in->queue].device;
}

static const struct mt_object *object_of(const struct part *s, const struct mt_instr *in)
{
    return &s->whole->objects[in->operand[0].object];
}

/* Whether it moves an activation to or from the disk. */
static bool is_spill(const struct part *s, const struct mt_instr *in)
{
    return (in->op == MT_OP_READ || in->op == MT_OP_WRITE) && object_of(s, in)->kind == MT_OBJ_SPILLED;
}

/* The host that makes what the instruction does; of the host's and the disk's queues the unit's owner, or whose the
 * activation is. */
static int host_of(const struct part *s, const struct mt_instr *in)
{
    bool spill = is_spill(s, in);
    if (!is_device(in) && !spill)
        return mt_program_owner(s->params, (size_t)in->unit);
    return mt_program_host_of(s->params, spill ? object_of(s, in)->lane : in->lane);
}

/* Whether the instruction is this host's own, or one that all hosts have. */
static bool is_here(const struct part *s, const struct mt_instr *in)
{
    bool renewed = in->op == MT_OP_WRITE && object_of(s, in)->kind == MT_OBJ_STAGED;
    if (is_device(in) || is_spill(s, in) ||
        (s->params->owned && (in->op == MT_OP_UPDATE || in->op == MT_OP_WRITE) && !renewed))
        return host_of(s, in) == s->params->host;
    if (in->op == MT_OP_READ)
        return !s->idle[in - s->whole->instrs];
    return in->op != MT_OP_GATHER ||
           mt_program_host_of(s->params, mt_micro_lane(s->params, (size_t)in->mb)) == s->params->host;
}

static bool moves_spilled(const struct part *s, const struct mt_instr *in)
{
    return (in->op == MT_OP_LOAD || in->op == MT_OP_STORE) && mt_kinds[object_of(s, in)->kind].home == MT_HOME_SPILL;
}

/* Whether it ends the update of a unit. */
static bool ends_update(const struct part *s, const struct mt_instr *in)
{
    size_t first = (size_t)in->piece * s->whole->piece_elems + in->first;
    return in->op == MT_OP_UPDATE && first + in->elems == s->params->units[in->unit].update_elems;
}

/* Whether it leaves in planes what those of all hosts must have. */
static bool is_shared(const struct part *s, const struct mt_instr *in)
{
    if (s->params->owned)
        return ends_update(s, in);
    return in->op == MT_OP_STORE_GRAD || (in->op == MT_OP_STORE && mt_kinds[object_of(s, in)->kind].returns);
}

/* The rows of experts in each group go to all hosts that add them up, when its last lists are made. */
static int find_counts(struct part *s, struct mt_err *err)
{
    const struct mt_program *p = s->whole;
    uint16_t to = 0;
    bool *known = mt_arrays_add(&s->arrays, mt_groups_n(p->groups), sizeof(*known));
    if (!known)
        return mt_fail_nomem(err, "a step program", mt_groups_n(p->groups));
    for (size_t i = p->n_instrs; i-- > 0 && p->balances;) { /* lists come before */
        const struct mt_instr *in = &p->instrs[i];
        size_t group = mt_group_of(p->groups, (size_t)in->mb);
        if (in->op == MT_OP_BALANCE)
            to |= (uint16_t)(1u << host_of(s, in));
        if (!mt_instr_makes_lists(in) || known[group])
            continue;
        known[group] = true;
        s->to[i] = (uint16_t)(to & ~(1u << host_of(s, in)));
    }
    return 0;
}

/* Finds which contents go to other hosts. */
static int find_messages(struct part *s, struct mt_err *err)
{
    const struct mt_program *p = s->whole;
    int32_t *store = mt_arrays_add(&s->arrays, p->n_objects, sizeof(*store)); /* by object: its newest store + 1 */
    if (!store)
        return mt_fail_nomem(err, "a step program", p->n_objects * sizeof(*store));
    for (size_t i = 0; i < p->n_instrs; i++) {
        const struct mt_instr *in = &p->instrs[i];
        if (is_shared(s, in))
            s->to[i] = (uint16_t)(((1u << mt_program_hosts(s->params)) - 1) & ~(1u << host_of(s, in)));
        if (!moves_spilled(s, in))
            continue;
        int32_t *from = &store[in->operand[0].object];
        if (in->op == MT_OP_STORE)
            *from = (int32_t)i + 1;
        else if (*from && host_of(s, &p->instrs[*from - 1]) != host_of(s, in))
            s->to[*from - 1] |= (uint16_t)(1u << host_of(s, in));
    }
    for (size_t i = 0; i < p->n_instrs; i++)
        if (s->to[i] && moves_spilled(s, &p->instrs[i]) && object_of(s, &p->instrs[i])->kind != MT_OBJ_GRAD)
            return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "hosts cannot pass on \"%s\" of unit %d",
                         mt_kinds[object_of(s, &p->instrs[i])->kind].name, p->instrs[i].unit);
    return 0;
}

/* Number of the operand's buffer, if it is in a host pool; else of none. */
static size_t buffer_of(const struct part *s, const struct mt_operand *o)
{
    enum mt_pool_id pool = s->whole->objects[o->object].pool;
    return mt_pools[pool].device ? s->buffer[MT_N_POOLS] : s->buffer[pool] + (size_t)o->buffer;
}

/* Whether what comes from the unit's owner in the place of this update is all that its staged planes have. */
static bool is_replaced(const struct part *s, const struct mt_instr *in)
{
    const struct mt_unit_shape *u = &s->params->units[in->unit];
    return s->params->owned && ends_update(s, in) && host_of(s, in) != s->params->host &&
           u->staged_bytes == u->staged_bytes_written;
}

/* From the end on: a READ is idle if nothing here uses its buffer before the next one into it. */
static int find_idle_reads(struct part *s, struct mt_err *err)
{
    const struct mt_program *p = s->whole;
    MT_FREED bool *used = mt_calloc(s->buffer[MT_N_POOLS] + 1, 1);
    if (!used)
        return mt_fail_nomem(err, "a step program", s->buffer[MT_N_POOLS]);
    for (size_t i = p->n_instrs; i-- > 0;) {
        const struct mt_instr *in = &p->instrs[i];
        bool reads = in->op == MT_OP_READ, ends = reads || is_replaced(s, in);
        for (int k = 0; k < in->n_operands; k++) {
            bool *b = &used[buffer_of(s, &in->operand[k])];
            s->idle[i] |= reads && !*b;
            *b = !ends && (*b || is_here(s, in));
        }
    }
    return 0;
}

static void wait_for(const struct part *s, struct mt_instr *in, int32_t at)
{
    if (at == NONE)
        return;
    int q = mt_instr_queue(&s->out->instrs[at]);
    in->wait[q] = MT_MAX(in->wait[q], at);
}

static int32_t push(struct part *s, const struct mt_instr *in)
{
    s->out->instrs[s->out->n_instrs] = *in;
    return (int32_t)s->out->n_instrs++;
}

/* What an instruction of the whole waited for, as far as that is here, or comes from elsewhere. */
static void take_waits(const struct part *s, struct mt_instr *own, const struct mt_instr *in)
{
    for (int q = 0; q < MT_MAX_QUEUES; q++)
        if (in->wait[q] >= 0) {
            wait_for(s, own, s->upto[in->wait[q]].own);
            wait_for(s, own, s->upto[in->wait[q]].told);
        }
}

/* An instruction of the whole that is here. */
static int32_t take(struct part *s, const struct mt_instr *in)
{
    struct mt_instr own = *in;
    bool ours = in->lane >= s->first && in->lane < s->end; /* else that of a READ, which a load there needs first */
    own.lane = (uint8_t)(ours ? in->lane - s->first : 0);
    for (int q = 0; q < MT_MAX_QUEUES; q++)
        own.wait[q] = MT_NO_WAIT;
    take_waits(s, &own, in);
    for (int k = 0; k < in->n_operands; k++) {
        const struct mt_object *o = &s->whole->objects[in->operand[k].object];
        if (in->operand[k].access & MT_WRITE) /* over what was sent from there */
            wait_for(s, &own, s->sent[buffer_of(s, &in->operand[k])]);
        if (o->kind == MT_OBJ_SPILLED)
            own.operand[k].buffer = (int16_t)(in->operand[k].buffer % s->params->n_buffers[0][o->pool]);
    }
    if (in->op == MT_OP_STORE && moves_spilled(s, in)) /* the same */
        wait_for(s, &own, s->home_use[in->operand[0].object][MT_Q_NET]);
    return push(s, &own);
}

/* Weights, in the planes or in the buffer in which they are staged. */
static int32_t add_renewal(struct part *s, struct mt_instr *m, const struct mt_instr *in)
{
    enum mt_access access = m->sends ? MT_READ : is_replaced(s, in) ? MT_WRITE : MT_UPDATE;
    m->bytes = mt_program_renewed_bytes(s->params, (size_t)in->unit);
    if (!m->sends)
        take_waits(s, m, in);
    for (int k = 0; k < in->n_operands; k++)
        if (s->whole->objects[in->operand[k].object].kind == MT_OBJ_STAGED)
            m->operand[m->n_operands++] =
                (struct mt_operand){in->operand[k].object, in->operand[k].buffer, access, MT_ROLE_NONE};
    int32_t *sent = m->n_operands ? &s->sent[buffer_of(s, &m->operand[0])] : NULL;
    if (sent && !m->sends)
        wait_for(s, m, *sent);
    int32_t at = push(s, m);
    if (sent && m->sends)
        *sent = at;
    return at;
}

/* The message with the content that instruction i makes, if it goes from here or comes here; or NONE. */
static int32_t add_message(struct part *s, size_t i, int32_t stored)
{
    const struct mt_instr *in = &s->whole->instrs[i];
    bool sum = moves_spilled(s, in), sends = host_of(s, in) == s->params->host, counts = mt_instr_makes_lists(in);
    bool renews = in->op == MT_OP_UPDATE;
    if (!s->to[i] || (!sends && !(s->to[i] & 1u << s->params->host)))
        return NONE;
    enum mt_opcode op = counts ? MT_OP_COUNTS : sum ? MT_OP_PASS : renews ? MT_OP_RENEW : MT_OP_SHARE;
    struct mt_instr m = mt_instr_make(op, (size_t)in->unit, (size_t)in->mb);
    m.sends = sends;
    m.hosts = sends ? s->to[i] : (uint16_t)(1u << host_of(s, in));
    wait_for(s, &m, stored);
    if (renews)
        return add_renewal(s, &m, in);
    if (counts) {
        m.bytes = s->params->count_bytes;
        return push(s, &m);
    }
    m.n_operands = 1;
    m.operand[0] = (struct mt_operand){in->operand[0].object, 0, sends ? MT_READ : MT_WRITE, MT_ROLE_NONE};
    m.bytes = in->bytes;
    m.row_bytes = in->row_bytes;
    if (!sum)
        wait_for(s, &m, s->host_use[in->unit]);
    for (int q = 0; q < MT_MAX_QUEUES && sum; q++)
        wait_for(s, &m, s->home_use[m.operand[0].object][q]);
    int32_t at = push(s, &m);
    if (sum)
        s->home_use[m.operand[0].object][MT_Q_NET] = at;
    return at;
}

static void note_use(struct part *s, const struct mt_instr *in, int32_t at)
{
    if (in->queue == MT_Q_HOST)
        s->host_use[in->unit] = at;
    if (moves_spilled(s, in))
        s->home_use[in->operand[0].object][mt_instr_queue(&s->out->instrs[at])] = at;
}

static void take_all(struct part *s)
{
    for (size_t i = 0; i < s->whole->n_instrs; i++) {
        const struct mt_instr *in = &s->whole->instrs[i];
        bool here = is_here(s, in);
        int32_t own = here ? take(s, in) : NONE, message = NONE;
        if (here)
            note_use(s, in, own);
        message = add_message(s, i, own);
        struct newest *last = &s->last[mt_instr_queue(in)];
        *(here ? &last->own : &last->told) = here ? own : message != NONE ? message : last->told;
        s->upto[i] = *last;
    }
}

/* The newest instruction here that uses the object's home. */
static int32_t home_until(const struct part *s, int object)
{
    int32_t at = NONE;
    for (int q = 0; q < MT_MAX_QUEUES; q++)
        at = MT_MAX(at, s->home_use[object][q]);
    return at;
}

/*
 * Homes for sums of groups, from their first use on. Each is as large as a unit's gradient in FP32, and is needed from
 * one store or message to the load or message that follows; so later sums take the homes of earlier ones, of those that
 * have been out of use for longest: a few more are left free, so that nothing waits for the newest, and a step of fewer
 * micro-batches, which may need some more at a time, has them.
 */
enum { HOMES_LEFT = 4, HOMELESS = -2 };

static void give_home(struct part *s, int object, int32_t at, int *homes, size_t *n)
{
    struct mt_object *x = &s->out->objects[object];
    size_t best = SIZE_MAX, n_free = 0;
    for (size_t i = 0; i < *n; i++) {
        bool is_free = s->out->objects[homes[i]].bytes == x->bytes && home_until(s, homes[i]) < at;
        n_free += is_free;
        if (is_free && (best == SIZE_MAX || home_until(s, homes[i]) < home_until(s, homes[best])))
            best = i;
    }
    size_t most = s->params->most_spill, end = s->out->spill_bytes + mt_align_up(x->bytes, 4096);
    if (!n_free || (n_free <= HOMES_LEFT && (!most || end <= most))) {
        mt_program_add_home(s->out, x);
        homes[(*n)++] = object;
        return;
    }
    x->spill = s->out->objects[homes[best]].spill;
    for (int q = 0; q < MT_MAX_QUEUES; q++)
        wait_for(s, &s->out->instrs[at], s->home_use[homes[best]][q]);
    homes[best] = object;
}

/* Homes of what this host has; what only others have is none of its objects. */
static int take_objects(struct part *s, struct mt_err *err)
{
    struct mt_program *p = s->out;
    size_t n = 0;
    MT_FREED int *homes = mt_calloc(p->n_objects + 1, sizeof(*homes));
    if (!homes)
        return mt_fail_nomem(err, "a step program", p->n_objects * sizeof(*homes));
    for (size_t o = 0; o < p->n_objects; o++) {
        struct mt_object *x = &p->objects[o];
        x->resident = x->resident && x->lane >= s->first && x->lane < s->end;
        x->lane = x->resident ? (uint8_t)(x->lane - s->first) : 0;
        x->spill = x->spill < 0 ? -1 : HOMELESS;
    }
    p->spill_bytes = p->sum_bytes = p->disk_spill_bytes = 0;
    for (size_t i = 0; i < p->n_instrs; i++)
        for (int k = 0; k < p->instrs[i].n_operands; k++) {
            const int o = p->instrs[i].operand[k].object;
            struct mt_object *x = &p->objects[o];
            if (x->spill == HOMELESS && x->kind == MT_OBJ_GRAD && home_until(s, o) != NONE)
                give_home(s, o, (int32_t)i, homes, &n);
            else if (x->spill == HOMELESS)
                mt_program_add_home(p, x);
        }
    for (size_t o = 0; o < p->n_objects; o++)
        p->objects[o].spill = MT_MAX(p->objects[o].spill, (int64_t)-1);
    return 0;
}

static void take_pools(struct part *s)
{
    struct mt_pool_shape pool[MT_MAX_LANES][MT_N_POOLS] = {{{0}}};
    for (int lane = s->first; lane < s->end; lane++)
        for (int i = 0; i < MT_N_POOLS; i++)
            if (mt_pools[i].device)
                pool[lane - s->first][i] = s->whole->pool[lane][i];
            else if (lane == s->first)
                pool[0][i] = (struct mt_pool_shape){s->whole->pool[0][i].n ? s->params->n_buffers[0][i] : 0,
                                                    s->whole->pool[0][i].bytes};
    memcpy(s->out->pool, pool, sizeof(pool));
    s->out->n_lanes = s->end - s->first;
    s->out->host = s->params->host;
    s->out->owned = s->params->owned;
}

static bool alloc_part(struct part *s)
{
    const struct mt_program *p = s->whole;
    for (int i = 0; i < MT_N_POOLS; i++)
        s->buffer[i + 1] = s->buffer[i] + (mt_pools[i].device ? 0 : (size_t)p->pool[0][i].n);
    s->sent = mt_arrays_add(&s->arrays, s->buffer[MT_N_POOLS] + 1, sizeof(*s->sent));
    s->to = mt_arrays_add(&s->arrays, MT_MAX(p->n_instrs, p->n_objects) + 1, sizeof(*s->to));
    s->idle = mt_arrays_add(&s->arrays, p->n_instrs + 1, 1);
    s->upto = mt_arrays_add(&s->arrays, p->n_instrs + 1, sizeof(*s->upto));
    s->host_use = mt_arrays_add(&s->arrays, p->n_units, sizeof(*s->host_use));
    s->home_use = mt_arrays_add(&s->arrays, p->n_objects + 1, sizeof(*s->home_use));
    s->out->instrs = mt_calloc(2 * p->n_instrs + 1, sizeof(*s->out->instrs)); /* each may be followed by a message */
    if (s->arrays.failed || !s->out->instrs)
        return false;
    for (size_t i = 0; i <= s->buffer[MT_N_POOLS]; i++)
        s->sent[i] = NONE;
    for (int q = 0; q < MT_MAX_QUEUES; q++)
        s->last[q] = (struct newest){NONE, NONE};
    for (size_t u = 0; u < p->n_units; u++)
        s->host_use[u] = NONE;
    for (size_t o = 0; o < p->n_objects; o++)
        for (int q = 0; q < MT_MAX_QUEUES; q++)
            s->home_use[o][q] = NONE;
    return true;
}

static int check_params(const struct mt_program_params *p, struct mt_err *err)
{
    bool away = mt_program_has_ring(p);
    for (size_t u = 0; u < p->n_units && !p->owned; u++)
        away |= p->units[u].grad_on_disk;
    if (p->by_data && !away && mt_program_lanes(p) % mt_program_hosts(p) == 0)
        return 0;
    return mt_fail(err, MT_ERR_USAGE, -EINVAL, "a step on several hosts: %s",
                   away ? "updates under backward, and gradients on drives if units have no owners, are of one host"
                        : "hosts need equal numbers of devices, which share the groups");
}

int mt_program_take_part(struct mt_program *p, const struct mt_program_params *params, struct mt_err *err)
{
    struct mt_program out = *p;
    struct part s = {.params = params, .whole = p, .out = &out};
    s.first = params->host * mt_program_own_lanes(params);
    s.end = s.first + mt_program_own_lanes(params);
    out.instrs = NULL;
    out.n_instrs = 0;
    out.cap_instrs = 2 * p->n_instrs + 1;
    int rc = check_params(params, err);
    if (!rc && !alloc_part(&s))
        rc = mt_fail_nomem(err, "a step program", 2 * p->n_instrs * sizeof(*p->instrs));
    rc = rc ?: find_messages(&s, err)
            ?: find_counts(&s, err)
            ?: find_idle_reads(&s, err);
    if (!rc) {
        take_all(&s);
        take_pools(&s);
        rc = take_objects(&s, err);
    }
    free(rc ? out.instrs : p->instrs);
    if (!rc)
        *p = out;
    mt_arrays_finish(&s.arrays);
    return rc;
}

uint64_t mt_program_hash(const struct mt_program *p, uint64_t seed)
{
    char line[512];
    for (size_t i = 0; i < p->n_instrs; i++) {
        const struct mt_instr *in = &p->instrs[i];
        mt_instr_format(line, sizeof(line), p, i);
        const uint64_t more[] = {seed, in->bytes, in->row_bytes, in->first, in->elems, in->hosts};
        seed = mt_sum64(line, strlen(line), mt_sum64(more, sizeof(more), 0));
    }
    return seed;
}

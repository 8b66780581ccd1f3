/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shares a step out to hosts. The program that comes in is of all hosts' lanes, as if they were in one process; a
 * host takes the instructions of its own lanes and all of the host's queue, as it updates all parameters. Three things
 * cross: a sum of groups that a lane of another host adds up (PASS, from home to home), and what a lane leaves in
 * planes: a gradient as cast, and states that its direction has changed (SHARE, from the planes of the host that has
 * them to those of all others); and the rows of experts in a group, which each BALANCE adds up (COUNTS). Each follows
 * the instruction that makes its content: a store, or the group's last lists.
 *
 * All hosts list these messages in the order of the whole program, and each starts its own of them in that order, many
 * under way at once. So no two hosts wait for each other: of all instructions that have not ended, the first of the
 * whole program can always go on.
 */
#include <errno.h>
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
    int first, end;   /* its lanes */
    uint16_t *to;     /* by instruction of the whole: hosts that its content goes to */
    bool *idle;       /* by instruction of the whole: a READ of what no instruction here uses */
    int32_t *upto;    /* by instruction of the whole: the newest of its queue, at or before it, that is here; of another
                         host's queue, the newest message from there */
    int32_t last[MT_MAX_QUEUES]; /* of each queue of the whole: the same so far */
    int32_t *host_use; /* by unit: the newest instruction of the host's queue */
    int32_t (*home_use)[MT_MAX_QUEUES]; /* by object: the newest instruction here, by queue, that uses its home */
};

static bool is_device(const struct mt_instr *in)
{
    return mt_queues[in->queue].device;
}

static int host_of(const struct part *s, const struct mt_instr *in)
{
    return mt_program_host_of(s->params, in->lane);
}

/* Whether the instruction is this host's own, or one that all hosts have. */
static bool is_here(const struct part *s, const struct mt_instr *in)
{
    if (is_device(in))
        return host_of(s, in) == s->params->host;
    if (in->op == MT_OP_READ)
        return !s->idle[in - s->whole->instrs];
    return in->op != MT_OP_GATHER ||
           mt_program_host_of(s->params, mt_micro_lane(s->params, (size_t)in->mb)) == s->params->host;
}

static const struct mt_object *object_of(const struct part *s, const struct mt_instr *in)
{
    return &s->whole->objects[in->operand[0].object];
}

static bool moves_spilled(const struct part *s, const struct mt_instr *in)
{
    return (in->op == MT_OP_LOAD || in->op == MT_OP_STORE) && mt_kinds[object_of(s, in)->kind].home == MT_HOME_SPILL;
}

/* Whether it stores what the planes of all hosts must have. */
static bool is_shared(const struct part *s, const struct mt_instr *in)
{
    return in->op == MT_OP_STORE_GRAD || (in->op == MT_OP_STORE && mt_kinds[object_of(s, in)->kind].returns);
}

/* The rows of experts in each group go to all hosts that add them up, when its last lists are made. */
static int find_counts(struct part *s, struct mt_err *err)
{
    const struct mt_program *p = s->whole;
    uint16_t to = 0;
    MT_FREED bool *known = mt_calloc(mt_groups_n(p->groups), sizeof(*known));
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
    int32_t *store = mt_calloc(p->n_objects, sizeof(*store)); /* by object: its newest store + 1 */
    if (!store && p->n_objects)
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
    int rc = 0;
    for (size_t i = 0; i < p->n_instrs && !rc; i++)
        if (s->to[i] && moves_spilled(s, &p->instrs[i]) && object_of(s, &p->instrs[i])->kind != MT_OBJ_GRAD)
            rc = mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "hosts cannot pass on \"%s\" of unit %d",
                         mt_kinds[object_of(s, &p->instrs[i])->kind].name, p->instrs[i].unit);
    free(store);
    return rc;
}

/* From the end on: a READ is idle if nothing here uses its buffer before the next one into it. */
static int find_idle_reads(struct part *s, struct mt_err *err)
{
    const struct mt_program *p = s->whole;
    size_t first[MT_N_POOLS], n = 0;
    for (int i = 0; i < MT_N_POOLS; i++) {
        first[i] = n;
        n += mt_pools[i].device ? 0 : (size_t)p->pool[0][i].n;
    }
    MT_FREED bool *used = mt_calloc(n + 1, 1);
    if (!used)
        return mt_fail_nomem(err, "a step program", n);
    for (size_t i = p->n_instrs; i-- > 0;) {
        const struct mt_instr *in = &p->instrs[i];
        bool reads = in->op == MT_OP_READ;
        for (int k = 0; k < in->n_operands; k++) {
            enum mt_pool_id pool = p->objects[in->operand[k].object].pool;
            bool *b = mt_pools[pool].device ? NULL : &used[first[pool] + (size_t)in->operand[k].buffer];
            if (b && reads)
                s->idle[i] = !*b;
            if (b)
                *b = !reads && (*b || is_here(s, in));
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

/* An instruction of the whole that is here, with what it waited for as far as that is here, or comes from elsewhere. */
static int32_t take(struct part *s, const struct mt_instr *in)
{
    struct mt_instr own = *in;
    bool ours = in->lane >= s->first && in->lane < s->end; /* else that of a READ, which a load there needs first */
    own.lane = (uint8_t)(ours ? in->lane - s->first : 0);
    for (int q = 0; q < MT_MAX_QUEUES; q++)
        own.wait[q] = MT_NO_WAIT;
    for (int q = 0; q < MT_MAX_QUEUES; q++)
        if (in->wait[q] >= 0)
            wait_for(s, &own, s->upto[in->wait[q]]);
    if (in->op == MT_OP_STORE && moves_spilled(s, in)) /* over what was sent from there */
        wait_for(s, &own, s->home_use[in->operand[0].object][MT_Q_NET]);
    return push(s, &own);
}

/* The message with the content that instruction i makes, if it goes from here or comes here; or NONE. */
static int32_t add_message(struct part *s, size_t i, int32_t stored)
{
    const struct mt_instr *in = &s->whole->instrs[i];
    bool sum = moves_spilled(s, in), sends = host_of(s, in) == s->params->host, counts = mt_instr_makes_lists(in);
    if (!s->to[i] || (!sends && !(s->to[i] & 1u << s->params->host)))
        return NONE;
    struct mt_instr m = mt_instr_make(counts ? MT_OP_COUNTS : sum ? MT_OP_PASS : MT_OP_SHARE, (size_t)in->unit,
                                      (size_t)in->mb);
    m.sends = sends;
    m.hosts = sends ? s->to[i] : (uint16_t)(1u << host_of(s, in));
    if (counts) {
        m.bytes = s->params->count_bytes;
        wait_for(s, &m, stored);
        return push(s, &m);
    }
    m.n_operands = 1;
    m.operand[0] = (struct mt_operand){in->operand[0].object, 0, sends ? MT_READ : MT_WRITE, MT_ROLE_NONE};
    m.bytes = in->bytes;
    m.row_bytes = in->row_bytes;
    wait_for(s, &m, stored);
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
        int32_t *last = &s->last[mt_instr_queue(in)];
        *last = here ? own : message != NONE ? message : *last;
        s->upto[i] = *last;
    }
}

/* Homes of what this host has, one after the other; what only others have is none of its objects. */
static void take_objects(struct part *s)
{
    struct mt_program *p = s->out;
    bool *used = (bool *)s->to; /* not needed any more */
    memset(used, 0, p->n_objects);
    for (size_t i = 0; i < p->n_instrs; i++)
        for (int k = 0; k < p->instrs[i].n_operands; k++)
            used[p->instrs[i].operand[k].object] = true;
    p->spill_bytes = 0;
    for (size_t o = 0; o < p->n_objects; o++) {
        struct mt_object *x = &p->objects[o];
        x->resident = x->resident && x->lane >= s->first && x->lane < s->end;
        x->lane = x->resident ? (uint8_t)(x->lane - s->first) : 0;
        if (x->spill < 0)
            continue;
        x->spill = used[o] ? (int64_t)p->spill_bytes : -1;
        p->spill_bytes += used[o] ? mt_align_up(x->bytes, 4096) : 0;
    }
}

static void take_pools(struct part *s)
{
    struct mt_pool_shape pool[MT_MAX_LANES][MT_N_POOLS] = {{{0}}};
    for (int lane = s->first; lane < s->end; lane++)
        for (int i = 0; i < MT_N_POOLS; i++)
            pool[lane - s->first][i] = s->whole->pool[mt_pools[i].device ? lane : 0][i];
    memcpy(s->out->pool, pool, sizeof(pool));
    s->out->n_lanes = s->end - s->first;
    s->out->host = s->params->host;
}

static bool alloc_part(struct part *s)
{
    const struct mt_program *p = s->whole;
    s->to = mt_calloc(MT_MAX(p->n_instrs, p->n_objects) + 1, sizeof(*s->to));
    s->idle = mt_calloc(p->n_instrs + 1, 1);
    s->upto = mt_calloc(p->n_instrs + 1, sizeof(*s->upto));
    s->host_use = mt_calloc(p->n_units, sizeof(*s->host_use));
    s->home_use = mt_calloc(p->n_objects + 1, sizeof(*s->home_use));
    s->out->instrs = mt_calloc(2 * p->n_instrs + 1, sizeof(*s->out->instrs)); /* each may be followed by a message */
    if (!s->to || !s->idle || !s->upto || !s->host_use || !s->home_use || !s->out->instrs)
        return false;
    for (int q = 0; q < MT_MAX_QUEUES; q++)
        s->last[q] = NONE;
    for (size_t u = 0; u < p->n_units; u++)
        s->host_use[u] = NONE;
    for (size_t o = 0; o < p->n_objects; o++)
        for (int q = 0; q < MT_MAX_QUEUES; q++)
            s->home_use[o][q] = NONE;
    return true;
}

static int check_params(const struct mt_program_params *p, struct mt_err *err)
{
    bool away = p->spill_disk || mt_program_has_ring(p);
    for (size_t u = 0; u < p->n_units; u++)
        away |= p->units[u].grad_on_disk;
    if (p->by_data && !away && mt_program_lanes(p) % mt_program_hosts(p) == 0)
        return 0;
    return mt_fail(err, MT_ERR_USAGE, -EINVAL, "a step on several hosts: %s",
                   away ? "gradients and activations on drives, and updates under backward, are of one host"
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
        take_objects(&s);
        take_pools(&s);
        free(p->instrs);
        *p = out;
    } else {
        free(out.instrs);
    }
    free(s.to);
    free(s.idle);
    free(s.upto);
    free(s.host_use);
    free(s.home_use);
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

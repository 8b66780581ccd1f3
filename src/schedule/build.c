/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes the draft of a step. Layered (Lamy-Poirier 2021): a unit runs for all micro-batches before the next
 * unit, so weights are loaded twice a step and gradients are stored once. By micro-batch: the loops are exchanged, as
 * in other offloading trainers; for comparison.
 */
#include "schedule/build.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "schedule/turns.h"

/* FAR_LAG: units that begin while sums come from other hosts; of 1 to 6, 2 gave the fastest plans at 25 Gb/s. */
enum { NONE = -1, EMPTY = -2, FAR_LAG = 2 };

/* What the writer keeps of a value. */
struct state {
    int32_t *objects;        /* [mt_value_objects()]; NONE: not yet made */
    int32_t *parts, *so_far; /* the same: contributions that complete it; those to a gradient so far */
    int32_t *node; /* [2 groups] of a gradient: the sums of groups and of pairs, as a heap: 1 is the root, and 2i and
                      2i + 1 are added to i. NONE: not yet made, EMPTY: of groups that have no micro-batches */
};

/* A sum of groups that is complete and not yet added: a node of its gradient's tree. */
struct due {
    int32_t value;
    size_t at, turn; /* turn: units that had begun then */
};

/* Sums in the order in which they became complete, each added after so many units have begun. */
struct dues {
    struct due *of;
    size_t n, cap, lag;
};

struct writer {
    struct mt_draft *d;
    const struct mt_program_params *p;
    struct mt_arrays arrays; /* values, objects and left */
    struct state *values;
    int32_t *objects;     /* of all values, then the other numbers of struct state */
    bool *left;           /* [n_units] its gradient has left the device */
    struct dues near;     /* where lanes share the groups: sums that their lane, or one of its host, adds up */
    struct dues far;      /* sums of which one comes from another host */
    size_t turn;          /* units that have begun */
    struct mt_instr sink; /* target of writes after memory ran out */
    bool failed;
};

static int32_t add_object(struct writer *w, const struct mt_object *o, enum mt_pool_id pool)
{
    struct mt_program *g = &w->d->prog;
    if (!mt_grow(&g->objects, &g->cap_objects, g->n_objects + 1, sizeof(*g->objects))) {
        w->failed = true;
        return NONE;
    }
    g->objects[g->n_objects] = *o;
    g->objects[g->n_objects].pool = pool;
    g->objects[g->n_objects].spill = -1;
    return (int32_t)g->n_objects++;
}

static struct mt_instr *add_instr(struct writer *w, enum mt_opcode op, size_t unit, size_t mb)
{
    struct mt_program *g = &w->d->prog;
    if (!mt_grow(&g->instrs, &g->cap_instrs, g->n_instrs + 1, sizeof(*g->instrs))) {
        w->failed = true;
        return &w->sink;
    }
    struct mt_instr *in = &g->instrs[g->n_instrs++];
    *in = mt_instr_make(op, unit, mb);
    in->lane = mt_queues[in->queue].device ? w->p->units[unit].lane : 0;
    return in;
}

/* What is done where the unit's backward is. */
static struct mt_instr *add_back(struct writer *w, enum mt_opcode op, size_t unit, size_t mb)
{
    struct mt_instr *in = add_instr(w, op, unit, mb);
    in->lane = w->p->units[unit].lane_back;
    return in;
}

static void operand(struct mt_instr *in, int32_t object, enum mt_access access, enum mt_role role)
{
    in->operand[in->n_operands++] = (struct mt_operand){object, NONE, (uint8_t)access, (uint8_t)role};
}

static int32_t *object_of(const struct writer *w, int32_t value, size_t mb)
{
    return &w->values[value].objects[mt_value_object(w->p, &w->p->values[value], mb)];
}

static int32_t make_object(struct writer *w, int32_t value, size_t mb)
{
    const struct mt_value *v = &w->p->values[value];
    int32_t *o = object_of(w, value, mb);
    size_t at = mt_value_object(w->p, v, mb);
    bool lives = v->life == MT_LIFE_RUN;
    int lane = lives && w->p->by_data ? mt_micro_lane(w->p, mb) : w->p->units[v->unit].lane;
    if (*o == NONE)
        *o = add_object(w, &(struct mt_object){.kind = v->kind, .unit = v->unit, .bytes = v->bytes,
                                               .mb = lives ? 0 : (int32_t)at, .resident = lives, .lane = (uint8_t)lane,
                                               .parts = w->values[value].parts[at]}, mt_program_pool_of(w->p, v));
    return *o;
}

static size_t block_first(const struct mt_program_params *p, size_t unit)
{
    while (unit > 0 && p->units[unit - 1].block == p->units[unit].block)
        unit--;
    return unit;
}

static size_t block_end(const struct mt_program_params *p, size_t unit)
{
    do
        unit++;
    while (unit < p->n_units && p->units[unit].block == p->units[unit - 1].block);
    return unit;
}

/* A unit's gradient has left the device: the updates of its block, if it was the last and they do not stay pending. */
static void write_own_updates(struct writer *w, size_t unit)
{
    const struct mt_program_params *p = w->p;
    size_t first = block_first(p, unit), end = block_end(p, unit);
    bool all = p->units[unit].grad_in_ring, decides = true;
    w->left[unit] = true;
    for (size_t u = first; u < end; u++)
        all &= w->left[u] || !p->units[u].trainable;
    for (size_t u = end; all && u-- > first;) {
        if (!p->units[u].trainable)
            continue;
        struct mt_instr *in = add_instr(w, MT_OP_UPDATE, u, 0);
        in->elems = p->units[u].update_elems;
        in->own = true;
        in->decides = decides;
        in->block = (int32_t)first;
        in->block_end = (int32_t)end;
        decides = false;
    }
}

static void write_store_grad(struct writer *w, size_t unit, int32_t object)
{
    struct mt_instr *in = add_back(w, MT_OP_STORE_GRAD, unit, 0);
    operand(in, object, MT_READ, MT_ROLE_NONE);
    in->bytes = w->p->units[unit].grad_out_bytes;
    in->row_bytes = mt_program_compacts(w->p, unit) ? w->p->units[unit].grad_row_bytes : 0;
    write_own_updates(w, unit);
}

/* The object of the unit's weights. */
static int32_t weights_of(struct writer *w, size_t unit)
{
    const struct mt_call *c = &w->p->units[unit].forward;
    int k = 0;
    while (k < c->n_uses && (w->p->values[c->use[k].value].kind != MT_OBJ_WEIGHTS ||
                             w->p->values[c->use[k].value].unit != (int32_t)unit))
        k++;
    return k < c->n_uses ? make_object(w, c->use[k].value, 0) : NONE;
}

/* Before the cast the gradient becomes a direction, in place: by the unit's weights and states. */
static void use_moments(struct writer *w, struct mt_instr *in, size_t unit, int32_t weights)
{
    struct mt_object o = {.kind = MT_OBJ_MOMENTS, .unit = (int32_t)unit, .bytes = w->p->units[unit].moment_bytes};
    operand(in, weights, MT_READ, MT_ROLE_WEIGHTS);
    operand(in, add_object(w, &o, mt_program_pool(w->p, MT_OBJ_MOMENTS, unit)), MT_UPDATE, MT_ROLE_MOMENTS);
}

/* A unit's gradient is complete: casts and stores it. */
static void write_grad_out(struct writer *w, size_t unit, int32_t g)
{
    const struct mt_program_params *p = w->p;
    int32_t out = g;
    size_t bytes = p->units[unit].grad_elems * p->grad_bytes; /* as cast, at the FP32 elements' indices */
    bool compacts = mt_program_compacts(p, unit), directs = p->units[unit].moment_bytes > 0;
    int32_t weights = directs ? weights_of(w, unit) : NONE;
    struct mt_instr *in = add_back(w, MT_OP_GRAD_CAST, unit, 0);
    operand(in, g, p->cast && !compacts && !directs ? MT_READ : MT_UPDATE, MT_ROLE_GRAD);
    if (p->cast) {
        out = add_object(w, &(struct mt_object){.kind = MT_OBJ_CAST, .unit = (int32_t)unit, .bytes = bytes},
                         mt_program_pool(p, MT_OBJ_CAST, unit));
        operand(in, out, MT_WRITE, MT_ROLE_CAST);
    }
    if (directs)
        use_moments(w, in, unit, weights);
    write_store_grad(w, unit, compacts ? g : out);
}

/* On the lane that has both groups, if there is one. */
static void write_add(struct writer *w, size_t unit, int32_t sum, int32_t other)
{
    const struct mt_program *g = &w->d->prog;
    struct mt_instr *in = add_back(w, MT_OP_ADD_GROUP, unit, 0);
    int lane = w->p->by_data && !w->failed ? mt_group_lane(w->p, (size_t)g->objects[sum].mb) : in->lane;
    if (!w->failed && w->p->by_data && lane == mt_group_lane(w->p, (size_t)g->objects[other].mb))
        in->lane = (uint8_t)lane;
    operand(in, sum, MT_UPDATE, MT_ROLE_GRAD);
    operand(in, other, MT_READ, MT_ROLE_NONE);
}

/* On which host a sum is. */
static int host_of(const struct writer *w, int32_t sum)
{
    return mt_program_host_of(w->p, mt_group_lane(w->p, (size_t)w->d->prog.objects[sum].mb));
}

static void add_due(struct writer *w, struct dues *d, int32_t value, size_t at)
{
    if (mt_grow(&d->of, &d->cap, d->n + 1, sizeof(*d->of)))
        d->of[d->n++] = (struct due){value, at, w->turn};
    else
        w->failed = true;
}

/* A sum of groups is complete: adds what can be added up the tree. The root is the gradient. far: sums that come from
 * another host, too; else these are due later. */
static void write_sum(struct writer *w, int32_t value, size_t at, bool far)
{
    int32_t *node = w->values[value].node;
    size_t unit = (size_t)w->p->values[value].unit, n = mt_groups_n(w->p->groups);
    if (at >= n)
        node[at] = w->values[value].objects[at - n];
    for (; at > 1 && node[at ^ 1] != NONE; at /= 2) {
        int32_t left = node[at & ~(size_t)1], right = node[at | 1];
        bool adds = left != EMPTY && right != EMPTY;
        if (adds && !far && !w->failed && host_of(w, left) != host_of(w, right)) {
            add_due(w, &w->far, value, at);
            return;
        }
        if (adds)
            write_add(w, unit, left, right);
        node[at / 2] = left != EMPTY ? left : right;
    }
    if (at == 1)
        write_grad_out(w, unit, node[1]);
}

/* Lanes that share the groups go on with the next unit while a sum comes to where it is added: it is due after that. */
static void note_group(struct writer *w, int32_t value, size_t group)
{
    size_t at = mt_groups_n(w->p->groups) + group;
    if (w->p->by_data)
        add_due(w, &w->near, value, at);
    else
        write_sum(w, value, at, false);
}

/* Adds the sums that are due; `all`: every one. */
static void write_due(struct writer *w, struct dues *d, bool far, bool all)
{
    size_t n = 0;
    while (n < d->n && (all || d->of[n].turn + d->lag < w->turn))
        n++;
    for (size_t i = 0; i < n; i++) {
        struct due x = d->of[i];
        write_sum(w, x.value, x.at, far);
    }
    d->n -= n;
    if (n)
        memmove(d->of, d->of + n, d->n * sizeof(*d->of));
}

/* After an operation on a gradient: stores it if the operation wrote all of it as cast; else notes what is complete. */
static void write_gradient(struct writer *w, int32_t value, size_t mb)
{
    const struct mt_value *v = &w->p->values[value];
    size_t at = mt_value_object(w->p, v, mb);
    if (v->kind == MT_OBJ_CAST)
        write_store_grad(w, (size_t)v->unit, *object_of(w, value, 0));
    else if (++w->values[value].so_far[at] == w->values[value].parts[at])
        note_group(w, value, at);
}

/* Access of a contribution. Before the first one, an object that is only added to is zeroed. */
static enum mt_access begin_part(struct writer *w, const struct mt_use *u, int lane, size_t mb)
{
    if (*object_of(w, u->value, mb) != NONE)
        return MT_ADD;
    if (u->access == MT_SUM)
        return MT_FILL;
    if (u->access == MT_ADD) {
        int32_t o = make_object(w, u->value, mb);
        struct mt_instr *zero = add_instr(w, MT_OP_ZERO, (size_t)w->p->values[u->value].unit, mb);
        zero->lane = (uint8_t)lane; /* where the first contribution is made */
        operand(zero, o, MT_WRITE, MT_ROLE_NONE);
    }
    return (enum mt_access)u->access;
}

/* Whether the operation has the operand for that micro-batch. */
static bool has_operand(const struct mt_program_params *p, const struct mt_use *u, size_t mb)
{
    return mt_use_is_made(p, u) && mt_share_has(&p->values[u->value].share, p->n_micro, mb);
}

static bool is_gradient(const struct mt_program_params *p, const struct mt_use *u)
{
    const struct mt_kind_desc *kind = &mt_kinds[p->values[u->value].kind];
    return kind->trained && !kind->returns && mt_use_is_made(p, u);
}

static void write_call(struct writer *w, size_t unit, const struct mt_call *c, size_t mb)
{
    const struct mt_program_params *p = w->p;
    enum mt_access access[MT_MAX_OPERANDS];
    int lane = mt_call_lane(p, unit, c, mb);
    for (int k = 0; k < c->n_uses; k++) {
        const struct mt_use *u = &c->use[k];
        if (has_operand(p, u, mb))
            access[k] = u->access & MT_PART ? begin_part(w, u, lane, mb) : (enum mt_access)u->access;
    }
    struct mt_instr *in = add_instr(w, c->op, unit, mb);
    if (mt_queues[in->queue].device)
        in->lane = (uint8_t)lane;
    for (int k = 0; k < c->n_uses; k++)
        if (has_operand(p, &c->use[k], mb))
            operand(in, make_object(w, c->use[k].value, mb), access[k], (enum mt_role)c->use[k].role);
    for (int k = 0; k < c->n_uses; k++)
        if (is_gradient(p, &c->use[k]))
            write_gradient(w, c->use[k].value, mb);
}

static bool uses_gradient(const struct mt_program_params *p, const struct mt_call *c)
{
    for (int k = 0; k < c->n_uses; k++)
        if (is_gradient(p, &c->use[k]))
            return true;
    return false;
}

/* Backward stops at the first unit with trained parameters: no unit below it needs a gradient. */
static size_t first_trained(const struct mt_program_params *p)
{
    size_t u = 0;
    while (u < p->n_units && !uses_gradient(p, &p->units[u].backward) && !uses_gradient(p, &p->units[u].forward))
        u++;
    return u;
}

/* --- the order of a step's operations ---------------------------------------------------------------------- */

/* The micro-batch of a pass whose place in the list is `i`: backward goes through a row's chunks from the last on. */
static size_t micro_at(const struct mt_program_params *p, const struct mt_call *c, bool back, size_t i)
{
    size_t chunks = back && c->scope == MT_SCOPE_MICROBATCH && p->chunks ? p->chunks : 1;
    return i / chunks * chunks + (chunks - 1 - i % chunks);
}

static void list_call(struct writer *w, struct mt_turns *t, size_t unit, const struct mt_call *c, size_t mb)
{
    if (mt_grow(&t->of, &t->cap, t->n + 1, sizeof(*t->of)))
        t->of[t->n++] = (struct mt_turn){c, unit, mb, mt_call_lane(w->p, unit, c, mb)};
    else
        w->failed = true;
}

/* The operation for all micro-batches, or groups. `first`: another, before those of each group. Before the head's of a
 * row's first chunk, the losses of all. */
static void list_pass(struct writer *w, struct mt_turns *t, size_t unit, const struct mt_call *first,
                      const struct mt_call *c)
{
    const struct mt_program_params *p = w->p;
    bool losses = c->op == MT_OP_HEAD && p->weighs_rows && p->mode == MT_MODE_TRAIN;
    for (size_t mb = 0; c->n_uses && mb < p->n_micro; mb = mt_call_next(p, c, mb)) {
        if (first && first->n_uses && mb == mt_group_first(p->groups, mt_group_of(p->groups, mb)))
            list_call(w, t, unit, first, mb);
        for (size_t k = 0; losses && !(mb % p->chunks) && k < p->chunks; k++)
            list_call(w, t, unit, &p->units[unit].losses, mb + k);
        list_call(w, t, unit, c, micro_at(p, c, c == &p->units[unit].backward, mb));
    }
}

/* The order in which one lane runs them: unit after unit, forward and then back. */
static void list_turns(struct writer *w, struct mt_turns *t)
{
    const struct mt_program_params *p = w->p;
    for (size_t u = mt_program_gathers(p); u < p->n_units; u++)
        list_pass(w, t, u, mt_perturb_call(p, u), mt_forward_call(p, u));
    for (size_t u = p->n_units; p->mode == MT_MODE_TRAIN && u-- > first_trained(p);)
        list_pass(w, t, u, NULL, &p->units[u].backward);
}

static bool is_backward(const struct mt_program_params *p, const struct mt_turn *t)
{
    return t->call == &p->units[t->unit].backward;
}

/* Before the first backward, on each lane that has micro-batches: the rows of experts in the whole step. */
static void write_balance(struct writer *w)
{
    bool has[MT_MAX_LANES] = {false};
    size_t lists = w->p->n_units - 1;
    while (lists && !w->p->units[lists].makes_lists)
        lists--;
    for (size_t mb = 0; mb < w->p->n_micro; mb++) {
        int lane = mt_micro_lane(w->p, mb);
        if (!has[lane])
            add_instr(w, MT_OP_BALANCE, lists, mb)->lane = (uint8_t)lane;
        has[lane] = true;
    }
}

static void write_layered(struct writer *w)
{
    struct mt_turns t = {NULL};
    list_turns(w, &t);
    if (mt_program_lanes(w->p) > 1 && !w->p->by_data && !w->failed)
        w->failed |= mt_turns_order(&t, w->p, NULL) != 0;
    for (size_t i = 0; i < t.n && !w->failed; i++) {
        if (i && t.of[i].call != t.of[i - 1].call) {
            w->turn++;
            write_due(w, &w->near, false, false);
            write_due(w, &w->far, true, false);
        }
        if (w->d->prog.balances && i && is_backward(w->p, &t.of[i]) && !is_backward(w->p, &t.of[i - 1]))
            write_balance(w);
        write_call(w, t.of[i].unit, t.of[i].call, t.of[i].mb);
    }
    write_due(w, &w->near, false, true);
    write_due(w, &w->far, true, true);
    free(t.of);
}

/* Whether forward and backward of the unit may be on different lanes: what stays for the run is on one, lists of
 * experts are not handed over, and a gradient is summed in one place. */
static bool may_part(const struct mt_program_params *p, const struct mt_unit_shape *s)
{
    return !s->adapter_bytes && !s->makes_lists && !s->follows_lists && !uses_gradient(p, &s->forward);
}

/* Experts follow the lists that their layer makes, so these are on one lane. */
static int check_lanes(const struct mt_program_params *p, struct mt_err *err)
{
    int lane = 0;
    if (p->count_bytes && mt_program_lanes(p) > 1 && !p->by_data)
        return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "lanes that share the units cannot add up the rows of experts");
    for (size_t u = 0; u < p->n_units; u++) {
        const struct mt_unit_shape *s = &p->units[u];
        lane = s->makes_lists || p->by_data ? s->lane : lane; /* a group is on one lane */
        if (s->lane_back >= mt_program_lanes(p) || (s->lane_back != s->lane && !may_part(p, s)))
            return mt_fail(err, MT_ERR_RUNTIME, -EINVAL,
                           "backward of unit %zu cannot be on lane %d of %d, and forward on %d", u,
                           s->lane_back, mt_program_lanes(p), s->lane);
        if (s->lane >= mt_program_lanes(p) || (s->follows_lists && s->lane != lane))
            return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "unit %zu cannot be on lane %d of %d%s", u, s->lane,
                           mt_program_lanes(p), s->follows_lists ? ": its layer's lists of experts are on another" : "");
    }
    return 0;
}

/* Counts the contributions to each value; refuses calls that cannot be scheduled. */
static int survey_call(struct writer *w, size_t unit, const struct mt_call *c, struct mt_err *err)
{
    const struct mt_program_params *p = w->p;
    for (const struct mt_use *u = c->use; u < c->use + c->n_uses; u++) {
        const struct mt_value *v = &p->values[u->value];
        if (c->scope == MT_SCOPE_GROUP && v->life == MT_LIFE_MICROBATCH)
            return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "unit %zu runs once a group and uses a micro-batch's \"%s\"",
                           unit, mt_kinds[v->kind].name);
        bool adds = u->access & MT_PART && mt_use_is_made(p, u);
        for (size_t mb = 0; adds && mb < p->n_micro; mb = mt_call_next(p, c, mb))
            w->values[u->value].parts[mt_value_object(p, v, mb)]++;
    }
    return 0;
}

static int survey(struct writer *w, struct mt_err *err)
{
    const struct mt_program_params *p = w->p;
    int rc = check_lanes(p, err);
    for (size_t v = 0; v < p->n_values && !rc; v++)
        if (p->values[v].life == MT_LIFE_RUN && !mt_kinds[p->values[v].kind].begins_home)
            return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "\"%s\" of unit %d cannot live for the run: no home has its content before",
                           mt_kinds[p->values[v].kind].name, p->values[v].unit);
    for (size_t u = 0; u < p->n_units && !rc; u++)
        rc = survey_call(w, u, mt_forward_call(p, u), err);
    for (size_t u = first_trained(p); p->mode == MT_MODE_TRAIN && u < p->n_units && !rc; u++)
        rc = survey_call(w, u, &p->units[u].backward, err);
    return rc;
}

/* Marks what has no micro-batches in this step. */
static void empty_nodes(const struct mt_program_params *p, int32_t *node)
{
    size_t n = mt_groups_n(p->groups), in_use = mt_groups_in_use(p->groups, p->n_micro);
    for (size_t i = 2 * n - 1; i > 0; i--)
        node[i] = i >= n ? (i - n < in_use ? NONE : EMPTY) : node[2 * i] == EMPTY ? EMPTY : NONE;
}

static bool alloc_writer(struct writer *w)
{
    const struct mt_program_params *p = w->p;
    size_t n = 0, nodes = 2 * mt_groups_n(p->groups);
    for (size_t v = 0; v < p->n_values; v++)
        n += mt_value_objects(p, &p->values[v]);
    w->values = mt_arrays_add(&w->arrays, p->n_values, sizeof(*w->values));
    w->objects = mt_arrays_add(&w->arrays, 3 * n + nodes * p->n_values, sizeof(*w->objects));
    w->left = mt_arrays_add(&w->arrays, p->n_units, sizeof(*w->left));
    if (w->arrays.failed)
        return false;
    for (size_t i = 0; i < n; i++)
        w->objects[i] = NONE;
    for (size_t v = 0, at = 0; v < p->n_values; v++) {
        struct state *s = &w->values[v];
        s->objects = w->objects + at;
        s->parts = s->objects + n;
        s->so_far = s->parts + n;
        s->node = w->objects + 3 * n + nodes * v;
        empty_nodes(p, s->node);
        at += mt_value_objects(p, &p->values[v]);
    }
    return true;
}

/* Positions and micro-batches are 32-bit numbers. */
static int check_size(const struct mt_program_params *p, struct mt_err *err)
{
    const size_t most = INT32_MAX / 40; /* forward and backward, each with a copy in and out for every operand */
    if (p->n_micro <= most / p->n_units)
        return 0;
    return mt_fail(err, MT_ERR_NO_FIT, -E2BIG,
                   "a step of %zu micro-batches over %zu units has too many instructions (at most %zu micro-batches): "
                   "raise train.micro_batch or lower train.tokens_per_step",
                   p->n_micro, p->n_units, most / p->n_units);
}

static void write_update(struct writer *w, size_t unit)
{
    const struct mt_unit_shape *u = &w->p->units[unit];
    size_t part = mt_program_part_elems(w->p, unit);
    bool pending = u->trainable && !u->grad_in_ring;
    for (size_t k = 0; pending && (!k || k * part < u->update_elems); k++) {
        struct mt_instr *in = add_instr(w, MT_OP_UPDATE, unit, 0);
        in->piece = (int32_t)k;
        in->first = k * part;
        in->elems = MT_MIN(part, u->update_elems - in->first);
        in->update = true;
    }
}

static void write_scatter(struct writer *w, size_t unit)
{
    if (!mt_program_compacts(w->p, unit))
        return;
    struct mt_instr *in = add_instr(w, MT_OP_SCATTER, unit, 0);
    in->bytes = w->p->units[unit].grad_out_bytes;
    in->row_bytes = w->p->units[unit].grad_row_bytes;
    in->update = true;
}

/* GATHER for micro-batches [from, to). */
static void write_gathers(struct writer *w, size_t from, size_t to)
{
    for (size_t mb = from; mb < to; mb++)
        write_call(w, 0, &w->p->units[0].gather, mb);
}

/*
 * In the order in which forward needs the weights. Rows of the embedding that are gathered have been updated on the
 * way, so its own update can be the last. Those of the first micro-batch are loaded under the first layer's update.
 */
static void write_updates(struct writer *w)
{
    const struct mt_program_params *p = w->p;
    bool gathers = mt_program_gathers(p), forward = p->mode != MT_MODE_UPDATE;
    bool updates = p->mode == MT_MODE_TRAIN || p->mode == MT_MODE_ZEROTH || !forward;
    if (gathers && forward)
        write_gathers(w, 0, 1);
    for (size_t u = gathers; u < p->n_units; u++) {
        if (updates)
            write_update(w, u);
        if (gathers && forward && u == 1)
            write_gathers(w, 1, p->n_micro);
    }
    if (gathers && updates) {
        write_scatter(w, 0);
        write_update(w, 0);
    }
}

/* Losses are where the head was, sums of squares where gradients were cast. */
static void write_stats(struct writer *w)
{
    const struct mt_program_params *p = w->p;
    size_t last[MT_MAX_LANES] = {0};
    bool has[MT_MAX_LANES] = {false};
    for (size_t mb = 0; mb < p->n_micro && p->by_data; mb++)
        has[mt_micro_lane(p, mb)] = true;
    for (size_t u = 0; u < p->n_units; u++) {
        const struct mt_unit_shape *s = &p->units[u];
        bool is_head = u + 1 == p->n_units, train = p->mode == MT_MODE_TRAIN;
        last[train ? s->lane_back : s->lane] = u;
        has[train ? s->lane_back : s->lane] |= train || (is_head && !p->by_data);
    }
    for (int lane = 0; lane < mt_program_lanes(p); lane++)
        if (has[lane])
            add_instr(w, MT_OP_STATS, last[lane], 0)->lane = (uint8_t)lane;
}

static void write_draft(struct writer *w)
{
    const struct mt_program_params *p = w->p;
    /* first: their order determines their buffers */
    for (size_t v = 0; p->mode != MT_MODE_UPDATE && v < p->n_values; v++)
        for (size_t mb = 0; p->values[v].life == MT_LIFE_RUN && mb < p->n_micro; mb++)
            make_object(w, (int32_t)v, mb);
    write_updates(w);
    if (p->mode == MT_MODE_UPDATE)
        return;
    write_layered(w);
    write_stats(w);
}

int mt_draft_write(struct mt_draft *d, const struct mt_program_params *p, struct mt_err *err)
{
    struct writer w = {.d = d, .p = p, .near.lag = 1, .far.lag = FAR_LAG};
    *d = (struct mt_draft){.params = p};
    d->prog.n_units = p->n_units;
    d->prog.n_micro = p->n_micro;
    d->prog.groups = p->groups;
    d->prog.chunks = p->chunks;
    d->prog.n_lanes = mt_program_lanes(p);
    d->prog.backward = p->mode == MT_MODE_TRAIN;
    d->prog.balances = d->prog.backward && p->count_bytes;
    int rc = check_size(p, err);
    if (!rc && !alloc_writer(&w))
        rc = mt_fail_nomem(err, "a step program", p->n_values * p->n_micro * sizeof(int32_t));
    if (!rc)
        rc = survey(&w, err);
    if (!rc)
        write_draft(&w);
    mt_arrays_finish(&w.arrays);
    free(w.near.of);
    free(w.far.of);
    if (!rc && w.failed)
        rc = mt_fail_nomem(err, "a step program", p->n_units * p->n_micro * sizeof(struct mt_instr));
    if (rc)
        mt_program_finish(&d->prog);
    return rc;
}


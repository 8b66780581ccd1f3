/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checks a program without knowing how it was made. It replays the instructions in program order, keeps the last
 * writer and readers of each buffer and of each object's home, and checks that every two conflicting accesses are
 * ordered, by their queue or by a chain of waits. Order is found with vector clocks, one entry per queue (Mattern
 * 1989): entry q of clock i is the newest instruction of queue number q that has ended when i starts. Instructions of
 * the disk queues start in order and end in any order: when one starts, all that its predecessor waited for has ended,
 * but the predecessor itself may not have. A wait for one of them is a wait for all before it.
 */
#include "schedule/check_priv.h"

enum { NONE = MT_CHECK_NONE };

int mt_check_fault(struct mt_checker *c, size_t i, int other, const char *what)
{
    char a[256], b[256] = "nothing";
    mt_instr_format(a, sizeof(a), c->p, i);
    if (other != NONE)
        mt_instr_format(b, sizeof(b), c->p, (size_t)other);
    return mt_fail(c->err, MT_ERR_RUNTIME, -EPROTO, "step program: %s: {%s} against {%s}", what, a, b);
}

int mt_check_that(struct mt_checker *c, size_t i, bool so, int other, const char *what)
{
    return so ? 0 : mt_check_fault(c, i, other, what);
}

int mt_check_after(struct mt_checker *c, size_t i, int before, const char *what)
{
    return mt_check_that(c, i, mt_check_ordered(c, before, i), before, what);
}

int mt_check_none(struct mt_checker *c, size_t i, int other, const char *what)
{
    return mt_check_that(c, i, other == NONE, other, what);
}

static int32_t *clock_of(const struct mt_checker *c, size_t i)
{
    return c->clock + i * (size_t)c->n_queues;
}

bool mt_check_ordered(const struct mt_checker *c, int before, size_t i)
{
    return before == NONE || before == (int)i || clock_of(c, i)[mt_instr_queue(&c->p->instrs[before])] >= before;
}

static int *loaded_on(const struct mt_checker *c, int unit, int lane)
{
    return &c->loaded[unit * c->p->n_lanes + lane];
}

static int advance_clock(struct mt_checker *c, size_t i)
{
    const struct mt_instr *in = &c->p->instrs[i];
    if (in->op >= MT_N_OPCODES || in->queue != mt_opcodes[in->op].queue || in->n_operands > MT_MAX_OPERANDS ||
        in->lane >= c->p->n_lanes)
        return mt_check_fault(c, i, NONE, "malformed instruction");
    int own = mt_instr_queue(in), n = c->n_queues;
    int32_t prev = c->last_of[own], *clock = clock_of(c, i);
    for (int q = 0; q < n; q++)
        clock[q] = prev >= 0 ? clock_of(c, (size_t)prev)[q] : NONE;
    if (prev >= 0 && mt_queues[in->queue].ends_in_order)
        clock[own] = prev;
    for (int q = 0; q < MT_MAX_QUEUES; q++) {
        int32_t w = in->wait[q];
        if (w < 0)
            continue;
        if ((size_t)w >= i || mt_instr_queue(&c->p->instrs[w]) != q || !c->p->instrs[w].signals)
            return mt_check_fault(c, i, NONE, "waits for an instruction that is later, in another queue or does not signal");
        for (int k = 0; k < n; k++)
            clock[k] = MT_MAX(clock[k], clock_of(c, (size_t)w)[k]);
        clock[q] = MT_MAX(clock[q], w);
    }
    c->last_of[own] = (int32_t)i;
    return 0;
}

int mt_check_read_place(struct mt_checker *c, size_t i, struct mt_check_place *at, const char *what)
{
    if (!mt_check_ordered(c, at->writer, i))
        return mt_check_fault(c, i, at->writer, what);
    at->reader[mt_instr_queue(&c->p->instrs[i])] = (int)i;
    return 0;
}

int mt_check_write_place(struct mt_checker *c, size_t i, struct mt_check_place *at, int object, int version,
                       const char *what)
{
    if (at->object != NONE && at->object != object && c->p->objects[at->object].resident)
        return mt_check_fault(c, i, at->writer, "takes a buffer whose object lives for the run");
    for (int q = 0; q < c->n_queues; q++)
        if (!mt_check_ordered(c, at->reader[q], i))
            return mt_check_fault(c, i, at->reader[q], what);
    if (!mt_check_ordered(c, at->writer, i))
        return mt_check_fault(c, i, at->writer, what);
    at->object = object;
    at->version = version;
    at->loaded = 0;
    at->writer = (int)i;
    for (int q = 0; q < c->n_queues; q++)
        at->reader[q] = NONE;
    return 0;
}

static int check_read(struct mt_checker *c, size_t i, int object, struct mt_check_place *at)
{
    return mt_check_that(c, i, at->object == object, at->writer, "reads a buffer that holds something else")
        ?: mt_check_that(c, i, at->version == c->objects[object].latest, at->writer, "reads an old version")
        ?: mt_check_that(c, i, !at->loaded, at->writer, "reads weights of which a part was not loaded")
        ?: mt_check_read_place(c, i, at, "reads before the content is complete");
}

/* The instruction that ends the update of the unit's first n elements, or NONE. */
static int update_of(const struct mt_checker *c, int unit, size_t n)
{
    int at = c->units[unit].updated;
    for (int i = at; i >= 0; i--) {
        const struct mt_instr *in = &c->p->instrs[i];
        if (in->op == MT_OP_UPDATE && in->unit == unit && in->first + in->elems >= n)
            at = i;
    }
    return at;
}

/* A load of a part of weights: they come in order, each after the update of its elements. */
static int check_part(struct mt_checker *c, size_t i, const struct mt_check_place *at, int object)
{
    const struct mt_instr *in = &c->p->instrs[i];
    int update = in->elems ? update_of(c, in->unit, in->first + in->elems) : c->units[in->unit].updated;
    bool follows = in->first == (at->object == object ? at->loaded : 0);
    return mt_check_that(c, i, !in->elems || follows, at->writer, "loads a part of weights that does not follow the one before")
        ?: mt_check_after(c, i, update, "loads weights before their update");
}

static size_t n_updated(const struct mt_checker *c, int unit)
{
    int at = c->units[unit].updated;
    return at == NONE ? 0 : c->p->instrs[at].first + c->p->instrs[at].elems;
}

static int check_load(struct mt_checker *c, size_t i, int object, struct mt_check_place *at)
{
    const struct mt_object *o = &c->p->objects[object];
    const struct mt_instr *in = &c->p->instrs[i];
    const struct mt_check_unit *unit = &c->units[o->unit];
    struct mt_check_place *home = mt_check_home(c, object);
    bool of_planes = mt_object_is_of_planes(o), stored = mt_kinds[o->kind].begins_home || home->object == object;
    bool lasts = !in->once || (o->resident && unit->updated == NONE);
    bool skips = o->kind == MT_OBJ_WEIGHTS && in->n_operands > 1 && unit->fetched != NONE &&
                 c->p->instrs[unit->fetched].if_rows && !in->if_rows;
    int *loaded = loaded_on(c, o->unit, in->lane), own = of_planes ? unit->own : NONE;
    int rc = mt_check_none(c, i, own, "loads weights that have the update of this step already")
          ?: mt_check_that(c, i, lasts, unit->updated, "loads only once an object that changes or does not keep its buffer");
    rc = rc || !of_planes ? rc : check_part(c, i, at, object);
    if (o->kind == MT_OBJ_WEIGHTS || (o->kind == MT_OBJ_ADAPTERS && *loaded == NONE))
        *loaded = (int)i;
    rc = rc ?: mt_check_that(c, i, !skips, unit->fetched, "loads what may not have been read")
            ?: mt_check_that(c, i, stored, NONE, "loads an object that was never stored")
            ?: mt_check_that(c, i, home->version == c->objects[object].latest, home->writer, "loads an old version")
            ?: mt_check_read_place(c, i, home, "loads before the store is complete")
            ?: mt_check_write_place(c, i, at, object, home->version, "loads over a buffer in use");
    at->loaded = in->first + in->elems < n_updated(c, o->unit) ? in->first + in->elems : 0;
    return rc;
}

static int check_store(struct mt_checker *c, size_t i, int object, struct mt_check_place *at)
{
    const struct mt_object *o = &c->p->objects[object];
    bool fits = o->spill >= 0 && (size_t)o->spill + o->bytes <= c->p->spill_bytes;
    bool has_home = fits || c->p->instrs[i].n_operands > 1 || mt_kinds[o->kind].home == MT_HOME_PLANE;
    return check_read(c, i, object, at)
        ?: mt_check_that(c, i, has_home, NONE, "stores an object that has no home")
        ?: mt_check_write_place(c, i, mt_check_home(c, object), object, at->version, "stores over a home in use");
}

/* Rows of the embedding, with the update that its plane does not have yet. */
static int check_gather(struct mt_checker *c, size_t i, int object)
{
    const struct mt_object *o = &c->p->objects[object];
    const struct mt_check_unit *unit = &c->units[c->p->instrs[i].unit];
    bool has_home = o->spill >= 0 && (size_t)o->spill + o->bytes <= c->p->spill_bytes;
    return mt_check_none(c, i, unit->updated, "gathers rows after their update, which it would make twice")
        ?: mt_check_none(c, i, unit->scattered, "gathers rows after their gradient was scattered")
        ?: mt_check_that(c, i, has_home, NONE, "gathers into an object that has no home")
        ?: mt_check_write_place(c, i, mt_check_home(c, object), object, ++c->objects[object].latest, "gathers over a home in use");
}

static int check_disk_read(struct mt_checker *c, size_t i, int object, struct mt_check_place *at)
{
    const struct mt_object *o = &c->p->objects[object];
    struct mt_check_place *home = mt_check_home(c, object);
    bool was_there = !mt_kinds[o->kind].device && (mt_kinds[o->kind].begins_home || home->object == object);
    bool newest = home->version == c->objects[object].latest;
    if (o->kind == MT_OBJ_STAGED)
        c->units[o->unit].fetched = (int)i;
    return mt_check_that(c, i, was_there, NONE, "reads an object from the disk that was never written there")
        ?: mt_check_that(c, i, newest, home->writer, "reads an old version from the disk")
        ?: mt_check_read_place(c, i, home, "reads from the disk before the write is complete")
        ?: mt_check_write_place(c, i, at, object, home->version, "reads over a buffer in use");
}

static int check_disk_write(struct mt_checker *c, size_t i, int object, struct mt_check_place *at)
{
    const struct mt_object *o = &c->p->objects[object];
    bool fits = o->spill >= 0 && (size_t)o->spill + o->bytes <= c->p->disk_spill_bytes;
    bool has_home = !mt_kinds[o->kind].device && (mt_kinds[o->kind].home != MT_HOME_SPILL || fits);
    int update = o->kind == MT_OBJ_GRAD_OUT ? c->units[o->unit].updated : NONE;
    return check_read(c, i, object, at)
        ?: mt_check_that(c, i, has_home, NONE, "writes an object that has no home")
        ?: mt_check_after(c, i, update, "writes over a gradient before its update")
        ?: mt_check_write_place(c, i, mt_check_home(c, object), object, at->version, "writes over a home in use");
}

static int check_store_grad(struct mt_checker *c, size_t i, int object, struct mt_check_place *at)
{
    struct mt_check_unit *unit = &c->units[c->p->objects[object].unit];
    bool scattered = !c->p->instrs[i].row_bytes || unit->scattered != NONE;
    int rc = mt_check_that(c, i, unit->taken != NONE, NONE, "stores a gradient that was not cast")
          ?: mt_check_after(c, i, unit->updated, "stores over a gradient before its update")
          ?: mt_check_that(c, i, scattered, NONE, "stores rows of a gradient over others that were not scattered");
    unit->stored = (int)i;
    return rc ?: check_read(c, i, object, at);
}

/* Chunks of a row contribute in their order, and to gradients in the reverse one; n: those that have. */
static bool is_in_turn(const struct mt_program *p, const struct mt_instr *in, const struct mt_object *o, size_t n)
{
    size_t row = (size_t)in->mb / p->chunks, chunk = (size_t)in->mb % p->chunks;
    return (size_t)o->mb == row && n == (o->kind == MT_OBJ_KEYS ? chunk : p->chunks - 1 - chunk);
}

/* Counts contributions (MT_PART) to an object: none may come after the last, and no read before it. */
static int count_part(struct mt_checker *c, size_t i, const struct mt_operand *op)
{
    const struct mt_instr *in = &c->p->instrs[i];
    const struct mt_object *o = &c->p->objects[op->object];
    int *n = &c->objects[op->object].parts;
    if (op->access & MT_PART) {
        if (*n == o->parts)
            return mt_check_fault(c, i, NONE, "contributes to an object that is complete");
        bool of_row = o->kind == MT_OBJ_KEYS || o->kind == MT_OBJ_DKEYS;
        if (of_row && !is_in_turn(c->p, in, o, (size_t)*n))
            return mt_check_fault(c, i, NONE, "contributes to a row out of turn");
        if (!of_row && (size_t)o->mb != mt_group_of(c->p->groups, (size_t)in->mb))
            return mt_check_fault(c, i, NONE, "contributes to another group than its micro-batch is in");
        ++*n;
    } else if (op->access & MT_READ && !mt_opcodes[in->op].moves && *n != o->parts) {
        return mt_check_fault(c, i, NONE, "reads an object that is not complete");
    } else if (in->op == MT_OP_ZERO && *n) {
        return mt_check_fault(c, i, NONE, "zeroes an object after a contribution");
    }
    if (in->op == MT_OP_GRAD_CAST && o->kind == MT_OBJ_GRAD) {
        if (c->objects[op->object].went != NONE)
            return mt_check_fault(c, i, c->objects[op->object].went, "casts the sum of a group that was taken on already");
        c->objects[op->object].went = (int)i;
    }
    /* cast in place, or into a cast object, which other operations may write, too */
    if (in->op == MT_OP_GRAD_CAST ? o->kind == MT_OBJ_GRAD : o->kind == MT_OBJ_CAST && op->access & MT_WRITE)
        c->units[o->unit].taken = (int)i;
    return 0;
}

int mt_check_operand(struct mt_checker *c, size_t i, const struct mt_operand *op)
{
    const struct mt_instr *in = &c->p->instrs[i];
    if (op->object < 0 || (size_t)op->object >= c->p->n_objects)
        return mt_check_fault(c, i, NONE, "has an operand that is not an object");
    const struct mt_object *o = &c->p->objects[op->object];
    if (in->op == MT_OP_GATHER)
        return check_gather(c, i, op->object);
    int lane = mt_pools[o->pool].device ? in->lane : 0;
    const struct mt_pool_shape *pool = &c->p->pool[lane][o->pool];
    if (op->buffer < 0 || op->buffer >= pool->n || o->bytes > pool->bytes)
        return mt_check_fault(c, i, NONE, "has an operand without a buffer of its pool");
    struct mt_check_place *at = &c->buffers[lane][o->pool][op->buffer];
    int rc = count_part(c, i, op);
    if (rc)
        return rc;
    bool staged = !mt_kinds[o->kind].device;
    if (staged == mt_pools[o->pool].device)
        return mt_check_fault(c, i, NONE, "has an operand in a pool of another tier");
    switch (in->op) {
    case MT_OP_LOAD:
        if (!staged)
            return check_load(c, i, op->object, at);
        break;
    case MT_OP_STORE:
        if (!staged)
            return check_store(c, i, op->object, at);
        break;
    case MT_OP_STORE_GRAD:
        if (!staged)
            return check_store_grad(c, i, op->object, at);
        break;
    case MT_OP_READ:
        return check_disk_read(c, i, op->object, at);
    case MT_OP_WRITE:
        return check_disk_write(c, i, op->object, at);
    case MT_OP_POISON:
        return mt_check_write_place(c, i, at, NONE, 0, "poisons a buffer in use");
    default:
        break;
    }
    if (op->access & MT_READ)
        rc = check_read(c, i, op->object, at);
    if (!rc && (op->access & MT_WRITE)) {
        /* a join changes the format of weights, not their values: their home is still valid */
        int version = in->op == MT_OP_JOIN ? at->version : ++c->objects[op->object].latest;
        if (mt_kinds[o->kind].returns)
            c->units[o->unit].returns = op->object;
        rc = mt_check_write_place(c, i, at, op->object, version, "writes a buffer that is still read");
    }
    return rc;
}

/* Instruction i uses a unit's weights by an object of lists: if `copy` may be skipped, it comes after the lists. */
static int check_if_rows(struct mt_checker *c, size_t i, int object, int copy)
{
    bool skips = copy != NONE && c->p->instrs[copy].if_rows;
    return mt_check_that(c, i, !skips || mt_check_ordered(c, c->objects[object].routed, (size_t)copy), copy,
                         "uses weights that were skipped or not before the rows of experts were known");
}

/* The unit whose weights an instruction uses, which may be an earlier one's; without weights, its own. */
static int unit_of_weights(const struct mt_checker *c, const struct mt_instr *in)
{
    for (int k = 0; k < in->n_operands; k++)
        if (in->operand[k].role == MT_ROLE_WEIGHTS)
            return c->p->objects[in->operand[k].object].unit;
    return in->unit;
}

/* Notes who makes lists, and checks who uses them. */
static int check_lists(struct mt_checker *c, size_t i)
{
    const struct mt_instr *in = &c->p->instrs[i];
    int rc = 0, unit = unit_of_weights(c, in), load = *loaded_on(c, unit, in->lane);
    for (int k = 0; !rc && in->queue == MT_Q_COMPUTE && k < in->n_operands; k++) {
        const struct mt_operand *op = &in->operand[k];
        if (op->role == MT_ROLE_MOMENTS && load != NONE)
            rc = mt_check_that(c, i, !c->p->instrs[load].if_rows, load, "makes a direction by weights that may have been skipped");
        if (op->role != MT_ROLE_ROUTING || !(op->access & MT_READ))
            continue;
        if (op->access & MT_WRITE) {
            c->objects[op->object].routed = (int)i;
            continue;
        }
        rc = check_if_rows(c, i, op->object, load);
        if (!rc)
            rc = check_if_rows(c, i, op->object, c->units[unit].fetched);
    }
    return rc;
}

/* A group's lists: no counts of it were sent or added up before. */
static int count_lists(struct mt_checker *c, size_t i)
{
    struct mt_check_group *group = &c->groups[mt_group_of(c->p->groups, (size_t)c->p->instrs[i].mb)];
    int rc = 0;
    for (int lane = 0; lane < c->p->n_lanes && !rc; lane++)
        rc = mt_check_none(c, i, c->balanced[lane], "makes lists of experts' rows after these were added up");
    rc = rc ?: mt_check_none(c, i, group->told, "makes lists of experts' rows after their counts were sent")
            ?: mt_check_after(c, i, group->counted, "makes lists of a group's rows beside others");
    group->counted = (int)i;
    return rc;
}

/* Adds up the rows of experts in the whole step: those of every group are known. */
static int add_up_counts(struct mt_checker *c, size_t i)
{
    for (size_t group = 0; group < mt_groups_in_use(c->p->groups, c->p->n_micro); group++)
        if (c->groups[group].counted == NONE || !mt_check_ordered(c, c->groups[group].counted, i))
            return mt_check_fault(c, i, c->groups[group].counted, "adds up the rows of experts before those of all groups are known");
    c->balanced[c->p->instrs[i].lane] = (int)i;
    return 0;
}

/* Who counts the rows of experts, who adds these up, and whose backward uses the sum. */
static int check_balance(struct mt_checker *c, size_t i)
{
    const struct mt_instr *in = &c->p->instrs[i];
    if (in->mb < 0 || (size_t)in->mb >= c->p->n_micro)
        return mt_check_fault(c, i, NONE, "is of a micro-batch that does not exist");
    if (in->op == MT_OP_BALANCE)
        return add_up_counts(c, i);
    if (mt_instr_makes_lists(in))
        return count_lists(c, i);
    for (int k = 0; k < in->n_operands && in->op == MT_OP_BACKWARD; k++)
        if (in->operand[k].role == MT_ROLE_ROUTING && c->balanced[in->lane] == NONE)
            return mt_check_fault(c, i, NONE, "runs backward before the rows of experts were added up");
    return 0;
}

int mt_check_counts(struct mt_checker *c, size_t i)
{
    const struct mt_instr *in = &c->p->instrs[i];
    struct mt_check_group *group = &c->groups[mt_group_of(c->p->groups, (size_t)in->mb)];
    int *message = in->sends ? &group->told : &group->counted;
    bool own = group->counted != NONE && c->p->instrs[group->counted].queue != MT_Q_NET;
    bool known = !in->sends || (own && mt_check_ordered(c, group->counted, i));
    int rc = mt_check_that(c, i, known, group->counted, "sends counts before they are known")
          ?: mt_check_none(c, i, *message, "a message with counts that were there already");
    *message = (int)i;
    return rc;
}

/* Rows of a gradient take their places before the update reads the plane; GATHER reads them as they came. */
static int check_scatter(struct mt_checker *c, size_t i)
{
    struct mt_check_unit *unit = &c->units[c->p->instrs[i].unit];
    unit->scattered = (int)i;
    return mt_check_none(c, i, unit->updated, "scatters a gradient after its update");
}

/* What the device has changed of a unit, its optimizer states, is home when the unit's update ends the step for it. */
static int check_returned(struct mt_checker *c, size_t i, int unit)
{
    int o = c->units[unit].returns;
    const struct mt_check_place *home = o == NONE ? NULL : mt_check_home(c, o);
    if (home && (home->version != c->objects[o].latest || !mt_check_ordered(c, home->writer, i)))
        return mt_check_fault(c, i, home->writer, "updates a unit before its states are home");
    return 0;
}

/* An update with gradients of this step: those of its block have left the device, and nothing loads its weights any
 * more. */
static int check_own_update(struct mt_checker *c, size_t i)
{
    const struct mt_instr *in = &c->p->instrs[i];
    if (in->unit < 0 || in->block < 0 || in->unit < in->block || in->unit >= in->block_end ||
        (size_t)in->block_end > c->p->n_units || in->piece != c->units[in->unit].pieces++)
        return mt_check_fault(c, i, NONE, "updates a unit that does not exist, or pieces of one out of order");
    struct mt_check_unit *unit = &c->units[in->unit];
    int rc = mt_check_none(c, i, unit->updated, "updates a unit for the second time");
    for (int lane = 0; lane < c->p->n_lanes && !rc; lane++)
        rc = mt_check_after(c, i, *loaded_on(c, in->unit, lane), "updates weights that are still being loaded");
    for (const struct mt_check_unit *u = &c->units[in->block]; u < &c->units[in->block_end] && !rc; u++) {
        bool arrived = u->taken == NONE || (u->stored != NONE && mt_check_ordered(c, u->stored, i));
        rc = mt_check_that(c, i, arrived, MT_MAX(u->taken, u->stored), "updates a block before all of its gradient has arrived");
    }
    unit->own = (int)i;
    return rc ?: mt_check_that(c, i, unit->stored != NONE, NONE, "updates a unit without a gradient")
              ?: check_returned(c, i, in->unit);
}

/* Height of the first node above both groups: where their paths to the root meet. */
static int meeting(int a, int b)
{
    int level = 0;
    while (a >> level != b >> level)
        level++;
    return level;
}

/*
 * Sums of groups are added as the tree says: of two neighbouring subtrees, the later to the earlier, each of them
 * complete. A subtree is complete if nothing below the meeting is left to be added, which check_grads_leave() finds.
 */
static int check_add_group(struct mt_checker *c, size_t i)
{
    const struct mt_instr *in = &c->p->instrs[i];
    int sum = in->operand[0].object, other = in->operand[1].object, n = (int)c->p->n_objects;
    if (in->n_operands != 2 || sum < 0 || other < 0 || sum >= n || other >= n)
        return mt_check_fault(c, i, NONE, "adds what are not two groups");
    const struct mt_object *a = &c->p->objects[sum], *b = &c->p->objects[other];
    struct mt_check_object *to = &c->objects[sum], *from = &c->objects[other];
    if (a->kind != MT_OBJ_GRAD || b->kind != MT_OBJ_GRAD || a->unit != b->unit || a->mb >= b->mb)
        return mt_check_fault(c, i, NONE, "adds groups of different gradients, or the earlier to the later");
    int level = meeting(a->mb, b->mb);
    bool below = to->level < level && from->level < level;
    int rc = mt_check_none(c, i, to->went, "adds the sum of a group that was taken on already")
          ?: mt_check_none(c, i, from->went, "adds the sum of a group that was taken on already")
          ?: mt_check_that(c, i, below, NONE, "adds groups in another order than the tree's");
    to->level = level;
    from->went = (int)i;
    return rc;
}

int mt_check_renews(struct mt_checker *c, size_t i)
{
    const int unit = c->p->instrs[i].unit;
    int rc = 0;
    for (int lane = 0; lane < c->p->n_lanes && !rc; lane++)
        rc = mt_check_none(c, i, *loaded_on(c, unit, lane), "updates weights that were loaded already");
    c->units[unit].updated = (int)i;
    return rc;
}

int mt_check_instr(struct mt_checker *c, size_t i)
{
    const struct mt_instr *in = &c->p->instrs[i];
    int rc = advance_clock(c, i);
    if (in->queue == MT_Q_NET)
        return rc;
    if (!rc && c->p->balances && in->queue == MT_Q_COMPUTE)
        rc = check_balance(c, i);
    if (!rc && in->op == MT_OP_ADD_GROUP)
        rc = check_add_group(c, i);
    if (!rc && in->op == MT_OP_UPDATE && in->own)
        rc = check_own_update(c, i);
    else if (!rc && in->op == MT_OP_UPDATE) {
        if (in->unit < 0 || (size_t)in->unit >= c->p->n_units || in->piece != c->units[in->unit].pieces++)
            return mt_check_fault(c, i, NONE, "updates a unit that does not exist, or pieces of one out of order");
        rc = mt_check_none(c, i, c->units[in->unit].renewed, "updates weights that went to other hosts already")
          ?: mt_check_renews(c, i);
    }
    if (!rc && in->op == MT_OP_SCATTER)
        rc = check_scatter(c, i);
    for (int k = 0; !rc && k < in->n_operands; k++)
        rc = mt_check_operand(c, i, &in->operand[k]);
    return rc ? rc : check_lists(c, i);
}

static int check_grads_leave(struct mt_checker *c)
{
    for (size_t u = 0; u < c->p->n_units; u++)
        if (c->units[u].taken != NONE && c->units[u].stored < c->units[u].taken)
            return mt_check_fault(c, (size_t)c->units[u].taken, NONE, "a gradient that was cast is never stored");
    for (size_t o = 0; o < c->p->n_objects; o++) {
        const struct mt_object *x = &c->p->objects[o];
        if (x->kind == MT_OBJ_GRAD && c->objects[o].parts && c->objects[o].went == NONE)
            return mt_check_fault(c, c->p->n_instrs - 1, mt_check_home(c, o)->writer, "a group's sum is in no gradient");
        if (x->kind == MT_OBJ_GRAD_RING && c->units[x->unit].own == NONE)
            return mt_check_fault(c, c->p->n_instrs - 1, c->units[x->unit].stored, "a gradient that has no plane is used by no update");
    }
    return 0;
}

/* The next step reads planes: what was changed elsewhere must have been written to them. */
static int check_planes_are_home(struct mt_checker *c)
{
    for (size_t o = 0; o < c->p->n_objects; o++) {
        const struct mt_kind_desc *kind = &mt_kinds[c->p->objects[o].kind];
        if (kind->home == MT_HOME_PLANE && mt_check_home(c, o)->version != c->objects[o].latest)
            return mt_check_fault(c, c->p->n_instrs - 1, NONE,
                         kind->device ? "states that changed on a device are never stored"
                                      : "a plane that changed is never written to the disk");
    }
    return 0;
}

int mt_check_end(struct mt_checker *c)
{
    int rc = c->p->backward ? check_grads_leave(c) : 0;
    return rc ? rc : check_planes_are_home(c);
}

/* Sums of groups may have one home in turn, at one place of spill memory. */
static void find_homes(struct mt_checker *c)
{
    const struct mt_object *x = c->p->objects;
    size_t n = 0;
    int *first = c->home_of + c->p->n_objects; /* [n] objects with different places */
    for (size_t o = 0; o < c->p->n_objects; o++) {
        size_t k = x[o].kind == MT_OBJ_GRAD && x[o].spill >= 0 ? 0 : n;
        while (k < n && x[first[k]].spill != x[o].spill)
            k++;
        c->home_of[o] = k < n ? first[k] : (int)o;
        if (k == n && x[o].kind == MT_OBJ_GRAD && x[o].spill >= 0)
            first[n++] = (int)o;
    }
}

static bool init_checker(struct mt_checker *c)
{
    const struct mt_program *p = c->p;
    c->n_queues = mt_n_queues(p->n_lanes);
    c->clock = mt_arrays_add(&c->arrays, p->n_instrs, (size_t)c->n_queues * sizeof(*c->clock));
    c->homes = mt_arrays_add(&c->arrays, p->n_objects, sizeof(*c->homes));
    c->objects = mt_arrays_add(&c->arrays, p->n_objects, sizeof(*c->objects));
    c->units = mt_arrays_add(&c->arrays, p->n_units, sizeof(*c->units));
    c->loaded = mt_arrays_add(&c->arrays, (size_t)p->n_lanes * p->n_units, sizeof(*c->loaded));
    c->groups = mt_arrays_add(&c->arrays, mt_groups_n(p->groups), sizeof(*c->groups));
    c->home_of = mt_arrays_add(&c->arrays, 2 * p->n_objects, sizeof(*c->home_of));
    if (c->arrays.failed)
        return false;
    find_homes(c);
    for (size_t i = 0; i < mt_groups_n(p->groups); i++)
        c->groups[i] = (struct mt_check_group){NONE, NONE};
    for (int lane = 0; lane < MT_MAX_LANES; lane++)
        c->balanced[lane] = NONE;
    for (size_t i = 0; i < p->n_units * (size_t)p->n_lanes; i++)
        c->loaded[i] = NONE;
    for (size_t u = 0; u < p->n_units; u++)
        c->units[u] = (struct mt_check_unit){NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, 0};
    struct mt_check_place empty = {.object = NONE, .writer = NONE};
    for (int q = 0; q < MT_MAX_QUEUES; q++)
        empty.reader[q] = c->last_of[q] = NONE;
    for (size_t o = 0; o < p->n_objects; o++) {
        c->homes[o] = empty;
        c->objects[o] = (struct mt_check_object){.went = NONE, .routed = NONE};
    }
    for (int lane = 0; lane < p->n_lanes; lane++)
        for (int i = 0; i < MT_N_POOLS; i++) {
            size_t n = (size_t)MT_MAX(p->pool[lane][i].n, 0);
            struct mt_check_place *b = c->buffers[lane][i] = mt_arrays_add(&c->arrays, n, sizeof(*b));
            for (size_t k = 0; b && k < n; k++)
                b[k] = empty;
        }
    return !c->arrays.failed;
}

/* Objects that live for the run have their buffers from the start, with an old version: they must be loaded first. */
static int put_residents(struct mt_checker *c)
{
    int next[MT_MAX_LANES][MT_N_POOLS] = {{0}};
    for (size_t o = 0; o < c->p->n_objects; o++) {
        enum mt_pool_id pool = c->p->objects[o].pool;
        int lane = c->p->objects[o].lane;
        if (!c->p->objects[o].resident)
            continue;
        if (lane >= c->p->n_lanes || next[lane][pool] >= c->p->pool[lane][pool].n)
            return mt_check_fault(c, 0, NONE, "has too few buffers for the objects that live for the run");
        struct mt_check_place *at = &c->buffers[lane][pool][next[lane][pool]++];
        at->object = (int)o;
        at->version = -1;
    }
    return 0;
}

int mt_check_begin(struct mt_checker *c)
{
    const struct mt_program *p = c->p;
    int rc = p->n_lanes >= 1 && p->n_lanes <= MT_MAX_LANES
                 ? 0 : mt_fail(c->err, MT_ERR_RUNTIME, -EPROTO, "step program: it has %d lanes", p->n_lanes);
    if (!rc && !init_checker(c))
        rc = mt_fail_nomem(c->err, "the schedule checker", p->n_instrs * sizeof(*c->clock));
    return rc || !p->n_instrs ? rc : put_residents(c);
}

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_SCHEDULE_BUILD_H
#define MT_SCHEDULE_BUILD_H

#include "schedule/program.h"

/**
 * A program before placement: the computations, in order, over objects without buffers. It has no loads, stores or
 * joins, except that each STORE_GRAD follows the instruction that completes its operand.
 */
struct mt_draft {
    const struct mt_program_params *params;
    struct mt_program prog; /* objects and pools filled; instrs are the draft */
};

int mt_draft_write(struct mt_draft *d, const struct mt_program_params *params, struct mt_err *err);
int mt_draft_place(struct mt_program *out, struct mt_draft *d, struct mt_err *err);

/** Whether any plane or spilled activation is kept on a disk. */
bool mt_program_uses_disk(const struct mt_program_params *p);
/** Whether updates follow under backward: gradients of some units leave to a ring of buffers, not to planes. */
bool mt_program_has_ring(const struct mt_program_params *p);
/** Raises n[] of the ring's pools to what a program needs, and two more of a kind with as many units, so that a
 * gradient leaves while the one before is updated. */
void mt_program_ring_buffers(const struct mt_program_params *p, int n[MT_N_POOLS]);
/**
 * Whether the embedding's forward is GATHER, on the host: it writes the first boundary to its home, with the pending update
 * of just those rows, so forward need not wait for the update of the whole embedding, which comes last. Needs all
 * of the embedding's planes in host memory.
 */
bool mt_program_gathers(const struct mt_program_params *p);
/**
 * Whether only the rows of the step's tokens leave the device of the unit's gradient. GRAD_CAST compacts them into the
 * FP32 gradient, STORE_GRAD copies them to the beginning of the plane, from where GATHER reads them, and UNPACK moves
 * them to their places before the update, after which the plane is zero again.
 */
bool mt_program_compacts(const struct mt_program_params *p, size_t unit);
/**
 * Elements of the trained planes that are updated and loaded at once, so that a part is loaded while the next is
 * updated: a part of those of the unit for which forward waits first, the first layer, else all of the unit's.
 */
size_t mt_program_part_elems(const struct mt_program_params *p, size_t unit);
/** The second placer: host staging between device and disk (stage.c). Replaces the instructions of *p. */
int mt_program_stage(struct mt_program *p, const struct mt_program_params *params, struct mt_err *err);
/** The part of params->host of a program of all hosts' lanes, with its messages (hosts.c). Replaces *p. */
int mt_program_take_part(struct mt_program *p, const struct mt_program_params *params, struct mt_err *err);
/** Drops waits implied by others, and marks the instructions that are waited for: each of those needs an event. */
int mt_program_prune_waits(struct mt_program *p, struct mt_err *err);

/** Whether the operand is in the program: gradients of frozen units are not, nor training's values outside training. */
static inline bool mt_use_is_made(const struct mt_program_params *p, const struct mt_use *u)
{
    const struct mt_value *v = &p->values[u->value];
    if ((mt_kinds[v->kind].training && p->mode != MT_MODE_TRAIN) || (mt_kinds[v->kind].returns && !v->bytes))
        return false;
    return !mt_kinds[v->kind].trained || p->units[v->unit].trainable;
}
/** How many objects a value has, and which of them an operation for the micro-batch uses. */
static inline size_t mt_value_objects(const struct mt_program_params *p, const struct mt_value *v)
{
    size_t own = v->life == MT_LIFE_RUN && p->by_data ? (size_t)mt_program_lanes(p) : 1; /* a lane has its own */
    return v->life == MT_LIFE_MICROBATCH ? p->n_micro : v->life == MT_LIFE_GROUP ? mt_groups_n(p->groups) : own;
}
static inline size_t mt_value_object(const struct mt_program_params *p, const struct mt_value *v, size_t mb)
{
    size_t own = v->life == MT_LIFE_RUN && p->by_data ? (size_t)mt_micro_lane(p, mb) : 0;
    return v->life == MT_LIFE_MICROBATCH ? mb : v->life == MT_LIFE_GROUP ? mt_group_of(p->groups, mb) : own;
}
/** The micro-batch of an operation's next run after that for `mb`; the first is for 0. */
static inline size_t mt_call_next(const struct mt_program_params *p, const struct mt_call *c, size_t mb)
{
    return c->scope == MT_SCOPE_GROUP ? mt_group_first(p->groups, mt_group_of(p->groups, mb) + 1) : mb + 1;
}
/** Sums of groups that are held at once while they are added up, beside the one that is being made. */
static inline int mt_program_levels(const struct mt_program_params *p)
{
    int levels = 0;
    while (mt_groups_n(p->groups) >> (levels + 1))
        levels++;
    return levels;
}
/** The unit's operation in the forward pass of the mode; n_uses is 0 if it has none. */
const struct mt_call *mt_forward_call(const struct mt_program_params *p, size_t unit);
/** The pool of a unit's objects of that kind. */
static inline enum mt_pool_id mt_program_pool(const struct mt_program_params *p, enum mt_object_kind kind, size_t unit)
{
    enum mt_size_class c = p->units[unit].size_class;
    return mt_kinds[kind].pool[c == MT_CLASS_VOCAB && p->one_ring ? MT_CLASS_LAYER : c];
}
/** The pool of a value's objects. */
static inline enum mt_pool_id mt_program_pool_of(const struct mt_program_params *p, const struct mt_value *v)
{
    return (enum mt_pool_id)(mt_program_pool(p, v->kind, (size_t)v->unit) + v->size);
}
/** An instruction without waits and operands, on the opcode's queue. */
struct mt_instr mt_instr_make(enum mt_opcode op, size_t unit, size_t mb);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "schedule/program.h"

/** Which objects a program with these parameters has, how many of each, and in which pools. */

/** Whether the operand is in the program: gradients of frozen units are not, nor training's values outside training. */
static inline bool mt_use_is_made(const struct mt_program_params *p, const struct mt_use *u)
{
    const struct mt_value *v = &p->values[u->value];
    if ((mt_kinds[v->kind].training && p->mode != MT_MODE_TRAIN) || (mt_kinds[v->kind].returns && !v->bytes))
        return false;
    if (v->kind == MT_OBJ_CACHE && p->draws_apart && p->mode != MT_MODE_LOGITS)
        return false;
    return !mt_kinds[v->kind].trained || p->units[v->unit].trainable;
}
/** Gives the object a home at the end of spill memory, or of what is spilled to the disk. */
void mt_program_add_home(struct mt_program *p, struct mt_object *o);
/** How many objects a value has, and which of them an operation for the micro-batch uses. */
static inline size_t mt_value_objects(const struct mt_program_params *p, const struct mt_value *v)
{
    size_t own = v->life == MT_LIFE_RUN && p->by_data ? (size_t)mt_program_lanes(p) : 1; /* a lane has its own */
    own = v->life == MT_LIFE_ONE_ROW ? p->n_micro / p->chunks : own;
    return v->life == MT_LIFE_MICROBATCH ? p->n_micro : v->life == MT_LIFE_GROUP ? mt_groups_n(p->groups) : own;
}
static inline size_t mt_value_object(const struct mt_program_params *p, const struct mt_value *v, size_t mb)
{
    size_t own = v->life == MT_LIFE_RUN && p->by_data ? (size_t)mt_micro_lane(p, mb) : 0;
    own = v->life == MT_LIFE_ONE_ROW ? mb / p->chunks : own;
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

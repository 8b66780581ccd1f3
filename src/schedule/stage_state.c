/* SPDX-License-Identifier: Apache-2.0 */
/* What stage.c and stage_emit.c ask of the second placer's state. */
#include "schedule/stage.h"

#include "base/mem.h"

size_t mt_stage_n_pieces(const struct mt_stager *s, size_t unit)
{
    const struct mt_unit_shape *u = &s->params->units[unit];
    return u->state_bytes ? mt_div_up(u->update_elems, s->params->piece_elems) : 1;
}

size_t mt_stage_piece_elems(const struct mt_stager *s, size_t unit, size_t piece)
{
    const struct mt_unit_shape *u = &s->params->units[unit];
    if (!u->state_bytes)
        return u->update_elems;
    return MT_MIN(s->params->piece_elems, u->update_elems - piece * s->params->piece_elems);
}

int mt_stage_updated(const struct mt_stager *s, size_t unit)
{
    return s->params->units[unit].staged_bytes_written ? s->unit_staged[unit] : MT_STAGE_NONE;
}

/* What a load reads. */
static int loaded_object(const struct mt_stager *s, int object)
{
    const struct mt_object *o = &s->out->objects[object];
    if (!mt_object_is_of_planes(o))
        return s->spilled[object];
    const struct mt_unit_shape *u = &s->params->units[o->unit];
    size_t adapters = u->staged_bytes_adapters;
    size_t bytes = o->kind == MT_OBJ_ADAPTERS ? adapters : u->staged_bytes - adapters;
    return bytes ? s->unit_staged[o->unit] : MT_STAGE_NONE;
}

bool mt_stage_is_own(const struct mt_stager *s, const struct mt_stage_step *t)
{
    return t->old != MT_STAGE_NONE && s->old->instrs[t->old].own;
}

int mt_stage_object_of(const struct mt_stager *s, const struct mt_stage_step *t, bool *made)
{
    *made = false;
    if (t->old == MT_STAGE_NONE || mt_stage_is_own(s, t))
        return mt_stage_updated(s, (size_t)t->unit);
    const struct mt_instr *in = &s->old->instrs[t->old];
    int o = in->operand[0].object;
    switch (in->op) {
    case MT_OP_LOAD:
        return loaded_object(s, o);
    case MT_OP_STORE:
        *made = true;
        return s->spilled[o];
    case MT_OP_STORE_GRAD:
        *made = true;
        return s->unit_grad[t->unit];
    default:
        return MT_STAGE_NONE;
    }
}

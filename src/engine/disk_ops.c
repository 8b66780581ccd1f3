/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The layout of host staging. A unit's planes on the disk fall in two: those that loads take (hi; in f32
 * also lo) are staged whole, one after the other; the rest goes through in pieces, one after the other,
 * each as long as a full piece of it.
 */
#include "base/mem.h"
#include "engine/engine_priv.h"

static size_t bytes_of(const mt_engine *e, enum mt_plane_kind k, size_t n)
{
    return mt_plane_desc_bytes(mt_plane_desc_of(e->p.planes, k), n);
}

static bool is_loaded(const mt_engine *e, enum mt_plane_kind k)
{
    return mt_plane_is_loaded(k, e->p.numerics.dtype);
}

/* Elements of a plane that a staging buffer has room for. */
static size_t room(const mt_engine *e, size_t unit, bool staged)
{
    size_t n = mt_align_up(e->layout->units[unit].n_elems, MT_PIECE_ALIGN);
    return staged ? n : MT_MIN(n, e->plan.program.piece_elems);
}

/* Offset of plane k in a buffer of the unit's staged planes, or of a piece of the others. */
static size_t offset_in(const mt_engine *e, size_t unit, enum mt_plane_kind k, bool staged)
{
    size_t at = 0;
    uint64_t unused;
    for (int i = 0; i < (int)k; i++)
        if (mt_plane_on_disk(e->p.planes, unit, (enum mt_plane_kind)i, &unused) &&
            is_loaded(e, (enum mt_plane_kind)i) == staged)
            at += bytes_of(e, (enum mt_plane_kind)i, room(e, unit, staged));
    return at;
}

struct mt_plane_view mt_plane_view(const mt_engine *e, size_t unit, enum mt_plane_kind k, size_t piece,
                                   char *state, char *staged)
{
    uint64_t unused;
    if (!mt_plane_on_disk(e->p.planes, unit, k, &unused))
        return (struct mt_plane_view){mt_plane(e->p.planes, unit, k), 0};
    if (is_loaded(e, k))
        return (struct mt_plane_view){staged + offset_in(e, unit, k, true), 0};
    return (struct mt_plane_view){state + offset_in(e, unit, k, false),
                                  piece * e->plan.program.piece_elems};
}

/* Elements [first, first + n) of the unit's planes of one sort. */
static void fill_planes(const mt_engine *e, size_t unit, bool staged, size_t first, size_t n, char *buf,
                        struct mt_disk_request *r)
{
    for (int i = 0; i < MT_N_PLANES; i++) {
        enum mt_plane_kind k = (enum mt_plane_kind)i;
        uint64_t at;
        if (!mt_plane_on_disk(e->p.planes, unit, k, &at) || is_loaded(e, k) != staged ||
            (r->write && mt_plane_desc_of(e->p.planes, k)->role == MT_ROLE_GRADIENT))
            continue;
        r->span[r->n_spans++] = (struct mt_disk_span){at + bytes_of(e, k, first), buf + offset_in(e, unit, k, staged),
                                                      mt_align_up(bytes_of(e, k, n), MT_DISK_ALIGN)};
    }
}

void mt_disk_op_fill(const mt_engine *e, const struct mt_program *prog, const struct mt_instr *in,
                     struct mt_disk_request *r)
{
    const struct mt_object *o = &prog->objects[in->operand[0].object];
    char *buf = e->buffers[o->pool][in->operand[0].buffer];
    size_t unit = (size_t)o->unit, n = e->layout->units[unit].n_elems;
    size_t first = (size_t)o->piece * prog->piece_elems;
    uint64_t at = 0;
    r->write = in->op == MT_OP_WRITE;
    r->n_spans = 0;
    switch (o->kind) {
    case MT_OBJ_STATE:
        fill_planes(e, unit, false, first, MT_MIN(prog->piece_elems, n - first), buf, r);
        break;
    case MT_OBJ_STAGED:
        fill_planes(e, unit, true, 0, n, buf, r);
        break;
    case MT_OBJ_GRAD_OUT:
        mt_plane_on_disk(e->p.planes, unit, MT_PLANE_GRAD, &at);
        r->span[r->n_spans++] = (struct mt_disk_span){at, buf, o->bytes};
        break;
    default: /* MT_OBJ_SPILLED */
        r->span[r->n_spans++] =
            (struct mt_disk_span){e->p.disk_spill_at + (uint64_t)o->spill, buf, o->bytes};
        break;
    }
}

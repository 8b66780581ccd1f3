/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The layout of host staging. Of a unit's planes on the disk or in files, those that are loaded (weights; lo only in
 * f32, and of units with a router in f32) are staged whole, one plane after the other. Those that only updates use are
 * staged in pieces of piece_elems elements: a buffer holds one piece of each of them, one after the other.
 */
#include "base/mem.h"
#include "engine/binding.h"

static size_t bytes_of(const struct mt_binding *b, enum mt_plane_kind k, size_t n)
{
    return mt_plane_desc_bytes(mt_plane_desc_of(b->planes, k), n);
}

static bool is_loaded(const struct mt_binding *b, size_t unit, enum mt_plane_kind k)
{
    return mt_unit_loaded_planes(b->layout, unit, b->dtype) >> k & 1;
}

_Static_assert(MT_RANGE_ALIGN % MT_PIECE_ALIGN == 0, "planes are cut at pieces");

/* Bytes that plane k of the unit takes in a buffer, staged whole or in pieces: whole pages. */
static size_t bytes_in(const struct mt_binding *b, size_t unit, enum mt_plane_kind k, bool staged)
{
    size_t n = mt_plane_elems(b->planes, unit, k);
    return bytes_of(b, k, staged ? n : MT_MIN(mt_align_up(n, b->piece_align), b->piece_elems));
}

static bool is_updated(const struct mt_binding *b, enum mt_plane_kind k)
{
    return mt_plane_desc_of(b->planes, k)->range == MT_RANGE_TRAINED;
}

static bool is_away(const struct mt_binding *b, size_t unit, enum mt_plane_kind k)
{
    uint64_t unused;
    return mt_plane_on_disk(b->planes, unit, k, &unused) || mt_plane_in_files(b->planes, unit, k);
}

/* Whether plane k of the unit is staged whole (`staged`), or in pieces. */
static bool goes_through(const struct mt_binding *b, size_t unit, enum mt_plane_kind k, bool staged)
{
    return is_away(b, unit, k) && is_loaded(b, unit, k) == staged && (staged || is_updated(b, k));
}

/* Offset of plane k in a buffer of the unit's staged planes, or of a piece of the others. */
static size_t offset_in(const struct mt_binding *b, size_t unit, enum mt_plane_kind k, bool staged)
{
    size_t at = 0;
    for (enum mt_plane_kind i = 0; i < k; i++)
        if (goes_through(b, unit, i, staged))
            at += bytes_in(b, unit, i, staged);
    return at;
}

struct mt_plane_view mt_plane_view(const struct mt_binding *b, size_t unit, enum mt_plane_kind k, size_t piece,
                                   char *state, char *staged)
{
    if (!is_away(b, unit, k))
        return (struct mt_plane_view){mt_plane(b->planes, unit, k), 0};
    bool loaded = is_loaded(b, unit, k);
    char *from = loaded ? staged : state;
    return (struct mt_plane_view){from ? from + offset_in(b, unit, k, loaded) : NULL,
                                  loaded ? 0 : piece * b->piece_elems};
}

static void add_span(struct mt_disk_request *r, uint64_t at, char *buf, size_t bytes, const struct mt_disk_sums *sums)
{
    r->span[r->n_spans++] = (struct mt_disk_span){at, buf, mt_align_up(bytes, MT_DISK_ALIGN), sums};
}

/* Spans of piece [first, first + n) of the planes that only updates use. */
static void fill_piece(const struct mt_binding *b, size_t unit, size_t first, size_t n,
                       char *buf, struct mt_disk_request *r)
{
    for (enum mt_plane_kind k = 0; k < MT_N_PLANES; k++) {
        uint64_t at;
        if (goes_through(b, unit, k, false) && mt_plane_on_disk(b->planes, unit, k, &at) &&
            !(r->write && mt_plane_desc_of(b->planes, k)->role == MT_ROLE_GRADIENT))
            add_span(r, at + bytes_of(b, k, first), buf + offset_in(b, unit, k, false), bytes_of(b, k, n),
                     mt_plane_sums(b->planes, unit, k));
    }
}

/* A read is of all staged planes, a write of those that updates change. */
static void fill_staged(const struct mt_binding *b, size_t unit, char *buf, struct mt_disk_request *r,
                        struct mt_file_request *f)
{
    f->unit = unit;
    for (enum mt_plane_kind k = 0; k < MT_N_PLANES; k++) {
        uint64_t at;
        if (!goes_through(b, unit, k, true) || (r->write && !is_updated(b, k)))
            continue;
        char *to = buf + offset_in(b, unit, k, true);
        if (mt_plane_on_disk(b->planes, unit, k, &at))
            add_span(r, at, to, bytes_in(b, unit, k, true), mt_plane_sums(b->planes, unit, k));
        else
            f->plane[k] = to;
    }
}

void mt_disk_op_fill(const struct mt_binding *b, const struct mt_program *prog, const struct mt_instr *in,
                     const struct mt_disk_sums *spilled, struct mt_disk_request *r, struct mt_file_request *f)
{
    const struct mt_object *o = &prog->objects[in->operand[0].object];
    char *buf = b->buffers[o->pool][in->operand[0].buffer];
    size_t unit = (size_t)o->unit, n = b->layout->units[unit].n_in_planes[MT_RANGE_TRAINED];
    size_t first = (size_t)o->piece * prog->piece_elems;
    uint64_t at = 0;
    r->write = in->op == MT_OP_WRITE;
    r->n_spans = 0;
    switch (o->kind) {
    case MT_OBJ_STATE:
        fill_piece(b, unit, first, MT_MIN(prog->piece_elems, n - first), buf, r);
        break;
    case MT_OBJ_STAGED:
        fill_staged(b, unit, buf, r, f);
        break;
    case MT_OBJ_GRAD_OUT:
        mt_plane_on_disk(b->planes, unit, MT_PLANE_GRAD, &at);
        add_span(r, at, buf, o->bytes, mt_plane_sums(b->planes, unit, MT_PLANE_GRAD));
        break;
    default: /* MT_OBJ_SPILLED */
        add_span(r, b->disk_spill_at + (uint64_t)o->spill, buf, o->bytes,
                 spilled ? &spilled[in->operand[0].object] : NULL);
        break;
    }
}

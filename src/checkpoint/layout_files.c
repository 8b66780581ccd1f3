/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/layout_files.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "checkpoint/quantization.h"
#include "model/ranges.h"

static int read_planes(void *planes, const struct mt_values *v, void *dst, struct mt_err *err)
{
    const struct mt_tensor *t = v->t;
    if (v->piece)
        return mt_planes_read(planes, t->unit, MT_PLANE_PACKED, v->piece->at + v->first * v->size, v->n * v->size, dst,
                              err);
    return v->size == sizeof(float)
               ? mt_tensor_read_masters(planes, t, v->first, v->n, dst, err)
               : mt_planes_read(planes, t->unit, mt_range_planes(t->kind).hi, t->at + v->first, v->n, dst, err);
}

static int read_file(const struct mt_source *s, size_t first, size_t n, void *dst, struct mt_err *err)
{
    struct mt_layout_files *f = s->ctx;
    const struct mt_stored *stored = s->of;
    struct mt_stored_part of = {(size_t)(stored - f->writer.l->stored), s->part, mt_st_dtype_size(s->decl.dtype)};
    int rc = mt_stored_gather(&f->writer, of, first, n, dst, err);
    if (rc && f->lost)
        *f->lost = true;
    return rc;
}

struct mt_source mt_layout_files_source(struct mt_layout_files *f, const struct mt_stored *s, struct mt_st_decl as)
{
    return (struct mt_source){as, read_file, f, s, 0};
}

static const struct mt_tensor *packed_tensor(const struct mt_layout *l, const struct mt_stored *s)
{
    const struct mt_tensor *t = &l->tensors[l->pieces[s->first_piece]];
    return t->kind == MT_RANGE_PACKED ? t : NULL;
}

/* As it is, or the pieces of a packed one. */
static int add_stored(struct mt_layout_files *f, const struct mt_stored *s, struct mt_err *err)
{
    const struct mt_tensor *t = packed_tensor(f->writer.l, s);
    struct mt_packed_piece *p = &f->pieces[f->n_pieces];
    if (!t)
        return mt_source_add(&f->list, mt_layout_files_source(f, s, mt_stored_decl(s)), err);
    int n = mt_packed_stored_pieces(p, s, t), rc = 0;
    f->n_pieces += (size_t)n;
    for (int i = 0; i < n && !rc; i++) {
        struct mt_st_decl d = {.name = p[i].name, .dtype = p[i].dtype, .n_dims = p[i].n_dims};
        memcpy(d.shape, p[i].shape, sizeof(p[i].shape));
        rc = mt_source_add(&f->list, (struct mt_source){d, read_file, f, s, 1 + i}, err);
    }
    return rc;
}

void mt_layout_files_begin(struct mt_layout_files *f, struct mt_stored_writer as)
{
    *f = (struct mt_layout_files){.writer = as};
}

void mt_layout_files_of_planes(struct mt_layout_files *f, const struct mt_layout *l, mt_plane_set *planes)
{
    mt_layout_files_begin(f, (struct mt_stored_writer){.l = l, .read = read_planes, .ctx = planes});
}

int mt_layout_files_init(struct mt_layout_files *f, const struct mt_layout *l, mt_plane_set *planes, const bool *left,
                         struct mt_err *err)
{
    size_t packed = 0;
    mt_layout_files_of_planes(f, l, planes);
    for (size_t i = 0; i < l->n_stored; i++)
        packed += packed_tensor(l, &l->stored[i]) != NULL;
    int rc = MT_NEW(&f->pieces, packed * MT_MAX_PIECES, "a model's files", err);
    for (size_t i = 0; i < l->n_stored && !rc; i++)
        if (!left || !left[i])
            rc = add_stored(f, &l->stored[i], err);
    return rc ?: mt_quantization_text(&f->quantization, l, err);
}

void mt_layout_files_finish(struct mt_layout_files *f)
{
    mt_stored_writer_finish(&f->writer);
    free(f->pieces);
    mt_source_list_finish(&f->list);
    free(f->quantization);
    *f = (struct mt_layout_files){.lost = NULL};
}

int mt_layout_files_add_copied(struct mt_layout_files *f, const struct mt_st_model *m, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < m->n_tensors && !rc; i++)
        if (mt_stored_goes_along(f->writer.l, m->tensors[i].name))
            rc = mt_source_add(&f->list, mt_source_raw(m, &m->tensors[i]), err);
    return rc;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/layout_files.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "checkpoint/quantization.h"
#include "model/ranges.h"

static const struct mt_tensor *packed_tensor(const struct mt_layout *l, const struct mt_stored *s)
{
    const struct mt_tensor *t = &l->tensors[l->pieces[s->first_piece]];
    return t->kind == MT_RANGE_PACKED ? t : NULL;
}

static void list_tensors(struct mt_layout_files *f, const bool *left)
{
    const struct mt_layout *l = f->layout;
    for (size_t i = 0; i < l->n_stored; i++) {
        const struct mt_tensor *t = packed_tensor(l, &l->stored[i]);
        struct mt_packed_piece piece[MT_MAX_PIECES];
        int n = t ? mt_packed_stored_pieces(piece, &l->stored[i], t) : 0;
        if (left && left[i])
            continue;
        for (int k = 0; k < n; k++)
            f->of[f->n++] = (struct mt_layout_file){i, t, piece[k], k};
        if (!n)
            f->of[f->n++] = (struct mt_layout_file){.stored = i};
    }
}

static struct mt_st_decl declare(const struct mt_layout *l, const struct mt_layout_file *of)
{
    const struct mt_packed_piece *p = &of->piece;
    const struct mt_stored *s = &l->stored[of->stored];
    if (of->packed)
        return (struct mt_st_decl){.name = p->name, .dtype = p->dtype, .n_dims = p->n_dims,
                                   .shape = {p->shape[0], p->shape[1], p->shape[2], p->shape[3]}};
    return (struct mt_st_decl){.name = s->name, .dtype = s->is_f32 ? MT_ST_F32 : MT_ST_BF16, .n_dims = s->n_dims,
                               .shape = {s->shape[0], s->shape[1], s->shape[2]}};
}

static int read_plain(void *ctx, const struct mt_tensor *t, size_t first, size_t n, size_t size, void *dst,
                      struct mt_err *err)
{
    mt_plane_set *planes = ctx;
    return size == sizeof(float)
               ? mt_tensor_read_masters(planes, t, first, n, dst, err)
               : mt_planes_read(planes, t->unit, mt_range_planes(t->kind).hi, t->at + first, n, dst, err);
}

/* Copies the tensor's rows to their places in the share. */
static int scatter(struct mt_layout_files *f, const struct mt_layout_file *of, const struct mt_tensor *t, size_t share,
                   struct mt_err *err)
{
    struct mt_packed_piece piece[MT_MAX_PIECES];
    struct mt_packed_rows r = mt_packing_rows(f->layout, t);
    mt_packed_pieces(piece, t);
    const struct mt_packed_piece *p = &piece[of->which];
    size_t n = (size_t)t->shape[0], row = p->bytes / n;
    if (!mt_grow(&f->tensor, &f->tensor_bytes, p->bytes, 1))
        return mt_fail_nomem(err, t->name, p->bytes);
    int rc = mt_planes_read(f->planes, t->unit, MT_PLANE_PACKED, p->at, p->bytes, f->tensor, err);
    for (size_t i = 0; i < n && !rc; i++)
        memcpy(f->share + ((r.first + i * r.step) * row) % share, f->tensor + i * row, row);
    return rc;
}

static int load_share(struct mt_layout_files *f, const struct mt_layout_file *of, size_t expert, size_t share,
                      struct mt_err *err)
{
    const struct mt_stored *s = &f->layout->stored[of->stored];
    int rc = 0;
    if (f->share_of == of && f->share_expert == expert)
        return 0;
    f->share_of = NULL;
    if (!mt_grow(&f->share, &f->share_bytes, share, 1))
        return mt_fail_nomem(err, s->name, share);
    for (size_t k = s->first_piece; k < s->first_piece + s->n_pieces && !rc; k++) {
        const struct mt_tensor *t = &f->layout->tensors[f->layout->pieces[k]];
        if (t->expert == (int)expert)
            rc = scatter(f, of, t, share, err);
    }
    if (rc)
        return rc;
    f->share_of = of;
    f->share_expert = expert;
    return 0;
}

/* Bytes of a fused piece of all experts of a layer. */
static int read_shares(struct mt_layout_files *f, const struct mt_layout_file *of, size_t first, size_t n, uint8_t *dst,
                       struct mt_err *err)
{
    const struct mt_packed_piece *p = &of->piece;
    size_t share = p->bytes / (size_t)p->shape[0];
    int rc = 0;
    for (size_t take; n && !rc; first += take, n -= take, dst += take) {
        take = MT_MIN(n, share - first % share);
        rc = load_share(f, of, first / share, share, err);
        if (!rc)
            memcpy(dst, f->share + first % share, take);
    }
    return rc;
}

static int read_any(struct mt_layout_files *f, const struct mt_layout_file *of, size_t first, size_t n, size_t size,
                    void *dst, struct mt_err *err)
{
    if (of->packed && f->layout->stored[of->stored].fused)
        return read_shares(f, of, first, n, dst, err);
    if (of->packed)
        return mt_planes_read(f->planes, of->packed->unit, MT_PLANE_PACKED, of->piece.at + first * size, n * size, dst,
                              err);
    return mt_stored_gather(&f->writer, of->stored, first, n, size, dst, err);
}

static int read_file(const struct mt_source *s, size_t first, size_t n, void *dst, struct mt_err *err)
{
    struct mt_layout_files *f = s->ctx;
    int rc = read_any(f, s->of, first, n, mt_st_dtype_size(s->decl.dtype), dst, err);
    if (rc && f->lost)
        *f->lost = true;
    return rc;
}

int mt_layout_files_init(struct mt_layout_files *f, const struct mt_layout *l, mt_plane_set *planes, const bool *left,
                         struct mt_err *err)
{
    size_t most = 0;
    for (size_t i = 0; i < l->n_stored; i++)
        most += packed_tensor(l, &l->stored[i]) ? MT_MAX_PIECES : 1;
    *f = (struct mt_layout_files){.layout = l, .planes = planes, .of = mt_calloc(most, sizeof(*f->of)),
                                  .writer = {.l = l, .read = read_plain, .ctx = planes}};
    if (!f->of)
        return mt_fail_nomem(err, "a model's files", most * sizeof(*f->of));
    list_tensors(f, left);
    int rc = 0;
    for (size_t i = 0; i < f->n && !rc; i++)
        rc = mt_source_add(&f->list, (struct mt_source){declare(l, &f->of[i]), read_file, f, &f->of[i], 0}, err);
    return rc ?: mt_quantization_text(&f->quantization, l, err);
}

void mt_layout_files_finish(struct mt_layout_files *f)
{
    mt_stored_writer_finish(&f->writer);
    free(f->share);
    free(f->tensor);
    free(f->of);
    mt_source_list_finish(&f->list);
    free(f->quantization);
    *f = (struct mt_layout_files){.layout = NULL};
}

int mt_layout_files_add_copied(struct mt_layout_files *f, const struct mt_st_model *m, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < m->n_tensors && !rc; i++)
        if (mt_stored_goes_along(f->layout, m->tensors[i].name))
            rc = mt_source_add(&f->list, mt_source_raw(m, &m->tensors[i]), err);
    return rc;
}

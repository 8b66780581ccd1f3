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

int mt_layout_files_init(struct mt_layout_files *f, const struct mt_layout *l, mt_plane_set *planes, const bool *left,
                         size_t more, struct mt_err *err)
{
    size_t most = 0;
    for (size_t i = 0; i < l->n_stored; i++)
        most += packed_tensor(l, &l->stored[i]) ? MT_MAX_PIECES : 1;
    *f = (struct mt_layout_files){.layout = l, .planes = planes, .of = mt_calloc(most, sizeof(*f->of)),
                                  .decls = mt_calloc(most + more, sizeof(*f->decls)),
                                  .writer = {.l = l, .read = read_plain, .ctx = planes}, .share_of = SIZE_MAX};
    if (!f->of || !f->decls)
        return mt_fail_nomem(err, "a model's files", most * sizeof(*f->of));
    list_tensors(f, left);
    for (size_t i = 0; i < f->n; i++)
        f->decls[i] = declare(l, &f->of[i]);
    return mt_quantization_text(&f->quantization, l, err);
}

void mt_layout_files_finish(struct mt_layout_files *f)
{
    mt_stored_writer_finish(&f->writer);
    free(f->share);
    free(f->tensor);
    free(f->of);
    free(f->decls);
    free(f->quantization);
    *f = (struct mt_layout_files){.layout = NULL};
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

static int load_share(struct mt_layout_files *f, size_t i, size_t expert, size_t share, struct mt_err *err)
{
    const struct mt_stored *s = &f->layout->stored[f->of[i].stored];
    int rc = 0;
    if (f->share_of == i && f->share_expert == expert)
        return 0;
    f->share_of = SIZE_MAX;
    if (!mt_grow(&f->share, &f->share_bytes, share, 1))
        return mt_fail_nomem(err, s->name, share);
    for (size_t k = s->first_piece; k < s->first_piece + s->n_pieces && !rc; k++) {
        const struct mt_tensor *t = &f->layout->tensors[f->layout->pieces[k]];
        if (t->expert == (int)expert)
            rc = scatter(f, &f->of[i], t, share, err);
    }
    if (rc)
        return rc;
    f->share_of = i;
    f->share_expert = expert;
    return 0;
}

/* Bytes of a fused piece of all experts of a layer. */
static int read_shares(struct mt_layout_files *f, size_t i, size_t first, size_t n, uint8_t *dst, struct mt_err *err)
{
    const struct mt_packed_piece *p = &f->of[i].piece;
    size_t share = p->bytes / (size_t)p->shape[0];
    int rc = 0;
    for (size_t take; n && !rc; first += take, n -= take, dst += take) {
        take = MT_MIN(n, share - first % share);
        rc = load_share(f, i, first / share, share, err);
        if (!rc)
            memcpy(dst, f->share + first % share, take);
    }
    return rc;
}

int mt_layout_files_read(struct mt_layout_files *f, size_t i, size_t first, size_t n, void *dst, struct mt_err *err)
{
    const struct mt_layout_file *of = &f->of[i];
    size_t size = mt_st_dtype_size(f->decls[i].dtype);
    if (of->packed && f->layout->stored[of->stored].fused)
        return read_shares(f, i, first, n, dst, err);
    if (of->packed)
        return mt_planes_read(f->planes, of->packed->unit, MT_PLANE_PACKED, of->piece.at + first * size, n * size, dst,
                              err);
    return mt_stored_gather(&f->writer, of->stored, first, n, size, dst, err);
}

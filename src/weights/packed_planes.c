/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/packed_planes.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "model/ranges.h"

/* Every scale as f32, from the pieces that there are. */
static void widen_scales(struct mt_packed_matrix *m, const struct mt_tensor *t, void *const piece[MT_N_PIECES],
                         size_t n)
{
    const uint8_t *bytes = piece[MT_PIECE_SCALES];
    const float *map = piece[MT_PIECE_MAP], *nested = piece[MT_PIECE_NESTED], *offset = piece[MT_PIECE_OFFSET];
    for (size_t i = 0; i < n; i++)
        if (nested) {
            float scale = map[bytes[i]] * nested[i / MT_NF4_NESTED];
            m->scales[i] = scale + *offset;
        } else {
            m->scales[i] = mt_scale_to_f32(t->scale, bytes, &m->factor, i);
        }
}

int mt_packed_matrix_read(struct mt_packed_matrix *out, const struct mt_tensor *t, mt_packed_read read, void *ctx,
                          struct mt_err *err)
{
    struct mt_packed_piece p[MT_MAX_PIECES + 1];
    void *piece[MT_N_PIECES] = {NULL};
    mt_packed_matrix_finish(out);
    int n = mt_packed_pieces(p, t), rc = 0;
    size_t n_scales = mt_packed_n_scales(t->packed, (size_t)t->shape[0], (size_t)t->shape[1]);
    if (t->scale == MT_SCALE_NESTED)
        p[n++] = (struct mt_packed_piece){.kind = MT_PIECE_OFFSET, .at = mt_packed_piece_at(t, MT_PIECE_OFFSET),
                                          .bytes = sizeof(float)};
    for (int i = 0; i < n && !rc; i++) {
        if (p[i].kind == MT_PIECE_VALUES || p[i].kind == MT_PIECE_NOTE)
            continue;
        void *to = piece[p[i].kind] = malloc(p[i].bytes);
        rc = to ? read(ctx, t, &p[i], to, err) : mt_fail_nomem(err, t->name, p[i].bytes);
    }
    *out = (struct mt_packed_matrix){.format = t->packed, .cols = (size_t)t->shape[1], .codes = piece[MT_PIECE_CODES],
                                     .scales = mt_calloc(n_scales, sizeof(float)), .factor = 1,
                                     .zeros = piece[MT_PIECE_ZEROS]};
    piece[MT_PIECE_ZEROS] = NULL;
    if (!rc && !out->scales)
        rc = mt_fail_nomem(err, t->name, n_scales * sizeof(float));
    if (!rc && piece[MT_PIECE_FACTOR])
        out->factor = *(const float *)piece[MT_PIECE_FACTOR];
    if (!rc)
        widen_scales(out, t, piece, n_scales);
    for (int k = MT_PIECE_CODES + 1; k < MT_N_PIECES; k++)
        free(piece[k]);
    return rc;
}

static int read_plane(void *planes, const struct mt_tensor *t, const struct mt_packed_piece *p, void *dst,
                      struct mt_err *err)
{
    return mt_planes_read(planes, t->unit, MT_PLANE_PACKED, p->at, p->bytes, dst, err);
}

int mt_packed_plane_read(struct mt_packed_matrix *out, mt_plane_set *planes, const struct mt_tensor *t,
                         struct mt_err *err)
{
    return mt_packed_matrix_read(out, t, read_plane, planes, err);
}

int mt_packed_plane_values(struct mt_packed_matrix *m, mt_plane_set *planes, const struct mt_tensor *t, size_t first,
                           size_t n, float *dst, struct mt_err *err)
{
    if (t->kind != MT_RANGE_PACKED)
        return mt_tensor_read_masters(planes, t, first, n, dst, err);
    int rc = m->codes ? 0 : mt_packed_plane_read(m, planes, t, err);
    if (!rc)
        mt_packed_matrix_values(m, first, n, dst);
    return rc;
}

void mt_packed_matrix_values(const struct mt_packed_matrix *p, size_t first, size_t n, float *dst)
{
    mt_packed_values(&(struct mt_packed_view){p->format, p->cols, p->codes, p->scales, p->zeros}, first, n, dst);
}

void mt_packed_matrix_finish(struct mt_packed_matrix *p)
{
    free(p->codes);
    free(p->scales);
    free(p->zeros);
    *p = (struct mt_packed_matrix){.codes = NULL};
}

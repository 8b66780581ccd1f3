/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/packed_files.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "model/ranges.h"

enum { PIECE = 1 << 20 };

/* --- as it is ------------------------------------------------------------------------------------- */

static int write_plane(mt_plane_set *planes, const struct mt_tensor *t, size_t at, size_t n, const void *src,
                       struct mt_err *err)
{
    return planes ? mt_planes_write(planes, t->unit, MT_PLANE_PACKED, at, n, src, err) : 0;
}

/* A packed tensor in files, and what sums the bytes that are read; or in planes. */
struct file {
    const struct mt_st_model *st;
    const struct mt_packed_source *src;
    const struct mt_tensor *t;
    struct mt_summer *summer; /* NULL: nothing does */
    mt_plane_set *planes;     /* NULL: it is in files */
};

/* A whole piece, which the files have in another order. */
static int read_turned(const struct file *f, const struct mt_packed_piece *p, void *dst, struct mt_err *err)
{
    const struct mt_packed_source *s = f->src;
    size_t rows = (size_t)f->t->shape[0], cols = (size_t)f->t->shape[1], across = mt_packed_across(s->format, cols);
    MT_FREED void *in = p->kind == MT_PIECE_NOTE ? NULL : mt_calloc(p->bytes, 1);
    if (p->kind == MT_PIECE_NOTE) { /* the shape, which they do not have */
        memcpy(dst, f->t->shape, p->bytes);
        return 0;
    }
    int rc = in ? mt_st_read_raw(f->st, s->piece[p->kind], 0, p->bytes, in, err)
                : mt_fail_nomem(err, p->name, p->bytes);
    if (!rc && p->kind == MT_PIECE_CODES)
        mt_turn_codes(s->turned, in, rows, cols, dst);
    else if (!rc && p->kind == MT_PIECE_ZEROS)
        mt_turn_zeros(s->turned, in, rows, across, s->to_zeros, dst);
    else if (!rc)
        mt_turn_scales(in, rows, across, dst);
    return rc;
}

/* Bytes [at, at + n) of a piece of t: whole rows, if rows of other tensors are between them. Scales are widened that
 * files have as F16. */
static int read_part(const struct file *f, const struct mt_packed_piece *p, size_t at, size_t n, void *dst,
                     struct mt_err *err)
{
    const struct mt_st_tensor *from = f->src->piece[p->kind];
    struct mt_packed_rows r = mt_packed_rows_in(f->src, p);
    size_t row = p->bytes / mt_packed_piece_rows(p);
    if (f->src->turned)
        return read_turned(f, p, dst, err);
    if (f->src->wider_scales && p->kind == MT_PIECE_SCALES)
        return mt_st_read_f32(f->st, from, (at + r.first * row) / sizeof(float), n / sizeof(float), dst, err);
    if (r.step <= 1)
        return mt_st_read_raw(f->st, from, at + r.first * row, n, dst, err);
    size_t bytes = ((n / row - 1) * r.step + 1) * row;
    MT_FREED char *span = malloc(bytes);
    int rc = span ? mt_st_read_raw(f->st, from, (r.first + at / row * r.step) * row, bytes, span, err)
                  : mt_fail_nomem(err, from->name, bytes);
    for (size_t i = 0; i < n / row && !rc; i++)
        memcpy((char *)dst + i * row, span + i * r.step * row, row);
    return rc;
}

static int read_summed(const struct file *f, const struct mt_packed_piece *p, size_t at, size_t n, void *dst,
                       struct mt_err *err)
{
    int rc = read_part(f, p, at, n, dst, err);
    if (!rc)
        mt_summer_add(f->summer, dst, n);
    return rc;
}

static bool bytes_below(const char *data, size_t n, unsigned mask, unsigned end)
{
    bool all = true;
    for (size_t i = 0; i < n; i++)
        all &= ((uint8_t)data[i] & mask) < end;
    return all;
}

/* A scale in BF16, F16 or F32, which may be unaligned. */
static float scale_at(enum mt_scale type, const char *data)
{
    uint32_t x = 0;
    memcpy(&x, data, mt_scale_size(type));
    return mt_scale_to_f32(type, &x, NULL, 0);
}

/* Are products of scales with a code of up to `most` finite? The first and last bytes may be of scales that other
 * blocks have. */
static bool scales_are_finite(enum mt_scale type, const char *data, size_t at, size_t n, float most)
{
    size_t size = mt_scale_size(type);
    bool all = true;
    if (type == MT_SCALE_E8M0) /* 2^(byte - 127) times 6 or 448 */
        return bytes_below(data, n, 0xff, most > 8 ? 247 : 253);
    for (size_t i = -at % size; i + size <= n; i += size)
        all &= isfinite(scale_at(type, data + i) * most);
    return all;
}

bool mt_packed_is_finite(enum mt_packed f, enum mt_scale scale, enum mt_piece piece, size_t at, const char *data,
                         size_t n)
{
    bool scales = piece == MT_PIECE_SCALES, fp8 = mt_packed_formats[f].bytes;
    float most = fp8 ? 448 : f == MT_PACKED_NF4 ? 1 : mt_scale_has_zeros(scale) ? 15 : 8;
    if (piece == MT_PIECE_NESTED || piece == MT_PIECE_MAP || piece == MT_PIECE_FACTOR)
        return scales_are_finite(MT_SCALE_F32, data, at, n, 1);
    if ((fp8 && piece == MT_PIECE_CODES) || (scales && f == MT_PACKED_NVFP4)) /* E4M3, of which two are NaN */
        return bytes_below(data, n, 0x7f, 0x7f);
    return !scales || scale == MT_SCALE_NESTED || scales_are_finite(scale, data, at, n, most);
}

struct mt_packed_rows mt_packed_rows_in(const struct mt_packed_source *src, const struct mt_packed_piece *p)
{
    return p->kind == MT_PIECE_CODES ? src->rows : src->scale_rows;
}

const struct mt_st_tensor *mt_packed_piece_in(const struct mt_packed_source *src, const struct mt_packed_piece *p)
{
    const struct mt_st_tensor *from = src->piece[p->kind];
    size_t bytes = src->wider_scales && p->kind == MT_PIECE_SCALES ? p->bytes / 2 : p->bytes;
    return from && (src->rows.step ? from->n_bytes % bytes == 0 : from->n_bytes == bytes) ? from : NULL;
}

/* buf: PIECE bytes, or a row, or all codes. */
static int copy_piece(const struct file *f, const struct mt_tensor *t, const struct mt_packed_piece *p,
                      mt_plane_set *planes, char *buf, struct mt_err *err)
{
    size_t row = p->bytes / mt_packed_piece_rows(p);
    size_t piece = f->src->turned      ? p->bytes
                   : f->src->rows.step ? MT_MAX(PIECE / row, (size_t)1) * row
                                       : PIECE;
    bool made = f->src->turned && p->kind == MT_PIECE_NOTE;
    int rc = 0;
    if (!made && !mt_packed_piece_in(f->src, p))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "tensor \"%s\" is missing or has another size than before", p->name);
    for (size_t at = 0; at < p->bytes && !rc; at += piece) {
        size_t n = MT_MIN(piece, p->bytes - at);
        rc = read_summed(f, p, at, n, buf, err);
        if (!rc && planes && !mt_packed_is_finite(t->packed, t->scale, p->kind, at, buf, n))
            rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: tensor \"%s\" holds weights that are not finite",
                         f->st->files[f->src->codes->file].path, f->src->codes->name);
        rc = rc ?: write_plane(planes, t, p->at + at, n, buf, err);
    }
    return rc;
}

int mt_packed_copy(const struct mt_st_model *st, const struct mt_packed_source *src, const struct mt_tensor *t,
                   mt_plane_set *planes, struct mt_summer *summer, struct mt_err *err)
{
    const struct file f = {.st = st, .src = src, .t = t, .summer = summer};
    struct mt_packed_piece p[MT_MAX_PIECES];
    int n = mt_packed_pieces(p, t), rc = 0;
    size_t size = MT_MAX((size_t)PIECE, src->turned ? p[0].bytes : (size_t)t->shape[1]);
    MT_FREED char *buf = malloc(size);
    if (!buf)
        return mt_fail_nomem(err, t->name, size);
    if (src->format != t->packed || src->scale != t->scale)
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: tensor \"%s\" is packed in a different format than before",
                     st->files[src->codes->file].path, src->codes->name);
    for (int i = 0; i < n && !rc; i++)
        rc = copy_piece(&f, t, &p[i], planes, buf, err);
    if (!rc && t->scale == MT_SCALE_NESTED)
        rc = write_plane(planes, t, mt_packed_piece_at(t, MT_PIECE_OFFSET), sizeof(src->offset), &src->offset, err);
    return rc;
}

/* --- as f32 ---------------------------------------------------------------------------------------- */

static int read_whole(const struct file *f, const struct mt_packed_piece *p, void *dst, struct mt_err *err)
{
    if (f->planes)
        return mt_planes_read(f->planes, f->t->unit, MT_PLANE_PACKED, p->at, p->bytes, dst, err);
    if (p->kind != MT_PIECE_OFFSET)
        return read_summed(f, p, 0, p->bytes, dst, err);
    memcpy(dst, &f->src->offset, p->bytes);
    return 0;
}

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

static int read_matrix(struct mt_packed_matrix *out, const struct file *f, struct mt_err *err)
{
    const struct mt_tensor *t = f->t;
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
        rc = to ? read_whole(f, &p[i], to, err) : mt_fail_nomem(err, t->name, p[i].bytes);
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

int mt_packed_file_read(struct mt_packed_matrix *out, const struct mt_st_model *st, const struct mt_packed_source *src,
                        const struct mt_tensor *t, struct mt_summer *summer, struct mt_err *err)
{
    struct mt_tensor of = *t;
    of.packed = src->format;
    of.scale = src->scale;
    return read_matrix(out, &(struct file){.st = st, .src = src, .t = &of, .summer = summer}, err);
}

int mt_packed_plane_read(struct mt_packed_matrix *out, mt_plane_set *planes, const struct mt_tensor *t,
                         struct mt_err *err)
{
    return read_matrix(out, &(struct file){.t = t, .planes = planes}, err);
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

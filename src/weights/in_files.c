/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frozen tensors that are read in place: which bytes of the files they are, and how these become those of planes. What
 * the files have as f16 or f32 becomes the two halves of masters; what they have in another order is read as a whole
 * share of the stored tensor and put to its place, line by line. It is done where a block is copied to staging anyway,
 * so that neither the device nor the link has more to do than for a base in host memory.
 */
#include "weights/in_files.h"

#include <stdlib.h>

#include "base/mem.h"
#include "model/packing.h"
#include "model/ranges.h"
#include "model/stored.h"
#include "weights/packed_files.h"
#include "weights/sources.h"

enum { CHUNK = 512 }; /* elements that are converted at once */

/* How a part becomes tensors. */
struct form {
    enum mt_st_dtype dtype;
    enum mt_packed packed;
    enum mt_scale scale;
    const struct mt_tensor *t[MT_FILE_LANES];
    int n;
    enum mt_piece kind[MT_MAX_PIECES + 1]; /* packed: of what it reads */
    size_t first; /* element of the stored tensor with which the part begins */
};

/* --- values -------------------------------------------------------------------------------------- */

/* Element i of a file's bytes, which may be unaligned, as bf16 or as its master. */
static uint16_t load_u16(const char *src, size_t i)
{
    uint16_t x;
    memcpy(&x, src + i * sizeof(x), sizeof(x));
    return x;
}

static float load_f32(const char *src, size_t i)
{
    float x;
    memcpy(&x, src + i * sizeof(x), sizeof(x));
    return x;
}

/* Every step-th of n elements from element `at` of src on. lo: only for masters. */
static void gather(enum mt_st_dtype dtype, const char *src, size_t at, size_t step, size_t n, uint16_t *hi,
                   uint16_t *lo)
{
    if (dtype == MT_ST_BF16)
        for (size_t i = 0; i < n; i++)
            hi[i] = load_u16(src, at + i * step);
    else if (dtype == MT_ST_F16)
        for (size_t i = 0; i < n; i++)
            mt_master_split(mt_f16_to_f32(load_u16(src, at + i * step)), &hi[i], &lo[i]);
    else
        for (size_t i = 0; i < n; i++)
            mt_master_split(load_f32(src, at + i * step), &hi[i], &lo[i]);
}

/* data: bytes [at, at + n) of the part. */
static int refuse_unfit(const struct mt_file_part *p, const char *path, size_t at, const char *data, size_t n,
                        struct mt_err *err)
{
    const struct form *f = p->form;
    size_t size = mt_st_dtype_size(f->dtype);
    uint16_t hi[CHUNK], lo[CHUNK] = {0};
    float x[CHUNK];
    int rc = 0;
    for (size_t i = 0, k; i < n / size && !rc; i += k) {
        k = MT_MIN((size_t)CHUNK, n / size - i);
        gather(f->dtype, data, i, 1, k, hi, lo);
        for (size_t j = 0; j < k; j++)
            x[j] = mt_master_join(hi[j], lo[j]);
        rc = mt_sources_check_finite(path, p->name, at / size + i, x, k, err);
    }
    return rc;
}

static int inspect(const struct mt_file_part *p, size_t piece, const char *path, size_t at, const void *data, size_t n,
                   struct mt_err *err)
{
    const struct form *f = p->form;
    if (!f->packed)
        return refuse_unfit(p, path, at, data, n, err);
    return mt_packed_is_finite(f->packed, f->scale, f->kind[piece], at, data, n)
               ? 0 : mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: tensor \"%s\" holds weights that are not finite", path, p->name);
}

/* --- places -------------------------------------------------------------------------------------- */

/* n elements: every step-th of data from `at` on. */
struct every {
    const char *data;
    size_t at, step, n;
};

/* Puts them to the tensor's elements from `first` on. */
static void put(const struct mt_file_part *p, const struct mt_tensor *t, size_t first, struct every src,
                const struct mt_file_target *to)
{
    const struct form *f = p->form;
    const size_t size = sizeof(uint16_t);
    uint16_t hi[CHUNK], lo[CHUNK];
    for (size_t i = 0; i < src.n; i += CHUNK) {
        size_t k = MT_MIN((size_t)CHUNK, src.n - i), to_byte = (t->at + first + i) * size;
        gather(f->dtype, src.data, src.at + i * src.step, src.step, k, hi, lo);
        mt_file_put(to, p->plane, to_byte, hi, k * size);
        if (p->low != MT_NO_PLANE)
            mt_file_put(to, p->low, to_byte, lo, k * size);
    }
}

/* The first column of a row at place `at` or after it; the row begins at `row`, its columns are `step` apart. */
static size_t column_at(size_t row, size_t step, size_t at)
{
    return at <= row ? 0 : step == 1 ? at - row : mt_div_up(at - row, step);
}

/* Of elements [from, end) of the share those that are the tensor's: parts of its rows, which lie there end to end, or one
 * element in each of many lines; then lines are gathered a chunk of them at a time, for several rows. */
static void put_share(const struct mt_file_part *p, const struct mt_tensor *t, size_t from, size_t end, const char *src,
                      const struct mt_file_target *to)
{
    const struct form *f = p->form;
    size_t rows = (size_t)t->shape[0], cols = (size_t)t->shape[1], step = t->place.col_step;
    size_t first = step == 1 ? 0 : from / step, last = step == 1 ? cols : MT_MIN(cols, mt_div_up(end, step));
    for (size_t c = first, next; c < last; c = next) {
        next = step == 1 ? last : MT_MIN(c + CHUNK, last);
        for (size_t r = 0; r < rows; r++) {
            size_t row = t->place.first - f->first + mt_stored_row(t, r) * t->place.row_step;
            size_t a = MT_MAX(c, column_at(row, step, from)), b = MT_MIN(next, column_at(row, step, end));
            if (a < b)
                put(p, t, r * cols + a, (struct every){src, row + a * step - from, step, b - a}, to);
        }
    }
}

static void place(const struct mt_file_part *p, size_t at, const void *data, size_t n, const struct mt_file_target *to)
{
    const struct form *f = p->form;
    size_t size = mt_st_dtype_size(f->dtype), from = at / size, end = from + n / size;
    for (int i = 0; i < f->n; i++) {
        if (p->elem)
            put(p, f->t[i], from, (struct every){data, 0, 1, end - from}, to);
        else
            put_share(p, f->t[i], from, end, data, to);
    }
}

/* --- parts --------------------------------------------------------------------------------------- */

struct list {
    const struct mt_layout *l;
    const struct mt_sources *sources;
    struct mt_file_part *part;   /* [n_tensors] */
    struct mt_file_piece *piece; /* [MT_MAX_PIECES + 1 for a packed tensor, 1 for another] */
    struct form *form;           /* [n_tensors] */
    size_t n, n_pieces;
};

static int fail_other(const struct mt_tensor *t, struct mt_err *err)
{
    return mt_fail(err, MT_ERR_INPUT, -EINVAL, "tensor \"%s\" in the model's files has changed since they were first read",
                   t->name);
}

static struct mt_file_part *add_part(struct list *v, const struct mt_tensor *t, enum mt_st_dtype dtype)
{
    struct mt_file_part *p = &v->part[v->n];
    struct form *f = &v->form[v->n++];
    *f = (struct form){.dtype = dtype, .packed = t->packed, .scale = t->scale, .t = {t}, .n = 1};
    *p = (struct mt_file_part){.unit = t->unit, .plane = mt_range_planes(t->kind).hi,
                               .low = mt_range_planes(t->kind).lo,
                               .piece = &v->piece[v->n_pieces], .n_lanes = 1, .n_tensors = 1, .tensor = {t->name},
                               .name = t->name, .form = f};
    return p;
}

static struct mt_file_piece *add_piece(struct list *v, struct mt_file_part *p, const struct mt_st_tensor *src,
                                       size_t skip, size_t bytes)
{
    struct mt_file_piece *q = &v->piece[v->n_pieces++];
    *q = (struct mt_file_piece){.file = src->file, .offset = src->offset + skip, .bytes = bytes};
    p->n_pieces++;
    return q;
}

/* Another tensor of what the last part reads. */
static void join_last(struct list *v, const struct mt_tensor *t)
{
    struct mt_file_part *p = &v->part[v->n - 1];
    struct form *f = &v->form[v->n - 1];
    f->t[f->n++] = t;
    p->tensor[p->n_tensors++] = t->name;
    p->name = v->l->stored[t->place.stored].name;
}

static bool is_of_last(const struct list *v, const struct mt_tensor *t, size_t first)
{
    const struct form *f = v->n ? &v->form[v->n - 1] : NULL;
    return f && f->n < MT_FILE_LANES && f->t[0]->unit == t->unit && f->t[0]->place.stored == t->place.stored &&
           f->t[0]->kind == t->kind && f->first == first && (v->part[v->n - 1].placed || v->part[v->n - 1].n_lanes > 1);
}

/* In the order of the plane: bf16 as it is, others converted. */
static void add_in_order(struct list *v, const struct mt_tensor *t, const struct mt_st_tensor *src)
{
    size_t size = mt_st_dtype_size(src->dtype);
    struct mt_file_part *p = add_part(v, t, src->dtype);
    struct mt_file_piece *q = add_piece(v, p, src, t->place.first * size, t->n * size);
    q->at[0] = p->at = t->at * sizeof(uint16_t);
    p->bytes = t->n * sizeof(uint16_t);
    p->placed = src->dtype != MT_ST_BF16;
    p->elem = size;
}

/* In another order: its expert's share of the stored tensor, which may have two tensors. */
static void add_share(struct list *v, const struct mt_tensor *t, const struct mt_st_tensor *src)
{
    size_t n = mt_stored_share(v->l, t), first = t->place.first / n * n, size = mt_st_dtype_size(src->dtype);
    size_t at = t->at * sizeof(uint16_t), end = at + t->n * sizeof(uint16_t);
    bool joins = is_of_last(v, t, first);
    struct mt_file_part *p = joins ? &v->part[v->n - 1] : add_part(v, t, src->dtype);
    size_t p_end = joins ? MT_MAX(p->at + p->bytes, end) : end;
    p->at = joins ? MT_MIN(p->at, at) : at;
    p->bytes = p_end - p->at;
    p->placed = true;
    v->form[v->n - 1].first = first;
    if (joins)
        join_last(v, t);
    else
        add_piece(v, p, src, first * size, n * size);
}

static int add_plain(struct list *v, const struct mt_tensor *t, struct mt_err *err)
{
    const struct mt_stored *stored = &v->l->stored[t->place.stored];
    const struct mt_st_tensor *src = v->sources->of[t - v->l->tensors].codes;
    if (!src || (src->dtype == MT_ST_BF16) != t->is_bf16 || mt_st_dtype_size(src->dtype) < sizeof(uint16_t) ||
        src->n_elems != stored->n)
        return fail_other(t, err);
    if (mt_stored_is_in_order(t))
        add_in_order(v, t, src);
    else
        add_share(v, t, src);
    return 0;
}

/* The scales' offset, which files have only in a text. */
static void add_offset(struct list *v, struct mt_file_part *p, const struct mt_tensor *t, float offset)
{
    struct mt_file_piece *q = &v->piece[v->n_pieces++];
    *q = (struct mt_file_piece){.file = -1, .bytes = sizeof(offset), .at = {mt_packed_piece_at(t, MT_PIECE_OFFSET)}};
    memcpy(&q->offset, &offset, sizeof(offset));
    p->n_pieces++;
}

static int add_packed(struct list *v, const struct mt_tensor *t, struct mt_err *err)
{
    struct mt_packed_piece piece[MT_MAX_PIECES];
    const struct mt_packed_source *src = &v->sources->of[t - v->l->tensors];
    if (src->format != t->packed || src->scale != t->scale || src->wider_scales)
        return fail_other(t, err);
    size_t lanes = MT_MAX(src->rows.step, (size_t)1), lane = src->rows.first % lanes;
    bool joins = lane && is_of_last(v, t, src->rows.first - lane);
    struct mt_file_part *p = joins ? &v->part[v->n - 1] : add_part(v, t, MT_ST_U8);
    int n = mt_packed_pieces(piece, t);
    if (lanes > MT_FILE_LANES || (lane && !joins))
        return fail_other(t, err);
    for (int i = 0; i < n; i++) {
        const struct mt_st_tensor *from = mt_packed_piece_in(src, &piece[i]);
        size_t row = piece[i].bytes / mt_packed_piece_rows(&piece[i]);
        if (!from || row * lanes > MT_SUM_BLOCK)
            return fail_other(t, err);
        struct mt_file_piece *q = joins ? &v->piece[(size_t)(p->piece - v->piece) + (size_t)i]
                                        : add_piece(v, p, from, mt_packed_rows_in(src, &piece[i]).first * row,
                                                    piece[i].bytes);
        v->form[v->n - 1].kind[i] = piece[i].kind;
        q->row = lanes > 1 ? row : 0;
        q->at[lane] = piece[i].at;
    }
    p->n_lanes = (int)lanes;
    v->form[v->n - 1].first = src->rows.first - lane;
    if (joins)
        join_last(v, t);
    v->form[v->n - 1].kind[n] = MT_PIECE_OFFSET;
    if (t->scale == MT_SCALE_NESTED)
        add_offset(v, p, t, src->offset);
    return 0;
}

static int list_parts(struct list *v, const mt_plane_bits *in_files, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < v->l->n_tensors && !rc; i++) {
        const struct mt_tensor *t = &v->l->tensors[i];
        if (in_files[t->unit] >> mt_range_planes(t->kind).hi & 1)
            rc = t->kind == MT_RANGE_PACKED ? add_packed(v, t, err) : add_plain(v, t, err);
    }
    return rc;
}

static size_t most_pieces(const struct mt_layout *l)
{
    size_t n = 0;
    for (size_t i = 0; i < l->n_tensors; i++)
        n += l->tensors[i].kind == MT_RANGE_PACKED ? MT_MAX_PIECES + 1 : 1;
    return n;
}

int mt_weights_open_files(mt_file_weights **out, const struct mt_layout *l, const mt_plane_bits *in_files,
                          const char *dir, enum mt_io_kind io, const struct mt_io_fault *fault, struct mt_err *err)
{
    struct mt_sources sources;
    struct list v = {.l = l, .sources = &sources};
    const struct mt_st_model *st = &sources.st;
    int rc = mt_sources_open(&sources, l, dir, err);
    if (rc) {
        mt_sources_close(&sources);
        return rc;
    }
    v.part = mt_calloc(l->n_tensors, sizeof(*v.part));
    v.piece = mt_calloc(most_pieces(l), sizeof(*v.piece));
    v.form = mt_calloc(l->n_tensors, sizeof(*v.form));
    MT_FREED const char **paths = mt_calloc((size_t)st->n_files, sizeof(*paths));
    rc = v.part && v.piece && v.form && paths ? list_parts(&v, in_files, err)
                                              : mt_fail_nomem(err, dir, l->n_tensors * sizeof(*v.part));
    for (int i = 0; i < st->n_files && paths; i++)
        paths[i] = st->files[i].path;
    if (!rc)
        rc = mt_file_weights_open(out,
                                  &(struct mt_file_weights_params){.n_units = l->n_units,
                                                                   .paths = paths,
                                                                   .n_paths = (size_t)st->n_files,
                                                                   .parts = v.part,
                                                                   .n_parts = v.n,
                                                                   .forms = v.form,
                                                                   .io = io,
                                                                   .fault = fault,
                                                                   .inspect = inspect,
                                                                   .place = place},
                                  err);
    if (rc)
        free(v.form);
    free(v.part);
    free(v.piece);
    mt_sources_close(&sources);
    return rc;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "model/packing.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"

enum { ALIGN = 64, LANDING_ALIGN = 256 };

/* Offsets in the unit's packed plane. */
struct places {
    size_t at[MT_N_PIECES], code_bytes, n_scales, end;
};

static size_t rows_of(const struct mt_tensor *t)
{
    return (size_t)t->shape[0];
}

static size_t cols_of(const struct mt_tensor *t)
{
    return (size_t)t->shape[1];
}

static bool is_int4(const struct mt_tensor *t)
{
    return mt_packed_kind(t->packed) == MT_PACKED_INT4;
}

static size_t take(size_t *at, size_t bytes)
{
    size_t first = *at;
    *at = mt_align_up(first + bytes, 16);
    return first;
}

static struct places places_of(const struct mt_tensor *t)
{
    size_t at = t->aux;
    struct places p = {.at[MT_PIECE_CODES] = t->at,
                       .code_bytes = mt_packed_code_bytes(t->packed, rows_of(t), cols_of(t)),
                       .n_scales = mt_packed_n_scales(t->packed, rows_of(t), cols_of(t))};
    p.at[MT_PIECE_SCALES] = take(&at, p.n_scales * mt_scale_size(t->scale));
    if (t->scale == MT_SCALE_NESTED) {
        p.at[MT_PIECE_NESTED] = take(&at, mt_div_up(p.n_scales, MT_NF4_NESTED) * sizeof(float));
        p.at[MT_PIECE_MAP] = take(&at, 256 * sizeof(float));
        p.at[MT_PIECE_OFFSET] = take(&at, sizeof(float));
    }
    if (mt_packed_factor_name(t->scale))
        p.at[MT_PIECE_FACTOR] = take(&at, sizeof(float));
    if (t->packed == MT_PACKED_NF4)
        p.at[MT_PIECE_VALUES] = take(&at, 16 * sizeof(float));
    if (mt_scale_has_zeros(t->scale))
        p.at[MT_PIECE_ZEROS] = take(&at, mt_packed_n_zeros(t->packed, rows_of(t), cols_of(t)) * sizeof(uint32_t));
    if (t->packed == MT_PACKED_NF4 || is_int4(t))
        p.at[MT_PIECE_NOTE] = take(&at, t->note_bytes);
    p.end = at;
    return p;
}

size_t mt_packed_piece_at(const struct mt_tensor *t, enum mt_piece kind)
{
    return places_of(t).at[kind];
}

size_t mt_packing_lay_out(struct mt_layout *l, struct mt_unit *u)
{
    size_t at = 0;
    for (int aux = 0; aux < 2; aux++)
        for (size_t i = u->first_tensor; i < u->first_tensor + u->n_tensors; i++) {
            struct mt_tensor *t = &l->tensors[i];
            if (t->kind != MT_RANGE_PACKED)
                continue;
            *(aux ? &t->aux : &t->at) = at;
            struct places p = places_of(t);
            at = mt_align_up(aux ? p.end : at + p.code_bytes, ALIGN);
        }
    return at;
}

static struct mt_packed_piece make_piece(const struct mt_tensor *t, enum mt_piece kind, const char *suffix,
                                         enum mt_st_dtype dtype, int n_dims, const size_t *dims)
{
    struct mt_packed_piece p = {.kind = kind, .dtype = dtype, .n_dims = n_dims, .at = mt_packed_piece_at(t, kind)};
    p.bytes = mt_st_dtype_size(dtype);
    for (int i = 0; i < n_dims; i++) {
        p.shape[i] = (int64_t)dims[i];
        p.bytes *= dims[i];
    }
    snprintf(p.name, sizeof(p.name), "%s%s", t->name, suffix);
    return p;
}

static struct mt_packed_piece codes_of(const struct mt_tensor *t, const struct mt_packed_format *f)
{
    bool words = is_int4(t), one_row = t->packed == MT_PACKED_NF4;
    size_t bytes = mt_packed_code_bytes(t->packed, rows_of(t), cols_of(t)), row = bytes / rows_of(t);
    const char *suffix = t->scale == MT_SCALE_E4M3 ? "" : f->codes_name;
    return make_piece(t, MT_PIECE_CODES, suffix, f->bytes ? MT_ST_F8_E4M3 : words ? MT_ST_I32 : MT_ST_U8, 2,
                      one_row ? (size_t[]){bytes, 1} : (size_t[]){rows_of(t), words ? row / sizeof(int32_t) : row});
}

static struct mt_packed_piece scales_of(const struct mt_tensor *t, const struct mt_packed_format *f)
{
    static const enum mt_st_dtype of[] = {[MT_SCALE_F32] = MT_ST_F32, [MT_SCALE_BF16] = MT_ST_BF16,
                                          [MT_SCALE_E8M0] = MT_ST_F8_E8M0, [MT_SCALE_NESTED] = MT_ST_U8,
                                          [MT_SCALE_E4M3] = MT_ST_F8_E4M3, [MT_SCALE_E4M3_OVER] = MT_ST_F8_E4M3,
                                          [MT_SCALE_F16] = MT_ST_F16, [MT_SCALE_F16_ZEROS] = MT_ST_F16,
                                          [MT_SCALE_BF16_ZEROS] = MT_ST_BF16};
    size_t n = mt_packed_n_scales(t->packed, rows_of(t), cols_of(t));
    size_t across = mt_packed_across(t->packed, cols_of(t));
    bool mx = t->packed == MT_PACKED_FP8_1X32 && t->scale == MT_SCALE_E8M0;
    int n_dims = t->packed == MT_PACKED_NF4 ? 1 : t->packed == MT_PACKED_FP8T ? 0 : 2;
    enum mt_st_dtype dtype = t->packed == MT_PACKED_MXFP4 || mx ? MT_ST_U8 : of[t->scale];
    return make_piece(t, MT_PIECE_SCALES, f->scales_name, dtype, n_dims,
                      n_dims == 1 ? (size_t[]){n, 1} : (size_t[]){n / across, across});
}

int mt_packed_pieces(struct mt_packed_piece piece[MT_MAX_PIECES], const struct mt_tensor *t)
{
    const struct mt_packed_format *f = &mt_packed_formats[t->packed];
    const char *factor = mt_packed_factor_name(t->scale);
    int n = 0;
    piece[n++] = codes_of(t, f);
    piece[n++] = scales_of(t, f);
    if (t->scale == MT_SCALE_NESTED) {
        size_t nested = mt_div_up(piece[1].bytes, MT_NF4_NESTED);
        piece[n++] = make_piece(t, MT_PIECE_NESTED, ".nested_absmax", MT_ST_F32, 1, &nested);
        piece[n++] = make_piece(t, MT_PIECE_MAP, ".nested_quant_map", MT_ST_F32, 1, (size_t[]){256});
    }
    if (factor)
        piece[n++] = make_piece(t, MT_PIECE_FACTOR, factor, MT_ST_F32, t->scale == MT_SCALE_E4M3_OVER, (size_t[]){1});
    if (t->packed == MT_PACKED_NF4) {
        piece[n++] = make_piece(t, MT_PIECE_VALUES, ".quant_map", MT_ST_F32, 1, (size_t[]){16});
        piece[n++] = make_piece(t, MT_PIECE_NOTE, ".quant_state.bitsandbytes__nf4", MT_ST_U8, 1,
                                (size_t[]){t->note_bytes});
    }
    if (mt_scale_has_zeros(t->scale)) {
        size_t across = mt_packed_across(t->packed, cols_of(t));
        piece[n++] = make_piece(t, MT_PIECE_ZEROS, "_zero_point", MT_ST_I32, 2,
                                (size_t[]){mt_div_up(rows_of(t), 8), across});
    }
    if (is_int4(t))
        piece[n++] = make_piece(t, MT_PIECE_NOTE, "_shape", t->note_bytes == 2 * sizeof(int32_t) ? MT_ST_I32 : MT_ST_I64,
                                1, (size_t[]){2});
    return n;
}

int mt_packed_stored_pieces(struct mt_packed_piece piece[MT_MAX_PIECES], const struct mt_stored *s,
                            const struct mt_tensor *t)
{
    const struct mt_packed_format *f = &mt_packed_formats[t->packed];
    int n = mt_packed_pieces(piece, t);
    size_t tensors = s->n / t->n, experts = s->fused ? (size_t)s->shape[0] : 1, name = strlen(t->name);
    for (int i = 0; i < n && !s->fused; i++) { /* files may have another name than layouts, of other length */
        struct mt_packed_piece p = piece[i];
        snprintf(piece[i].name, sizeof(piece[i].name), "%s%s", s->name, p.name + name);
    }
    for (int i = 0; i < n && s->fused; i++) {
        struct mt_packed_piece *p = &piece[i];
        bool mx = t->packed == MT_PACKED_MXFP4; /* as in the release of gpt-oss */
        size_t rows = mt_packed_piece_rows(p), across = p->bytes / rows / mt_st_dtype_size(p->dtype);
        snprintf(p->name, sizeof(p->name), "%s%s", s->name, mx ? i ? "_scales" : "_blocks" : i ? f->scales_name : "");
        p->n_dims = mx && !i ? 4 : 3;
        p->shape[3] = MT_MXFP4_BLOCK / 2;
        p->shape[2] = mx ? t->shape[1] / MT_MXFP4_BLOCK : (int64_t)across;
        p->shape[1] = (int64_t)(rows * (tensors / experts));
        p->shape[0] = (int64_t)experts;
        p->bytes *= tensors;
        p->at = 0;
    }
    return n;
}

size_t mt_packed_piece_rows(const struct mt_packed_piece *p)
{
    return p->n_dims == 2 ? (size_t)p->shape[0] : 1;
}

struct mt_packed_rows mt_packing_rows(const struct mt_layout *l, const struct mt_tensor *t,
                                      const struct mt_packed_piece *piece)
{
    const struct mt_tensor_place *p = &t->place;
    const struct mt_stored *s = &l->stored[p->stored];
    if (!s->fused)
        return (struct mt_packed_rows){0, 0};
    size_t cols = cols_of(t), share = s->n / (size_t)s->shape[0], in = p->first % share;
    bool transposed = p->col_step != 1;
    struct mt_packed_rows at = {.first = p->first / share * (share / cols) + (transposed ? in : in / cols),
                                .step = transposed ? p->row_step : p->row_step / cols};
    size_t rows = piece ? mt_packed_piece_rows(piece) : rows_of(t);
    return rows == rows_of(t) ? at : (struct mt_packed_rows){.first = at.first / rows_of(t) * rows, .step = 1};
}

bool mt_packing_lies_alone(const struct mt_layout *l, const struct mt_tensor *t)
{
    const struct mt_stored *s = &l->stored[t->place.stored];
    return !s->fused && !t->place.paired_rows && s->n == t->n;
}

/* Which part of a layer a matrix belongs to, by its name. */
static unsigned part_of(const char *name)
{
    return strstr(name, ".experts.")       ? MT_PLAIN_EXPERTS
           : strstr(name, ".shared_expert") ? MT_PLAIN_SHARED
           : strstr(name, "attn.")          ? MT_PLAIN_ATTENTION
                                            : MT_PLAIN_MLP;
}

bool mt_packing_is_router(const char *name)
{
    static const char *const routers[] = {".gate.weight", ".gate.wg.weight", "shared_expert_gate.weight", "router.weight"};
    for (size_t i = 0; i < MT_ARRAY_LEN(routers); i++)
        if (mt_ends_with(name, routers[i]))
            return true;
    return false;
}

bool mt_packing_takes(const struct mt_layout *l, const struct mt_tensor *t, enum mt_packed f)
{
    bool fused = l->stored[t->place.stored].fused;
    if (l->units[t->unit].kind != MT_UNIT_LAYER || t->n_dims != 2 || t->adapter)
        return false;
    bool fused_fp8 = fused && mt_packed_formats[f].bytes && f == l->cfg.packed && t->place.col_step == 1;
    if (f == MT_PACKED_MXFP4 ? fused != !!l->cfg.family->fused : fused && !fused_fp8)
        return false;
    if (!fused && (!mt_packing_lies_alone(l, t) || l->stored[t->place.stored].n_dims == 3))
        return false;
    if (mt_packing_is_router(t->name))
        return false;
    if (f == l->cfg.packed && l->cfg.plain_parts & part_of(t->name))
        return false;
    const struct mt_packed_format *p = &mt_packed_formats[f];
    return !p->block || p->by_rows || p->may_end || t->shape[1] % p->block == 0;
}

bool mt_packing_keeps(const struct mt_layout *l, const struct mt_tensor *t)
{
    size_t u = t->unit;
    bool trained = false;
    if (!l->stored[t->place.stored].fused)
        return true;
    while (u && l->units[u - 1].layer == l->units[t->unit].layer)
        u--;
    for (; u < l->n_units && l->units[u].layer == l->units[t->unit].layer; u++)
        for (size_t i = l->units[u].first_tensor; i < l->units[u].first_tensor + l->units[u].n_tensors; i++)
            trained |= l->tensors[i].n_dims == 2 && l->tensors[i].trainable && !l->tensors[i].adapter &&
                       l->stored[l->tensors[i].place.stored].fused;
    return !trained;
}

/* --- on the device --------------------------------------------------------------------------------- */

/* Is a part of it whole rows, of which eight have their zero points in a word? */
static bool is_by_rows(const struct mt_tensor *t)
{
    return mt_packed_formats[t->packed].by_rows || mt_scale_has_zeros(t->scale);
}

/* A packed tensor is decoded in multiples of so many elements. */
static size_t granule(const struct mt_tensor *t)
{
    return is_by_rows(t) ? MT_FP8_BLOCK * cols_of(t) : (size_t)MT_NF4_BLOCK * MT_NF4_NESTED;
}

size_t mt_unit_plain_end(const struct mt_layout *l, size_t unit)
{
    const struct mt_unit *u = &l->units[unit];
    size_t end = 0;
    for (size_t i = u->first_range; i < u->first_range + u->n_ranges; i++)
        if (l->ranges[i].kind != MT_RANGE_PACKED)
            end = l->ranges[i].first + l->ranges[i].n;
    return end;
}

void mt_layout_keep_codes(struct mt_layout *l)
{
    for (size_t u = 0; u < l->n_units && !l->adapter_default.merge; u++)
        l->units[u].codes_stay |= l->units[u].n_in_planes[MT_RANGE_PACKED] && !l->units[u].per_step;
}

bool mt_unit_keeps_codes(const struct mt_layout *l, size_t unit, enum mt_dtype dtype)
{
    return dtype == MT_BF16 && l->units[unit].codes_stay;
}

/* r NULL: the end of all ranges. */
size_t mt_unit_range_at(const struct mt_layout *l, size_t unit, const struct mt_range *r, enum mt_dtype dtype)
{
    const struct mt_unit *u = &l->units[unit];
    size_t at = 0;
    if (r && !mt_unit_keeps_codes(l, unit, dtype))
        return r->first;
    for (size_t i = u->first_range; i < u->first_range + u->n_ranges && &l->ranges[i] != r; i++)
        at += l->ranges[i].kind == MT_RANGE_PACKED ? 0 : mt_align_up(l->ranges[i].n, MT_PARAM_ALIGN);
    return at;
}

/*
 * The packed plane must begin after the unpacked ranges, and so late that each tensor's last piece ends before its own
 * codes and before the scales, which follow all codes: outputs grow faster than codes, so earlier pieces have more
 * space.
 */
size_t mt_unit_landing(const struct mt_layout *l, size_t unit, enum mt_dtype dtype)
{
    const struct mt_unit *u = &l->units[unit];
    size_t size = mt_dtype_size(dtype), plane = u->n_in_planes[MT_RANGE_PACKED], all = u->n_elems * size;
    size_t landing = mt_unit_plain_end(l, unit);
    landing = (dtype == MT_F32 ? mt_align_up(landing, MT_JOIN_BLOCK) : landing) * size;
    if (!plane)
        return all;
    if (mt_unit_keeps_codes(l, unit, dtype))
        return mt_align_up(mt_unit_range_at(l, unit, NULL, dtype) * size, LANDING_ALIGN);
    for (size_t i = u->first_tensor; i < u->first_tensor + u->n_tensors; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        if (t->kind != MT_RANGE_PACKED)
            continue;
        size_t last = (t->n - 1) / granule(t) * granule(t), end = (t->first + t->n) * size;
        size_t codes = t->at + mt_packed_codes_before(t->packed, last);
        landing = MT_MAX(landing, end - MT_MIN(end, MT_MIN(codes, t->aux)));
        if (last) { /* the piece before it, which is a whole granule */
            size_t before = last - granule(t), before_end = (t->first + last) * size;
            codes = t->at + mt_packed_codes_before(t->packed, before);
            landing = MT_MAX(landing, before_end - MT_MIN(before_end, codes));
        }
    }
    return mt_align_up(MT_MAX(landing, all - MT_MIN(all, plane)), LANDING_ALIGN);
}

const struct mt_tensor *mt_unit_f32_tensor(const struct mt_layout *l, size_t unit, enum mt_dtype dtype)
{
    size_t t = l->units[unit].f32_tensor;
    return dtype == MT_F32 || t == MT_NO_TENSOR ? NULL : &l->tensors[t];
}

size_t mt_unit_f32_at(const struct mt_layout *l, size_t unit, enum mt_dtype dtype)
{
    return mt_align_up(mt_unit_landing(l, unit, dtype) + l->units[unit].n_in_planes[MT_RANGE_PACKED], LANDING_ALIGN);
}

static size_t norms_at(const struct mt_layout *l, size_t unit, enum mt_dtype dtype)
{
    const struct mt_tensor *t = mt_unit_f32_tensor(l, unit, dtype);
    if (t)
        return mt_unit_f32_at(l, unit, dtype) + mt_align_up(t->n, MT_JOIN_BLOCK) * sizeof(float);
    return mt_unit_landing(l, unit, dtype) + l->units[unit].n_in_planes[MT_RANGE_PACKED];
}

size_t mt_unit_slot_bytes(const struct mt_layout *l, size_t unit, enum mt_dtype dtype)
{
    size_t n = l->units[unit].n_norms, at = norms_at(l, unit, dtype);
    return n ? mt_align_up(at, LANDING_ALIGN) + 2 * n * sizeof(float) : at;
}

float *mt_unit_norms(const struct mt_layout *l, size_t unit, enum mt_dtype dtype, const void *slot)
{
    return (float *)(void *)((char *)(uintptr_t)slot + mt_align_up(norms_at(l, unit, dtype), LANDING_ALIGN));
}

/* What a load of the unit moves in bf16 compute, F32 routers aside. */
static size_t load_bytes(const struct mt_layout *l, const struct mt_unit *u)
{
    size_t bytes = u->n_in_planes[MT_RANGE_PACKED];
    for (size_t i = u->first_range; i < u->first_range + u->n_ranges; i++)
        bytes += l->ranges[i].kind == MT_RANGE_PACKED ? 0 : l->ranges[i].n * mt_dtype_size(MT_BF16);
    return bytes;
}

size_t mt_packing_expert_group(const struct mt_layout *l)
{
    size_t one = 1;
    bool packed = false;
    for (const struct mt_unit *u = l->units; u < l->units + l->n_units; u++) {
        int n = u->n_parts ? l->parts[u->first_part].n_experts : 0;
        if (!n)
            continue;
        packed |= u->n_in_planes[MT_RANGE_PACKED] > 0;
        one = MT_MAX(one, mt_div_up(load_bytes(l, u), (size_t)n));
    }
    size_t group = MT_MAX((size_t)MT_EXPERT_GROUP_BYTES / one, (size_t)1);
    return packed ? MT_MIN(group, (size_t)l->cfg.moe.n_experts) : l->cut.expert_group;
}

size_t mt_unit_adapter_bytes(const struct mt_unit *u, enum mt_dtype dtype)
{
    return mt_align_up(u->n_in_planes[MT_RANGE_TRAINED], MT_JOIN_BLOCK) * mt_dtype_size(dtype);
}

/* Number of elements from `first` on that fit before their own codes, in whole granules. */
static size_t piece_at(const struct mt_tensor *t, size_t first, size_t size, size_t landing)
{
    size_t codes = landing + t->at + mt_packed_codes_before(t->packed, first), out = (t->first + first) * size;
    size_t n = codes > out ? (codes - out) / size / granule(t) * granule(t) : 0;
    size_t last = (t->n - 1) / granule(t) * granule(t);
    if (first >= last) /* the tensor's end, which is a granule or less */
        return t->n - first;
    return MT_MIN(n, last - first);
}

/* Elements [first, first + n); plane: the unit's packed one, out: where the tensor begins. */
static struct mt_decode decode_of(const struct mt_tensor *t, enum mt_dtype dtype, const char *plane, char *out,
                                  size_t first, size_t n)
{
    struct places p = places_of(t);
    bool by_rows = is_by_rows(t);
    size_t cols = cols_of(t), block = mt_packed_scale_at(t->packed, cols, first); /* whose scale is the first */
    struct mt_decode a = {
        .rows = by_rows ? n / cols : 1,
        .cols = by_rows ? cols : n,
        .dtype = dtype,
        .format = t->packed,
        .scale = t->scale,
        .codes = (const uint8_t *)plane + p.at[MT_PIECE_CODES] + mt_packed_codes_before(t->packed, first),
        .scales = plane + p.at[MT_PIECE_SCALES] + block * mt_scale_size(t->scale),
        .out = out + first * mt_dtype_size(dtype),
    };
    if (mt_scale_has_zeros(t->scale))
        a.zeros = (const uint32_t *)(plane + p.at[MT_PIECE_ZEROS]) +
                  mt_packed_n_zeros(t->packed, first / cols, cols);
    if (mt_packed_factor_name(t->scale))
        a.factor = (const float *)(plane + p.at[MT_PIECE_FACTOR]);
    if (t->scale == MT_SCALE_NESTED) {
        a.nested_scales = (const float *)(plane + p.at[MT_PIECE_NESTED]) + block / MT_NF4_NESTED;
        a.nested_map = (const float *)(plane + p.at[MT_PIECE_MAP]);
        a.nested_offset = (const float *)(plane + p.at[MT_PIECE_OFFSET]);
    }
    return a;
}

static bool is_merged(const struct mt_tensor *t)
{
    return !t->adapter && t->param->adapter && t->param->adapter->merged;
}

/* The adapter's target that has rows [row, ...) of the layer's matrix; NULL: none. */
static const struct mt_adapter_target *target_at(const struct mt_adapter *ad, size_t row)
{
    for (size_t i = 0; i < ad->n_targets; i++)
        if (row >= ad->target[i].col && row < ad->target[i].col + ad->target[i].out)
            return &ad->target[i];
    return NULL;
}

bool mt_adapter_of(const struct mt_tensor *t, struct mt_merge_place *out)
{
    const struct mt_adapter *ad = t->adapter ? NULL : t->param->adapter;
    size_t row = ad ? (t->first - t->param->at) / ad->in : 0;
    const struct mt_adapter_target *target = ad ? target_at(ad, row) : NULL;
    if (!target)
        return false;
    row -= target->col;
    *out = (struct mt_merge_place){.a = ad->a.at + target->row * ad->in, .b = target->b.at + row * target->rank,
                                   .magnitude = target->magnitude.n ? target->magnitude.at + row : SIZE_MAX,
                                   .norm = target->norm + row, .rank = target->rank, .scale = target->scale};
    return true;
}

bool mt_merge_of(const struct mt_layout *l, const struct mt_tensor *t, struct mt_merge_place *out)
{
    if (!is_merged(t) || !mt_adapter_of(t, out))
        return false;
    bool packs = l->adapter_default.merge != MT_MERGE_BF16 && t->kind == MT_RANGE_PACKED;
    out->format = packs ? t->packed : MT_PACKED_NONE;
    return true;
}

/* Merges an adapter into the tensor's weights, which lie decoded in the slot. */
static int merge(const struct mt_layout *l, const struct mt_tensor *t, enum mt_dtype dtype, char *slot, mt_device *dev,
                 struct mt_err *err)
{
    struct mt_merge_place p;
    size_t size = mt_dtype_size(dtype);
    char *out = slot + t->first * size;
    if (!mt_merge_of(l, t, &p))
        return 0;
    struct mt_decode of = {.dtype = dtype, .out = out};
    if (p.format)
        of = decode_of(t, dtype, slot + mt_unit_landing(l, t->unit, dtype), out, 0, t->n);
    of.rows = rows_of(t);
    of.cols = cols_of(t);
    struct mt_merge_adapter a = {.of = of,
                                 .rescale = p.format && l->adapter_default.merge_scale == MT_SCALES_RECOMPUTED,
                                 .r = p.rank,
                                 .s = p.scale,
                                 .a = slot + p.a * size,
                                 .b = slot + p.b * size};
    if (p.magnitude != SIZE_MAX) {
        a.magnitude = slot + p.magnitude * size;
        a.scale = mt_unit_norms(l, t->unit, dtype, slot) + p.norm;
        a.inverse = a.scale + l->units[t->unit].n_norms;
    }
    return mt_op_merge_adapter(dev, &a, err);
}

bool mt_unit_is_decoded(const struct mt_layout *l, size_t unit, enum mt_dtype dtype)
{
    const struct mt_unit *u = &l->units[unit];
    bool merges = false;
    for (size_t i = u->first_tensor; i < u->first_tensor + u->n_tensors && l->adapter_default.merge; i++)
        merges |= is_merged(&l->tensors[i]);
    return merges || (u->n_in_planes[MT_RANGE_PACKED] && !mt_unit_keeps_codes(l, unit, dtype));
}

int mt_unit_decode(const struct mt_layout *l, size_t unit, enum mt_dtype dtype, char *slot, mt_device *dev,
                   struct mt_err *err)
{
    const struct mt_unit *u = &l->units[unit];
    size_t landing = mt_unit_landing(l, unit, dtype);
    int rc = 0;
    if (!mt_unit_is_decoded(l, unit, dtype))
        return 0;
    for (const struct mt_tensor *t = &l->tensors[u->first_tensor], *end = t + u->n_tensors; t < end && !rc; t++) {
        for (size_t at = 0; t->kind == MT_RANGE_PACKED && at < t->n && !rc;) {
            size_t n = piece_at(t, at, mt_dtype_size(dtype), landing);
            struct mt_decode a = decode_of(t, dtype, slot + landing, slot + t->first * mt_dtype_size(dtype), at, n);
            if (!n)
                return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "tensor \"%s\" would be decoded over its own codes", t->name);
            rc = mt_op_decode(dev, &a, err);
            at += n;
        }
        rc = rc ? rc : merge(l, t, dtype, slot, dev, err); /* before the next tensor lies over its scales */
    }
    return rc;
}

size_t mt_expert_elems(const struct mt_layout *l)
{
    const struct mt_param *p = l->experts[0];
    size_t end = 0;
    for (int i = 0; i < MT_EXPERT_MAX_PARAMS; i++)
        end = MT_MAX(end, p[i].at + p[i].n);
    return mt_align_up(end - p[0].at, MT_PARAM_ALIGN);
}

size_t mt_unit_decoded_bytes(const struct mt_layout *l, size_t unit, enum mt_dtype dtype)
{
    const struct mt_unit *u = &l->units[unit];
    return mt_unit_keeps_codes(l, unit, dtype) && !u->per_step ? u->n_elems * mt_dtype_size(dtype) : 0;
}

int mt_unit_decode_to(const struct mt_layout *l, const struct mt_decoding *d, mt_device *dev, struct mt_err *err)
{
    const struct mt_unit *u = &l->units[d->unit];
    const char *plane = d->slot + mt_unit_landing(l, d->unit, MT_BF16);
    size_t size = mt_dtype_size(MT_BF16);
    int rc = 0;
    for (const struct mt_range *r = &l->ranges[u->first_range], *end = r + u->n_ranges; r < end && !rc; r++) {
        size_t bytes = r->n * size;
        const char *at = d->slot + mt_unit_range_at(l, d->unit, r, MT_BF16) * size;
        struct mt_copy c = {d->out + r->first * size, bytes, at, bytes, bytes, 1};
        rc = r->kind == MT_RANGE_PACKED ? 0 : mt_device_copy(dev, MT_STREAM_COMPUTE, &c, err);
    }
    for (size_t i = u->first_tensor; i < u->first_tensor + u->n_tensors && !rc; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        if (t->kind != MT_RANGE_PACKED || d->plain)
            continue;
        struct mt_decode a = decode_of(t, MT_BF16, plane, d->out + t->first * size, 0, t->n);
        rc = mt_op_decode(dev, &a, err);
    }
    return rc;
}

bool mt_unit_codes(const struct mt_layout *l, size_t unit, size_t first, const char *slot, struct mt_decode *out)
{
    const struct mt_unit *u = &l->units[unit];
    const struct mt_tensor *t = &l->tensors[u->first_tensor], *end = t + u->n_tensors;
    while (t < end && (t->first != first || t->adapter))
        t++;
    if (t == end || t->kind != MT_RANGE_PACKED)
        return false;
    *out = decode_of(t, MT_BF16, slot + mt_unit_landing(l, unit, MT_BF16), NULL, 0, t->n);
    out->rows = rows_of(t);
    out->cols = cols_of(t);
    return true;
}

bool mt_layout_codes_multiply(const struct mt_layout *l)
{
    for (const struct mt_tensor *t = l->tensors; t < l->tensors + l->n_tensors; t++)
        if (t->kind == MT_RANGE_PACKED && cols_of(t) % 64)
            return false;
    for (size_t i = 0; i < l->n_adapters; i++)
        if (l->adapters[i].dora)
            return false;
    return true;
}

/* The place of an unpacked tensor in the buffer. */
static const char *plain_at(const struct mt_layout *l, const struct mt_tensor *t, const char *slot)
{
    const struct mt_range *r = &l->ranges[l->units[t->unit].first_range];
    while (t->first < r->first || t->first >= r->first + r->n)
        r++;
    return slot + (mt_unit_range_at(l, t->unit, r, MT_BF16) + (t->first - r->first)) * mt_dtype_size(MT_BF16);
}

int mt_expert_decode(const struct mt_layout *l, const struct mt_decoding *d, int expert, mt_device *dev,
                     struct mt_err *err)
{
    const struct mt_unit *u = &l->units[d->unit];
    const char *plane = d->slot + mt_unit_landing(l, d->unit, MT_BF16);
    size_t base = SIZE_MAX, size = mt_dtype_size(MT_BF16);
    int rc = 0;
    for (const struct mt_tensor *t = &l->tensors[u->first_tensor], *end = t + u->n_tensors; t < end && !rc; t++) {
        if (t->expert != expert)
            continue;
        base = base == SIZE_MAX ? t->first : base;
        char *to = d->out + (t->first - base) * size;
        if (t->kind == MT_RANGE_PACKED) {
            struct mt_decode a = decode_of(t, MT_BF16, plane, to, 0, t->n);
            rc = d->plain ? 0 : mt_op_decode(dev, &a, err);
        } else {
            struct mt_copy c = {to, t->n * size, plain_at(l, t, d->slot), t->n * size, t->n * size, 1};
            rc = mt_device_copy(dev, MT_STREAM_COMPUTE, &c, err);
        }
    }
    return rc;
}

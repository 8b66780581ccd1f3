/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/packed_files.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "model/stored.h"
#include "weights/packer.h"

enum { NOTE_MAX = 4096, PIECE = 1 << 20 };

static const char *const suffixes[] = {
    "weight_scale_inv",     "weight_blocks",    "weight_scales",        "weight_packed",
    "weight_scale",         "weight_shape",     "weight_scale_2",       "weight_global_scale",
    "weight.absmax",        "weight.nested_absmax",                     "weight.nested_quant_map",
    "weight.quant_map",     "weight.quant_state.bitsandbytes__nf4",
    /* by which programs that compute in FP8 or FP4 divide what goes into a layer, or keys and values; not used here */
    ".activation_scale", ".input_scale", ".input_global_scale", ".k_scale", ".v_scale",
};

/* The pieces that hold all experts of a layer: of gpt-oss, and FP8. */
static bool is_of_experts(const char *name)
{
    static const char *const names[] = {"gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks",
                                        "down_proj_scales",    "gate_up_proj_scale_inv", "down_proj_scale_inv",
                                        "gate_up_proj_scale",  "down_proj_scale", "gate_up_proj_activation_scale",
                                        "down_proj_activation_scale"};
    const char *experts = strstr(name, ".experts.");
    for (size_t i = 0; experts && i < MT_ARRAY_LEN(names); i++)
        if (!strcmp(experts + strlen(".experts."), names[i]))
            return true;
    return false;
}

bool mt_packed_is_piece(const char *name)
{
    for (size_t i = 0; i < MT_ARRAY_LEN(suffixes); i++)
        if (mt_ends_with(name, suffixes[i]))
            return true;
    return is_of_experts(name);
}

static const struct mt_st_tensor *beside(const struct mt_st_model *st, const char *name, const char *suffix)
{
    char other[320];
    snprintf(other, sizeof(other), "%.250s%s", name, suffix);
    return mt_st_find(st, other);
}

static int bad(struct mt_err *err, const struct mt_st_model *st, const struct mt_st_tensor *t, const char *why)
{
    return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: tensor \"%s\" %s", st->files[t->file].path, t->name, why);
}

static bool is_like(const struct mt_st_tensor *t, enum mt_st_dtype dtype, size_t n)
{
    return t && t->dtype == dtype && t->n_elems == n;
}

/* bitsandbytes' quant_state, a JSON text: block sizes, shape, the nested scales' offset. */
int mt_packed_read_offset(const struct mt_st_model *st, const struct mt_packed_source *s, const struct mt_tensor *t,
                          float *offset, struct mt_err *err)
{
    char text[NOTE_MAX + 1];
    MT_JSON_FREED cJSON *o = NULL;
    int rc = mt_st_read_raw(st, s->note, 0, s->note->n_bytes, text, err);
    rc = rc ?: mt_json_parse(&o, text, s->note->n_bytes, s->note->name, MT_ERR_INPUT, err);
    if (rc)
        return rc;
    const cJSON *shape = mt_json_get(o, "shape"), *type = mt_json_get(o, "quant_type");
    bool same = cJSON_IsArray(shape) && cJSON_GetArraySize(shape) == 2, nested = s->scale == MT_SCALE_NESTED;
    for (int i = 0; i < 2 && same; i++)
        same = cJSON_GetArrayItem(shape, i)->valuedouble == (double)t->shape[i];
    if (!cJSON_IsString(type) || strcmp(type->valuestring, "nf4"))
        rc = bad(err, st, s->note, "is not for NF4");
    else if (!same)
        rc = bad(err, st, s->note, "has another shape than config.json asks for");
    else if (mt_json_number(o, "blocksize", NAN) != MT_NF4_BLOCK || (nested && mt_json_number(o, "nested_blocksize", NAN) != MT_NF4_NESTED))
        rc = bad(err, st, s->note, "must have blocks of 64 weights, and of 256 scales if these are packed, too");
    else if (nested && !isfinite(mt_json_number(o, "nested_offset", NAN)))
        rc = bad(err, st, s->note, "has no nested_offset");
    *offset = nested && !rc ? (float)mt_json_number(o, "nested_offset", NAN) : 0;
    return rc;
}

static int find_nf4(struct mt_packed_source *s, const struct mt_st_model *st, const struct mt_tensor *t,
                    struct mt_err *err)
{
    const char *name = s->codes->name;
    size_t scales = mt_packed_n_scales(MT_PACKED_NF4, (size_t)t->shape[0], (size_t)t->shape[1]);
    float have[16], offset;
    s->values = beside(st, name, ".quant_map");
    s->note = beside(st, name, ".quant_state.bitsandbytes__nf4");
    s->scales = beside(st, name, ".absmax");
    s->nested_scales = beside(st, name, ".nested_absmax");
    s->nested_map = beside(st, name, ".nested_quant_map");
    bool nested = s->nested_scales || s->nested_map;
    s->scale = nested ? MT_SCALE_NESTED : MT_SCALE_F32;
    if (!s->note || !s->scales)
        return bad(err, st, s->codes, "is packed in an unsupported format (supported: bitsandbytes' NF4 in uint8)");
    if (s->note->dtype != MT_ST_U8 || s->note->n_bytes > NOTE_MAX)
        return bad(err, st, s->note, "is not a quant_state of bitsandbytes");
    if (s->codes->n_elems != mt_packed_code_bytes(MT_PACKED_NF4, (size_t)t->shape[0], (size_t)t->shape[1]))
        return bad(err, st, s->codes, "has another size than config.json asks for");
    if (!is_like(s->scales, nested ? MT_ST_U8 : MT_ST_F32, scales))
        return bad(err, st, s->scales, "does not have a scale for each 64 weights");
    if (nested && (!is_like(s->nested_scales, MT_ST_F32, mt_div_up(scales, MT_NF4_NESTED)) ||
                      !is_like(s->nested_map, MT_ST_F32, 256)))
        return bad(err, st, s->codes, "has nested scales of the wrong size");
    if (!is_like(s->values, MT_ST_F32, 16))
        return bad(err, st, s->codes, "has no quant_map of 16 values");
    int rc = mt_st_read_f32(st, s->values, 0, 16, have, err);
    bool same = true;
    for (int i = 0; i < 16; i++)
        same &= mt_f32_bits(have[i]) == mt_f32_bits(mt_nf4_values[i]);
    if (!rc && !same)
        rc = bad(err, st, s->values, "holds other values than NF4's");
    return rc ? rc : mt_packed_read_offset(st, s, t, &offset, err);
}

/* A matrix in FP8, which may be one of the experts' in a tensor: [experts, parts * rows, cols]. */
struct fp8 {
    size_t experts, parts, rows, cols;
    size_t down, across; /* scales of each of the experts */
};

static bool is_shaped(const struct mt_st_tensor *t, const struct fp8 *m, bool fused)
{
    const int64_t shape[] = {(int64_t)m->experts, (int64_t)(m->parts * m->rows), (int64_t)m->cols};
    return t->n_dims == 2 + fused && !memcmp(t->shape, shape + !fused, sizeof(shape[0]) * (size_t)t->n_dims);
}

/* How many scales a matrix has, from the shape of their tensor: [down, across], [down] or none, after [experts] where
 * it holds those of all; ModelOpt writes [down, 1, across, 1]. down 0: another shape. */
static void read_grid(struct fp8 *m, const struct mt_st_tensor *scales, bool fused)
{
    const int64_t *shape = scales->shape + fused;
    int n = scales->n_dims - fused;
    bool blocks = n == 4 && shape[1] == 1 && shape[3] == 1;
    m->down = n == 1 || n == 2 || blocks ? (size_t)shape[0] : (size_t)(n == 0);
    m->across = n == 2 ? (size_t)shape[1] : blocks ? (size_t)shape[2] : 1;
    if (fused && (n < 0 || scales->shape[0] != (int64_t)m->experts))
        m->down = 0;
}

/* The kind that has such scales: `said`, if it can be. Sets where they lie; a scale may be for all parts. */
static void match_grid(struct mt_packed_source *s, struct fp8 *m, enum mt_packed said)
{
    bool for_all = m->parts > 1 && m->down == 1;
    size_t down = for_all ? 1 : m->down / m->parts;
    enum mt_packed first = s->scales->n_dims < 2 ? MT_PACKED_FP8T : said;
    bool whole = m->down && (for_all || m->down % m->parts == 0);
    s->format = whole ? mt_packed_fp8_with(first, m->rows, m->cols, down, m->across) : MT_PACKED_NONE;
    size_t block = mt_packed_formats[s->format].rows;
    if (s->rows.step > 1 || (m->parts > 1 && down > 1 && m->rows % block)) /* a block has rows of two matrices */
        s->format = MT_PACKED_NONE;
    s->scale_rows = (struct mt_packed_rows){s->rows.first / m->rows * m->down / m->parts, s->rows.step};
}

/* l NULL: the tensor is of no layout. */
static int find_fp8(struct mt_packed_source *s, const struct mt_st_model *st, const struct mt_layout *l,
                    const struct mt_tensor *t, struct mt_err *err)
{
    const struct mt_stored *stored = l ? &l->stored[t->place.stored] : NULL;
    bool fused = stored && stored->fused;
    struct fp8 m = {.experts = 1, .parts = 1, .rows = (size_t)t->shape[0], .cols = (size_t)t->shape[1]};
    s->scales = beside(st, s->codes->name, "_scale_inv");
    if (!s->scales)
        s->scales = beside(st, s->codes->name, "_scale");
    if (!s->scales)
        return bad(err, st, s->codes, "is FP8 without a weight_scale_inv or weight_scale: only blocks, a scale for "
                   "each row and one for the tensor are supported");
    if (fused) {
        m.experts = (size_t)stored->shape[0];
        m.parts = stored->n / m.experts / t->n;
        s->rows = mt_packing_rows(l, t, NULL);
    }
    if (!is_shaped(s->codes, &m, fused))
        return bad(err, st, s->codes, "has another shape than config.json asks for");
    enum mt_st_dtype dtype = s->scales->dtype;
    bool bytes = dtype == MT_ST_F8_E8M0 || dtype == MT_ST_U8;
    s->wider_scales = dtype == MT_ST_F16;
    s->scale = dtype == MT_ST_BF16 ? MT_SCALE_BF16 : bytes ? MT_SCALE_E8M0 : MT_SCALE_F32;
    read_grid(&m, s->scales, fused);
    match_grid(s, &m, l ? l->cfg.packed : MT_PACKED_NONE);
    bool known = dtype == MT_ST_F32 || s->wider_scales || s->scale != MT_SCALE_F32;
    return known && s->format
               ? 0 : bad(err, st, s->scales, "is not an F32, BF16, F16 or F8_E8M0 scale for each block of 128x128, "
                         "64x64, 32x32, 1x128, 1x64 or 1x32, for each row, or for the matrix, experts' two matrices apart");
}

/* Is it [rows, cols], as I32 or I64? */
static int check_noted_shape(const struct mt_st_model *st, const struct mt_st_tensor *note, const struct mt_tensor *t,
                             struct mt_err *err)
{
    union {
        int32_t i32[2];
        int64_t i64[2];
    } have = {.i64 = {0, 0}};
    bool narrow = note && note->dtype == MT_ST_I32;
    int rc = 0;
    if (note && note->n_elems == 2 && (narrow || note->dtype == MT_ST_I64))
        rc = mt_st_read_raw(st, note, 0, note->n_bytes, &have, err);
    bool same = narrow ? have.i32[0] == t->shape[0] && have.i32[1] == t->shape[1]
                       : have.i64[0] == t->shape[0] && have.i64[1] == t->shape[1];
    return rc || same ? rc : mt_fail(err, MT_ERR_INPUT, -EINVAL, "tensor \"%s\": its weight_shape is missing, or is not the "
                                     "[%lld, %lld] that config.json asks for", t->name, (long long)t->shape[0],
                                     (long long)t->shape[1]);
}

/* compressed-tensors' pack-quantized: int4 in groups of 32, symmetric. */
static int find_int4(struct mt_packed_source *s, const struct mt_st_model *st, const struct mt_tensor *t,
                     const char *name, struct mt_err *err)
{
    s->scales = beside(st, name, "_scale");
    s->note = beside(st, name, "_shape");
    if (s->codes->dtype != MT_ST_I32 || t->n_dims != 2 || t->shape[1] % MT_INT4_BLOCK || s->codes->n_dims != 2 ||
        s->codes->shape[0] != t->shape[0] || s->codes->shape[1] * 8 != t->shape[1])
        return bad(err, st, s->codes, "has another shape than config.json asks for, or another number of bits than 4");
    if (!is_like(s->scales, MT_ST_BF16, t->n / MT_INT4_BLOCK) || s->scales->shape[0] != t->shape[0])
        return bad(err, st, s->codes, "does not have a BF16 weight_scale for each 32 weights of a row");
    if (beside(st, name, "_zero_point") || beside(st, name, "_g_idx"))
        return bad(err, st, s->codes, "is not symmetric or not in order (weight_zero_point, weight_g_idx)");
    return check_noted_shape(st, s->note, t, err);
}

/* ModelOpt's, or compressed-tensors' nvfp4-pack-quantized, whose names go on from `name`. */
static int find_nvfp4(struct mt_packed_source *s, const struct mt_st_model *st, const struct mt_tensor *t,
                      const char *name, struct mt_err *err)
{
    float factor;
    bool over = s->scale == MT_SCALE_E4M3_OVER;
    s->format = MT_PACKED_NVFP4;
    s->scales = beside(st, name, "_scale");
    s->factor = beside(st, name, mt_packed_factor_name(s->scale));
    if (t->n_dims != 2 || t->shape[1] % MT_NVFP4_BLOCK || s->codes->n_dims != 2 || s->codes->shape[0] != t->shape[0] ||
        s->codes->shape[1] * 2 != t->shape[1])
        return bad(err, st, s->codes, "has another shape than config.json asks for");
    if (!is_like(s->scales, MT_ST_F8_E4M3, t->n / MT_NVFP4_BLOCK) || s->scales->shape[0] != t->shape[0])
        return bad(err, st, s->codes, "does not have an F8_E4M3 weight_scale for each 16 weights of a row");
    if (!is_like(s->factor, MT_ST_F32, 1))
        return bad(err, st, s->codes, over ? "has no weight_global_scale of one F32" : "has no weight_scale_2 of one F32");
    int rc = mt_st_read_f32(st, s->factor, 0, 1, &factor, err);
    return rc || (factor > 0 && isfinite(over ? 448 * 6 / factor : 448 * 6 * factor))
               ? rc : bad(err, st, s->factor, "is not a positive number that leaves weights finite");
}

static int find_mxfp4(struct mt_packed_source *s, const struct mt_st_model *st, const struct mt_tensor *t,
                      struct mt_err *err)
{
    if (s->codes->dtype != MT_ST_U8 || t->n_dims != 2 || s->codes->n_elems * 2 != t->n || s->codes->n_dims < 2 ||
        s->codes->shape[0] != t->shape[0] || t->shape[1] % MT_MXFP4_BLOCK)
        return bad(err, st, s->codes, "has another shape than config.json asks for");
    if (!is_like(s->scales, MT_ST_U8, t->n / MT_MXFP4_BLOCK))
        return bad(err, st, s->codes, "does not have a scale for each 32 weights");
    return 0;
}

/* Checks codes and scales of all experts of a layer together. */
static int find_fused(struct mt_packed_source *s, const struct mt_st_model *st, const struct mt_stored *stored,
                      const struct mt_tensor *t, struct mt_err *err)
{
    const struct mt_st_tensor *have[] = {s->codes, s->scales};
    struct mt_packed_piece want[MT_MAX_PIECES];
    struct mt_tensor packed = *t;
    if (t->n_dims != 2 || t->shape[1] % MT_MXFP4_BLOCK)
        return bad(err, st, s->codes, "has another shape than config.json asks for");
    mt_packing_make(&packed, MT_PACKED_MXFP4);
    mt_packed_stored_pieces(want, stored, &packed);
    for (int i = 0; i < 2; i++) {
        bool same = have[i]->dtype == MT_ST_U8 && have[i]->n_dims == want[i].n_dims;
        for (int k = 0; same && k < want[i].n_dims; k++)
            same = have[i]->shape[k] == want[i].shape[k];
        if (!same)
            return bad(err, st, have[i], "has another shape than config.json asks for");
    }
    return 0;
}

int mt_packed_find(struct mt_packed_source *out, const struct mt_st_model *st, const struct mt_layout *l,
                   const struct mt_tensor *t, struct mt_err *err)
{
    const struct mt_stored *stored = l ? &l->stored[t->place.stored] : NULL;
    const char *name = stored ? stored->name : t->name;
    struct mt_packed_source s = {.codes = mt_stored_find(st, name)};
    char blocks[192], scales[192], codes[256];
    snprintf(blocks, sizeof(blocks), "%s_blocks", name);
    snprintf(scales, sizeof(scales), "%s_scales", name);
    snprintf(codes, sizeof(codes), "%.180s_packed", name);
    bool alone = !l || mt_packing_lies_alone(l, t);
    int rc = 0;
    bool experts = !alone && stored->fused && s.codes && s.codes->dtype == MT_ST_F8_E4M3 && t->n_dims == 2;
    if (experts && t->place.col_step == 1) {
        rc = find_fp8(&s, st, l, t, err);
    } else if (!alone && s.codes && (s.codes->dtype == MT_ST_U8 || s.codes->dtype == MT_ST_F8_E4M3)) {
        rc = bad(err, st, s.codes, experts ? "holds all experts of a layer in FP8 as [experts, columns, rows], which "
                                             "is read as [experts, rows, columns]: decode the model with transformers "
                                             "(FineGrainedFP8Config(dequantize=True), save_pretrained); "
                                             "model.base_dtype = fp8 packs it again"
                                           : "is packed, which is not supported for a tensor that files have in another order: "
                                             "decode the model to bf16");
    } else if (!s.codes && (alone || stored->fused)) {
        s.codes = mt_stored_find(st, blocks);
        s.scales = mt_stored_find(st, scales);
        s.format = s.codes && s.scales ? MT_PACKED_MXFP4 : MT_PACKED_NONE;
        s.scale = MT_SCALE_E8M0;
        if (!s.format)
            s.codes = NULL;
        else if (!alone)
            s.rows = s.scale_rows = mt_packing_rows(l, t, NULL);
        if (s.format)
            rc = alone ? find_mxfp4(&s, st, t, err) : find_fused(&s, st, stored, t, err);
        else if (alone && (s.codes = mt_stored_find(st, codes))) {
            snprintf(codes, sizeof(codes), "%.*s", (int)(strlen(s.codes->name) - strlen("_packed")), s.codes->name);
            bool fp4 = s.codes->dtype == MT_ST_U8;
            s.scales = beside(st, codes, "_scale");
            bool mx = fp4 && s.scales && s.scales->dtype == MT_ST_U8;
            s.format = mx ? MT_PACKED_MXFP4 : fp4 ? MT_PACKED_NVFP4 : MT_PACKED_INT4;
            s.scale = mt_packed_formats[s.format].scale;
            rc = mx ? find_mxfp4(&s, st, t, err) : (fp4 ? find_nvfp4 : find_int4)(&s, st, t, codes, err);
        }
    } else if (alone && s.codes && s.codes->dtype == MT_ST_U8 && beside(st, s.codes->name, "_scale_2")) {
        s.scale = MT_SCALE_E4M3;
        rc = find_nvfp4(&s, st, t, s.codes->name, err);
    } else if (alone && s.codes && s.codes->dtype == MT_ST_U8) {
        s.format = MT_PACKED_NF4;
        rc = t->n_dims == 2 ? find_nf4(&s, st, t, err) : bad(err, st, s.codes, "has dtype U8");
    } else if (alone && s.codes && s.codes->dtype == MT_ST_F8_E4M3) {
        rc = t->n_dims == 2 ? find_fp8(&s, st, l, t, err) : bad(err, st, s.codes, "has dtype F8_E4M3");
    }
    if (!rc)
        *out = s;
    return rc;
}

/* --- as it is ------------------------------------------------------------------------------------- */

static int write_plane(mt_plane_set *planes, const struct mt_tensor *t, size_t at, size_t n, const void *src,
                       struct mt_err *err)
{
    return planes ? mt_planes_write(planes, t->unit, MT_PLANE_PACKED, at, n, src, err) : 0;
}

/* A packed tensor in files, and what sums the bytes that are read. */
struct file {
    const struct mt_st_model *st;
    const struct mt_packed_source *src;
    struct mt_summer *summer; /* NULL: nothing does */
};

/* Bytes [at, at + n) of a piece of t: whole rows, if rows of other tensors are between them. Scales are widened that
 * files have as F16. */
static int read_part(const struct file *f, const struct mt_packed_piece *p, size_t at, size_t n, void *dst,
                     struct mt_err *err)
{
    const struct mt_st_tensor *from = f->src->piece[p->kind];
    struct mt_packed_rows r = mt_packed_rows_in(f->src, p);
    size_t row = p->bytes / mt_packed_piece_rows(p);
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
    if (!rc && f->summer)
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

/* A scale in BF16 or F32, which may be unaligned. */
static float scale_at(enum mt_scale type, const char *data)
{
    uint16_t half;
    float x;
    memcpy(&half, data, sizeof(half));
    if (type == MT_SCALE_BF16)
        return mt_bf16_to_f32(half);
    memcpy(&x, data, sizeof(x));
    return x;
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
    float most = fp8 ? 448 : f == MT_PACKED_NF4 ? 1 : 8;
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

/* buf: PIECE bytes, or a row. */
static int copy_piece(const struct file *f, const struct mt_tensor *t, const struct mt_packed_piece *p,
                      mt_plane_set *planes, char *buf, struct mt_err *err)
{
    size_t row = p->bytes / mt_packed_piece_rows(p);
    size_t piece = f->src->rows.step ? MT_MAX(PIECE / row, (size_t)1) * row : PIECE;
    int rc = 0;
    if (!mt_packed_piece_in(f->src, p))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "tensor \"%s\" is missing or has another size than before", p->name);
    for (size_t at = 0; at < p->bytes && !rc; at += piece) {
        size_t n = MT_MIN(piece, p->bytes - at);
        rc = read_summed(f, p, at, n, buf, err);
        if (!rc && planes && !mt_packed_is_finite(t->packed, t->scale, p->kind, at, buf, n))
            rc = bad(err, f->st, f->src->codes, "holds weights that are not finite");
        rc = rc ?: write_plane(planes, t, p->at + at, n, buf, err);
    }
    return rc;
}

int mt_packed_copy(const struct mt_st_model *st, const struct mt_packed_source *src, const struct mt_tensor *t,
                   mt_plane_set *planes, struct mt_summer *summer, struct mt_err *err)
{
    const struct file f = {st, src, summer};
    struct mt_packed_piece p[MT_MAX_PIECES];
    int n = mt_packed_pieces(p, t), rc = 0;
    float offset = 0;
    size_t size = MT_MAX((size_t)PIECE, (size_t)t->shape[1]);
    MT_FREED char *buf = malloc(size);
    if (!buf)
        return mt_fail_nomem(err, t->name, size);
    if (summer)
        mt_summer_begin(summer);
    if (src->format != t->packed || src->scale != t->scale)
        rc = bad(err, st, src->codes, "is packed in a different format than before");
    for (int i = 0; i < n && !rc; i++)
        rc = copy_piece(&f, t, &p[i], planes, buf, err);
    if (!rc && src->note && src->format == MT_PACKED_NF4)
        rc = mt_packed_read_offset(st, src, t, &offset, err);
    if (!rc && t->scale == MT_SCALE_NESTED)
        rc = write_plane(planes, t, mt_packed_piece_at(t, MT_PIECE_OFFSET), sizeof(offset), &offset, err);
    return rc;
}

/* --- as f32 ---------------------------------------------------------------------------------------- */

static int read_whole(void *ctx, const struct mt_tensor *t, const struct mt_packed_piece *p, void *dst,
                      struct mt_err *err)
{
    const struct file *f = ctx;
    return p->kind == MT_PIECE_OFFSET ? mt_packed_read_offset(f->st, f->src, t, dst, err)
                                      : read_summed(f, p, 0, p->bytes, dst, err);
}

int mt_packed_file_read(struct mt_packed_matrix *out, const struct mt_st_model *st, const struct mt_packed_source *src,
                        const struct mt_tensor *t, struct mt_summer *summer, struct mt_err *err)
{
    struct mt_tensor of = *t;
    struct file f = {st, src, summer};
    of.packed = src->format;
    of.scale = src->scale;
    if (summer)
        mt_summer_begin(summer);
    return mt_packed_matrix_read(out, &of, read_whole, &f, err);
}

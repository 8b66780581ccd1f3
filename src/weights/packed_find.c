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

enum { NOTE_MAX = 4096 };
#define IN_ANOTHER_ORDER \
    "is packed, which is not supported for a tensor that files have in another order: decode the model to bf16"
#define MEND ": quantize it without that, or decode the model to bf16, which model.base_dtype = int4 packs again"

static const char *const suffixes[] = {
    "weight_scale_inv",     "weight_blocks",    "weight_scales",        "weight_packed",
    "weight_scale",         "weight_shape",     "weight_scale_2",       "weight_global_scale",
    "weight.absmax",        "weight.nested_absmax",                     "weight.nested_quant_map",
    "weight.quant_map",     "weight.quant_state.bitsandbytes__nf4",     "weight_zero_point",
    ".qweight",             ".qzeros",              ".scales",              ".g_idx",
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

bool mt_packed_is_bias(const struct mt_st_model *st, const struct mt_st_tensor *t)
{
    char stem[256];
    snprintf(stem, sizeof(stem), "%s", t->name);
    if (!mt_ends_with(stem, ".bias"))
        return false;
    stem[strlen(stem) - strlen("bias")] = 0;
    return beside(st, stem, "qweight");
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
static int read_note(struct mt_packed_source *s, const struct mt_st_model *st, const struct mt_tensor *t,
                     struct mt_err *err)
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
    s->offset = nested && !rc ? (float)mt_json_number(o, "nested_offset", NAN) : 0;
    return rc;
}

static int find_nf4(struct mt_packed_source *s, const struct mt_st_model *st, const struct mt_tensor *t,
                    struct mt_err *err)
{
    const char *name = s->codes->name;
    size_t scales = mt_packed_n_scales(MT_PACKED_NF4, (size_t)t->shape[0], (size_t)t->shape[1]);
    float have[16];
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
    return rc ?: read_note(s, st, t, err);
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

static bool is_grid(const struct mt_st_tensor *t, int64_t rows, int64_t cols)
{
    return t && t->n_dims == 2 && t->shape[0] == rows && t->shape[1] == cols;
}

/* The kind of int4 that has so many scales in a row of a matrix; what config.json says, if it can be. */
static enum mt_packed int4_with(const struct mt_layout *l, size_t cols, size_t across)
{
    enum mt_packed said = l ? l->cfg.packed : MT_PACKED_NONE;
    bool is = mt_packed_kind(said) == MT_PACKED_INT4 && mt_packed_across(said, cols) == across;
    if (!across || cols % across || cols % MT_INT4_BLOCK)
        return MT_PACKED_NONE;
    return is ? said : mt_packed_int4_of((double)(cols / across)) ?: across == 1 ? MT_PACKED_INT4R : MT_PACKED_NONE;
}

/* Sets the format by the scales, [rows, across] or turned, and their type by the zero points, which there may be. */
static int take_int4(struct mt_packed_source *s, const struct mt_st_model *st, const struct mt_layout *l,
                     const struct mt_tensor *t, struct mt_err *err)
{
    int64_t rows = t->shape[0], across = s->scales && s->scales->n_dims == 2 ? s->scales->shape[!s->turned] : 0;
    int64_t words = (rows + 7) / 8;
    bool half = s->scales && s->scales->dtype == MT_ST_F16;
    s->format = int4_with(l, (size_t)t->shape[1], (size_t)across);
    s->scale = s->zeros ? (half ? MT_SCALE_F16_ZEROS : MT_SCALE_BF16_ZEROS) : half ? MT_SCALE_F16 : MT_SCALE_BF16;
    if (!s->format || (!half && s->scales->dtype != MT_ST_BF16) || s->scales->shape[s->turned != 0] != rows)
        return bad(err, st, s->codes, "does not have an F16 or BF16 scale for each 32, 64 or 128 weights of a row, or for "
                   "each row");
    bool grid = s->turned ? is_grid(s->zeros, across, words) : is_grid(s->zeros, words, across);
    if (s->zeros && (s->zeros->dtype != MT_ST_I32 || !grid))
        return bad(err, st, s->zeros, "does not have a zero point of 4 bits for each scale");
    return 0;
}

/* compressed-tensors' pack-quantized: int4, symmetric or with zero points. */
static int find_int4(struct mt_packed_source *s, const struct mt_st_model *st, const struct mt_layout *l,
                     const struct mt_tensor *t, const char *name, struct mt_err *err)
{
    s->scales = beside(st, name, "_scale");
    s->zeros = beside(st, name, "_zero_point");
    s->note = beside(st, name, "_shape");
    if (s->codes->dtype != MT_ST_I32 || t->n_dims != 2 || t->shape[1] % MT_INT4_BLOCK ||
        !is_grid(s->codes, t->shape[0], t->shape[1] / 8))
        return bad(err, st, s->codes, "has another shape than config.json asks for, or another number of bits than 4");
    if (beside(st, name, "_g_idx"))
        return bad(err, st, s->codes, "has columns in another order (weight_g_idx)" MEND);
    return take_int4(s, st, l, t, err) ?: check_noted_shape(st, s->note, t, err);
}

/* Are groups neighbouring columns? */
static int check_order(const struct mt_packed_source *s, const struct mt_st_model *st, const struct mt_st_tensor *g_idx,
                       size_t cols, struct mt_err *err)
{
    size_t group = cols / mt_packed_across(s->format, cols);
    MT_FREED int32_t *of = NULL;
    if (!g_idx)
        return 0;
    if (!is_like(g_idx, MT_ST_I32, cols))
        return bad(err, st, g_idx, "does not have a number for each column");
    int rc = MT_NEW(&of, cols, g_idx->name, err) ?: mt_st_read_raw(st, g_idx, 0, g_idx->n_bytes, of, err);
    for (size_t i = 0; i < cols && !rc; i++)
        if (of[i] != (int32_t)(i / group))
            rc = bad(err, st, g_idx, "has groups of columns that are not neighbours (desc_act)" MEND);
    return rc;
}

/* GPTQ's and AWQ's layers. codes NULL: it is not there. */
static int find_turned(struct mt_packed_source *s, const struct mt_st_model *st, const struct mt_layout *l,
                       const struct mt_tensor *t, const char *name, struct mt_err *err)
{
    char stem[256];
    snprintf(stem, sizeof(stem), "%.*sqweight", (int)MT_MAX(strlen(name), strlen("weight")) - (int)strlen("weight"), name);
    *s = (struct mt_packed_source){.codes = mt_ends_with(name, ".weight") ? mt_stored_find(st, stem) : NULL};
    if (!s->codes)
        return 0;
    if (l && !mt_packing_lies_alone(l, t))
        return bad(err, st, s->codes, IN_ANOTHER_ORDER);
    snprintf(stem, sizeof(stem), "%.*s", (int)(strlen(s->codes->name) - strlen("qweight")), s->codes->name);
    int64_t rows = t->shape[0], cols = t->n_dims == 2 ? t->shape[1] : 0;
    s->scales = beside(st, stem, "scales");
    s->zeros = beside(st, stem, "qzeros");
    s->turned = is_grid(s->codes, cols / 8, rows)   ? MT_TURNED_GPTQ
                : is_grid(s->codes, cols, rows / 8) ? MT_TURNED_AWQ
                                                    : MT_TURNED_NOT;
    if (s->codes->dtype != MT_ST_I32 || !s->turned || rows % 8 || cols % MT_INT4_BLOCK)
        return bad(err, st, s->codes, "has another shape than config.json asks for, or another number of bits than 4");
    if (!s->zeros)
        return bad(err, st, s->codes, "has no qzeros beside it");
    s->to_zeros = s->turned == MT_TURNED_GPTQ && l && l->cfg.zeros_less_one ? 0x11111111u : 0;
    return take_int4(s, st, l, t, err) ?: check_order(s, st, beside(st, stem, "g_idx"), (size_t)cols, err);
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

/* The tensor itself is there: plain, or codes. */
static int find_codes(struct mt_packed_source *s, const struct mt_st_model *st, const struct mt_layout *l,
                      const struct mt_tensor *t, struct mt_err *err)
{
    bool fp8 = s->codes->dtype == MT_ST_F8_E4M3, alone = !l || mt_packing_lies_alone(l, t);
    bool experts = !alone && l->stored[t->place.stored].fused && fp8 && t->n_dims == 2;
    if (!fp8 && s->codes->dtype != MT_ST_U8)
        return 0;
    if (alone && t->n_dims != 2)
        return bad(err, st, s->codes, fp8 ? "has dtype F8_E4M3" : "has dtype U8");
    if (experts && t->place.col_step != 1)
        return bad(err, st, s->codes, "holds all experts of a layer in FP8 as [experts, columns, rows], which is read as "
                   "[experts, rows, columns]: decode the model with transformers (FineGrainedFP8Config(dequantize=True), "
                   "save_pretrained); model.base_dtype = fp8 packs it again");
    if (!alone && !experts)
        return bad(err, st, s->codes, IN_ANOTHER_ORDER);
    if (fp8)
        return find_fp8(s, st, l, t, err);
    s->format = MT_PACKED_NF4;
    s->scale = MT_SCALE_E4M3;
    return beside(st, s->codes->name, "_scale_2") ? find_nvfp4(s, st, t, s->codes->name, err) : find_nf4(s, st, t, err);
}

static const struct mt_st_tensor *named(const struct mt_st_model *st, const char *name, const char *suffix)
{
    char whole[256];
    snprintf(whole, sizeof(whole), "%.180s%s", name, suffix);
    return mt_stored_find(st, whole);
}

/* Its pieces may be there, under other names. */
static int find_pieces(struct mt_packed_source *s, const struct mt_st_model *st, const struct mt_layout *l,
                       const struct mt_tensor *t, const char *name, struct mt_err *err)
{
    bool alone = !l || mt_packing_lies_alone(l, t);
    char stem[256];
    s->codes = named(st, name, "_blocks");
    s->scales = named(st, name, "_scales");
    s->format = MT_PACKED_MXFP4;
    s->scale = MT_SCALE_E8M0;
    if (s->codes && s->scales && alone)
        return find_mxfp4(s, st, t, err);
    if (s->codes && s->scales && l->stored[t->place.stored].fused) {
        s->rows = s->scale_rows = mt_packing_rows(l, t, NULL);
        return find_fused(s, st, &l->stored[t->place.stored], t, err);
    }
    s->codes = alone ? named(st, name, "_packed") : NULL;
    if (!s->codes)
        return find_turned(s, st, l, t, name, err);
    snprintf(stem, sizeof(stem), "%.*s", (int)(strlen(s->codes->name) - strlen("_packed")), s->codes->name);
    if (s->codes->dtype != MT_ST_U8)
        return find_int4(s, st, l, t, stem, err);
    s->scales = beside(st, stem, "_scale");
    if (s->scales && s->scales->dtype == MT_ST_U8)
        return find_mxfp4(s, st, t, err);
    s->scale = MT_SCALE_E4M3_OVER;
    return find_nvfp4(s, st, t, stem, err);
}

int mt_packed_find(struct mt_packed_source *out, const struct mt_st_model *st, const struct mt_layout *l,
                   const struct mt_tensor *t, struct mt_err *err)
{
    const char *name = l ? l->stored[t->place.stored].name : t->name;
    struct mt_packed_source s = {.codes = mt_stored_find(st, name)};
    int rc = s.codes ? find_codes(&s, st, l, t, err) : find_pieces(&s, st, l, t, name, err);
    if (!rc)
        *out = s;
    return rc;
}

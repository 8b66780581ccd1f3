/* SPDX-License-Identifier: Apache-2.0 */
#include "base/packed.h"

#include "base/mem.h"

const char *const mt_packed_names[MT_N_PACKED] = {"none", "nf4", "mxfp4", "fp8", "int4", "nvfp4", "fp8 with one scale",
                                                  "fp8 with a scale a row", "fp8 in blocks of 64x64",
                                                  "fp8 in blocks of 32x32", "fp8 in blocks of 1x128",
                                                  "fp8 in blocks of 1x64", "fp8 in blocks of 1x32",
                                                  "int4 in groups of 64", "int4 in groups of 128",
                                                  "int4 with a scale a row"};

/* Digit for digit those of bitsandbytes. */
const float mt_nf4_values[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
};

const float mt_fp4_values[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

const float mt_int4_values[31] = {-15, -14, -13, -12, -11, -10, -9, -8, -7, -6, -5, -4, -3, -2, -1, 0,
                                  1,   2,   3,   4,   5,   6,   7,  8,  9,  10, 11, 12, 13, 14, 15};

#define INT4(of_cols) \
    .rows = 1, .block = of_cols, .values = mt_int4_values + 7, .scale = MT_SCALE_BF16, .codes_name = "_packed", \
    .scales_name = "_scale"
#define FP8(of_rows, of_cols, name) \
    {.bytes = true, .by_rows = true, .rows = of_rows, .block = of_cols, .codes_name = "", .scales_name = name}
const struct mt_packed_format mt_packed_formats[MT_N_PACKED] = {
    [MT_PACKED_NF4] = {.may_end = true, .block = MT_NF4_BLOCK, .values = mt_nf4_values, .codes_name = "",
                       .scales_name = ".absmax"},
    [MT_PACKED_MXFP4] = {.block = MT_MXFP4_BLOCK, .values = mt_fp4_values, .scale = MT_SCALE_E8M0,
                         .codes_name = "_packed", .scales_name = "_scale"},
    [MT_PACKED_FP8] = FP8(MT_FP8_BLOCK, MT_FP8_BLOCK, "_scale_inv"),
    [MT_PACKED_FP8T] = FP8(0, 0, "_scale_inv"),
    [MT_PACKED_INT4] = {INT4(MT_INT4_BLOCK)},
    [MT_PACKED_NVFP4] = {.block = MT_NVFP4_BLOCK, .values = mt_fp4_values, .scale = MT_SCALE_E4M3_OVER,
                         .codes_name = "_packed", .scales_name = "_scale"},
    [MT_PACKED_FP8R] = FP8(1, 0, "_scale"),
    [MT_PACKED_FP8_64] = FP8(64, 64, "_scale_inv"),
    [MT_PACKED_FP8_32] = FP8(32, 32, "_scale_inv"),
    [MT_PACKED_FP8_1X128] = FP8(1, 128, "_scale"),
    [MT_PACKED_FP8_1X64] = FP8(1, 64, "_scale"),
    [MT_PACKED_FP8_1X32] = FP8(1, 32, "_scale"),
    [MT_PACKED_INT4_64] = {INT4(64)},
    [MT_PACKED_INT4_128] = {INT4(128)},
    [MT_PACKED_INT4R] = {INT4(0), .by_rows = true},
};

size_t mt_scale_size(enum mt_scale s)
{
    static const uint8_t size[MT_N_SCALES] = {
        [MT_SCALE_F32] = 4,  [MT_SCALE_BF16] = 2,      [MT_SCALE_F16] = 2, [MT_SCALE_BF16_ZEROS] = 2,
        [MT_SCALE_E8M0] = 1, [MT_SCALE_F16_ZEROS] = 2, [MT_SCALE_E4M3] = 1, [MT_SCALE_E4M3_OVER] = 1,
        [MT_SCALE_NESTED] = 1};
    return size[s];
}

bool mt_scale_has_zeros(enum mt_scale s)
{
    return s == MT_SCALE_BF16_ZEROS || s == MT_SCALE_F16_ZEROS;
}

const char *mt_packed_factor_name(enum mt_scale s)
{
    return s == MT_SCALE_E4M3 ? "_scale_2" : s == MT_SCALE_E4M3_OVER ? "_global_scale" : NULL;
}

size_t mt_packed_codes_before(enum mt_packed f, size_t n)
{
    return mt_packed_formats[f].bytes ? n : n / 2;
}

size_t mt_packed_code_bytes(enum mt_packed f, size_t rows, size_t cols)
{
    return mt_packed_formats[f].bytes ? rows * cols : mt_div_up(rows * cols, 2);
}

size_t mt_packed_n_scales(enum mt_packed f, size_t rows, size_t cols)
{
    const struct mt_packed_format *p = &mt_packed_formats[f];
    size_t by_row = mt_packed_across(f, cols);
    return !p->by_rows ? mt_div_up(rows * cols, p->block) : by_row * (p->rows ? mt_div_up(rows, p->rows) : 1);
}

size_t mt_packed_scale_at(enum mt_packed f, size_t cols, size_t i)
{
    const struct mt_packed_format *p = &mt_packed_formats[f];
    if (!p->by_rows)
        return i / p->block;
    size_t row = p->rows ? i / cols / p->rows : 0;
    return p->block ? row * mt_packed_across(f, cols) + i % cols / p->block : row;
}

size_t mt_packed_across(enum mt_packed f, size_t cols)
{
    size_t block = mt_packed_formats[f].block;
    return block ? mt_div_up(cols, block) : 1;
}

enum mt_packed mt_packed_kind(enum mt_packed f)
{
    const struct mt_packed_format *p = &mt_packed_formats[f];
    return p->bytes ? MT_PACKED_FP8 : p->values == mt_int4_values + 7 ? MT_PACKED_INT4 : f;
}

enum mt_packed mt_packed_int4_of(double elems)
{
    for (enum mt_packed f = MT_PACKED_INT4; f < MT_N_PACKED; f++)
        if (mt_packed_kind(f) == MT_PACKED_INT4 && (double)mt_packed_formats[f].block == elems)
            return f;
    return MT_PACKED_NONE;
}

enum mt_packed mt_packed_fp8_of(double rows, double cols)
{
    for (enum mt_packed f = MT_PACKED_FP8; f < MT_N_PACKED; f++) {
        const struct mt_packed_format *p = &mt_packed_formats[f];
        if (p->bytes && (double)p->rows == rows && (double)p->block == cols)
            return f;
    }
    return MT_PACKED_NONE;
}

enum mt_packed mt_packed_fp8_with(enum mt_packed first, size_t rows, size_t cols, size_t down, size_t across)
{
    for (int i = -1; i < MT_N_PACKED; i++) {
        enum mt_packed f = i < 0 ? first : (enum mt_packed)i;
        const struct mt_packed_format *p = &mt_packed_formats[f];
        size_t has_down = p->rows ? mt_div_up(rows, p->rows) : 1, has_across = mt_packed_across(f, cols);
        if (p->bytes && has_down == down && has_across == across)
            return f;
    }
    return MT_PACKED_NONE;
}

static float value_at(const struct mt_packed_view *p, size_t i)
{
    const struct mt_packed_format *f = &mt_packed_formats[p->format];
    bool high = (p->format == MT_PACKED_NF4) == (i % 2 == 0);
    size_t block = mt_packed_scale_at(p->format, p->cols, i), row = i / p->cols;
    if (f->bytes)
        return mt_e4m3_to_f32(p->codes[i]) * p->scales[block];
    unsigned code = high ? p->codes[i / 2] >> 4 : p->codes[i / 2] & 15;
    size_t across = mt_packed_across(p->format, p->cols);
    const float *values = p->zeros ? mt_int4_values + 15 - mt_packed_zero(p->zeros, across, row, block - row * across)
                                   : f->values;
    return values[code] * p->scales[block];
}

void mt_packed_values(const struct mt_packed_view *p, size_t first, size_t n, float *out)
{
    for (size_t i = 0; i < n; i++)
        out[i] = value_at(p, first + i);
}

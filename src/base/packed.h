/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"

/**
 * Packed formats of frozen weights: a code of 4 or 8 bits for each element, a scale for each block of elements. A value
 * is code times scale, computed in f32 and rounded once, to nearest even, to the dtype wanted; a NaN stays NaN.
 *
 * NF4    (Dettmers 2023; bitsandbytes) the matrix is read as one row: two codes a byte, the first in the high half; a
 *        block is 64 elements, its scale the largest magnitude in it, in f32. Nested: that scale is
 *        nested_map[scale byte] * nested_scale + offset, with one nested scale for 256 blocks. A code's value is in
 *        mt_nf4_values[].
 * MXFP4  (OCP Microscaling 1.0; gpt-oss; compressed-tensors, mxfp4-pack-quantized) two codes a byte, the first in the
 *        low half; a block is 32 elements of a row, its scale 2^(byte - 127). A code's value is in mt_fp4_values[].
 * FP8    E4M3 without infinities (Micikevicius 2022; DeepSeek-V3): a block is 128 rows of 128 columns, fewer at the
 *        edges, its scale an f32, a bf16 or 2^(byte - 127).
 * FP8T   the same codes with one scale for the whole matrix (Ministral 3; ModelOpt).
 * FP8R   the same codes with a scale for each row, an f32 or a bf16 (compressed-tensors, float-quantized by channel).
 * FP8_*  the same codes in blocks of other sizes: of 64x64 and 32x32, and of a part of a row (compressed-tensors,
 *        float-quantized by group; MXFP8 has 32 elements and 2^(byte - 127)).
 * INT4   (compressed-tensors, pack-quantized; Kimi-K2-Thinking) two codes a byte, the first in the low half; a block is
 *        32 elements of a row, its scale a bf16 or an f16. A code's value is code - 8; or code - zero, where each scale
 *        has a zero point of 4 bits beside it (asymmetric; what GPTQ's and AWQ's files become).
 * INT4_* the same codes in blocks of 64 and 128.
 * INT4R  the same codes with a scale for each row.
 * NVFP4  (NVIDIA 2025) MXFP4's codes; a block is 16 elements of a row, its scale an E4M3 times one f32 for the matrix
 *        (ModelOpt's weight_scale_2), or divided by it (compressed-tensors' weight_global_scale).
 */
enum mt_packed {
    MT_PACKED_NONE, MT_PACKED_NF4, MT_PACKED_MXFP4, MT_PACKED_FP8, MT_PACKED_INT4, MT_PACKED_NVFP4,
    MT_PACKED_FP8T, MT_PACKED_FP8R, MT_PACKED_FP8_64, MT_PACKED_FP8_32, MT_PACKED_FP8_1X128, MT_PACKED_FP8_1X64,
    MT_PACKED_FP8_1X32, MT_PACKED_INT4_64, MT_PACKED_INT4_128, MT_PACKED_INT4R, MT_N_PACKED,
    MT_N_PACKABLE = MT_PACKED_FP8T /* those before it can be made from wider weights; the others are only read */
};
#define MT_PACKED_NAMES "auto|nf4|mxfp4|fp8|int4|nvfp4" /* values of a setting; auto is MT_PACKED_NONE */

/** The type of scales: of E8M0, a byte is the value 2^(byte - 127); nested ones are NF4's bytes; E4M3 ones are
 * multiplied with the matrix's factor, or divided by it; *_ZEROS have zero points beside them. */
enum mt_scale {
    MT_SCALE_F32, MT_SCALE_BF16, MT_SCALE_E8M0, MT_SCALE_NESTED, MT_SCALE_E4M3, MT_SCALE_E4M3_OVER, MT_SCALE_F16,
    MT_SCALE_BF16_ZEROS, MT_SCALE_F16_ZEROS, MT_N_SCALES,
};
size_t mt_scale_size(enum mt_scale s);
bool mt_scale_has_zeros(enum mt_scale s);
/** Has the matrix a factor? What files append to the tensor's name for it; NULL: it has none. */
const char *mt_packed_factor_name(enum mt_scale s);

enum {
    MT_NF4_BLOCK = 64,
    MT_NF4_NESTED = 256, /* blocks to a nested scale */
    MT_MXFP4_BLOCK = 32,
    MT_FP8_BLOCK = 128,  /* rows, and columns; whole blocks of each kind of FP8 */
    MT_INT4_BLOCK = 32,
    MT_NVFP4_BLOCK = 16,
};

/** What the formats are, by enum mt_packed. */
struct mt_packed_format {
    bool bytes;             /* a code is a byte; else half of one */
    bool by_rows;           /* blocks are of several rows, so that a part of a matrix is whole rows */
    bool may_end;           /* the last block may have fewer elements */
    size_t block;           /* elements of a row, or of the matrix read as one, that share a scale; 0: all of them */
    size_t rows;            /* by_rows: rows that share a scale; 0: all of them */
    const float *values;    /* [16] of codes that are half a byte */
    enum mt_scale scale;    /* as weights are packed here, and as in most files */
    const char *codes_name, *scales_name; /* what files append to the name of the tensor */
};
extern const struct mt_packed_format mt_packed_formats[MT_N_PACKED];

/** "nf4", as in the configuration. */
extern const char *const mt_packed_names[MT_N_PACKED];
extern const float mt_nf4_values[16], mt_fp4_values[16];
/** Whole numbers from -15 on: those of a zero point's codes begin at [15 - zero], those of the zero point 8 at [7]. */
extern const float mt_int4_values[31];

/** For a [rows, cols] matrix: bytes of its codes, and number of its scales (nested scales not counted). */
size_t mt_packed_code_bytes(enum mt_packed f, size_t rows, size_t cols);
size_t mt_packed_n_scales(enum mt_packed f, size_t rows, size_t cols);
/** Number of the scale of element i. */
size_t mt_packed_scale_at(enum mt_packed f, size_t cols, size_t i);
/** The kind of FP8 in blocks of so many rows and columns; MT_PACKED_NONE: there is none. */
enum mt_packed mt_packed_fp8_of(double rows, double cols);
/** The kind of FP8 of which a [rows, cols] matrix has [down, across] scales: `first` if it does; MT_PACKED_NONE:
 * none. */
enum mt_packed mt_packed_fp8_with(enum mt_packed first, size_t rows, size_t cols, size_t down, size_t across);
/** The kind of INT4 in groups of so many elements; 0: a whole row; MT_PACKED_NONE: there is none. */
enum mt_packed mt_packed_int4_of(double elems);
/** The format whose codes and code it has: FP8 in any blocks is MT_PACKED_FP8, int4 in any groups MT_PACKED_INT4. */
enum mt_packed mt_packed_kind(enum mt_packed f);
/** Blocks beside each other. */
size_t mt_packed_across(enum mt_packed f, size_t cols);
/** Bytes of the codes of the first n elements, which are whole bytes. */
size_t mt_packed_codes_before(enum mt_packed f, size_t n);

/** Zero points: words of those of 8 rows, the first in the lowest bits, for each block beside another. */
static inline size_t mt_packed_n_zeros(enum mt_packed f, size_t rows, size_t cols)
{
    return (rows + 7) / 8 * mt_packed_across(f, cols);
}
static inline unsigned mt_packed_zero(const uint32_t *zeros, size_t across, size_t row, size_t block)
{
    return zeros[row / 8 * across + block] >> row % 8 * 4 & 15;
}

/** A matrix on the host. Scales are f32 here, whatever their type in files. */
struct mt_packed_view {
    enum mt_packed format;
    size_t cols;
    const uint8_t *codes;
    const float *scales;
    const uint32_t *zeros; /* NULL: it has no zero points */
};
/** Decodes elements [first, first + n). */
void mt_packed_values(const struct mt_packed_view *p, size_t first, size_t n, float *out);

/** 2^(byte - 127); infinity for 255. */
static inline float mt_e8m0_to_f32(uint8_t e)
{
    return mt_f32_from_bits(e ? (uint32_t)e << 23 : 0x400000u);
}

/** Exact; 0x7f and 0xff are NaN. Branch-free, so that loops over it are vectorised. */
static inline float mt_e4m3_to_f32(uint8_t c)
{
    uint32_t mag = c & 0x7fu, sign = (uint32_t)(c & 0x80u) << 24;
    uint32_t normal = (mag << 20) + (120u << 23), small = mt_f32_bits((float)(int32_t)mag * 0x1p-9f);
    uint32_t bits = mag < 8 ? small : normal;
    return mt_f32_from_bits((mag == 0x7f ? 0x7fc00000u : bits) | sign);
}

/** A scale of NVFP4. */
static inline float mt_e4m3_scale(enum mt_scale type, uint8_t e, float factor)
{
    return type == MT_SCALE_E4M3 ? mt_e4m3_to_f32(e) * factor : mt_e4m3_to_f32(e) / factor;
}

/** Scale i of an array of that type, which is not MT_SCALE_NESTED; factor: the matrix's, of E4M3 scales. */
static inline float mt_scale_to_f32(enum mt_scale type, const void *scales, const float *factor, size_t i)
{
    switch (type) {
    case MT_SCALE_BF16:
    case MT_SCALE_BF16_ZEROS:
        return mt_bf16_to_f32(((const uint16_t *)scales)[i]);
    case MT_SCALE_F16:
    case MT_SCALE_F16_ZEROS:
        return mt_f16_to_f32(((const uint16_t *)scales)[i]);
    case MT_SCALE_E8M0:
        return mt_e8m0_to_f32(((const uint8_t *)scales)[i]);
    case MT_SCALE_E4M3:
    case MT_SCALE_E4M3_OVER:
        return mt_e4m3_scale(type, ((const uint8_t *)scales)[i], *factor);
    default:
        return ((const float *)scales)[i];
    }
}

/** To nearest even; beyond 448 saturates, but infinity and NaN become NaN. Branch-free. */
static inline uint8_t mt_f32_to_e4m3(float f)
{
    uint32_t u = mt_f32_bits(f) & 0x7fffffffu, sign = mt_f32_bits(f) >> 24 & 0x80u;
    uint32_t normal = ((u + 0x7ffffu + (u >> 20 & 1)) >> 20) - (120u << 3);
    /* steps of 2^-9, which is the last bit of 2^14 */
    uint32_t small = mt_f32_bits(mt_f32_from_bits(u) + 0x1p14f) - mt_f32_bits(0x1p14f);
    uint32_t mag = u < 0x3c800000u ? small : normal; /* 2^-6 */
    mag = u > 0x43e00000u ? 0x7eu : mag;             /* 448 */
    return (uint8_t)((u >= 0x7f800000u ? 0x7fu : mag) | sign);
}

/**
 * The power of two with which values of magnitudes up to `amax` become codes: the largest that leaves them within 448.
 * Its inverse is a normal number. 1 if amax is 0, infinite or a NaN.
 */
static inline float mt_e4m3_factor(float amax)
{
    uint32_t u = mt_f32_bits(amax), mantissa = u & 0x7fffffu, exponent = u >> 23;
    if (!u || exponent >= 255)
        return 1;
    uint32_t up = mantissa > 0x600000u; /* beyond 1.75, as 448 = 1.75 * 2^8 */
    uint32_t to = 127 + 127 + 8 - exponent - up; /* of the factor, biased */
    return mt_f32_from_bits((to > 253 ? 253u : to) << 23);
}

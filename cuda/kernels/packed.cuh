/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/packed.h"
#include "launch.cuh"
#include "scalar.cuh"

/* Scales and codes of packed formats (base/packed.h). */

static __device__ __forceinline__ uint32_t magnitude(float x)
{
    return bits_of_float(x) & 0x7fffffffu;
}

/* Values of 4-bit codes, which kernels look up in shared memory, where the 16 are in different banks. */
struct code_values {
    float of[16];
};

static inline code_values values_of(int format)
{
    const float *of = format == MT_PACKED_NF4    ? mt_nf4_values
                      : format == MT_PACKED_INT4 ? mt_int4_values + 7
                                                 : mt_fp4_values;
    code_values v;
    for (int i = 0; i < 16; i++)
        v.of[i] = of[i];
    return v;
}

static __device__ __forceinline__ void share_values(float (&value)[16], const code_values &values)
{
    if (threadIdx.x == 0) {
        MT_UNROLL(16)
        for (int i = 0; i < 16; i++) /* a variable index would put the table into local memory */
            value[i] = values.of[i];
    }
    __syncthreads();
}

/* Code k of `codes`, which begin at an even element. */
template <int FORMAT> static __device__ __forceinline__ unsigned nibble(uint32_t codes, int k)
{
    constexpr int FIRST = FORMAT == MT_PACKED_NF4 ? 4 : 0; /* shift of a byte's first code */
    return codes >> (k / 2 * 8 + (k % 2 ? 4 - FIRST : FIRST)) & 15;
}

template <bool NESTED> static __device__ __forceinline__ float nf4_scale(const struct mt_decode &a, size_t block)
{
    if constexpr (!NESTED)
        return static_cast<const float *>(a.scales)[block];
    else
        return a.nested_map[static_cast<const uint8_t *>(a.scales)[block]] * a.nested_scales[block / MT_NF4_NESTED] +
               *a.nested_offset;
}

static __device__ __forceinline__ float mxfp4_scale(const struct mt_decode &a, size_t block)
{
    uint32_t e = static_cast<const uint8_t *>(a.scales)[block];
    return float_of_bits(e ? e << 23 : 0x400000u);
}

static __device__ __forceinline__ float bf16_scale(const struct mt_decode &a, size_t block)
{
    return float_of_bits(static_cast<uint32_t>(static_cast<const uint16_t *>(a.scales)[block]) << 16);
}

/* mt_e4m3_to_f32(). */
static __device__ __forceinline__ float e4m3(uint32_t c)
{
    uint32_t mag = c & 0x7fu;
    uint32_t small = bits_of_float(static_cast<float>(static_cast<int>(mag)) * 0x1p-9f);
    uint32_t bits = mag < 8 ? small : (mag << 20) + (120u << 23);
    return float_of_bits((mag == 0x7f ? 0x7fc00000u : bits) | (c & 0x80u) << 24);
}

static __device__ __forceinline__ float nvfp4_scale(const struct mt_decode &a, size_t block)
{
    float x = e4m3(static_cast<const uint8_t *>(a.scales)[block]);
    return a.scale == MT_SCALE_E4M3 ? x * *a.factor : x / *a.factor;
}

/* Rows are whole vectors, of which there are less than 2^32. */
static __device__ __forceinline__ uint32_t row_of_codes(const struct mt_decode &a, size_t i)
{
    return static_cast<uint32_t>(i / 8) / static_cast<uint32_t>(a.cols / 8);
}

/* Rows and columns of a block of FP8, as powers of two; 63: all. */
struct block_bits {
    unsigned rows, cols;
};
static __device__ __forceinline__ block_bits fp8_bits_of(int format)
{
    switch (format) {
    case MT_PACKED_FP8:
        return {7, 7};
    case MT_PACKED_FP8_64:
        return {6, 6};
    case MT_PACKED_FP8_32:
        return {5, 5};
    case MT_PACKED_FP8R:
        return {0, 63};
    case MT_PACKED_FP8_1X128:
        return {0, 7};
    case MT_PACKED_FP8_1X64:
        return {0, 6};
    case MT_PACKED_FP8_1X32:
        return {0, 5};
    default:
        return {63, 63};
    }
}

/* Columns of a block of int4, as a power of two; 63: all. */
static __device__ __forceinline__ unsigned int4_bits_of(int format)
{
    return format == MT_PACKED_INT4       ? 5
           : format == MT_PACKED_INT4_64  ? 6
           : format == MT_PACKED_INT4_128 ? 7
                                          : 63;
}

static __device__ __forceinline__ size_t int4_block(const struct mt_decode &a, size_t i)
{
    unsigned bits = int4_bits_of(a.format);
    return bits == 63 ? row_of_codes(a, i) : i >> bits;
}

/* mt_f16_to_f32() of a finite number. */
static __device__ __forceinline__ float int4_scale(const struct mt_decode &a, size_t block)
{
    if (a.scale == MT_SCALE_BF16 || a.scale == MT_SCALE_BF16_ZEROS)
        return bf16_scale(a, block);
    uint32_t h = static_cast<const uint16_t *>(a.scales)[block];
    return float_of_bits((h & 0x8000u) << 16 | (h & 0x7fffu) << 13) * 0x1p112f;
}

/* 8 less the zero point of element i, which is exact. */
template <int FORMAT> static __device__ __forceinline__ float shift_of(const struct mt_decode &a, size_t i)
{
    if (FORMAT != MT_PACKED_INT4 || !a.zeros)
        return 0;
    uint32_t row = row_of_codes(a, i);
    size_t across = ((a.cols - 1) >> int4_bits_of(a.format)) + 1, block = int4_block(a, i) - row * across;
    return 8.0f - static_cast<float>(a.zeros[row / 8 * across + block] >> row % 8 * 4 & 15);
}

/* The value of a 4-bit code before its scale. */
template <int FORMAT>
static __device__ __forceinline__ float code_value(const float *value, unsigned code, float shift)
{
    return FORMAT == MT_PACKED_INT4 ? value[code] + shift : value[code];
}

template <int FORMAT, bool NESTED>
static __device__ __forceinline__ float scale_of(const struct mt_decode &a, size_t i)
{
    if constexpr (FORMAT == MT_PACKED_NF4)
        return nf4_scale<NESTED>(a, i / MT_NF4_BLOCK);
    else if constexpr (FORMAT == MT_PACKED_INT4)
        return int4_scale(a, int4_block(a, i));
    else if constexpr (FORMAT == MT_PACKED_NVFP4)
        return nvfp4_scale(a, i / MT_NVFP4_BLOCK);
    else
        return mxfp4_scale(a, i / MT_MXFP4_BLOCK);
}

static __device__ __forceinline__ float fp8_scale(const struct mt_decode &a, size_t block)
{
    if (a.scale == MT_SCALE_F32)
        return static_cast<const float *>(a.scales)[block];
    return a.scale == MT_SCALE_BF16 ? bf16_scale(a, block) : mxfp4_scale(a, block);
}

static __device__ __forceinline__ size_t fp8_block(const struct mt_decode &a, size_t row, size_t col)
{
    block_bits b = fp8_bits_of(a.format);
    size_t across = ((a.cols - 1) >> b.cols) + 1;
    return (row >> b.rows) * across + (col >> b.cols);
}

/* Of the block of an element of any format. */
template <int FORMAT, bool NESTED>
static __device__ __forceinline__ float scale_at(const struct mt_decode &a, size_t row, size_t col)
{
    if constexpr (FORMAT != MT_PACKED_FP8)
        return scale_of<FORMAT, NESTED>(a, row * a.cols + col);
    else
        return fp8_scale(a, fp8_block(a, row, col));
}

/* f() of the format, where FP8 and INT4 stand for all of their kinds, and of whether scales are nested. */
template <typename F> static inline cudaError_t for_format(const struct mt_decode &a, F f)
{
    const std::false_type plain;
    switch (a.format) {
    case MT_PACKED_NF4:
        return for_flag(a.nested_scales, [=](auto nested) {
            return f(std::integral_constant<int, MT_PACKED_NF4>(), nested);
        });
    case MT_PACKED_MXFP4:
        return f(std::integral_constant<int, MT_PACKED_MXFP4>(), plain);
    case MT_PACKED_INT4:
    case MT_PACKED_INT4_64:
    case MT_PACKED_INT4_128:
    case MT_PACKED_INT4R:
        return f(std::integral_constant<int, MT_PACKED_INT4>(), plain);
    case MT_PACKED_NVFP4:
        return f(std::integral_constant<int, MT_PACKED_NVFP4>(), plain);
    default:
        return f(std::integral_constant<int, MT_PACKED_FP8>(), plain);
    }
}

/* mt_f32_to_e4m3(). */
static __device__ __forceinline__ uint32_t e4m3_of(float x)
{
    uint32_t u = magnitude(x), sign = bits_of_float(x) >> 24 & 0x80u;
    uint32_t normal = ((u + 0x7ffffu + (u >> 20 & 1)) >> 20) - (120u << 3);
    uint32_t small = bits_of_float(float_of_bits(u) + 0x1p14f) - 0x46800000u;
    uint32_t mag = u < 0x3c800000u ? small : normal;
    mag = u > 0x43e00000u ? 0x7eu : mag;
    return (u >= 0x7f800000u ? 0x7fu : mag) | sign;
}

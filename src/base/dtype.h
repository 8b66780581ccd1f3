/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/** Element types of device buffers and state planes; AUTO: a setting that is not resolved yet. E4M3: the operands of
 * products in FP8 (Micikevicius et al. 2022), codes with a scale for the whole matrix; nothing else is stored so. */
enum mt_dtype { MT_DTYPE_AUTO = -1, MT_F32, MT_BF16, MT_E4M3 };

static inline size_t mt_dtype_size(enum mt_dtype t)
{
    return t == MT_F32 ? 4 : t == MT_E4M3 ? 1 : 2;
}

static inline const char *mt_dtype_name(enum mt_dtype t)
{
    return t == MT_F32 ? "f32" : t == MT_E4M3 ? "e4m3" : "bf16";
}

static inline uint32_t mt_f32_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static inline float mt_f32_from_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline float mt_bf16_to_f32(uint16_t h)
{
    return mt_f32_from_bits((uint32_t)h << 16);
}

/** Round to nearest even; a NaN stays a NaN (its quiet bit is set). */
static inline uint16_t mt_f32_to_bf16(float f)
{
    uint32_t u = mt_f32_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

/**
 * The FP32 master as two 16-bit planes: `hi` is the bf16 weight that is streamed, `lo` the rest.
 * Exact for every bit pattern: join(split(u)) == u. `hi` rounds half away from zero.
 */
static inline void mt_master_split(float master, uint16_t *hi, uint16_t *lo)
{
    uint32_t u = mt_f32_bits(master);
    *hi = (uint16_t)((u + 0x8000u) >> 16);
    *lo = (uint16_t)u;
}

static inline float mt_master_join(uint16_t hi, uint16_t lo)
{
    return mt_f32_from_bits(((uint32_t)hi << 16) + (uint32_t)(int32_t)(int16_t)lo);
}

/** Masters of trained weights: of 32 bits; the upper 24 of them, with `lo` of a byte; or `hi` alone. */
enum mt_master { MT_MASTER_F32, MT_MASTER_24BIT, MT_MASTER_BF16 };
enum { MT_N_MASTERS = MT_MASTER_BF16 + 1 };
#define MT_MASTER_NAMES "f32|24bit|bf16"

/** Bytes of `lo`. */
static inline size_t mt_master_lo_bytes(enum mt_master master)
{
    return master == MT_MASTER_F32 ? 2 : master == MT_MASTER_24BIT ? 1 : 0;
}

/**
 * A master of 24 bits, rounded half away from zero; back, it is mt_master_join(hi, lo << 8). `hi` is rounded from the
 * 24 bits, so that it may be infinite from 0x7f7f7f80 on.
 */
static inline void mt_master_split24(uint32_t u, uint16_t *hi, uint8_t *lo)
{
    uint32_t u24 = (u + 0x80u) >> 8;
    *hi = (uint16_t)((u24 + 0x80u) >> 8);
    *lo = (uint8_t)u24;
}

/* Exact. The exponent is moved by a product, which makes subnormal numbers normal; without branches. */
static inline float mt_f16_to_f32(uint16_t h)
{
    float f = mt_f32_from_bits((uint32_t)(h & 0x7fff) << 13) * 0x1p112f;
    uint32_t special = (h & 0x7c00) == 0x7c00 ? 0x7f800000u : 0; /* infinity, NaN */
    return mt_f32_from_bits(mt_f32_bits(f) | special | (uint32_t)(h & 0x8000) << 16);
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups of 16 numbers in the vectors of the instruction set that a file is compiled for; one number without any.
 * Operators are GCC's: those of C for each lane. Only what they lack, or make slow, is named here.
 *
 * AVX2 packs and unpacks halves of a vector apart: with the middle quarters exchanged before and after, numbers keep
 * their order.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "base/dtype.h"

/* The form of an expression for the instruction set: AVX-512, AVX2, none. */
#if defined(__AVX512F__)
enum { MT_LANES = 16, MT_VECTORS = 1 };
#define MT_LANES_FORM(wide, half, one) wide
#elif defined(__AVX2__)
enum { MT_LANES = 8, MT_VECTORS = 2 };
#define MT_LANES_FORM(wide, half, one) half
#else
enum { MT_LANES = 1, MT_VECTORS = 1 };
#define MT_LANES_FORM(wide, half, one) one
#endif
enum { MT_GROUP = MT_LANES * MT_VECTORS };

#ifdef __AVX2__
typedef float mt_lanes __attribute__((vector_size(4 * MT_LANES)));
typedef uint32_t mt_lanes_u __attribute__((vector_size(4 * MT_LANES)));
typedef int32_t mt_lanes_i __attribute__((vector_size(4 * MT_LANES)));
#define MT_LANES_CONVERT(x, type) __builtin_convertvector(x, type)
#define MT_LANES_MASK(condition) ((mt_lanes_u)(condition))
#define MT_LANES_BITS(x) ((mt_lanes_u)(x))
#define MT_LANES_OF(u) ((mt_lanes)(u))
#else
typedef float mt_lanes;
typedef uint32_t mt_lanes_u;
typedef int32_t mt_lanes_i;
#define MT_LANES_CONVERT(x, type) ((type)(x))
#define MT_LANES_MASK(condition) (-(mt_lanes_u)(condition))
#define MT_LANES_BITS(x) mt_f32_bits(x)
#define MT_LANES_OF(u) mt_f32_from_bits(u)
#endif

/* --- between memory, at any address, and vectors -------------------------------------------------------------- */

static inline mt_lanes mt_lanes_load(const float *p)
{
    mt_lanes x;
    memcpy(&x, p, sizeof(x));
    return x;
}

static inline void mt_lanes_store(float *p, mt_lanes x)
{
    memcpy(p, &x, sizeof(x));
}

static inline mt_lanes_u mt_lanes_load_u32(const uint32_t *p)
{
    mt_lanes_u x;
    memcpy(&x, p, sizeof(x));
    return x;
}

/* Bytes of codes, with and without a sign. */
static inline mt_lanes_i mt_lanes_load_byte(const uint8_t *p, bool sign)
{
#if defined(__AVX512F__)
    __m128i x = _mm_loadu_si128((const __m128i *)(const void *)p);
    return (mt_lanes_i)(sign ? _mm512_cvtepi8_epi32(x) : _mm512_cvtepu8_epi32(x));
#elif defined(__AVX2__)
    __m128i x = _mm_loadl_epi64((const __m128i *)(const void *)p);
    return (mt_lanes_i)(sign ? _mm256_cvtepi8_epi32(x) : _mm256_cvtepu8_epi32(x));
#else
    return sign ? (int8_t)*p : *p;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
enum { MT_LANES_MIDDLE = 0xd8 };

static inline __m256i mt_lanes_quarters(const void *p)
{
    return _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i *)p), MT_LANES_MIDDLE);
}

static inline void mt_lanes_unpack(mt_lanes_u x[MT_VECTORS], __m256i low, __m256i high)
{
    x[0] = (mt_lanes_u)_mm256_unpacklo_epi16(low, high);
    x[1] = (mt_lanes_u)_mm256_unpackhi_epi16(low, high);
}

/* (hi << 16) + lo, lo with a sign. */
static inline void mt_lanes_join(mt_lanes_u x[MT_VECTORS], __m256i hi, __m256i lo)
{
    mt_lanes_unpack(x, lo, _mm256_add_epi16(hi, _mm256_srai_epi16(lo, 15)));
}
#endif

/* A group of numbers of 16 bits, zero-extended. */
static inline void mt_lanes_load_u16(mt_lanes_u x[MT_VECTORS], const uint16_t *p)
{
#if defined(__AVX512F__)
    x[0] = (mt_lanes_u)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
#elif defined(__AVX2__)
    mt_lanes_unpack(x, mt_lanes_quarters(p), _mm256_setzero_si256());
#else
    x[0] = *p;
#endif
}

/* A group of bf16. */
static inline void mt_lanes_load_bf16(mt_lanes_u x[MT_VECTORS], const uint16_t *p)
{
#if defined(__AVX2__) && !defined(__AVX512F__)
    mt_lanes_unpack(x, _mm256_setzero_si256(), mt_lanes_quarters(p));
#else
    mt_lanes_load_u16(x, p);
    x[0] <<= 16;
#endif
}

/* Bits of masters of 32 and of 24 bits. */
static inline void mt_lanes_load_master(mt_lanes_u x[MT_VECTORS], const uint16_t *hi, const uint16_t *lo)
{
#if defined(__AVX512F__)
    mt_lanes_load_bf16(x, hi);
    x[0] += (mt_lanes_u)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)lo));
#elif defined(__AVX2__)
    mt_lanes_join(x, mt_lanes_quarters(hi), mt_lanes_quarters(lo));
#else
    x[0] = mt_f32_bits(mt_master_join(*hi, *lo));
#endif
}

static inline void mt_lanes_load_master24(mt_lanes_u x[MT_VECTORS], const uint16_t *hi, const uint8_t *lo)
{
#if defined(__AVX2__) && !defined(__AVX512F__)
    __m128i low = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(const void *)lo), MT_LANES_MIDDLE);
    mt_lanes_join(x, mt_lanes_quarters(hi), _mm256_slli_epi16(_mm256_cvtepu8_epi16(low), 8));
#else
    mt_lanes_load_bf16(x, hi);
    x[0] += (mt_lanes_u)mt_lanes_load_byte(lo, true) << 8;
#endif
}

/* Numbers below 2^16. */
static inline void mt_lanes_store_u16(uint16_t *p, const mt_lanes_u x[MT_VECTORS])
{
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi32_epi16((__m512i)x[0]));
#elif defined(__AVX2__)
    __m256i packed = _mm256_packus_epi32((__m256i)x[0], (__m256i)x[1]);
    _mm256_storeu_si256((__m256i *)(void *)p, _mm256_permute4x64_epi64(packed, MT_LANES_MIDDLE));
#else
    *p = (uint16_t)x[0];
#endif
}

/* Numbers that a byte has, with or without a sign. */
static inline void mt_lanes_store_byte(uint8_t *p, const mt_lanes_i x[MT_VECTORS], bool sign)
{
#if defined(__AVX512F__)
    (void)sign;
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8((__m512i)x[0]));
#elif defined(__AVX2__)
    __m256i words = _mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]);
    words = sign ? _mm256_packs_epi16(words, words) : _mm256_packus_epi16(words, words);
    __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
    _mm_storeu_si128((__m128i *)(void *)p, _mm_unpacklo_epi32(low, high));
#else
    (void)sign;
    *p = (uint8_t)x[0];
#endif
}

/* --- what operators lack -------------------------------------------------------------------------------------- */

static inline mt_lanes_u mt_lanes_choose(mt_lanes_u mask, mt_lanes_u yes, mt_lanes_u no)
{
#if defined(__AVX2__) && !defined(__AVX512F__)
    return (mt_lanes_u)_mm256_blendv_epi8((__m256i)no, (__m256i)yes, (__m256i)mask);
#else
    return (yes & mask) | (no & ~mask);
#endif
}

/* Whether a mask has any lane. */
static inline bool mt_lanes_any(mt_lanes_u mask)
{
    return MT_LANES_FORM(_mm512_test_epi32_mask((__m512i)mask, (__m512i)mask),
                         _mm256_movemask_epi8((__m256i)mask), mask);
}

/* Of numbers below 2^31. */
static inline mt_lanes_u mt_lanes_at_least(mt_lanes_u x, uint32_t least)
{
    return MT_LANES_MASK((mt_lanes_i)x > (int32_t)(least - 1));
}

static inline mt_lanes_u mt_lanes_size(mt_lanes_u x)
{
    return x & 0x7fffffffu;
}

static inline mt_lanes mt_lanes_abs(mt_lanes x)
{
    return MT_LANES_OF(mt_lanes_size(MT_LANES_BITS(x)));
}

/* x, or `least` where it is not above: where it is no number too. */
static inline mt_lanes mt_lanes_above(mt_lanes x, float least)
{
    return MT_LANES_FORM((mt_lanes)_mm512_max_ps((__m512)x, _mm512_set1_ps(least)),
                         (mt_lanes)_mm256_max_ps((__m256)x, _mm256_set1_ps(least)), x > least ? x : least);
}

/* x, or `least` where it is less; what is no number stays. */
static inline mt_lanes mt_lanes_least(mt_lanes x, float least)
{
    return MT_LANES_FORM((mt_lanes)_mm512_max_ps(_mm512_set1_ps(least), (__m512)x),
                         (mt_lanes)_mm256_max_ps(_mm256_set1_ps(least), (__m256)x), x < least ? least : x);
}

static inline mt_lanes_u mt_lanes_max(mt_lanes_u a, mt_lanes_u b)
{
    return MT_LANES_FORM((mt_lanes_u)_mm512_max_epu32((__m512i)a, (__m512i)b),
                         (mt_lanes_u)_mm256_max_epu32((__m256i)a, (__m256i)b), a > b ? a : b);
}

/* The largest of all lanes. */
static inline uint32_t mt_lanes_most(mt_lanes_u x)
{
#if defined(__AVX512F__)
    return _mm512_reduce_max_epu32((__m512i)x);
#elif defined(__AVX2__)
    __m128i most = _mm_max_epu32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4e));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(most);
#else
    return x;
#endif
}

static inline uint32_t mt_lanes_sum(mt_lanes_u x)
{
    uint32_t lane[MT_LANES], sum = 0;
    memcpy(lane, &x, sizeof(lane));
    for (int i = 0; i < MT_LANES; i++)
        sum += lane[i];
    return sum;
}

static inline mt_lanes mt_lanes_sqrt(mt_lanes x)
{
    return MT_LANES_FORM((mt_lanes)_mm512_sqrt_ps((__m512)x), (mt_lanes)_mm256_sqrt_ps((__m256)x), __builtin_sqrtf(x));
}

static inline mt_lanes mt_lanes_floor(mt_lanes x)
{
    return MT_LANES_FORM((mt_lanes)_mm512_floor_ps((__m512)x),
                         (mt_lanes)_mm256_floor_ps((__m256)x), __builtin_floorf(x));
}

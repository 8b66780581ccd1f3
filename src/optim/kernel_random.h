/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Philox of consecutive blocks, in the lanes of a vector: compilers do not find products of 32 bits in loops over
 * mt_philox(). A lane has 64 bits, of which the lower half counts, since that is what the product reads.
 */
#pragma once

#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "base/philox.h"

enum { MT_KERNEL_LANES = 16 }; /* at most: blocks are made in whole vectors */

#ifdef __AVX2__
#ifdef __AVX512F__
typedef uint64_t mt_kernel_lanes __attribute__((vector_size(64)));

static inline mt_kernel_lanes mt_kernel_product(mt_kernel_lanes a, uint32_t b)
{
    return (mt_kernel_lanes)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
}
#else
typedef uint64_t mt_kernel_lanes __attribute__((vector_size(32)));

static inline mt_kernel_lanes mt_kernel_product(mt_kernel_lanes a, uint32_t b)
{
    return (mt_kernel_lanes)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
}
#endif

/* Of two vectors' lanes of 64 bits: a0 b0 a1 b1 ... */
static inline void mt_kernel_interleave(uint32_t *random, mt_kernel_lanes a, mt_kernel_lanes b)
{
#ifdef __AVX512F__
    mt_kernel_lanes words[2] = {__builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11),
                                __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)};
#else
    mt_kernel_lanes words[2] = {__builtin_shufflevector(a, b, 0, 4, 1, 5), __builtin_shufflevector(a, b, 2, 6, 3, 7)};
#endif
    memcpy(random, words, sizeof(words));
}

/* Words of blocks [first, first + n) and some more. Two vectors at a time, since each waits for its products. */
static inline void mt_kernel_random(uint32_t *restrict random, uint64_t seed, uint64_t stream, uint64_t first, size_t n)
{
    enum { LANES = sizeof(mt_kernel_lanes) / sizeof(uint64_t) };
    const mt_kernel_lanes none = {0};
    mt_kernel_lanes count;
    for (uint64_t i = 0; i < LANES; i++)
        count[i] = first + i;
    for (size_t at = 0; at < n; at += 2 * LANES, count += 2 * LANES) {
        mt_kernel_lanes c0[2] = {count, count + LANES}, c1[2] = {c0[0] >> 32, c0[1] >> 32};
        mt_kernel_lanes c2[2] = {none + (uint32_t)stream, none + (uint32_t)stream};
        mt_kernel_lanes c3[2] = {none + (stream >> 32), none + (stream >> 32)};
        mt_kernel_lanes k0 = none + (uint32_t)seed, k1 = none + (seed >> 32);
        for (int round = 0; round < 10; round++) {
            for (int i = 0; i < 2; i++) {
                mt_kernel_lanes p0 = mt_kernel_product(c0[i], 0xD2511F53u), p1 = mt_kernel_product(c2[i], 0xCD9E8D57u);
                c0[i] = p1 >> 32 ^ c1[i] ^ k0;
                c2[i] = p0 >> 32 ^ c3[i] ^ k1;
                c1[i] = p1;
                c3[i] = p0;
            }
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        for (size_t i = 0; i < 2; i++)
            mt_kernel_interleave(random + 4 * (at + i * LANES), (c0[i] & 0xffffffffu) | c1[i] << 32,
                                 (c2[i] & 0xffffffffu) | c3[i] << 32);
    }
}
#else
static inline void mt_kernel_random(uint32_t *restrict random, uint64_t seed, uint64_t stream, uint64_t first, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        struct mt_philox block = mt_philox(seed, stream, first + i);
        memcpy(random + 4 * i, block.v, sizeof(block.v));
    }
}
#endif

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

/**
 * Philox4x32-10, a counter-based generator (Salmon et al. 2011): the same key and counter always give the same
 * 128 bits. A stream is named by (seed, stream); `index` counts.
 */
struct mt_philox {
    uint32_t v[4];
};

/** Inline, since loops over many blocks call it. */
static inline struct mt_philox mt_philox(uint64_t seed, uint64_t stream, uint64_t index)
{
    uint32_t c0 = (uint32_t)index, c1 = (uint32_t)(index >> 32);
    uint32_t c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (struct mt_philox){{c0, c1, c2, c3}};
}

/** Fills dst[i] with a normal number of mean 0 that depends on (seed, stream, first + i) only. */
void mt_philox_normal(float *dst, size_t n, uint64_t first, uint64_t seed, uint64_t stream,
                      float std);

/** Uniform in [0, 1), 53 bits. */
double mt_philox_uniform(uint64_t seed, uint64_t stream, uint64_t index);

/**
 * The image of `i` under a pseudo-random permutation of [0, n) named by (seed, stream): a four-round
 * Feistel network with cycle walking, O(1) time and no memory.
 */
uint64_t mt_permute(uint64_t i, uint64_t n, uint64_t seed, uint64_t stream);

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_BASE_PHILOX_H
#define MT_BASE_PHILOX_H

#include <stddef.h>
#include <stdint.h>

/**
 * Philox4x32-10, a counter-based generator (Salmon et al. 2011): the same key and counter always give the same
 * 128 bits. A stream is named by (seed, stream); `index` counts.
 */
struct mt_philox {
    uint32_t v[4];
};

struct mt_philox mt_philox(uint64_t seed, uint64_t stream, uint64_t index);

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

#endif

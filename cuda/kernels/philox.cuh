/* SPDX-License-Identifier: Apache-2.0 */
/* Philox4x32-10 (Salmon et al. 2011), as base/philox.h: the key is the seed, x and y the index, z and w the stream. */
#pragma once

#include "launch.cuh"

static __device__ __forceinline__ uint4 philox(uint32_t k0, uint32_t k1, uint4 c)
{
    MT_UNROLL(10)
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c.x, p1 = static_cast<uint64_t>(0xCD9E8D57u) * c.z;
        c.x = static_cast<uint32_t>(p1 >> 32) ^ c.y ^ k0;
        c.z = static_cast<uint32_t>(p0 >> 32) ^ c.w ^ k1;
        c.y = static_cast<uint32_t>(p1);
        c.w = static_cast<uint32_t>(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

/* Word k of 4, of a block that stays in registers. */
static __device__ __forceinline__ uint32_t word_of(uint4 r, unsigned k)
{
    return k == 0 ? r.x : k == 1 ? r.y : k == 2 ? r.z : r.w;
}

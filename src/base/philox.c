/* SPDX-License-Identifier: Apache-2.0 */
#include "base/philox.h"

#include <math.h>


/* Box-Muller on one block of four words gives four numbers. */
static void normal4(double out[4], struct mt_philox r)
{
    for (int k = 0; k < 4; k += 2) {
        double u = (r.v[k] + 0.5) * 0x1p-32, a = r.v[k + 1] * 0x1p-32 * 6.283185307179586;
        double s = sqrt(-2.0 * log(u));
        out[k] = s * cos(a);
        out[k + 1] = s * sin(a);
    }
}

void mt_philox_normal(float *dst, size_t n, uint64_t first, uint64_t seed, uint64_t stream,
                      float std)
{
    double z[4];
    uint64_t block = UINT64_MAX;
    for (size_t i = 0; i < n; i++) {
        uint64_t at = first + i;
        if (at / 4 != block) {
            block = at / 4;
            normal4(z, mt_philox(seed, stream, block));
        }
        dst[i] = (float)(z[at % 4] * std);
    }
}

double mt_philox_uniform(uint64_t seed, uint64_t stream, uint64_t index)
{
    struct mt_philox r = mt_philox(seed, stream, index);
    return (double)((((uint64_t)r.v[0] << 32) | r.v[1]) >> 11) * 0x1p-53;
}

uint64_t mt_permute(uint64_t i, uint64_t n, uint64_t seed, uint64_t stream)
{
    if (n < 2)
        return i;
    int half = (64 - __builtin_clzll(n - 1) + 1) / 2;
    uint64_t mask = (UINT64_C(1) << half) - 1;
    do {
        uint64_t l = i >> half, r = i & mask;
        for (uint64_t round = 0; round < 4; round++) {
            struct mt_philox h = mt_philox(seed ^ (round << 56), stream, r);
            uint64_t f = (((uint64_t)h.v[0] << 32) | h.v[1]) & mask;
            uint64_t t = l ^ f;
            l = r;
            r = t;
        }
        i = (l << half) | r;
    } while (i >= n);
    return i;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "base/sum64.h"

#include <xxhash.h>

#include "base/isa.h"
#include "base/sum64_isa.h"

uint64_t mt_sum64(const void *data, size_t bytes, uint64_t seed)
{
#ifdef __x86_64__
    if (mt_has_avx512())
        return mt_sum64_avx512(data, bytes, seed);
    if (mt_has_avx2())
        return mt_sum64_avx2(data, bytes, seed);
#endif
    return XXH3_64bits_withSeed(data, bytes, seed);
}

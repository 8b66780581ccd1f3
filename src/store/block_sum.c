/* SPDX-License-Identifier: Apache-2.0 */
#include "store/block_sum.h"

#include <xxhash.h>

#include "base/mem.h"

uint64_t mt_block_sum(const void *data, size_t bytes)
{
    return XXH3_64bits(data, bytes);
}

void mt_block_sums(uint64_t *sum, size_t at, const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += MT_SUM_BLOCK)
        sum[(at + i) / MT_SUM_BLOCK] = mt_block_sum((const char *)data + i, MT_MIN((size_t)MT_SUM_BLOCK, bytes - i));
}

uint64_t mt_tensor_sum(const uint64_t *sum, size_t n_blocks)
{
    return XXH3_64bits(sum, n_blocks * sizeof(*sum));
}

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_STORE_BLOCK_SUM_H
#define MT_STORE_BLOCK_SUM_H

#include <stddef.h>
#include <stdint.h>

/**
 * What a tensor's bytes are known by: the XXH3 of each block of MT_SUM_BLOCK bytes, counted from the tensor's first
 * byte (the last block may be shorter), and the XXH3 of these sums, in order, each little-endian. Blocks can be summed
 * in any order and checked one by one.
 */
enum { MT_SUM_BLOCK = 1 << 20 };

static inline size_t mt_sum_blocks(size_t bytes)
{
    return (bytes + MT_SUM_BLOCK - 1) / MT_SUM_BLOCK;
}
/** Of one block. */
uint64_t mt_block_sum(const void *data, size_t bytes);
/** Sums of the blocks of bytes [at, at + bytes) of a tensor, into sum[]; both ends are a block's, or the tensor's. */
void mt_block_sums(uint64_t *sum, size_t at, const void *data, size_t bytes);
/** Of the tensor, from the sums of all its blocks. */
uint64_t mt_tensor_sum(const uint64_t *sum, size_t n_blocks);

#endif

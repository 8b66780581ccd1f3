/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/**
 * Checksum of a tensor's bytes in a file: the XXH3 of each block of MT_SUM_BLOCK bytes, from the first byte on (the
 * last block may be shorter), and the XXH3 of these sums, in order, each little-endian. Blocks can be summed in any
 * order and checked one by one.
 */
enum { MT_SUM_BLOCK = 1 << 20 };

static inline size_t mt_sum_blocks(size_t bytes)
{
    return (bytes + MT_SUM_BLOCK - 1) / MT_SUM_BLOCK;
}
/** Sum of one block. */
uint64_t mt_block_sum(const void *data, size_t bytes);
/** Sum of all bytes, from the sums of the blocks. */
uint64_t mt_tensor_sum(const uint64_t *sum, size_t n_blocks);

/** Computes the same sum from pieces of any size, in order. */
struct mt_summer {
    struct XXH3_state_s *block, *whole;
    struct XXH3_state_s *plain; /* the XXH3 of all bytes; NULL: not wanted */
    size_t n; /* bytes of the current block so far */
};
int mt_summer_init(struct mt_summer *s, struct mt_err *err);
/** Before the first bytes: mt_summer_plain() is wanted, too. */
int mt_summer_want_plain(struct mt_summer *s, struct mt_err *err);
/** The XXH3 of the bytes since it began; after mt_summer_end(), too. */
uint64_t mt_summer_plain(const struct mt_summer *s);
/** Accepts an all-zero struct. */
void mt_summer_finish(struct mt_summer *s);
void mt_summer_begin(struct mt_summer *s);
/** s NULL: the bytes are not summed. */
void mt_summer_add(struct mt_summer *s, const void *data, size_t bytes);
uint64_t mt_summer_end(struct mt_summer *s);

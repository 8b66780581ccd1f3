/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "store/io/job_pool.h"

/**
 * Checksums of an area of the disk (a plane, a spilled activation), in host memory: one for each block. Blocks end at
 * multiples of the block size, and at the ends of the area and of the pieces in which it is transferred.
 *
 * A sum is the XXH3 of the bytes, seeded with their address on the disk. Each write of a block replaces its sum; each
 * read is compared with it. So any data that is not the newest write to that address is detected: changed bits, a lost
 * write, an older write, another block.
 *
 * Spans of requests on such an area must begin and end at ends of blocks.
 */
struct mt_disk_sums {
    uint64_t *sum;  /* [mt_disk_sums_n()]; 0: the block was never written and must read as zeros */
    uint64_t offset, bytes; /* the area */
    uint64_t piece; /* bytes of the pieces in which it is transferred; 0: whole */
    size_t block;   /* mt_disk_block() */
    const char *what; /* for messages: "first moments"; and the unit */
    size_t unit;
};

/** Number of sums of an area at any address. */
size_t mt_disk_sums_n(uint64_t bytes, uint64_t piece, size_t block);
/** Begin and end of the block that contains an address of the area. */
uint64_t mt_disk_block_begin(const struct mt_disk_sums *s, uint64_t offset);
uint64_t mt_disk_block_end(const struct mt_disk_sums *s, uint64_t offset);
/** The sum of the block that contains an address. */
uint64_t *mt_disk_sum_of(const struct mt_disk_sums *s, uint64_t offset);

/** One block to be summed, by a pool or by job.run() on the caller's thread. */
struct mt_sum_job {
    struct mt_job job; /* first */
    const void *buf;
    size_t bytes;
    uint64_t seed;
    uint64_t sum; /* never 0 */
    bool zeros;   /* all bytes are 0 */
};
struct mt_sum_job mt_sum_job(const void *buf, size_t bytes, uint64_t seed);

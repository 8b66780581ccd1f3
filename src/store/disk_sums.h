/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_STORE_DISK_SUMS_H
#define MT_STORE_DISK_SUMS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

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

/** One block to be summed; the caller keeps it, and its data, until mt_sum_pool_take() returns it. */
struct mt_sum_job {
    const void *buf;
    size_t bytes;
    uint64_t seed;
    uint64_t sum; /* never 0 */
    bool zeros;   /* all bytes are 0 */
    struct mt_sum_job *next;
};

/** Computes sums on its own threads, of which each sums about 10 GB/s. Thread-safety: one thread adds and takes. */
typedef struct mt_sum_pool mt_sum_pool;

/** `wake` is called on a thread of the pool when a job has ended and none was waiting to be taken. */
int mt_sum_pool_create(mt_sum_pool **out, int n_threads, void (*wake)(void *ctx), void *ctx, struct mt_err *err);
/** Accepts NULL. No job may be under way. */
void mt_sum_pool_destroy(mt_sum_pool **p);
void mt_sum_pool_add(mt_sum_pool *p, struct mt_sum_job *job);
/** Takes a job that has ended; NULL: there is none. */
struct mt_sum_job *mt_sum_pool_take(mt_sum_pool *p);
/** CPU time of all threads so far. */
int64_t mt_sum_pool_ns(mt_sum_pool *p);
/** Sums a block on the caller's thread. */
void mt_sum_job_run(struct mt_sum_job *job);

#endif

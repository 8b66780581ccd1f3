/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_STORE_DISK_SUMS_H
#define MT_STORE_DISK_SUMS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/**
 * Sums of an area of the disk (a plane, a spilled activation), held in host memory: one for each block. A block is
 * what lies between multiples of the block size, cut at the ends of the area and of the pieces that it is moved in.
 *
 * A sum is the XXH3 of the bytes, seeded with their address on the disk. It is made when the block is written, and
 * replaces the one before; a read must agree with it. So whatever a drive returns that is not the newest write
 * to that address shows: turned bits, a write that was lost, an older write, another block.
 *
 * Spans of requests on such an area begin and end where blocks do.
 */
struct mt_disk_sums {
    uint64_t *sum;  /* [mt_disk_sums_n()], zero at first: never written, reads as zeros */
    uint64_t offset, bytes; /* the area */
    uint64_t piece; /* bytes of the pieces that it is moved in; 0: moved whole */
    size_t block;   /* mt_disk_block() */
    const char *what; /* in messages: "first moments", of which unit */
    size_t unit;
};

/** Sums of an area, wherever it lies on the disk. */
size_t mt_disk_sums_n(uint64_t bytes, uint64_t piece, size_t block);
/** Where the block of an address in the area begins and ends. */
uint64_t mt_disk_block_begin(const struct mt_disk_sums *s, uint64_t offset);
uint64_t mt_disk_block_end(const struct mt_disk_sums *s, uint64_t offset);
/** The sum of the block of an address. */
uint64_t *mt_disk_sum_of(const struct mt_disk_sums *s, uint64_t offset);

/** One block to be summed; the caller's until it has been taken back. */
struct mt_sum_job {
    const void *buf;
    size_t bytes;
    uint64_t seed;
    uint64_t sum; /* never 0 */
    bool zeros;   /* all of it */
    struct mt_sum_job *next;
};

/** Sums on threads of their own: one takes about a core for 10 GB/s. Thread-safety: one thread adds and takes. */
typedef struct mt_sum_pool mt_sum_pool;

/** `wake` is called on a thread of the pool whenever a job has ended. */
int mt_sum_pool_create(mt_sum_pool **out, int n_threads, void (*wake)(void *ctx), void *ctx, struct mt_err *err);
/** Accepts NULL. No job may be under way. */
void mt_sum_pool_destroy(mt_sum_pool **p);
void mt_sum_pool_add(mt_sum_pool *p, struct mt_sum_job *job);
/** A job that has ended, or NULL. */
struct mt_sum_job *mt_sum_pool_take(mt_sum_pool *p);
/** CPU time of all threads so far. */
int64_t mt_sum_pool_ns(mt_sum_pool *p);
/** Sums a block on the caller's thread. */
void mt_sum_job_run(struct mt_sum_job *job);

#endif

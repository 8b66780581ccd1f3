/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"

/**
 * A team of threads for data-parallel loops. One loop runs at a time; the caller takes part as
 * thread 0. Chunks are handed out dynamically, so a loop's result may not depend on which thread ran
 * a chunk: divide the work by shape, never by thread count.
 *
 * Used instead of OpenMP so that several teams (compute, optimizer) share the cores without
 * spinning against each other, and so that ThreadSanitizer sees the synchronisation.
 *
 * Thread-safety: mt_pool_run() from one thread at a time.
 */
typedef struct mt_pool mt_pool;

typedef void (*mt_pool_fn)(void *ctx, size_t chunk, int thread);

struct mt_pool_params {
    const char *name;  /* name of the threads, at most 12 characters */
    int n_threads;     /* including the caller; at least 1 */
    const int *cpus;   /* [n_threads] CPU that each thread is bound to, or NULL; entry 0 is not used */
    void (*thread_init)(void); /* called once in each thread but the caller's; may be NULL */
};

int mt_pool_create(mt_pool **out, const struct mt_pool_params *params, struct mt_err *err);
/** Joins the threads; accepts NULL; sets *pool to NULL. */
void mt_pool_destroy(mt_pool **pool);
int mt_pool_n_threads(const mt_pool *pool);
/** Calls fn(ctx, chunk, thread) for each chunk in [0, n_chunks); returns when all have ended. pool NULL: on the
 * calling thread alone, so that a loop can run within a chunk of another. */
void mt_pool_run(mt_pool *pool, mt_pool_fn fn, void *ctx, size_t n_chunks);

/**
 * Lanes divide a pool's threads: in mt_pool_run_in_lanes() a thread takes the chunks of its own lane first, then those
 * that other lanes have left, so that no thread waits while there is work. A new pool has one lane.
 *
 * Sets the lane of a thread, in [0, n_lanes); n_lanes is the same in all calls, and at most MT_POOL_MAX_LANES. No loop
 * may run.
 */
enum { MT_POOL_MAX_LANES = 64 };
void mt_pool_set_lane(mt_pool *pool, int thread, int lane, int n_lanes);
/** Chunk c is number `first` + c of a row that is divided into stripes of `stripe` chunks; stripe s belongs to lane
 * s modulo the pool's lanes. */
struct mt_pool_stripes {
    size_t first, stripe;
};
void mt_pool_run_in_lanes(mt_pool *pool, mt_pool_fn fn, void *ctx, size_t n_chunks, struct mt_pool_stripes stripes);

/** Lowers the calling thread's priority for good, so that other threads go first when all cores are busy. */
void mt_thread_gives_way(void);

/** Binds the calling thread to a CPU; does nothing if that is not allowed. */
void mt_bind_thread(int cpu);
/** Keeps the calling thread off a CPU, if it may run on others; else does nothing. */
void mt_keep_thread_off(int cpu);

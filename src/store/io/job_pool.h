/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

#include "base/err.h"

/** Work for another thread; the caller keeps it, and what it needs, until mt_job_pool_take() returns it. */
struct mt_job {
    void (*run)(struct mt_job *job); /* on a thread of the pool */
    struct mt_job *next;             /* used by the pool */
};

/**
 * Threads that do what would keep the thread of an I/O backend from its requests: they sum and copy what was read, or
 * are the backend without io_uring.
 *
 * Thread-safety: one thread adds and takes.
 */
typedef struct mt_job_pool mt_job_pool;

enum { MT_JOB_MAX_THREADS = 32 };

/** `name`: of the threads, at most 8 characters. `wake` is called on one of them when a job has ended and none was
 * waiting to be taken. n_threads: at most MT_JOB_MAX_THREADS are started. */
int mt_job_pool_create(mt_job_pool **out, const char *name, int n_threads, void (*wake)(void *ctx), void *ctx,
                       struct mt_err *err);
/** Accepts NULL. No job may be under way. */
void mt_job_pool_destroy(mt_job_pool **p);
void mt_job_pool_add(mt_job_pool *p, struct mt_job *job);
/** Takes a job that has ended; NULL: there is none. */
struct mt_job *mt_job_pool_take(mt_job_pool *p);
/** CPU time of all threads so far. */
int64_t mt_job_pool_ns(mt_job_pool *p);

/* SPDX-License-Identifier: Apache-2.0 */
#include "base/lock.h"
#include "base/pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "base/mem.h"
#include "base/thread.h"

struct worker {
    mt_pool *pool;
    pthread_t thread;
    int index, cpu, lane;
};

/* Chunks of a lane that are taken; a cache line each, as threads of other nodes count on the others. */
struct lane {
    _Alignas(64) atomic_size_t next;
};

struct mt_pool {
    int n_threads, n_started;
    struct worker *workers;
    void (*thread_init)(void);
    pthread_mutex_t lock;
    pthread_cond_t start, done;
    atomic_uint generation; /* of the loop; a change starts the workers */
    atomic_int busy;        /* workers inside the loop; changed under lock */
    bool open, stop;        /* whether a worker may still join the loop; under lock */
    mt_pool_fn fn;
    void *ctx;
    size_t n_chunks;
    struct mt_pool_stripes stripes;
    int n_lanes;
    struct lane lane[MT_POOL_MAX_LANES];
};

/* How often a worker polls for the next loop, and the caller for the end of one, before it sleeps: loops follow each
 * other quickly, and many are shorter than a sleep and a wake-up. */
enum { SPIN = 2000 };

void mt_bind_thread(int cpu)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

void mt_keep_thread_off(int cpu)
{
    cpu_set_t set;
    if (pthread_getaffinity_np(pthread_self(), sizeof(set), &set))
        return;
    CPU_CLR(cpu, &set);
    if (CPU_COUNT(&set))
        pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

void mt_thread_gives_way(void)
{
    enum { NICE = 5 }; /* whoever wakes up goes first, and a core without others is used as before */
    if (getpriority(PRIO_PROCESS, 0) < NICE)
        setpriority(PRIO_PROCESS, 0, NICE); /* of the thread alone, on Linux */
}

/* Runs chunks of a lane until none is left. They are counted from the beginning of the lane's first stripe, of which a
 * part may lie before the first chunk. */
static void drain_lane(mt_pool *p, int lane, int thread)
{
    size_t n = (size_t)p->n_lanes, stripe = p->stripes.stripe, from = p->stripes.first / stripe;
    size_t first_stripe = from + ((size_t)lane + n - from % n) % n;
    for (;;) {
        size_t i = atomic_fetch_add_explicit(&p->lane[lane].next, 1, memory_order_relaxed);
        size_t number = (first_stripe + i / stripe * n) * stripe + i % stripe;
        if (number >= p->stripes.first + p->n_chunks)
            return;
        if (number >= p->stripes.first)
            p->fn(p->ctx, number - p->stripes.first, thread);
    }
}

static void drain(mt_pool *p, int thread)
{
    for (int l = 0; l < p->n_lanes; l++)
        drain_lane(p, (p->workers[thread].lane + l) % p->n_lanes, thread);
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    mt_pool *p = w->pool;
    if (w->cpu >= 0)
        mt_bind_thread(w->cpu);
    if (p->thread_init)
        p->thread_init();
    unsigned seen = 0;
    for (;;) {
        for (int i = 0; i < SPIN; i++) {
            if (atomic_load_explicit(&p->generation, memory_order_relaxed) != seen)
                break;
            __builtin_ia32_pause();
        }
        pthread_mutex_lock(&p->lock);
        while (!p->stop && atomic_load(&p->generation) == seen)
            pthread_cond_wait(&p->start, &p->lock);
        seen = atomic_load(&p->generation);
        bool stop = p->stop, join = p->open;
        p->busy += join;
        pthread_mutex_unlock(&p->lock);
        if (stop)
            return NULL;
        if (!join) /* woke after the others had finished the loop */
            continue;
        drain(p, w->index);
        MT_LOCKED(&p->lock);
        if (--p->busy == 0)
            pthread_cond_signal(&p->done);
    }
}

int mt_pool_create(mt_pool **out, const struct mt_pool_params *params, struct mt_err *err)
{
    int n = MT_MAX(params->n_threads, 1);
    mt_pool *p = mt_alloc_aligned(sizeof(*p));
    if (p)
        memset(p, 0, sizeof(*p));
    if (!p || !(p->workers = mt_calloc((size_t)n, sizeof(*p->workers)))) {
        free(p);
        return mt_fail_nomem(err, "a thread pool", (unsigned long long)n);
    }
    p->n_threads = n;
    p->n_lanes = 1;
    p->thread_init = params->thread_init;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->start, NULL);
    pthread_cond_init(&p->done, NULL);
    for (int i = 1; i < n; i++) {
        struct worker *w = &p->workers[i];
        *w = (struct worker){.pool = p, .index = i, .cpu = params->cpus ? params->cpus[i] : -1};
        char name[16];
        snprintf(name, sizeof(name), "%.10s/%hu", params->name, (unsigned short)i);
        int rc = mt_thread_start(&w->thread, name, worker_main, w, err);
        if (rc) {
            mt_pool_destroy(&p);
            return rc;
        }
        p->n_started++;
    }
    *out = p;
    return 0;
}

void mt_pool_destroy(mt_pool **pool)
{
    mt_pool *p = *pool;
    if (!p)
        return;
    mt_raise(&p->lock, &p->start, &p->stop);
    for (int i = 1; i <= p->n_started; i++)
        pthread_join(p->workers[i].thread, NULL);
    pthread_cond_destroy(&p->start);
    pthread_cond_destroy(&p->done);
    pthread_mutex_destroy(&p->lock);
    free(p->workers);
    free(p);
    *pool = NULL;
}

int mt_pool_n_threads(const mt_pool *pool)
{
    return pool->n_threads;
}

void mt_pool_set_lane(mt_pool *p, int thread, int lane, int n_lanes)
{
    p->workers[thread].lane = lane;
    p->n_lanes = n_lanes;
}

void mt_pool_run(mt_pool *p, mt_pool_fn fn, void *ctx, size_t n_chunks)
{
    mt_pool_run_in_lanes(p, fn, ctx, n_chunks, (struct mt_pool_stripes){0, 1});
}

void mt_pool_run_in_lanes(mt_pool *p, mt_pool_fn fn, void *ctx, size_t n_chunks, struct mt_pool_stripes stripes)
{
    if (!p || p->n_threads == 1 || n_chunks <= 1) {
        for (size_t c = 0; c < n_chunks; c++)
            fn(ctx, c, 0);
        return;
    }
    pthread_mutex_lock(&p->lock);
    p->fn = fn;
    p->ctx = ctx;
    p->n_chunks = n_chunks;
    p->stripes = stripes;
    for (int l = 0; l < p->n_lanes; l++)
        atomic_store_explicit(&p->lane[l].next, 0, memory_order_relaxed);
    p->open = true;
    atomic_fetch_add(&p->generation, 1);
    pthread_cond_broadcast(&p->start);
    pthread_mutex_unlock(&p->lock);
    drain(p, 0);
    pthread_mutex_lock(&p->lock);
    p->open = false;
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < SPIN && atomic_load_explicit(&p->busy, memory_order_relaxed); i++)
        __builtin_ia32_pause();
    MT_LOCKED(&p->lock);
    while (p->busy)
        pthread_cond_wait(&p->done, &p->lock);
}

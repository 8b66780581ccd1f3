/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The blocks of a launch, handed out in an order drawn from the seed to the stream's own thread and a few
 * helpers. Helpers take no part in small grids: waking them costs more than it gives.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "emu.h"

enum { BLOCKS_WORTH_HELP = 4 };

struct job {
    const struct mt_emu_launch *launch;
    int device;
    uint64_t n_blocks, skipped, seed, first, stride; /* skipped: blocks before those that run */
    _Atomic uint64_t next;
    unsigned helpers; /* at work on it; under the pool's lock */
    struct job *queued;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER, idle = PTHREAD_COND_INITIALIZER;
static struct job *jobs;
static unsigned n_helpers;
static _Atomic uint64_t most_blocks; /* 0: any number */

void mt_emu_run_last_blocks(uint64_t n)
{
    atomic_store(&most_blocks, n);
}

static uint64_t gcd(uint64_t a, uint64_t b)
{
    return b ? gcd(b, a % b) : a;
}

static void run_blocks(struct job *j)
{
    uint64_t i;
    while ((i = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed)) < j->n_blocks)
        mt_emu_run_block(j->launch,
                         j->skipped + (uint64_t)(((unsigned __int128)i * j->stride + j->first) % j->n_blocks), j->seed);
}

static void *helper(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!jobs)
            pthread_cond_wait(&work, &lock);
        struct job *j = jobs;
        j->helpers++;
        pthread_mutex_unlock(&lock);
        mt_emu_device_access(j->device);
        run_blocks(j);
        pthread_mutex_lock(&lock);
        for (struct job **p = &jobs; *p; p = &(*p)->queued)
            if (*p == j) {
                *p = j->queued;
                break;
            }
        if (!--j->helpers)
            pthread_cond_broadcast(&idle);
    }
    return NULL;
}

static void offer(struct job *j)
{
    unsigned wanted = mt_emu_settings()->workers - 1;
    pthread_t t;
    pthread_mutex_lock(&lock);
    for (; n_helpers < wanted; n_helpers++) {
        if (pthread_create(&t, NULL, helper, NULL))
            mt_emu_die("cannot start a thread for blocks");
        pthread_detach(t);
    }
    j->queued = jobs;
    jobs = j;
    pthread_cond_broadcast(&work);
    pthread_mutex_unlock(&lock);
}

/* No block is left: takes the job back, and waits for the helpers that are still at one. */
static void withdraw(struct job *j)
{
    pthread_mutex_lock(&lock);
    for (struct job **p = &jobs; *p; p = &(*p)->queued)
        if (*p == j) {
            *p = j->queued;
            break;
        }
    while (j->helpers)
        pthread_cond_wait(&idle, &lock);
    pthread_mutex_unlock(&lock);
}

void mt_emu_run_grid(const struct mt_emu_launch *l, int device, uint64_t seed)
{
    struct job j = {.launch = l,
                    .device = device,
                    .n_blocks = (uint64_t)l->grid.x * l->grid.y * l->grid.z,
                    .seed = seed,
                    .stride = 1};
    uint64_t most = atomic_load(&most_blocks);
    if (most && j.n_blocks > most) {
        j.skipped = j.n_blocks - most;
        j.n_blocks = most;
    }
    if (seed && j.n_blocks > 1) {
        uint64_t random = seed;
        j.first = mt_emu_random(&random) % j.n_blocks;
        do
            j.stride = 1 + mt_emu_random(&random) % (j.n_blocks - 1);
        while (gcd(j.stride, j.n_blocks) != 1);
    }
    bool help = j.n_blocks >= BLOCKS_WORTH_HELP && mt_emu_settings()->workers > 1;
    if (help)
        offer(&j);
    run_blocks(&j);
    if (help)
        withdraw(&j);
}

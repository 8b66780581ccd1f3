/* SPDX-License-Identifier: Apache-2.0 */
#include "store/disk_sums.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <xxhash.h>

#include "base/mem.h"

/* --- blocks ---------------------------------------------------------------------------------- */

/* At most: whole blocks, and a part of a block at each end. */
static uint64_t sums_of_piece(uint64_t piece, size_t block)
{
    return piece / block + 2;
}

size_t mt_disk_sums_n(uint64_t bytes, uint64_t piece, size_t block)
{
    if (!bytes)
        return 0;
    if (!piece || piece > bytes)
        piece = bytes;
    return (size_t)((bytes + piece - 1) / piece * sums_of_piece(piece, block));
}

static uint64_t piece_of(const struct mt_disk_sums *s)
{
    return s->piece && s->piece < s->bytes ? s->piece : s->bytes;
}

static uint64_t piece_begin(const struct mt_disk_sums *s, uint64_t offset)
{
    return offset - (offset - s->offset) % piece_of(s);
}

uint64_t mt_disk_block_begin(const struct mt_disk_sums *s, uint64_t offset)
{
    return MT_MAX(offset - offset % s->block, piece_begin(s, offset));
}

uint64_t mt_disk_block_end(const struct mt_disk_sums *s, uint64_t offset)
{
    uint64_t end = MT_MIN(piece_begin(s, offset) + piece_of(s), s->offset + s->bytes);
    return MT_MIN(offset - offset % s->block + s->block, end);
}

uint64_t *mt_disk_sum_of(const struct mt_disk_sums *s, uint64_t offset)
{
    uint64_t begin = piece_begin(s, offset), piece = piece_of(s);
    uint64_t first = (begin - s->offset) / piece * sums_of_piece(piece, s->block);
    return s->sum + first + (offset / s->block - begin / s->block);
}

/* --- threads --------------------------------------------------------------------------------- */

enum { MAX_THREADS = 8 };

struct jobs {
    struct mt_sum_job *first, *last;
};

struct mt_sum_pool {
    pthread_mutex_t lock;
    pthread_cond_t work;
    struct jobs todo, ended;
    int64_t ns;
    bool quit;
    void (*wake)(void *ctx);
    void *ctx;
    pthread_t thread[MAX_THREADS];
    int n_threads;
};

static void push(struct jobs *l, struct mt_sum_job *job)
{
    job->next = NULL;
    if (l->last)
        l->last->next = job;
    else
        l->first = job;
    l->last = job;
}

static struct mt_sum_job *pop(struct jobs *l)
{
    struct mt_sum_job *job = l->first;
    if (job && !(l->first = job->next))
        l->last = NULL;
    return job;
}

void mt_sum_job_run(struct mt_sum_job *job)
{
    const char *p = job->buf;
    job->sum = XXH3_64bits_withSeed(p, job->bytes, job->seed);
    job->sum += !job->sum;
    job->zeros = !p[0] && !memcmp(p, p + 1, job->bytes - 1);
}

static int64_t thread_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void *sum_main(void *arg)
{
    mt_sum_pool *p = arg;
    int64_t counted = thread_ns();
    pthread_mutex_lock(&p->lock);
    for (;;) {
        struct mt_sum_job *job;
        while (!(job = pop(&p->todo)) && !p->quit)
            pthread_cond_wait(&p->work, &p->lock);
        if (!job)
            break;
        pthread_mutex_unlock(&p->lock);
        mt_sum_job_run(job);
        int64_t now = thread_ns();
        pthread_mutex_lock(&p->lock);
        p->ns += now - counted;
        counted = now;
        bool wake = !p->ended.first; /* else the owner has been woken and has not taken the jobs yet */
        push(&p->ended, job);
        if (!wake)
            continue;
        pthread_mutex_unlock(&p->lock);
        p->wake(p->ctx);
        pthread_mutex_lock(&p->lock);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

int mt_sum_pool_create(mt_sum_pool **out, int n_threads, void (*wake)(void *ctx), void *ctx, struct mt_err *err)
{
    mt_sum_pool *p = mt_calloc(1, sizeof(*p));
    int rc = 0;
    if (!p)
        return mt_fail_nomem(err, "the threads of the drives' sums", sizeof(*p));
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    p->wake = wake;
    p->ctx = ctx;
    for (int i = 0; i < MT_MIN(n_threads, (int)MAX_THREADS) && !rc; i++) {
        char name[16];
        int e = pthread_create(&p->thread[i], NULL, sum_main, p);
        if (e) {
            rc = mt_fail(err, MT_ERR_RUNTIME, -e, "cannot start the threads of the drives' sums: %s", strerror(e));
            break;
        }
        snprintf(name, sizeof(name), "mt-sum/%hu", (unsigned short)i);
        pthread_setname_np(p->thread[i], name);
        p->n_threads++;
    }
    if (rc) {
        mt_sum_pool_destroy(&p);
        return rc;
    }
    *out = p;
    return 0;
}

void mt_sum_pool_destroy(mt_sum_pool **pool)
{
    mt_sum_pool *p = *pool;
    if (!p)
        return;
    pthread_mutex_lock(&p->lock);
    p->quit = true;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->n_threads; i++)
        pthread_join(p->thread[i], NULL);
    pthread_cond_destroy(&p->work);
    pthread_mutex_destroy(&p->lock);
    free(p);
    *pool = NULL;
}

void mt_sum_pool_add(mt_sum_pool *p, struct mt_sum_job *job)
{
    pthread_mutex_lock(&p->lock);
    push(&p->todo, job);
    pthread_cond_signal(&p->work);
    pthread_mutex_unlock(&p->lock);
}

struct mt_sum_job *mt_sum_pool_take(mt_sum_pool *p)
{
    pthread_mutex_lock(&p->lock);
    struct mt_sum_job *job = pop(&p->ended);
    pthread_mutex_unlock(&p->lock);
    return job;
}

int64_t mt_sum_pool_ns(mt_sum_pool *p)
{
    pthread_mutex_lock(&p->lock);
    int64_t ns = p->ns;
    pthread_mutex_unlock(&p->lock);
    return ns;
}

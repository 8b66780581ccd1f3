/* SPDX-License-Identifier: Apache-2.0 */
#include "store/io/job_pool.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <time.h>

#include "base/lock.h"
#include "base/mem.h"
#include "base/thread.h"

struct jobs {
    struct mt_job *first, *last;
};

struct mt_job_pool {
    pthread_mutex_t lock;
    pthread_cond_t work;
    struct jobs todo, ended;
    int64_t ns;
    bool quit;
    void (*wake)(void *ctx);
    void *ctx;
    pthread_t thread[MT_JOB_MAX_THREADS];
    int n_threads;
};

static void push(struct jobs *l, struct mt_job *job)
{
    job->next = NULL;
    if (l->last)
        l->last->next = job;
    else
        l->first = job;
    l->last = job;
}

static struct mt_job *pop(struct jobs *l)
{
    struct mt_job *job = l->first;
    if (job && !(l->first = job->next))
        l->last = NULL;
    return job;
}

static int64_t thread_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void *pool_main(void *arg)
{
    mt_job_pool *p = arg;
    int64_t counted = thread_ns();
    pthread_mutex_lock(&p->lock);
    for (;;) {
        struct mt_job *job;
        while (!(job = pop(&p->todo)) && !p->quit)
            pthread_cond_wait(&p->work, &p->lock);
        if (!job)
            break;
        pthread_mutex_unlock(&p->lock);
        job->run(job);
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

int mt_job_pool_create(mt_job_pool **out, const char *name, int n_threads, void (*wake)(void *ctx), void *ctx,
                       struct mt_err *err)
{
    mt_job_pool *p = mt_calloc(1, sizeof(*p));
    int rc = 0;
    if (!p)
        return mt_fail_nomem(err, name, sizeof(*p));
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    p->wake = wake;
    p->ctx = ctx;
    for (int i = 0; i < MT_MIN(n_threads, (int)MT_JOB_MAX_THREADS) && !rc; i++) {
        char numbered[16];
        snprintf(numbered, sizeof(numbered), "%.8s/%hu", name, (unsigned short)i);
        rc = mt_thread_start(&p->thread[i], numbered, pool_main, p, err);
        p->n_threads += !rc;
    }
    if (rc)
        mt_job_pool_destroy(&p);
    else
        *out = p;
    return rc;
}

void mt_job_pool_destroy(mt_job_pool **pool)
{
    mt_job_pool *p = *pool;
    if (!p)
        return;
    mt_raise(&p->lock, &p->work, &p->quit);
    for (int i = 0; i < p->n_threads; i++)
        pthread_join(p->thread[i], NULL);
    pthread_cond_destroy(&p->work);
    pthread_mutex_destroy(&p->lock);
    free(p);
    *pool = NULL;
}

void mt_job_pool_add(mt_job_pool *p, struct mt_job *job)
{
    MT_LOCKED(&p->lock);
    push(&p->todo, job);
    pthread_cond_signal(&p->work);
}

struct mt_job *mt_job_pool_take(mt_job_pool *p)
{
    MT_LOCKED(&p->lock);
    return pop(&p->ended);
}

int64_t mt_job_pool_ns(mt_job_pool *p)
{
    MT_LOCKED(&p->lock);
    return p->ns;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The backend without io_uring: threads that call pread and pwrite. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/mem.h"
#include "base/thread.h"
#include "store/io/io_backend.h"

enum { MAX_THREADS = 32 };

struct threads {
    struct mt_io base;
    pthread_t thread[MAX_THREADS];
    int n_threads;
    int *fds;
    pthread_mutex_t lock;
    pthread_cond_t work, result;
    struct mt_io_op *ops; /* ring of `cap`: [head, tail) wait for a thread */
    size_t cap, head, tail;
    struct mt_io_result *results;
    size_t n_results, in_flight;
    bool woken, quit;
};

static struct threads *threads(mt_io *io)
{
    return (struct threads *)io;
}

static void *thread_main(void *arg)
{
    struct threads *t = arg;
    pthread_mutex_lock(&t->lock);
    for (;;) {
        while (t->head == t->tail && !t->quit)
            pthread_cond_wait(&t->work, &t->lock);
        if (t->head == t->tail)
            break;
        struct mt_io_op op = t->ops[t->head++ % t->cap];
        int fd = t->fds[op.file];
        pthread_mutex_unlock(&t->lock);
        ssize_t n = op.write ? pwrite(fd, op.buf, op.bytes, (off_t)op.offset)
                             : pread(fd, op.buf, op.bytes, (off_t)op.offset);
        int64_t res = n < 0 ? -errno : n;
        pthread_mutex_lock(&t->lock);
        t->results[t->n_results++] = (struct mt_io_result){op.tag, res};
        pthread_cond_signal(&t->result);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

static void threads_destroy(mt_io *io)
{
    struct threads *t = threads(io);
    pthread_mutex_lock(&t->lock);
    t->quit = true; /* a thread ends when the queue is empty */
    pthread_cond_broadcast(&t->work);
    pthread_mutex_unlock(&t->lock);
    for (int i = 0; i < t->n_threads; i++)
        pthread_join(t->thread[i], NULL);
    pthread_cond_destroy(&t->work);
    pthread_cond_destroy(&t->result);
    pthread_mutex_destroy(&t->lock);
    free(t->fds);
    free(t->ops);
    free(t->results);
    free(t);
}

static int threads_set_files(mt_io *io, const int *fds, int n, struct mt_err *err)
{
    struct threads *t = threads(io);
    int *copy = mt_calloc((size_t)n, sizeof(*copy));
    if (!copy)
        return mt_fail_nomem(err, "a list of files", (size_t)n * sizeof(*copy));
    memcpy(copy, fds, (size_t)n * sizeof(*copy));
    pthread_mutex_lock(&t->lock);
    free(t->fds);
    t->fds = copy;
    pthread_mutex_unlock(&t->lock);
    return 0;
}

static int threads_set_buffers(mt_io *, const struct iovec *, int)
{
    return 0;
}

static int threads_submit(mt_io *io, const struct mt_io_op *ops, int n)
{
    struct threads *t = threads(io);
    int rc = 0;
    pthread_mutex_lock(&t->lock);
    for (int i = 0; i < n && !rc; i++) {
        if (t->in_flight == t->cap) {
            rc = -EBUSY;
            break;
        }
        t->ops[t->tail++ % t->cap] = ops[i];
        t->in_flight++;
    }
    pthread_cond_broadcast(&t->work);
    pthread_mutex_unlock(&t->lock);
    return rc;
}

static int threads_wait(mt_io *io, struct mt_io_result *out, int max)
{
    struct threads *t = threads(io);
    pthread_mutex_lock(&t->lock);
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += (MT_IO_WAIT_MS % 1000) * 1000000L;
    until.tv_sec += MT_IO_WAIT_MS / 1000 + until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    while (!t->n_results && !t->woken && pthread_cond_timedwait(&t->result, &t->lock, &until) != ETIMEDOUT)
        ;
    t->woken = false;
    size_t n = MT_MIN(t->n_results, (size_t)max);
    memcpy(out, t->results, n * sizeof(*out));
    memmove(t->results, t->results + n, (t->n_results - n) * sizeof(*out));
    t->n_results -= n;
    t->in_flight -= n;
    pthread_mutex_unlock(&t->lock);
    return (int)n;
}

static void threads_wake(mt_io *io)
{
    struct threads *t = threads(io);
    pthread_mutex_lock(&t->lock);
    t->woken = true;
    pthread_cond_signal(&t->result);
    pthread_mutex_unlock(&t->lock);
}

static const struct mt_io_backend backend = {
    .name = "threads",
    .destroy = threads_destroy,
    .set_files = threads_set_files,
    .set_buffers = threads_set_buffers,
    .submit = threads_submit,
    .wait = threads_wait,
    .wake = threads_wake,
};

int mt_io_threads_create(mt_io **out, unsigned depth, struct mt_err *err)
{
    struct threads *t = mt_calloc(1, sizeof(*t));
    if (!t)
        return mt_fail_nomem(err, "I/O threads", sizeof(*t));
    t->base.backend = &backend;
    t->cap = depth;
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->work, NULL);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&t->result, &clock);
    pthread_condattr_destroy(&clock);
    t->ops = mt_calloc(depth, sizeof(*t->ops));
    t->results = mt_calloc(depth, sizeof(*t->results));
    int rc = t->ops && t->results ? 0 : mt_fail_nomem(err, "I/O threads", depth * sizeof(*t->ops));
    for (int i = 0; i < MT_MIN((int)depth, MAX_THREADS) && !rc; i++) {
        rc = mt_thread_start(&t->thread[i], MT_PATH("mt-io/%hu", (unsigned short)i), thread_main, t, err);
        t->n_threads += !rc;
    }
    if (rc)
        threads_destroy(&t->base);
    else
        *out = &t->base;
    return rc;
}

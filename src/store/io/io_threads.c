/* SPDX-License-Identifier: Apache-2.0 */
/* The backend without io_uring: threads that call pread and pwrite. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/lock.h"
#include "base/mem.h"
#include "store/io/io.h"
#include "store/io/job_pool.h"

struct operation {
    struct mt_job job;
    struct mt_io_op op;
    int fd;
    int64_t res;
    struct operation *next; /* of those that are free */
};

struct threads {
    struct mt_io base;
    mt_job_pool *pool;
    int *fds;
    struct operation *operations, *free; /* [depth] */
    pthread_mutex_t lock;
    pthread_cond_t wakes;
    bool woken; /* under lock: an operation has ended, or wake() */
};

static struct threads *threads(mt_io *io)
{
    return (struct threads *)io;
}

static void run(struct mt_job *job)
{
    struct operation *o = (struct operation *)job;
    ssize_t n = o->op.write ? pwrite(o->fd, o->op.buf, o->op.bytes, (off_t)o->op.offset)
                            : pread(o->fd, o->op.buf, o->op.bytes, (off_t)o->op.offset);
    o->res = n < 0 ? -errno : n;
}

static void threads_destroy(mt_io *io)
{
    struct threads *t = threads(io);
    mt_job_pool_destroy(&t->pool);
    pthread_cond_destroy(&t->wakes);
    pthread_mutex_destroy(&t->lock);
    free(t->fds);
    free(t->operations);
    free(t);
}

static int threads_set_files(mt_io *io, const int *fds, int n, struct mt_err *err)
{
    struct threads *t = threads(io);
    int *copy = mt_calloc((size_t)n, sizeof(*copy));
    if (!copy)
        return mt_fail_nomem(err, "a list of files", (size_t)n * sizeof(*copy));
    memcpy(copy, fds, (size_t)n * sizeof(*copy));
    free(t->fds);
    t->fds = copy;
    return 0;
}

static int threads_set_buffers(mt_io *, const struct iovec *, int)
{
    return 0;
}

static int threads_submit(mt_io *io, const struct mt_io_op *ops, int n)
{
    struct threads *t = threads(io);
    for (int i = 0; i < n; i++) {
        struct operation *o = t->free;
        if (!o)
            return -EBUSY;
        t->free = o->next;
        *o = (struct operation){.job.run = run, .op = ops[i], .fd = t->fds[ops[i].file]};
        mt_job_pool_add(t->pool, &o->job);
    }
    return 0;
}

static void await(struct threads *t, bool any)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += (MT_IO_WAIT_MS % 1000) * 1000000L;
    until.tv_sec += MT_IO_WAIT_MS / 1000 + until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    MT_LOCKED(&t->lock);
    while (!any && !t->woken && pthread_cond_timedwait(&t->wakes, &t->lock, &until) != ETIMEDOUT)
        ;
    t->woken = false;
}

static int threads_wait(mt_io *io, struct mt_io_result *out, int max)
{
    struct threads *t = threads(io);
    struct mt_job *job = mt_job_pool_take(t->pool);
    int n = 0;
    await(t, job != NULL);
    for (job = job ? job : mt_job_pool_take(t->pool); job; job = n < max ? mt_job_pool_take(t->pool) : NULL) {
        struct operation *o = (struct operation *)job;
        out[n++] = (struct mt_io_result){o->op.tag, o->res};
        o->next = t->free;
        t->free = o;
    }
    return n;
}

static void wake(void *ctx)
{
    struct threads *t = ctx;
    mt_raise(&t->lock, &t->wakes, &t->woken);
}

static void threads_wake(mt_io *io)
{
    wake(threads(io));
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
    pthread_mutex_init(&t->lock, NULL);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&t->wakes, &clock);
    pthread_condattr_destroy(&clock);
    t->operations = mt_calloc(depth, sizeof(*t->operations));
    for (unsigned i = 0; i < depth && t->operations; i++)
        t->operations[i].next = i + 1 < depth ? &t->operations[i + 1] : NULL;
    t->free = t->operations;
    int rc = t->operations ? mt_job_pool_create(&t->pool, "mt-io", (int)depth, wake, t, err)
                           : mt_fail_nomem(err, "I/O threads", depth * sizeof(*t->operations));
    if (rc)
        threads_destroy(&t->base);
    else
        *out = &t->base;
    return rc;
}

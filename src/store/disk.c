/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One thread submits to the backend and takes its results. Requests wait in one list for reads and one for writes; they
 * are cut into pieces. Up to `depth` reads and `depth` writes are under way, so that neither starves the other.
 */
#include "store/disk.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "store/disk_priv.h"

enum { READ, WRITE, MAX_RESULTS = 64, MAX_RETRIES = 10000, SUM_AT_ONCE = 128 << 10 };

static void append(struct mt_disk_list *l, struct mt_disk_request *r)
{
    r->next = NULL;
    if (l->last)
        l->last->next = r;
    else
        l->first = r;
    l->last = r;
}

static void drop_first(struct mt_disk_list *l)
{
    l->first = l->first->next;
    if (!l->first)
        l->last = NULL;
}

/* --- the thread ------------------------------------------------------------------------------ */

static bool fully_started(const struct mt_disk_request *r)
{
    return r->rc || r->at_span == r->n_spans;
}

static void fail_request(struct mt_disk *d, struct mt_disk_piece *p, int rc)
{
    struct mt_disk_request *r = p->r;
    const struct mt_disk_file *f = &d->files[p->file];
    if (r->rc)
        return;
    r->rc = mt_fail(&r->err, rc == -ENOSPC || rc == -EDQUOT ? MT_ERR_NO_FIT : MT_ERR_RUNTIME, rc,
                    "cannot %s %zu bytes at offset %llu of %s (%s): %s; the last checkpoint is not "
                    "affected",
                    r->write ? "write" : "read", p->bytes - p->done,
                    (unsigned long long)(p->offset + p->done), f->path, f->drive,
                    rc == -ENODATA ? "the file has become shorter" : strerror(-rc));
}

static void end_piece(struct mt_disk *d, struct mt_disk_piece *p)
{
    struct mt_disk_request *r = p->r;
    int dir = r->write;
    if (--d->in_flight[dir] == 0) {
        pthread_mutex_lock(&d->lock);
        d->stats.busy_ns[dir] += mt_now_ns() - d->busy_since[dir];
        pthread_mutex_unlock(&d->lock);
    }
    if (--r->in_flight == 0 && fully_started(r)) {
        if (d->going[dir].first == r)
            drop_first(&d->going[dir]);
        r->done(r);
    }
}

static void finish_piece(struct mt_disk *d, struct mt_disk_piece *p)
{
    p->next = d->free_pieces;
    d->free_pieces = p;
    end_piece(d, p);
}

/* The request whose pieces are submitted next. Removes requests whose pieces are all submitted from the list: they end
 * with their last piece. */
static struct mt_disk_request *next_request(struct mt_disk *d, int dir)
{
    struct mt_disk_request *r;
    while ((r = d->going[dir].first) && fully_started(r)) {
        drop_first(&d->going[dir]);
        if (!r->in_flight)
            r->done(r); /* an empty request */
    }
    return r;
}

/* Fails all requests in the lists: the disk was given up before they were fully started. */
static void refuse_all(struct mt_disk *d)
{
    for (int dir = 0; dir < 2; dir++)
        for (struct mt_disk_request *r = d->going[dir].first; r; r = r->next)
            if (!r->rc)
                r->rc = mt_fail(&r->err, MT_ERR_RUNTIME, d->broken, "cannot %s %s (%s): disk I/O was given up: %s",
                                dir ? "write" : "read", d->files[0].path, d->files[0].drive, strerror(-d->broken));
}

/*
 * The backend or a drive has failed: ends all pieces that the backend has. Whether it still transfers them cannot be
 * known, so they are not used again.
 */
static void give_up(struct mt_disk *d, int rc, const char *why)
{
    if (d->broken)
        return;
    d->broken = rc;
    mt_log(MT_LOG_ERROR, "disk I/O: %s: %s; nothing is read or written any more", why, strerror(-rc));
    for (unsigned i = 0; i < 2 * d->depth; i++) {
        struct mt_disk_piece *p = &d->pieces[i];
        if (!p->under_way)
            continue;
        d->n_lost++;
        fail_request(d, p, rc);
        end_piece(d, p);
    }
    refuse_all(d); /* at once: there may be no free piece left to start one */
}

static void submit_piece(struct mt_disk *d, struct mt_disk_piece *p)
{
    struct mt_io_op op = {.write = p->r->write,
                          .file = (int)p->file,
                          .buf = p->buf + p->done,
                          .bytes = p->bytes - p->done,
                          .offset = p->offset + p->done,
                          .tag = p};
    if (d->broken) {
        fail_request(d, p, d->broken);
        finish_piece(d, p);
        return;
    }
    p->under_way = true;
    p->since = d->clock_ns;
    int rc = mt_io_submit(d->io, &op, 1);
    if (rc)
        give_up(d, rc, "a transfer was not accepted");
}

/* --- sums ------------------------------------------------------------------------------------ */

static void fail_sum(struct mt_disk *d, struct mt_disk_piece *p)
{
    struct mt_disk_request *r = p->r;
    const struct mt_disk_file *f = &d->files[p->file];
    if (!r->rc)
        r->rc = mt_fail(&r->err, MT_ERR_RUNTIME, -EBADMSG,
                        "%zu bytes of unit %zu's %s at offset %llu of %s (%s) are not what was written there, in two reads: "
                        "the drive, its cable or its controller changes data; none of it is saved to a checkpoint, the "
                        "last one is not affected",
                        p->bytes, p->sums->unit, p->sums->what, (unsigned long long)p->offset, f->path, f->drive);
}

/* A block has been summed: starts its write, or ends its read or repeats it once. */
static void take_sum(struct mt_disk *d, struct mt_disk_piece *p)
{
    uint64_t *sum = mt_disk_sum_of(p->sums, p->address);
    if (p->r->write) {
        *sum = p->job.sum;
        submit_piece(d, p);
        return;
    }
    if (*sum ? *sum != p->job.sum : !p->job.zeros) {
        if (!p->reread) {
            mt_warn("%s (%s), offset %llu: %zu bytes of unit %zu's %s are not what was written; reading them again",
                    d->files[p->file].path, d->files[p->file].drive, (unsigned long long)p->offset, p->bytes,
                    p->sums->unit, p->sums->what);
            pthread_mutex_lock(&d->lock);
            d->stats.n_reread++;
            pthread_mutex_unlock(&d->lock);
            p->reread = true;
            p->done = 0;
            submit_piece(d, p);
            return;
        }
        fail_sum(d, p);
    }
    finish_piece(d, p);
}

static void sum_piece(struct mt_disk *d, struct mt_disk_piece *p)
{
    p->job = (struct mt_sum_job){.buf = p->buf, .bytes = p->bytes, .seed = p->address};
    if (p->bytes > SUM_AT_ONCE) {
        mt_sum_pool_add(d->sums, &p->job);
        return;
    }
    int64_t t0 = mt_now_ns();
    mt_sum_job_run(&p->job);
    pthread_mutex_lock(&d->lock);
    d->stats.sum_ns += mt_now_ns() - t0;
    pthread_mutex_unlock(&d->lock);
    take_sum(d, p);
}

static void take_sums(struct mt_disk *d)
{
    for (struct mt_sum_job *j; (j = mt_sum_pool_take(d->sums));)
        take_sum(d, (struct mt_disk_piece *)j);
}

/* Cuts the next piece off a request, a block if it has sums, and starts it. */
static void start_piece(struct mt_disk *d, struct mt_disk_request *r)
{
    struct mt_disk_span *s = &r->span[r->at_span];
    struct mt_disk_piece *p = d->free_pieces;
    d->free_pieces = p->next;
    *p = (struct mt_disk_piece){.r = r, .buf = (char *)s->buf + r->at_byte,
                               .sums = s->sums, .address = s->offset + r->at_byte};
    uint64_t run = mt_stripe_find(&d->stripe, p->address, &p->file, &p->offset);
    uint64_t block = p->sums ? mt_disk_block_end(p->sums, p->address) - p->address : UINT64_MAX;
    p->bytes = (size_t)MT_MIN(MT_MIN(run, (uint64_t)d->request_bytes), (uint64_t)(s->bytes - r->at_byte));
    bool whole = !p->sums || (block <= p->bytes && mt_disk_block_begin(p->sums, p->address) == p->address);
    p->bytes = (size_t)MT_MIN((uint64_t)p->bytes, block);
    r->at_byte += p->bytes;
    if (r->at_byte == s->bytes) {
        r->at_byte = 0;
        do
            r->at_span++;
        while (r->at_span < r->n_spans && !r->span[r->at_span].bytes);
    }
    r->in_flight++;
    if (d->in_flight[r->write]++ == 0)
        d->busy_since[r->write] = mt_now_ns();
    if (!whole) {
        fail_request(d, p, -EINVAL); /* a span with sums must be whole blocks */
        finish_piece(d, p);
    } else if (p->sums && r->write) {
        sum_piece(d, p);
    } else {
        submit_piece(d, p);
    }
}

static void take_waiting(struct mt_disk *d, bool *quit)
{
    pthread_mutex_lock(&d->lock);
    for (int dir = 0; dir < 2; dir++)
        while (d->waiting[dir].first) {
            struct mt_disk_request *r = d->waiting[dir].first;
            drop_first(&d->waiting[dir]);
            append(&d->going[dir], r);
        }
    *quit = d->quit;
    pthread_mutex_unlock(&d->lock);
}

static void start_pieces(struct mt_disk *d)
{
    if (d->broken)
        refuse_all(d);
    for (bool any = true; any;) {
        any = false;
        for (int dir = 0; dir < 2; dir++) {
            struct mt_disk_request *r = d->in_flight[dir] < d->depth ? next_request(d, dir) : NULL;
            if (r)
                start_piece(d, r);
            any |= r != NULL;
        }
    }
}

static void count(struct mt_disk *d, int dir, uint64_t bytes, bool shortened, bool retried)
{
    pthread_mutex_lock(&d->lock);
    d->stats.bytes[dir] += bytes;
    d->stats.n_short += shortened;
    d->stats.n_retried += retried;
    pthread_mutex_unlock(&d->lock);
}

static void take_result(struct mt_disk *d, struct mt_disk_piece *p, int64_t res)
{
    p->under_way = false;
    if (res == -EINTR || res == -EAGAIN) {
        if (++p->retries < MAX_RETRIES) {
            if (res == -EAGAIN) /* the kernel is short of memory or of requests: wait a little */
                nanosleep(&(struct timespec){0, 100000}, NULL);
            count(d, p->r->write, 0, false, true);
            submit_piece(d, p);
            return;
        }
    }
    if (res == 0)
        res = p->r->write ? -EIO : -ENODATA;
    if (res < 0) {
        fail_request(d, p, (int)res);
        finish_piece(d, p);
        return;
    }
    size_t n = MT_MIN((size_t)res, p->bytes - p->done);
    bool whole = p->done + n == p->bytes;
    count(d, p->r->write, n, !whole, false);
    if (whole && p->sums && !p->r->write) {
        sum_piece(d, p);
        return;
    }
    if (whole) {
        finish_piece(d, p);
        return;
    }
    /* direct I/O continues at an aligned offset: the bytes after the last one are transferred again */
    const struct mt_disk_file *f = &d->files[p->file];
    size_t step = f->direct ? f->align : 1, next = (p->done + n) / step * step;
    if (next == p->done && ++p->retries >= MAX_RETRIES) {
        fail_request(d, p, -EIO);
        finish_piece(d, p);
        return;
    }
    p->done = next;
    submit_piece(d, p);
}

/* Drives are not given up because the process was stopped for a while: only time in which this thread runs counts. */
static void watch_drives(struct mt_disk *d)
{
    int64_t now = mt_now_ns(), most = 2 * MT_IO_WAIT_MS * (int64_t)1000000;
    d->clock_ns += MT_MIN(now - d->seen_ns, most);
    d->seen_ns = now;
    for (unsigned i = 0; i < 2 * d->depth && !d->broken; i++) {
        const struct mt_disk_piece *p = &d->pieces[i];
        char why[256];
        if (!p->under_way || d->clock_ns - p->since < d->deadline_ns)
            continue;
        snprintf(why, sizeof(why), "%s has not answered for %.0f s", d->files[p->file].drive,
                 (double)d->deadline_ns * 1e-9);
        give_up(d, -ETIMEDOUT, why);
    }
}

void *mt_disk_main(void *arg)
{
    struct mt_disk *d = arg;
    struct mt_io_result r[MAX_RESULTS];
    for (;;) {
        bool quit;
        take_waiting(d, &quit);
        start_pieces(d);
        if (quit && !d->in_flight[READ] && !d->in_flight[WRITE])
            return NULL;
        int n = 0;
        if (d->broken)
            nanosleep(&(struct timespec){0, 10000000}, NULL); /* the backend cannot be woken any more */
        else
            n = mt_io_wait(d->io, r, MAX_RESULTS);
        if (n < 0)
            give_up(d, n, "waiting for results failed");
        for (int i = 0; i < n; i++)
            take_result(d, r[i].tag, r[i].res);
        take_sums(d);
        watch_drives(d);
    }
}

/* --- requests -------------------------------------------------------------------------------- */

void mt_disk_submit(mt_disk *d, struct mt_disk_request *r)
{
    r->at_span = 0;
    r->at_byte = 0;
    r->in_flight = 0;
    r->rc = 0;
    while (r->at_span < r->n_spans && !r->span[r->at_span].bytes)
        r->at_span++;
    pthread_mutex_lock(&d->lock);
    append(&d->waiting[r->write], r);
    pthread_mutex_unlock(&d->lock);
    mt_io_wake(d->io);
}

struct waiter {
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool over;
};

static void wake_waiter(struct mt_disk_request *r)
{
    struct waiter *w = r->ctx;
    pthread_mutex_lock(&w->lock);
    w->over = true;
    pthread_cond_signal(&w->cond);
    pthread_mutex_unlock(&w->lock);
}

int mt_disk_run(mt_disk *d, struct mt_disk_request *r, struct mt_err *err)
{
    struct waiter w = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false};
    r->done = wake_waiter;
    r->ctx = &w;
    mt_disk_submit(d, r);
    pthread_mutex_lock(&w.lock);
    while (!w.over)
        pthread_cond_wait(&w.cond, &w.lock);
    pthread_mutex_unlock(&w.lock);
    if (r->rc && err)
        *err = r->err;
    return r->rc;
}

void mt_disk_stats(mt_disk *d, struct mt_disk_stats *out)
{
    pthread_mutex_lock(&d->lock);
    *out = d->stats;
    pthread_mutex_unlock(&d->lock);
    out->sum_ns += mt_sum_pool_ns(d->sums);
}

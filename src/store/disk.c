/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One thread starts transfers and takes their results. Requests wait in one list for reads and one for writes; they
 * are cut into pieces. Up to `depth` reads and `depth` writes are under way, so that neither starves the other.
 */
#include "store/disk.h"

#include <pthread.h>
#include <string.h>

#include "base/clock.h"
#include "base/lock.h"
#include "base/log.h"
#include "base/mem.h"
#include "store/disk_priv.h"
#include "store/io/waiter.h"

enum { READ, WRITE, SUM_AT_ONCE = 128 << 10 };

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
    const struct mt_transfer *x = &p->x;
    const struct mt_disk_file *f = &d->files[x->file];
    if (r->rc)
        return;
    r->rc = mt_fail(&r->err, rc == -ENOSPC || rc == -EDQUOT ? MT_ERR_NO_FIT : MT_ERR_RUNTIME, rc,
                    "cannot %s %zu bytes at offset %llu of %s (%s): %s; the last checkpoint is not "
                    "affected",
                    r->write ? "write" : "read", x->bytes - x->done,
                    (unsigned long long)(x->offset + x->done), f->path, f->drive,
                    rc == -ENODATA ? "the file has become shorter" : strerror(-rc));
}

static void end_piece(struct mt_disk *d, struct mt_disk_piece *p)
{
    struct mt_disk_request *r = p->r;
    int dir = r->write;
    if (--d->in_flight[dir] == 0) {
        MT_LOCKED(&d->lock);
        d->stats.busy_ns[dir] += mt_now_ns() - d->busy_since[dir];
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
    int rc = mt_transfers_broken(d->transfers);
    for (int dir = 0; dir < 2; dir++)
        for (struct mt_disk_request *r = d->going[dir].first; r; r = r->next)
            if (!r->rc)
                r->rc = mt_fail(&r->err, MT_ERR_RUNTIME, rc, "cannot %s %s (%s): disk I/O was given up: %s",
                                dir ? "write" : "read", d->files[0].path, d->files[0].drive, strerror(-rc));
}

/* --- sums ------------------------------------------------------------------------------------ */

static void fail_sum(struct mt_disk *d, struct mt_disk_piece *p)
{
    struct mt_disk_request *r = p->r;
    const struct mt_disk_file *f = &d->files[p->x.file];
    if (!r->rc)
        r->rc = mt_fail(&r->err, MT_ERR_RUNTIME, -EBADMSG,
                        "%zu bytes of unit %zu's %s at offset %llu of %s (%s) are not what was written there, in two reads: "
                        "the drive, its cable or its controller changes data; none of it is saved to a checkpoint, the "
                        "last one is not affected",
                        p->x.bytes, p->sums->unit, p->sums->what, (unsigned long long)p->x.offset, f->path, f->drive);
}

/* A block has been summed: starts its write, or ends its read or repeats it once. */
static void take_sum(struct mt_disk *d, struct mt_disk_piece *p)
{
    uint64_t *sum = mt_disk_sum_of(p->sums, p->address);
    if (p->r->write) {
        *sum = p->job.sum;
        mt_transfers_start(d->transfers, &p->x);
        return;
    }
    if (*sum ? *sum != p->job.sum : !p->job.zeros) {
        if (!p->reread) {
            mt_warn("%s (%s), offset %llu: %zu bytes of unit %zu's %s are not what was written; reading them again",
                    d->files[p->x.file].path, d->files[p->x.file].drive, (unsigned long long)p->x.offset, p->x.bytes,
                    p->sums->unit, p->sums->what);
            pthread_mutex_lock(&d->lock);
            d->stats.n_reread++;
            pthread_mutex_unlock(&d->lock);
            p->reread = true;
            mt_transfers_start(d->transfers, &p->x);
            return;
        }
        fail_sum(d, p);
    }
    finish_piece(d, p);
}

static void sum_piece(struct mt_disk *d, struct mt_disk_piece *p)
{
    p->job = mt_sum_job(p->x.buf, p->x.bytes, p->address);
    if (p->x.bytes > SUM_AT_ONCE) {
        mt_job_pool_add(d->sums, &p->job.job);
        return;
    }
    int64_t t0 = mt_now_ns();
    p->job.job.run(&p->job.job);
    pthread_mutex_lock(&d->lock);
    d->stats.sum_ns += mt_now_ns() - t0;
    pthread_mutex_unlock(&d->lock);
    take_sum(d, p);
}

static void take_sums(struct mt_disk *d)
{
    for (struct mt_job *j; (j = mt_job_pool_take(d->sums));)
        take_sum(d, (struct mt_disk_piece *)j);
}

/* Cuts the next piece off a request, a block if it has sums, and starts it. */
static void start_piece(struct mt_disk *d, struct mt_disk_request *r)
{
    struct mt_disk_span *s = &r->span[r->at_span];
    struct mt_disk_piece *p = d->free_pieces;
    d->free_pieces = p->next;
    *p = (struct mt_disk_piece){.r = r, .sums = s->sums, .address = s->offset + r->at_byte};
    size_t file;
    uint64_t offset, run = mt_stripe_find(&d->stripe, p->address, &file, &offset);
    uint64_t block = p->sums ? mt_disk_block_end(p->sums, p->address) - p->address : UINT64_MAX;
    size_t bytes = (size_t)MT_MIN(MT_MIN(run, (uint64_t)d->request_bytes), (uint64_t)(s->bytes - r->at_byte));
    bool whole = !p->sums || (block <= bytes && mt_disk_block_begin(p->sums, p->address) == p->address);
    bytes = (size_t)MT_MIN((uint64_t)bytes, block);
    p->x = (struct mt_transfer){.write = r->write, .file = (int)file, .buf = (char *)s->buf + r->at_byte,
                                .offset = offset, .bytes = bytes, .least = bytes, .owner = p};
    r->at_byte += bytes;
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
        mt_transfers_start(d->transfers, &p->x);
    }
}

static void take_waiting(struct mt_disk *d, bool *quit)
{
    MT_LOCKED(&d->lock);
    for (int dir = 0; dir < 2; dir++)
        while (d->waiting[dir].first) {
            struct mt_disk_request *r = d->waiting[dir].first;
            drop_first(&d->waiting[dir]);
            append(&d->going[dir], r);
        }
    *quit = d->quit;
}

static void start_pieces(struct mt_disk *d)
{
    for (bool any = true; any;) {
        any = false;
        if (mt_transfers_broken(d->transfers)) /* at once: there may be no free piece left */
            refuse_all(d);
        for (int dir = 0; dir < 2; dir++) {
            struct mt_disk_request *r = d->in_flight[dir] < d->depth ? next_request(d, dir) : NULL;
            if (r)
                start_piece(d, r);
            any |= r != NULL;
        }
    }
}

void mt_disk_transfer_ended(struct mt_transfer *x, void *disk)
{
    struct mt_disk *d = disk;
    struct mt_disk_piece *p = x->owner;
    pthread_mutex_lock(&d->lock);
    d->stats.bytes[x->write] += x->moved;
    d->stats.n_short += x->n_short;
    d->stats.n_retried += x->n_retried;
    pthread_mutex_unlock(&d->lock);
    if (!x->rc && p->sums && !x->write) {
        sum_piece(d, p);
        return;
    }
    if (x->rc)
        fail_request(d, p, x->rc);
    if (x->lost)
        end_piece(d, p); /* it is not used again */
    else
        finish_piece(d, p);
}

void *mt_disk_main(void *arg)
{
    struct mt_disk *d = arg;
    for (;;) {
        bool quit;
        take_waiting(d, &quit);
        start_pieces(d);
        if (quit && !d->in_flight[READ] && !d->in_flight[WRITE])
            return NULL;
        mt_transfers_wait(d->transfers);
        take_sums(d);
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
    mt_transfers_wake(d->transfers);
}

static void wake_waiter(struct mt_disk_request *r)
{
    mt_waiter_end(r->ctx);
}

int mt_disk_run(mt_disk *d, struct mt_disk_request *r, struct mt_err *err)
{
    struct mt_waiter w = mt_waiter_for(1);
    r->done = wake_waiter;
    r->ctx = &w;
    mt_disk_submit(d, r);
    mt_waiter_wait(&w);
    if (r->rc && err)
        *err = r->err;
    return r->rc;
}

void mt_disk_stats(mt_disk *d, struct mt_disk_stats *out)
{
    pthread_mutex_lock(&d->lock);
    *out = d->stats;
    pthread_mutex_unlock(&d->lock);
    out->sum_ns += mt_job_pool_ns(d->sums);
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One thread cuts requests into blocks, starts their reads and takes the results; each drive has buffers of its own, so
 * that a slow one does not stop the others. What was read is summed and put to its place by a pool of threads.
 */
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/thread.h"
#include "store/files/file_priv.h"
#include "store/io/waiter.h"

/* A quarter of a drive's buffers is not read to, so that when many reads end at once, as those of virtual drives do, the
 * drive has others while these are summed. */
enum { ALIGN = MT_DISK_ALIGN, SPARE = 4, MOST_PLACING = 8 };

/* --- requests -------------------------------------------------------------------------------- */

static size_t drive_of(const mt_file_weights *f, const struct mt_summed_part *p)
{
    return f->files[p->p.piece[0].file].drive;
}

/* Call under lock. */
static bool wants(const mt_file_weights *f, const struct mt_file_request *r, size_t part, size_t block)
{
    const struct mt_summed_part *p = &f->parts[part];
    if (r->sum_only)
        return part == r->part && !f->known[p->first_sum + block];
    if (r->end)
        return mt_file_block_has(p, block, r->of, r->first, r->end);
    return r->plane[p->p.plane];
}

/* Call under lock. Moves the cursor to the next block that is wanted from the drive; false: there is none. */
static bool find_block(const mt_file_weights *f, struct mt_file_request *r, size_t drive)
{
    size_t end = f->unit_first[r->unit + 1], *part = &r->cursor[drive].part, *block = &r->cursor[drive].block;
    for (; *part < end; (*part)++, *block = 0)
        for (; drive_of(f, &f->parts[*part]) == drive && *block < f->parts[*part].n_blocks; (*block)++)
            if (wants(f, r, *part, *block))
                return true;
    return false;
}

static void append(struct mt_file_drive *d, size_t i, struct mt_file_request *r)
{
    r->next[i] = NULL;
    if (d->last)
        d->last->next[i] = r;
    else
        d->first = r;
    d->last = r;
}

/* Call under lock. Takes the next block of the drive's oldest request. */
static void take_block(mt_file_weights *f, size_t drive, struct mt_file_request **r, size_t *part, size_t *block)
{
    struct mt_file_drive *d = &f->drive[drive];
    *r = d->first;
    *part = d->first->cursor[drive].part;
    *block = d->first->cursor[drive].block++;
    if (find_block(f, d->first, drive))
        return;
    d->first = d->first->next[drive];
    if (!d->first)
        d->last = NULL;
}

static void end_block(mt_file_weights *f, struct mt_file_request *r, int rc, const struct mt_err *err, uint64_t bytes)
{
    pthread_mutex_lock(&f->lock);
    f->stats.bytes += bytes;
    if (rc && !r->rc) {
        r->rc = rc;
        r->err = *err;
    }
    bool over = --r->left == 0;
    if (over && --f->n_under_way == 0)
        f->stats.busy_ns += mt_now_ns() - f->busy_since;
    pthread_mutex_unlock(&f->lock);
    if (over)
        r->done(r);
}

/* Call under lock. */
static size_t count_blocks(const mt_file_weights *f, const struct mt_file_request *r)
{
    size_t n = 0;
    for (size_t i = f->unit_first[r->unit]; i < f->unit_first[r->unit + 1]; i++)
        for (size_t b = 0; b < f->parts[i].n_blocks; b++)
            n += wants(f, r, i, b);
    return n;
}

static void submit(mt_file_weights *f, struct mt_file_request *r)
{
    r->rc = 0;
    pthread_mutex_lock(&f->lock);
    r->left = count_blocks(f, r);
    bool any = r->left;
    if (any && f->n_under_way++ == 0)
        f->busy_since = mt_now_ns();
    for (size_t d = 0; d < f->n_drives && any; d++) {
        r->cursor[d].part = f->unit_first[r->unit];
        r->cursor[d].block = 0;
        if (find_block(f, r, d))
            append(&f->drive[d], d, r);
    }
    pthread_mutex_unlock(&f->lock);
    if (any)
        mt_transfers_wake(f->transfers);
    else
        r->done(r);
}

void mt_file_weights_submit(mt_file_weights *f, struct mt_file_request *r)
{
    r->sum_only = false;
    r->first = r->end = 0;
    submit(f, r);
}

static void wake_waiter(struct mt_file_request *r)
{
    mt_waiter_end(r->ctx);
}

int mt_file_reader_run(mt_file_weights *f, struct mt_file_request *r, struct mt_err *err)
{
    struct mt_waiter w = mt_waiter_for(1);
    r->done = wake_waiter;
    r->ctx = &w;
    submit(f, r);
    mt_waiter_wait(&w);
    if (r->rc && err)
        *err = r->err;
    return r->rc;
}

/* --- the thread ------------------------------------------------------------------------------ */

static void end_slot(mt_file_weights *f, struct mt_file_slot *s)
{
    struct mt_file_request *r = s->r;
    const struct mt_summed_part *p = s->b.p;
    uint64_t bytes = (uint64_t)(s->b.end - s->b.first) * (uint64_t)p->p.n_lanes;
    f->n_busy--;
    if (!s->x.lost) { /* else the buffer may still be written to */
        s->next = f->drive[s->drive].free;
        f->drive[s->drive].free = s;
    }
    end_block(f, r, s->rc, &s->err, bytes);
}

/* Starts the read of the aligned bytes around the block's next run. */
static void read_run(mt_file_weights *f, struct mt_file_slot *s)
{
    const struct mt_file_run *r = &s->b.run;
    uint64_t from = r->offset / ALIGN * ALIGN;
    size_t least = (size_t)(r->offset - from) + r->bytes;
    s->x = (struct mt_transfer){.file = r->file, .buf = s->buf, .offset = from, .bytes = mt_align_up(least, ALIGN),
                                .least = least, .owner = s};
    f->drive[s->drive].n_reading++;
    mt_transfers_start(f->transfers, &s->x);
}

/* On a thread of the pool. */
static void take_run(struct mt_job *job)
{
    struct mt_file_slot *s = (struct mt_file_slot *)job;
    s->rc = mt_file_block_take(&s->b, s->buf + s->b.run.offset % ALIGN, &s->err);
    s->more = !s->rc && mt_file_block_next(&s->b);
    if (!s->rc && !s->more)
        s->rc = mt_file_block_end(&s->b, &s->err);
}

/* The block has other sums than when it was first read: reads it once more, from its drive. */
static void read_again(mt_file_weights *f, struct mt_file_slot *s)
{
    const struct mt_file_target to = s->b.to;
    const struct mt_direct_file *file = &f->files[s->b.p->p.piece[0].file].f;
    mt_warn("%s; reading them again", s->err.msg);
    if (!file->direct)
        posix_fadvise(file->fd, 0, 0, POSIX_FADV_DONTNEED);
    pthread_mutex_lock(&f->lock);
    f->stats.n_reread++;
    pthread_mutex_unlock(&f->lock);
    s->reread = true;
    s->rc = 0;
    mt_file_block_begin(&s->b, s->b.p, s->b.index, s->b.put ? &to : NULL);
    mt_file_block_next(&s->b);
    read_run(f, s);
}

static void transfer_ended(struct mt_transfer *x, void *file_weights)
{
    mt_file_weights *f = file_weights;
    struct mt_file_slot *s = x->owner;
    f->drive[s->drive].n_reading--;
    if (!x->rc) {
        mt_job_pool_add(f->jobs, &s->job);
        return;
    }
    s->rc = mt_fail(&s->err, MT_ERR_RUNTIME, x->rc, "cannot read %zu bytes at offset %llu of %s: %s", x->least - x->done,
                    (unsigned long long)(x->offset + x->done), f->files[x->file].f.path,
                    x->rc == -ENODATA ? "the file has become shorter" : strerror(-x->rc));
    end_slot(f, s);
}

static void start_block(mt_file_weights *f, struct mt_file_slot *s, struct mt_file_request *r, size_t part,
                        size_t block)
{
    struct mt_file_target to = {.first = r->first, .end = r->end ? r->end : SIZE_MAX};
    memcpy(to.plane, r->plane, sizeof(to.plane));
    f->n_busy++;
    s->r = r;
    s->rc = 0;
    s->reread = false;
    mt_file_block_begin(&s->b, &f->parts[part], block, r->sum_only ? NULL : &to);
    mt_file_block_next(&s->b);
    read_run(f, s);
}

/* Starts a block of the drive if it may have another one under way; false: none was started. */
static bool start_next(mt_file_weights *f, size_t drive)
{
    struct mt_file_drive *d = &f->drive[drive];
    struct mt_file_slot *s = d->free;
    struct mt_file_request *r;
    size_t part, block;
    int rc = mt_transfers_broken(f->transfers);
    pthread_mutex_lock(&f->lock);
    bool any = d->first && ((s && d->n_reading < d->most_reading) || rc);
    if (any) {
        take_block(f, drive, &r, &part, &block);
        rc = r->rc ? r->rc : rc;
    }
    pthread_mutex_unlock(&f->lock);
    if (any && rc) { /* the rest of a failed request is not read */
        struct mt_err err = {0};
        mt_fail(&err, MT_ERR_RUNTIME, rc, "cannot read %s: reading was given up: %s",
                f->files[f->parts[part].p.piece[0].file].f.path, strerror(-rc));
        end_block(f, r, rc, &err, 0);
    } else if (any) {
        d->free = s->next;
        start_block(f, s, r, part, block);
    }
    return any;
}

static void take_jobs(mt_file_weights *f)
{
    for (struct mt_job *j; (j = mt_job_pool_take(f->jobs));) {
        struct mt_file_slot *s = (struct mt_file_slot *)j;
        if (s->more)
            read_run(f, s);
        else if (s->rc && s->b.changed && !s->reread)
            read_again(f, s);
        else
            end_slot(f, s);
    }
}

static void *reader_main(void *arg)
{
    mt_file_weights *f = arg;
    for (;;) {
        for (size_t i = 0; i < f->n_drives; i++)
            while (start_next(f, i))
                ;
        pthread_mutex_lock(&f->lock);
        bool quit = f->quit;
        pthread_mutex_unlock(&f->lock);
        if (quit && !f->n_busy) /* nothing is under way then: no request waits */
            return NULL;
        mt_transfers_wait(f->transfers);
        take_jobs(f);
    }
}

/* --- start and stop -------------------------------------------------------------------------- */

static void describe(void *file_weights, size_t i, struct mt_transfer_file *out)
{
    const struct mt_direct_file *d = &((mt_file_weights *)file_weights)->files[i].f;
    *out = (struct mt_transfer_file){.fd = d->fd, .align = d->direct ? d->align : 1, .drive = d->drive};
}

static int open_transfers(mt_file_weights *f, const struct mt_file_weights_params *p, struct mt_err *err)
{
    const char *why = NULL;
    struct mt_transfers_params t = {.n_files = f->n_files, .describe = describe, .depth = (unsigned)f->n_slots,
                                    .io = p->io, .deadline_s = p->deadline_s, .fault = p->fault,
                                    .what = "reading the model's files", .ended = transfer_ended, .ctx = f};
    int rc = mt_transfers_open(&f->transfers, &t, &why, err);
    if (rc)
        return rc;
    if (why)
        mt_info("the model's files are read by threads with pread: %s", why);
    rc = mt_transfers_set_buffers(f->transfers, &(struct iovec){f->buffers, f->buffer_bytes}, 1);
    if (rc)
        mt_info("buffers for the model's files stay unregistered (%s): RLIMIT_MEMLOCK may be low", strerror(-rc));
    return 0;
}

static int make_slots(mt_file_weights *f, unsigned depth, struct mt_err *err)
{
    size_t each = depth / MT_MAX(f->n_drives, (size_t)1);
    for (size_t i = 0; i < f->n_drives; i++)
        f->drive[i].most_reading = each - each / SPARE;
    f->slots = mt_calloc(each * f->n_drives, sizeof(*f->slots));
    if (!f->slots)
        return mt_fail_nomem(err, "reading a model's files", depth * sizeof(*f->slots));
    for (size_t i = 0; i < each * f->n_drives; i++) {
        struct mt_file_slot *s = &f->slots[f->n_slots++];
        struct mt_file_drive *d = &f->drive[i / each];
        s->job.run = take_run;
        s->drive = i / each;
        s->buf = f->buffers + i * MT_FILE_BUFFER;
        s->next = d->free;
        d->free = s;
        int rc = mt_file_block_init(&s->b, f, err);
        if (rc)
            return rc;
    }
    return 0;
}

/* As many as cores: converting to another format is slower than a fast drive. */
static int n_threads(void)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof(set), &set) ? MOST_PLACING : MT_MIN(CPU_COUNT(&set), (int)MOST_PLACING);
}

static void wake_reader(void *transfers)
{
    mt_transfers_wake(transfers);
}

int mt_file_reader_start(mt_file_weights *f, const struct mt_file_weights_params *p, unsigned depth, struct mt_err *err)
{
    int rc = make_slots(f, depth, err)
          ?: open_transfers(f, p, err)
          ?: mt_job_pool_create(&f->jobs, "mt-place", n_threads(), wake_reader, f->transfers, err);
    if (rc)
        return rc;
    rc = mt_thread_start(&f->thread, "mt-files", reader_main, f, err);
    f->started = !rc;
    return rc;
}

bool mt_file_reader_stop(mt_file_weights *f)
{
    if (f->started) {
        pthread_mutex_lock(&f->lock);
        f->quit = true;
        pthread_mutex_unlock(&f->lock);
        mt_transfers_wake(f->transfers);
        pthread_join(f->thread, NULL);
    }
    mt_job_pool_destroy(&f->jobs); /* its threads wake the transfers' */
    if (!mt_transfers_close(&f->transfers, f))
        return false;
    for (size_t i = 0; i < f->n_slots; i++)
        mt_file_block_finish(&f->slots[i].b);
    free(f->slots);
    return true;
}

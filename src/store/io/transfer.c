/* SPDX-License-Identifier: Apache-2.0 */
#include "store/io/transfer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"

enum { MAX_RESULTS = 64, MAX_FAILED = 10000, MAX_STUCK = 100, MAX_SAID = 20, SLOW_S = 10 };
static const int64_t SECOND_NS = 1000000000;
/* Pauses before a transfer with an error of its drive is tried again, as parts of the deadline: none, 0.1 s and 1 s of
 * the usual 300 s. Cables are touched, and servers start again. */
static const double PAUSE[] = {0, 1.0 / 3000, 1.0 / 300};

struct mt_transfers {
    struct mt_transfers_params p;
    struct mt_transfer_file *files;
    mt_io *io;
    const char *io_name;
    struct mt_transfer **going; /* [depth] those that the backend has */
    unsigned n_going, n_said;
    struct mt_transfer *waiting; /* to be tried again when due */
    int broken;
    bool lost;
    int64_t slow_ns; /* when a drive was last said to be slow */
    int64_t clock_ns, seen_ns; /* time while the thread could run; when it was last advanced */
    int64_t deadline_ns;
    void *keep;
    struct mt_transfers *next_lost;
};

static struct mt_transfers *lost_ones; /* a list, so that leak checkers find them */

static void end(mt_transfers *t, struct mt_transfer *x, int rc)
{
    x->rc = rc;
    t->p.ended(x, t->p.ctx);
}

/* Whether the backend still does what it has cannot be known. */
static void give_up(mt_transfers *t, int rc, const char *why)
{
    if (t->broken)
        return;
    t->broken = rc;
    mt_log(MT_LOG_ERROR, "%s: %s: %s; nothing is read or written any more", t->p.what, why, strerror(-rc));
    t->lost = t->n_going > 0;
    for (unsigned i = 0; i < t->n_going; i++)
        t->going[i]->lost = true;
    while (t->n_going)
        end(t, t->going[--t->n_going], rc);
    while (t->waiting) {
        struct mt_transfer *x = t->waiting;
        t->waiting = x->next;
        end(t, x, rc);
    }
}

static void submit(mt_transfers *t, struct mt_transfer *x)
{
    struct mt_io_op op = {.write = x->write,
                          .file = x->file,
                          .buf = x->buf + x->done,
                          .bytes = x->bytes - x->done,
                          .offset = x->offset + x->done,
                          .tag = x};
    if (t->broken) {
        end(t, x, t->broken);
        return;
    }
    x->at = t->n_going;
    x->since = t->clock_ns;
    t->going[t->n_going++] = x;
    int rc = t->io->backend->submit(t->io, &op, 1);
    if (rc)
        give_up(t, rc, "a transfer was not accepted");
}

void mt_transfers_start(mt_transfers *t, struct mt_transfer *x)
{
    x->rc = 0;
    x->lost = false;
    x->done = 0;
    x->moved = 0;
    x->n_short = x->n_retried = x->n_failed = x->n_stuck = x->n_errors = 0;
    submit(t, x);
}

/* Errors of drives, of the way to them, and of servers. */
static bool may_pass(int64_t res)
{
    return res == -EIO || res == -ETIMEDOUT || res == -ESTALE || res == -ENODATA || res == -EREMOTEIO || res == -ENXIO;
}

/* Has the transfer tried again, unless that was done often enough. */
static bool try_again(mt_transfers *t, struct mt_transfer *x, int rc)
{
    const struct mt_transfer_file *f = &t->files[x->file];
    if (x->n_errors == MT_ARRAY_LEN(PAUSE))
        return false;
    if (t->n_said++ < MAX_SAID)
        mt_warn("%s: %zu bytes at offset %llu of a file on %s cannot be %s: %s; trying again", t->p.what, x->bytes - x->done,
                (unsigned long long)(x->offset + x->done), f->drive, x->write ? "written" : "read", strerror(-rc));
    x->n_retried++;
    x->due_ns = mt_now_ns() + (int64_t)(PAUSE[x->n_errors++] * (double)t->deadline_ns);
    x->next = t->waiting;
    t->waiting = x;
    return true;
}

static void submit_due(mt_transfers *t)
{
    int64_t now = mt_now_ns();
    for (struct mt_transfer **at = &t->waiting; *at && !t->broken;) {
        struct mt_transfer *x = *at;
        if (x->due_ns > now) {
            at = &x->next;
            continue;
        }
        *at = x->next;
        submit(t, x);
        at = &t->waiting; /* what was submitted may have ended, and others with it */
    }
}

static void take_result(mt_transfers *t, struct mt_transfer *x, int64_t res)
{
    t->going[x->at] = t->going[--t->n_going];
    t->going[x->at]->at = x->at;
    if ((res == -EINTR || res == -EAGAIN) && ++x->n_failed < MAX_FAILED) {
        if (res == -EAGAIN) /* the kernel is short of memory or of requests: wait a little */
            nanosleep(&(struct timespec){0, 100000}, NULL);
        x->n_retried++;
        submit(t, x);
        return;
    }
    int none = x->write ? -EIO : -ENODATA;
    if (may_pass(res) && try_again(t, x, (int)res))
        return;
    if (res <= 0) {
        end(t, x, res ? (int)res : none);
        return;
    }
    size_t got = x->done + MT_MIN((size_t)res, x->bytes - x->done);
    x->moved += got - x->done;
    if (got >= x->least) {
        x->done = got;
        end(t, x, 0);
        return;
    }
    /* direct I/O continues at an aligned offset: the bytes after the last one are transferred again */
    size_t step = t->files[x->file].align, next = got / step * step;
    x->n_short++;
    if (next == x->done && ++x->n_stuck == MAX_STUCK) {
        end(t, x, none);
        return;
    }
    x->done = next;
    submit(t, x);
}

/* Drives are not given up because the process was stopped for a while: only time in which this thread runs counts. */
static void watch_drives(mt_transfers *t)
{
    int64_t now = mt_now_ns(), most = 2 * MT_IO_WAIT_MS * (int64_t)1000000;
    t->clock_ns += MT_MIN(now - t->seen_ns, most);
    t->seen_ns = now;
    for (unsigned i = 0; i < t->n_going && !t->broken; i++) {
        const struct mt_transfer *x = t->going[i];
        char why[256];
        if (t->clock_ns - x->since > SLOW_S * SECOND_NS && t->clock_ns - t->slow_ns > 60 * SECOND_NS) {
            t->slow_ns = t->clock_ns;
            mt_warn("%s: %s has not answered for %d s: it has become slow, or hangs", t->p.what, t->files[x->file].drive,
                    SLOW_S);
        }
        if (t->clock_ns - x->since < t->deadline_ns)
            continue;
        snprintf(why, sizeof(why), "%s has not answered for %.0f s", t->files[x->file].drive,
                 (double)t->deadline_ns * 1e-9);
        give_up(t, -ETIMEDOUT, why);
    }
}

void mt_transfers_wait(mt_transfers *t)
{
    struct mt_io_result r[MAX_RESULTS];
    int n = 0;
    submit_due(t);
    if (t->broken || (t->waiting && !t->n_going))
        nanosleep(&(struct timespec){0, 10000000}, NULL); /* broken: the backend cannot be woken any more */
    else
        n = t->io->backend->wait(t->io, r, MAX_RESULTS);
    if (n < 0)
        give_up(t, n, "waiting for results failed");
    for (int i = 0; i < n && !t->broken; i++)
        take_result(t, r[i].tag, r[i].res);
    watch_drives(t);
}

void mt_transfers_wake(mt_transfers *t)
{
    t->io->backend->wake(t->io);
}

int mt_transfers_broken(const mt_transfers *t)
{
    return t->broken;
}

const char *mt_transfers_backend(const mt_transfers *t)
{
    return t->io_name;
}

int mt_transfers_set_buffers(mt_transfers *t, const struct iovec *iov, int n)
{
    return t->io->backend->set_buffers(t->io, iov, n);
}

static int open_io(mt_transfers *t, const char **why, struct mt_err *err)
{
    const struct mt_transfers_params *p = &t->p;
    MT_FREED int *fds = mt_calloc(p->n_files, sizeof(*fds));
    if (!fds)
        return mt_fail_nomem(err, p->what, p->n_files * sizeof(*fds));
    for (size_t i = 0; i < p->n_files; i++)
        fds[i] = t->files[i].fd;
    int rc = mt_io_create(&t->io, p->io, p->fault ? 2 * p->depth : p->depth, why, err); /* faults add operations */
    if (!rc) {
        t->io_name = t->io->backend->name;
        rc = t->io->backend->set_files(t->io, fds, (int)p->n_files, err);
    }
    if (!rc && p->fault) {
        mt_io *inner = t->io;
        t->io = NULL; /* if this fails, it is gone */
        rc = mt_io_create_fault(&t->io, inner, p->fault, p->depth, err);
    }
    return rc;
}

int mt_transfers_open(mt_transfers **out, const struct mt_transfers_params *p, const char **why, struct mt_err *err)
{
    mt_transfers *t = mt_calloc(1, sizeof(*t));
    if (!t)
        return mt_fail_nomem(err, p->what, sizeof(*t));
    t->p = *p;
    t->deadline_ns = (int64_t)((p->deadline_s > 0 ? p->deadline_s : MT_TRANSFER_DEADLINE_S) * 1e9);
    t->seen_ns = mt_now_ns();
    t->slow_ns = INT64_MIN / 2;
    t->files = mt_calloc(p->n_files, sizeof(*t->files));
    t->going = mt_calloc(p->depth, sizeof(*t->going));
    int rc = t->files && t->going ? 0 : mt_fail_nomem(err, p->what, p->depth * sizeof(*t->going));
    if (!rc) {
        for (size_t i = 0; i < p->n_files; i++)
            p->describe(p->ctx, i, &t->files[i]);
        rc = open_io(t, why, err);
    }
    if (rc)
        mt_transfers_close(&t, NULL);
    else
        *out = t;
    return rc;
}

bool mt_transfers_close(mt_transfers **transfers, void *keep)
{
    mt_transfers *t = *transfers;
    *transfers = NULL;
    if (!t)
        return true;
    if (t->lost) { /* the kernel or a thread may still use transfers and the backend */
        t->keep = keep;
        t->next_lost = lost_ones;
        lost_ones = t;
        return false;
    }
    mt_io_destroy(&t->io);
    free(t->files);
    free(t->going);
    free(t);
    return true;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Opening and closing a disk: its files, its backend and its thread (disk.c). */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/thread.h"
#include "store/disk_priv.h"

static int open_files(struct mt_disk *d, const struct mt_disk_params *p, struct mt_err *err)
{
    size_t chunk = p->chunk_bytes ? p->chunk_bytes : MT_DISK_BLOCK;
    for (size_t i = 0; i < p->n_dirs; i++)
        mt_disk_remove_stale(p->dirs[i]);
    int rc = mt_stripe_init(&d->stripe, p->n_dirs, chunk, p->rates, err);
    d->files = mt_calloc(p->n_dirs, sizeof(*d->files));
    if (!rc && !d->files)
        rc = mt_fail_nomem(err, "scratch files", p->n_dirs * sizeof(*d->files));
    d->direct = true;
    for (size_t i = 0; i < p->n_dirs && !rc; i++) {
        struct mt_disk_file *f = &d->files[i];
        rc = mt_disk_file_open(f, p->dirs[i], i, mt_stripe_file_bytes(&d->stripe, i, p->bytes),
                               p->buffered, err);
        if (rc)
            break;
        d->n_files++;
        d->direct &= f->direct || !f->bytes;
    }
    return rc;
}

static void describe(void *disk, size_t i, struct mt_transfer_file *out)
{
    const struct mt_disk_file *f = &((struct mt_disk *)disk)->files[i];
    *out = (struct mt_transfer_file){.fd = f->fd, .align = f->direct ? f->align : 1, .drive = f->drive};
}

static int open_transfers(struct mt_disk *d, const struct mt_disk_params *p, struct mt_err *err)
{
    const char *why = NULL;
    unsigned n = 2 * d->depth;
    d->pieces = mt_calloc(n, sizeof(*d->pieces));
    if (!d->pieces)
        return mt_fail_nomem(err, "disk requests", n * sizeof(*d->pieces));
    for (unsigned i = 0; i < n; i++) {
        d->pieces[i].next = d->free_pieces;
        d->free_pieces = &d->pieces[i];
    }
    struct mt_transfers_params t = {.n_files = d->n_files, .describe = describe, .depth = n, .io = p->io,
                                    .deadline_s = p->deadline_s, .fault = p->fault, .what = "disk I/O",
                                    .ended = mt_disk_transfer_ended, .ctx = d};
    int rc = mt_transfers_open(&d->transfers, &t, &why, err);
    if (!rc && why)
        mt_warn("disk I/O by threads with pread and pwrite: %s", why);
    return rc;
}

static void wake_disk(void *transfers)
{
    mt_transfers_wake(transfers);
}

int mt_disk_open_rated(mt_disk **out, const struct mt_disk_params *p, struct mt_err *err)
{
    mt_disk *d = mt_calloc(1, sizeof(*d));
    if (!d)
        return mt_fail_nomem(err, "the disk", sizeof(*d));
    pthread_mutex_init(&d->lock, NULL);
    d->request_bytes = p->request_bytes ? p->request_bytes : MT_DISK_BLOCK;
    d->depth = p->depth ? p->depth : 32;
    int rc = open_files(d, p, err) ?: open_transfers(d, p, err);
    if (!rc) /* one more than drives: for reads and writes at once */
        rc = mt_job_pool_create(&d->sums, "mt-sum", (int)p->n_dirs + 1, wake_disk, d->transfers, err);
    if (!rc) {
        rc = mt_thread_start(&d->thread, "mt-disk", mt_disk_main, d, err);
        d->started = !rc;
    }
    if (rc)
        mt_disk_close(&d);
    else
        *out = d;
    return rc;
}

void mt_disk_close(mt_disk **disk)
{
    mt_disk *d = *disk;
    if (!d)
        return;
    if (d->started) {
        pthread_mutex_lock(&d->lock);
        d->quit = true;
        pthread_mutex_unlock(&d->lock);
        mt_transfers_wake(d->transfers);
        pthread_join(d->thread, NULL);
    }
    mt_job_pool_destroy(&d->sums); /* its threads wake the transfers' */
    bool all_ended = mt_transfers_close(&d->transfers, d);
    for (size_t i = 0; i < d->n_files; i++)
        if (all_ended)
            mt_disk_file_close(&d->files[i]);
        else
            unlink(d->files[i].path); /* not closed: a late write must not reach another file by a reused number */
    mt_stripe_finish(&d->stripe);
    pthread_mutex_destroy(&d->lock);
    *disk = NULL;
    if (!all_ended)
        return;
    free(d->files);
    free(d->pieces);
    free(d);
}

void mt_disk_set_buffers(mt_disk *d, const struct iovec *iov, int n)
{
    int rc = mt_transfers_set_buffers(d->transfers, iov, n);
    d->buffers_registered = !rc && n && !strcmp(mt_transfers_backend(d->transfers), "io_uring");
    if (rc)
        mt_info("disk I/O: staging memory stays unregistered (%s): RLIMIT_MEMLOCK may be low",
                strerror(-rc));
}

void mt_disk_info(const mt_disk *d, struct mt_disk_info *out)
{
    *out = (struct mt_disk_info){.io = mt_transfers_backend(d->transfers), .direct = d->direct, .depth = d->depth,
                                 .buffers_registered = d->buffers_registered, .align = 512,
                                 .n_dirs = d->n_files};
    for (size_t i = 0; i < d->n_files; i++)
        out->align = MT_MAX(out->align, d->files[i].align);
}

int mt_disk_sync(mt_disk *d, struct mt_err *err)
{
    for (size_t i = 0; i < d->n_files; i++)
        while (fdatasync(d->files[i].fd))
            if (errno != EINTR)
                return mt_fail(err, MT_ERR_RUNTIME, -errno, "cannot sync %s (%s): %s: what is read from it may not be what was "
                               "written", d->files[i].path, d->files[i].drive, strerror(errno));
    return 0;
}

size_t mt_disk_block(const mt_disk *d)
{
    size_t chunk = d->stripe.chunk, block = MT_MIN(chunk, mt_align_up(d->request_bytes, MT_DISK_ALIGN));
    return chunk % block || block > d->request_bytes ? (size_t)MT_DISK_ALIGN : block; /* a block is on one drive */
}

const char *mt_disk_file(const mt_disk *d, size_t i, uint64_t *bytes, double *share)
{
    *bytes = d->files[i].bytes;
    *share = (double)d->stripe.per_dir[i] / (double)d->stripe.n_slots;
    return d->files[i].path;
}

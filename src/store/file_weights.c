/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Each thread takes the next block of the oldest request of its drive, reads it, sums it and copies it to its place, so
 * that reads, sums and copies overlap.
 */
#include "store/file_weights.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"

enum { ALIGN = MT_DISK_ALIGN, BUFFER = MT_SUM_BLOCK + 2 * ALIGN };

struct file {
    char *path;
    int fd;
    bool direct;
    size_t drive;
};

struct part {
    struct mt_file_part p;
    size_t first_sum, n_blocks, n_known;
    bool expects;
    uint64_t expected;
};

struct drive {
    mt_file_weights *f;
    dev_t dev;
    struct mt_file_request *first, *last; /* requests with blocks that no thread has taken; under lock */
    pthread_cond_t work;
};

struct mt_file_weights {
    struct file *files;
    size_t n_files;
    struct part *parts;
    size_t n_parts;
    size_t *unit_first; /* [n_units + 1] parts of a unit */
    uint64_t *sum;
    bool *known;
    int (*inspect)(const struct mt_file_part *p, const char *path, size_t at, const void *data, size_t n,
                   struct mt_err *err);
    struct drive drive[MT_FILE_MAX_DRIVES];
    size_t n_drives;
    struct reader {
        struct drive *drive;
        pthread_t thread;
        char *buf;
    } *readers;
    size_t n_readers;
    char *buffers;
    size_t buffer_bytes;
    pthread_mutex_t lock;
    struct mt_file_weights_stats stats;
    size_t n_under_way;
    int64_t busy_since;
    bool quit;
};

/* --- a block --------------------------------------------------------------------------------- */

static size_t block_bytes(const struct part *p, size_t block)
{
    return MT_MIN((size_t)MT_SUM_BLOCK, p->p.bytes - block * MT_SUM_BLOCK);
}

/* Reads the aligned bytes around a block; *data is the begin of the block in `buf`. */
static int read_cover(const struct file *f, uint64_t offset, size_t bytes, char *buf, char **data, struct mt_err *err)
{
    uint64_t from = offset / ALIGN * ALIGN;
    size_t want = (size_t)(offset - from) + bytes, cover = mt_align_up(want, ALIGN), got = 0;
    while (got < want) {
        ssize_t n = pread(f->fd, buf + got, cover - got, (off_t)(from + got));
        if (n < 0 && (errno == EINTR || errno == EAGAIN))
            continue;
        size_t next = n > 0 ? got + (size_t)n : got;
        if (next < want) /* direct I/O continues at an aligned offset */
            next = next / ALIGN * ALIGN;
        if (next == got)
            return mt_fail(err, MT_ERR_INPUT, n < 0 ? -errno : -ENODATA, "cannot read %zu bytes at offset %llu of %s: %s",
                           want - got, (unsigned long long)(from + got), f->path,
                           n < 0 ? strerror(errno) : "the file has become shorter");
        got = next;
    }
    *data = buf + (offset - from);
    return 0;
}

static int fail_changed(const struct file *f, const struct part *p, size_t block, struct mt_err *err)
{
    uint64_t at = p->p.offset + (uint64_t)block * MT_SUM_BLOCK;
    return mt_fail(err, MT_ERR_INPUT, -EBADMSG,
                   "%s: tensor \"%s\" has changed: bytes %llu to %llu of the file have another checksum than when "
                   "they were first read; the file was changed during the run, or its drive is failing",
                   f->path, p->p.name, (unsigned long long)at, (unsigned long long)(at + block_bytes(p, block)));
}

static int fail_expected(const struct file *f, const struct part *p, struct mt_err *err)
{
    return mt_fail(err, MT_ERR_INPUT, -EBADMSG,
                   "%s: tensor \"%s\" does not have the checksum in the checkpoint: it is not the model that the run was "
                   "made on, or it was changed since; set model.path to that model", f->path, p->p.name);
}

/* Keeps a block's sum, or compares it with the one kept. */
static int check_block(mt_file_weights *f, struct part *p, size_t block, const char *data, struct mt_err *err)
{
    const struct file *file = &f->files[p->p.file];
    size_t n = block_bytes(p, block), at = p->first_sum + block;
    uint64_t sum = mt_block_sum(data, n);
    pthread_mutex_lock(&f->lock);
    bool known = f->known[at], same = f->sum[at] == sum;
    pthread_mutex_unlock(&f->lock);
    if (known)
        return same ? 0 : fail_changed(file, p, block, err);
    int rc = f->inspect ? f->inspect(&p->p, file->path, block * MT_SUM_BLOCK, data, n, err) : 0;
    if (rc)
        return rc;
    pthread_mutex_lock(&f->lock);
    p->n_known += !f->known[at];
    f->known[at] = true;
    f->sum[at] = sum;
    bool whole = p->n_known == p->n_blocks;
    pthread_mutex_unlock(&f->lock);
    bool wrong = whole && p->expects && mt_tensor_sum(f->sum + p->first_sum, p->n_blocks) != p->expected;
    return wrong ? fail_expected(file, p, err) : 0;
}

/* Reads a block and checks it; *data points into `buf`. */
static int load_block(mt_file_weights *f, struct part *p, size_t block, char *buf, char **data, struct mt_err *err)
{
    const struct file *file = &f->files[p->p.file];
    int rc = read_cover(file, p->p.offset + (uint64_t)block * MT_SUM_BLOCK, block_bytes(p, block), buf, data, err);
    return rc ? rc : check_block(f, p, block, *data, err);
}

/* --- requests -------------------------------------------------------------------------------- */

static size_t drive_of(const mt_file_weights *f, size_t part)
{
    return f->files[f->parts[part].p.file].drive;
}

/* Whether the request needs the part and it is on the drive. */
static bool wants(const mt_file_weights *f, const struct mt_file_request *r, size_t part, size_t drive)
{
    return r->plane[f->parts[part].p.plane] && drive_of(f, part) == drive;
}

/* Moves the cursor to the next part that is needed from the drive; false: there is none. */
static bool find_part(const mt_file_weights *f, struct mt_file_request *r, size_t drive)
{
    size_t end = f->unit_first[r->unit + 1];
    while (r->cursor[drive].part < end && !wants(f, r, r->cursor[drive].part, drive))
        r->cursor[drive].part++;
    return r->cursor[drive].part < end;
}

static void append(struct drive *d, size_t i, struct mt_file_request *r)
{
    r->next[i] = NULL;
    if (d->last)
        d->last->next[i] = r;
    else
        d->first = r;
    d->last = r;
    pthread_cond_broadcast(&d->work);
}

/* Call under lock. Takes the next block of the drive's oldest request. */
static void take_block(mt_file_weights *f, struct drive *d, struct mt_file_request **r, size_t *part, size_t *block)
{
    size_t i = (size_t)(d - f->drive);
    *r = d->first;
    *part = d->first->cursor[i].part;
    *block = d->first->cursor[i].block++;
    if (*block + 1 < f->parts[*part].n_blocks)
        return;
    d->first->cursor[i].part++;
    d->first->cursor[i].block = 0;
    if (!find_part(f, d->first, i)) {
        d->first = d->first->next[i];
        if (!d->first)
            d->last = NULL;
    }
}

static void end_block(mt_file_weights *f, struct mt_file_request *r, int rc, const struct mt_err *err, size_t bytes)
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

static void *reader_main(void *arg)
{
    struct reader *me = arg;
    struct drive *d = me->drive;
    mt_file_weights *f = d->f;
    pthread_mutex_lock(&f->lock);
    for (;;) {
        struct mt_file_request *r;
        struct mt_err err = {0};
        size_t part, block;
        char *data;
        while (!d->first && !f->quit)
            pthread_cond_wait(&d->work, &f->lock);
        if (!d->first)
            break;
        take_block(f, d, &r, &part, &block);
        int rc = r->rc; /* the rest of a failed request is not read */
        pthread_mutex_unlock(&f->lock);
        struct part *p = &f->parts[part];
        size_t n = rc ? 0 : block_bytes(p, block);
        if (!rc)
            rc = load_block(f, p, block, me->buf, &data, &err);
        if (!rc && n)
            memcpy(r->plane[p->p.plane] + p->p.at + block * MT_SUM_BLOCK, data, n);
        end_block(f, r, rc, &err, n);
        pthread_mutex_lock(&f->lock);
    }
    pthread_mutex_unlock(&f->lock);
    return NULL;
}

uint64_t mt_file_weights_wanted(const mt_file_weights *f, const struct mt_file_request *r)
{
    uint64_t bytes = 0;
    for (size_t i = f->unit_first[r->unit]; i < f->unit_first[r->unit + 1]; i++)
        bytes += r->plane[f->parts[i].p.plane] ? f->parts[i].p.bytes : 0;
    return bytes;
}

void mt_file_weights_submit(mt_file_weights *f, struct mt_file_request *r)
{
    bool on[MT_FILE_MAX_DRIVES] = {false};
    r->rc = 0;
    r->left = 0;
    for (size_t i = f->unit_first[r->unit]; i < f->unit_first[r->unit + 1]; i++)
        if (r->plane[f->parts[i].p.plane]) {
            r->left += f->parts[i].n_blocks;
            on[drive_of(f, i)] = true;
        }
    if (!r->left) {
        r->done(r);
        return;
    }
    pthread_mutex_lock(&f->lock);
    if (f->n_under_way++ == 0)
        f->busy_since = mt_now_ns();
    for (size_t d = 0; d < f->n_drives; d++) {
        r->cursor[d].part = f->unit_first[r->unit];
        r->cursor[d].block = 0;
        if (on[d] && find_part(f, r, d))
            append(&f->drive[d], d, r);
    }
    pthread_mutex_unlock(&f->lock);
}

/* --- synchronous reads ----------------------------------------------------------------------- */

static int alloc_buffer(char **buf, struct mt_err *err)
{
    void *p = NULL;
    *buf = NULL;
    if (posix_memalign(&p, ALIGN, BUFFER))
        return mt_fail_nomem(err, "reading a model's files", BUFFER);
    *buf = p;
    return 0;
}

/* Copies the block's part of bytes [first, end) of the plane to its place in dst. */
static void copy_overlap(const struct part *p, size_t block, const char *data, size_t first, size_t end, char *dst)
{
    size_t at = p->p.at + block * MT_SUM_BLOCK, to = at + block_bytes(p, block);
    size_t a = MT_MAX(at, first), b = MT_MIN(to, end);
    if (a < b)
        memcpy(dst + (a - first), data + (a - at), b - a);
}

int mt_file_weights_read(mt_file_weights *f, size_t unit, enum mt_plane_kind k, size_t first, size_t n, void *dst,
                         struct mt_err *err)
{
    char *buf, *data;
    size_t end = first + n;
    int rc = alloc_buffer(&buf, err);
    memset(dst, 0, n); /* padding between parts */
    for (size_t i = f->unit_first[unit]; i < f->unit_first[unit + 1] && !rc; i++) {
        struct part *p = &f->parts[i];
        if (p->p.plane != k || p->p.at >= end || p->p.at + p->p.bytes <= first)
            continue;
        size_t from = first > p->p.at ? (first - p->p.at) / MT_SUM_BLOCK : 0;
        for (size_t b = from; b < p->n_blocks && p->p.at + b * MT_SUM_BLOCK < end && !rc; b++) {
            rc = load_block(f, p, b, buf, &data, err);
            if (!rc)
                copy_overlap(p, b, data, first, end, dst);
        }
    }
    free(buf);
    return rc;
}

int mt_file_weights_sum(mt_file_weights *f, size_t i, uint64_t *sum, struct mt_err *err)
{
    struct part *p = &f->parts[i];
    char *buf = NULL, *data;
    int rc = p->n_known < p->n_blocks ? alloc_buffer(&buf, err) : 0;
    for (size_t b = 0; b < p->n_blocks && !rc; b++)
        if (!f->known[p->first_sum + b])
            rc = load_block(f, p, b, buf, &data, err);
    free(buf);
    if (!rc)
        *sum = mt_tensor_sum(f->sum + p->first_sum, p->n_blocks);
    return rc;
}

void mt_file_weights_expect(mt_file_weights *f, size_t i, uint64_t sum)
{
    f->parts[i].expects = true;
    f->parts[i].expected = sum;
}

size_t mt_file_weights_n_parts(const mt_file_weights *f)
{
    return f->n_parts;
}

const struct mt_file_part *mt_file_weights_part(const mt_file_weights *f, size_t i, const char **path)
{
    if (path)
        *path = f->files[f->parts[i].p.file].path;
    return &f->parts[i].p;
}

void mt_file_weights_stats(mt_file_weights *f, struct mt_file_weights_stats *out)
{
    pthread_mutex_lock(&f->lock);
    *out = f->stats;
    if (f->n_under_way)
        out->busy_ns += mt_now_ns() - f->busy_since;
    pthread_mutex_unlock(&f->lock);
}

bool mt_file_weights_direct(const mt_file_weights *f, size_t *n_drives)
{
    bool direct = true;
    for (size_t i = 0; i < f->n_files; i++)
        direct &= f->files[i].direct;
    *n_drives = f->n_drives;
    return direct;
}

/* --- set-up ---------------------------------------------------------------------------------- */

/* Opens with O_DIRECT if a first read succeeds: some file systems refuse only that. */
static bool open_direct(struct file *f, char *buf)
{
    int fd = open(f->path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (fd < 0)
        return false;
    if (pread(fd, buf, ALIGN, 0) < 0) {
        close(fd);
        return false;
    }
    f->fd = fd;
    f->direct = true;
    return true;
}

static size_t find_drive(mt_file_weights *f, dev_t dev)
{
    for (size_t i = 0; i < f->n_drives; i++)
        if (f->drive[i].dev == dev)
            return i;
    if (f->n_drives == MT_FILE_MAX_DRIVES)
        return 0;
    f->drive[f->n_drives] = (struct drive){.f = f, .dev = dev};
    pthread_cond_init(&f->drive[f->n_drives].work, NULL);
    return f->n_drives++;
}

static int open_files(mt_file_weights *f, const struct mt_file_weights_params *p, struct mt_err *err)
{
    for (; f->n_files < p->n_paths; f->n_files++) {
        struct file *file = &f->files[f->n_files];
        struct stat st;
        *file = (struct file){.path = strdup(p->paths[f->n_files]), .fd = -1};
        if (!file->path)
            return mt_fail_nomem(err, "a model's files", p->n_paths);
        if (p->buffered || !open_direct(file, f->buffers))
            file->fd = open(file->path, O_RDONLY | O_CLOEXEC);
        if (file->fd < 0 || fstat(file->fd, &st)) {
            int rc = -errno;
            f->n_files++;
            return mt_fail(err, MT_ERR_INPUT, rc, "cannot open %s: %s", file->path, strerror(-rc));
        }
        file->drive = find_drive(f, st.st_dev);
        if (!file->direct && !p->buffered)
            mt_info("%s: its file system has no direct I/O; using the page cache", file->path);
    }
    return 0;
}

static int take_parts(mt_file_weights *f, const struct mt_file_weights_params *p, struct mt_err *err)
{
    size_t n_sums = 0;
    for (; f->n_parts < p->n_parts; f->n_parts++) {
        struct part *t = &f->parts[f->n_parts];
        *t = (struct part){.p = p->parts[f->n_parts], .first_sum = n_sums};
        t->n_blocks = mt_sum_blocks(t->p.bytes);
        n_sums += t->n_blocks;
        f->unit_first[t->p.unit + 1]++;
    }
    for (size_t u = 0; u < p->n_units; u++)
        f->unit_first[u + 1] += f->unit_first[u];
    f->sum = mt_calloc(n_sums, sizeof(*f->sum));
    f->known = mt_calloc(n_sums, sizeof(*f->known));
    return f->sum && f->known ? 0 : mt_fail_nomem(err, "sums of a model's files", n_sums * sizeof(*f->sum));
}

static int start_readers(mt_file_weights *f, unsigned depth, struct mt_err *err)
{
    size_t n = depth / MT_MAX(f->n_drives, (size_t)1) * f->n_drives;
    for (; f->n_readers < n; f->n_readers++) {
        struct reader *r = &f->readers[f->n_readers];
        *r = (struct reader){.drive = &f->drive[f->n_readers % f->n_drives], .buf = f->buffers + f->n_readers * BUFFER};
        int rc = pthread_create(&r->thread, NULL, reader_main, r);
        if (rc)
            return mt_fail(err, MT_ERR_RUNTIME, -rc, "cannot start threads that read the model's files: %s",
                           strerror(rc));
        pthread_setname_np(r->thread, "mt-files");
    }
    return 0;
}

static unsigned depth_of(unsigned depth)
{
    return depth ? MT_MAX(depth, (unsigned)MT_FILE_MAX_DRIVES) : MT_FILE_DEPTH;
}

size_t mt_file_weights_bytes(unsigned depth)
{
    return (size_t)depth_of(depth) * BUFFER;
}

int mt_file_weights_open(mt_file_weights **out, const struct mt_file_weights_params *p, struct mt_err *err)
{
    unsigned depth = depth_of(p->depth);
    mt_file_weights *f = mt_calloc(1, sizeof(*f));
    if (!f)
        return mt_fail_nomem(err, "a model's files", sizeof(*f));
    pthread_mutex_init(&f->lock, NULL);
    f->inspect = p->inspect;
    f->files = mt_calloc(p->n_paths, sizeof(*f->files));
    f->parts = mt_calloc(p->n_parts, sizeof(*f->parts));
    f->unit_first = mt_calloc(p->n_units + 1, sizeof(*f->unit_first));
    f->readers = mt_calloc(depth, sizeof(*f->readers));
    int rc = f->files && f->parts && f->unit_first && f->readers
                 ? 0 : mt_fail_nomem(err, "a model's files", p->n_parts * sizeof(*f->parts));
    void *buffers = NULL;
    if (!rc)
        rc = mt_host_alloc(&buffers, (size_t)depth * BUFFER, "reading a model's files", err);
    f->buffers = buffers;
    f->buffer_bytes = (size_t)depth * BUFFER;
    if (!rc)
        rc = open_files(f, p, err);
    if (!rc)
        rc = take_parts(f, p, err);
    if (!rc)
        rc = start_readers(f, depth, err);
    if (rc) {
        mt_file_weights_close(&f);
        return rc;
    }
    *out = f;
    return 0;
}

void mt_file_weights_close(mt_file_weights **file_weights)
{
    mt_file_weights *f = *file_weights;
    if (!f)
        return;
    pthread_mutex_lock(&f->lock);
    f->quit = true;
    for (size_t i = 0; i < f->n_drives; i++)
        pthread_cond_broadcast(&f->drive[i].work);
    pthread_mutex_unlock(&f->lock);
    for (size_t i = 0; i < f->n_readers; i++)
        pthread_join(f->readers[i].thread, NULL);
    for (size_t i = 0; i < f->n_drives; i++)
        pthread_cond_destroy(&f->drive[i].work);
    for (size_t i = 0; i < f->n_files; i++) {
        if (f->files[i].fd >= 0)
            close(f->files[i].fd);
        free(f->files[i].path);
    }
    mt_host_free(f->buffers, f->buffer_bytes);
    pthread_mutex_destroy(&f->lock);
    free(f->files);
    free(f->parts);
    free(f->unit_first);
    free(f->readers);
    free(f->sum);
    free(f->known);
    free(f);
    *file_weights = NULL;
}

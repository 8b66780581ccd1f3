/* SPDX-License-Identifier: Apache-2.0 */
#include "data/teacher.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/mem.h"

/* Where a sample's rows are. */
struct entry {
    uint64_t hash, first, n;
};

struct mt_teacher_out {
    int fd;
    size_t top;
    uint64_t n_samples;
    struct mt_teacher_header header;
    struct entry *entry; /* [n_samples] */
};

struct mt_teacher {
    const char *map;
    size_t bytes, top, of_row;
    uint64_t rows_at;
    uint64_t *first; /* [samples of the data set] */
};

size_t mt_teacher_row_bytes(size_t top)
{
    return top * sizeof(struct mt_top) + sizeof(float);
}

static uint64_t rows_at(uint64_t n_samples)
{
    return sizeof(struct mt_teacher_header) + n_samples * sizeof(struct entry);
}

uint64_t mt_teacher_bytes(uint64_t n_samples, uint64_t n_rows, size_t top)
{
    return rows_at(n_samples) + n_rows * mt_teacher_row_bytes(top);
}

/* Trained tokens of a sample; mask: scratch. */
static uint64_t count_rows(const mt_dataset *d, uint64_t i, uint8_t *mask)
{
    size_t n = mt_dataset_sample(d, i, NULL, mask);
    uint64_t rows = 0;
    for (size_t k = 1; k < n; k++)
        rows += mask[k];
    return rows;
}

/* The entries of a data set's samples; *n_rows: of all. */
static int list_samples(struct entry **out, const mt_dataset *d, uint64_t *n_rows, struct mt_err *err)
{
    const struct mt_dataset_stats *s = mt_dataset_stats(d);
    uint8_t *mask = mt_calloc(s->max_len + 1, 1);
    struct entry *e = mt_calloc(s->n_samples + 1, sizeof(*e));
    int rc = mask && e ? 0 : mt_fail_nomem(err, "samples of a teacher", s->n_samples * sizeof(*e));
    *n_rows = 0;
    for (uint64_t i = 0; i < s->n_samples && !rc; i++) {
        e[i] = (struct entry){mt_dataset_sample_hash(d, i, true), *n_rows, count_rows(d, i, mask)};
        *n_rows += e[i].n;
    }
    free(mask);
    if (rc)
        free(e);
    else
        *out = e;
    return rc;
}

static int write_at(int fd, const void *data, size_t n, uint64_t at)
{
    for (const char *p = data; n;) {
        ssize_t put = pwrite(fd, p, n, (off_t)at);
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return put ? -errno : -EIO;
        p += put;
        n -= (size_t)put;
        at += (uint64_t)put;
    }
    return 0;
}

/* Begins the file, unless it is one of the same key. */
static int begin(mt_teacher_out *t, const struct mt_teacher_params *p, struct mt_err *err)
{
    struct mt_teacher_header was = {0};
    uint64_t bytes = mt_teacher_bytes(t->n_samples, t->header.n_rows, t->top);
    struct stat st;
    bool whole = !fstat(t->fd, &st) && (uint64_t)st.st_size == bytes;
    if (whole && !mt_pread_all(t->fd, &was, sizeof(was), 0) && !memcmp(&was, &t->header, sizeof(was)))
        return 0;
    if (p->goes_on)
        return mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s does not hold what was computed before: give --force to start over",
                       p->path);
    int rc = ftruncate(t->fd, 0) ? -errno : 0;
    if (!rc)
        rc = write_at(t->fd, t->entry, t->n_samples * sizeof(*t->entry), sizeof(was));
    if (!rc)
        rc = -posix_fallocate(t->fd, 0, (off_t)bytes);
    if (!rc)
        rc = write_at(t->fd, &t->header, sizeof(t->header), 0);
    if (!rc && fdatasync(t->fd))
        rc = -errno;
    return rc ? mt_fail(err, MT_ERR_RUNTIME, rc, "%s: %s", p->path, strerror(-rc)) : 0;
}

int mt_teacher_create(mt_teacher_out **out, const struct mt_teacher_params *p, struct mt_err *err)
{
    mt_teacher_out *t = mt_calloc(1, sizeof(*t));
    uint64_t n_rows;
    if (!t)
        return mt_fail_nomem(err, "a teacher", sizeof(*t));
    t->fd = open(p->path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    t->top = p->top;
    t->n_samples = mt_dataset_stats(p->data)->n_samples;
    int rc = t->fd < 0 ? mt_fail(err, MT_ERR_RUNTIME, -errno, "%s: %s", p->path, strerror(errno))
                       : list_samples(&t->entry, p->data, &n_rows, err);
    if (!rc) {
        t->header = (struct mt_teacher_header){
            MT_TEACHER_MAGIC, (uint32_t)p->top, (uint32_t)p->vocab, t->n_samples, n_rows, p->key | 1, {0}};
        rc = begin(t, p, err);
    }
    if (rc)
        mt_teacher_close(&t, false, NULL);
    else
        *out = t;
    return rc;
}

int mt_teacher_write(mt_teacher_out *t, uint64_t sample, const struct mt_top *token, const float *rest, size_t n,
                     struct mt_err *err)
{
    const struct entry *e = &t->entry[sample];
    size_t bytes = mt_teacher_row_bytes(t->top);
    char *rows = n == e->n ? mt_calloc(n, bytes) : NULL;
    if (!rows)
        return n == e->n ? mt_fail_nomem(err, "rows of a teacher", n * bytes)
                         : mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "sample %llu has %zu rows instead of %llu",
                                   (unsigned long long)sample, n, (unsigned long long)e->n);
    for (size_t i = 0; i < n; i++) {
        memcpy(rows + i * bytes, token + i * t->top, t->top * sizeof(*token));
        memcpy(rows + (i + 1) * bytes - sizeof(float), &rest[i], sizeof(float));
    }
    int rc = write_at(t->fd, rows, n * bytes, rows_at(t->n_samples) + e->first * bytes);
    free(rows);
    return rc ? mt_fail(err, MT_ERR_RUNTIME, rc, "the teacher's file cannot be written: %s", strerror(-rc)) : 0;
}

int mt_teacher_sync(mt_teacher_out *t, struct mt_err *err)
{
    return fdatasync(t->fd) ? mt_fail(err, MT_ERR_RUNTIME, -errno, "the teacher's file cannot be synced: %s", strerror(errno))
                            : 0;
}

int mt_teacher_close(mt_teacher_out **teacher, bool complete, struct mt_err *err)
{
    mt_teacher_out *t = *teacher;
    int rc = 0;
    if (!t)
        return 0;
    t->header.key = 0;
    if (complete && (fdatasync(t->fd) || write_at(t->fd, &t->header, sizeof(t->header), 0) || fdatasync(t->fd)))
        rc = mt_fail(err, MT_ERR_RUNTIME, -EIO, "the teacher's file cannot be completed: %s", strerror(errno));
    if (t->fd >= 0)
        close(t->fd);
    free(t->entry);
    free(t);
    *teacher = NULL;
    return rc;
}

static int map_file(mt_teacher *t, const char *path, struct mt_err *err)
{
    struct stat st;
    int fd = mt_open_regular(path, err), rc = fd < 0 ? fd : 0;
    if (!rc && (fstat(fd, &st) || (size_t)st.st_size < sizeof(struct mt_teacher_header)))
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s is no file of megatrain score --top", path);
    if (!rc) {
        t->bytes = (size_t)st.st_size;
        void *map = mmap(NULL, t->bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        rc = map == MAP_FAILED ? mt_fail(err, MT_ERR_RUNTIME, -errno, "%s: %s", path, strerror(errno)) : 0;
        t->map = rc ? NULL : map;
    }
    if (fd >= 0)
        close(fd);
    return rc;
}

static int check(const mt_teacher *t, const struct mt_teacher_params *p, struct mt_err *err)
{
    const struct mt_teacher_header *h = (const void *)t->map;
    const char *path = p->path;
    if (memcmp(h->magic, MT_TEACHER_MAGIC, sizeof(h->magic)) || !h->top || h->n_samples > t->bytes ||
        h->n_rows > t->bytes || h->top > t->bytes || mt_teacher_bytes(h->n_samples, h->n_rows, h->top) != t->bytes)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s is no whole file of megatrain score --top", path);
    if (h->key)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s is not complete: run megatrain score --top again, which goes on from there",
                       path);
    if (h->top < p->top)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "distill.top = %zu: %s has %u tokens of each row: lower it", p->top, path,
                       h->top);
    if (h->vocab != p->vocab)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s is of a teacher with a vocabulary of %u tokens, the model has %zu: they do "
                       "not speak of the same tokens", path, h->vocab, p->vocab);
    return 0;
}

static int by_hash(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;
    return (x->hash > y->hash) - (x->hash < y->hash);
}

/* Finds the rows of the data set's samples. */
static int find_samples(mt_teacher *t, const struct mt_teacher_params *p, struct mt_err *err)
{
    const struct mt_teacher_header *h = (const void *)t->map;
    struct entry *own = NULL, *there = mt_calloc(h->n_samples + 1, sizeof(*there));
    uint64_t n = mt_dataset_stats(p->data)->n_samples, n_rows, missing = 0;
    char at[200] = "";
    int rc = there ? list_samples(&own, p->data, &n_rows, err)
                   : mt_fail_nomem(err, p->path, h->n_samples * sizeof(*there));
    t->first = mt_calloc(n + 1, sizeof(*t->first));
    if (!rc && !t->first)
        rc = mt_fail_nomem(err, p->path, n * sizeof(*t->first));
    if (!rc) {
        memcpy(there, t->map + sizeof(*h), h->n_samples * sizeof(*there));
        qsort(there, h->n_samples, sizeof(*there), by_hash);
    }
    for (uint64_t i = 0; i < n && !rc; i++) {
        const struct entry *e = bsearch(&own[i], there, h->n_samples, sizeof(*there), by_hash);
        bool good = e && e->n == own[i].n && e->first <= h->n_rows && e->n <= h->n_rows - e->first;
        t->first[i] = good ? e->first : 0;
        if (!good && !missing++)
            mt_dataset_place(p->data, i, at, sizeof(at));
    }
    free(own);
    free(there);
    return rc || !missing ? rc
                          : mt_fail(err, MT_ERR_INPUT, -ENODATA, "%s does not have %llu of %llu samples, the first of them %s: it is of "
                                    "other data, or was made with another tokenizer, chat template or data.seq_len", p->path,
                                    (unsigned long long)missing, (unsigned long long)n, at);
}

int mt_teacher_open(mt_teacher **out, const struct mt_teacher_params *p, struct mt_err *err)
{
    mt_teacher *t = mt_calloc(1, sizeof(*t));
    int rc = t ? map_file(t, p->path, err) : mt_fail_nomem(err, p->path, sizeof(*t));
    if (!rc)
        rc = check(t, p, err);
    if (!rc)
        rc = find_samples(t, p, err);
    if (rc) {
        mt_teacher_close_read(&t);
        return rc;
    }
    const struct mt_teacher_header *h = (const void *)t->map;
    t->top = p->top;
    t->of_row = mt_teacher_row_bytes(h->top);
    t->rows_at = rows_at(h->n_samples);
    *out = t;
    return 0;
}

void mt_teacher_close_read(mt_teacher **teacher)
{
    mt_teacher *t = *teacher;
    if (t && t->map)
        munmap((void *)(uintptr_t)t->map, t->bytes);
    if (t)
        free(t->first);
    free(t);
    *teacher = NULL;
}

struct mt_teacher_row mt_teacher_row(const mt_teacher *t, uint64_t sample, uint64_t row)
{
    const char *at = t->map + t->rows_at + (t->first[sample] + row) * t->of_row;
    struct mt_teacher_row r = {.token = (const struct mt_top *)(const void *)at};
    float rest;
    memcpy(&rest, at + t->of_row - sizeof(rest), sizeof(rest));
    r.rest = (double)rest;
    for (size_t k = t->top; k < (t->of_row - sizeof(float)) / sizeof(struct mt_top); k++)
        r.rest += exp((double)r.token[k].logp);
    return r;
}

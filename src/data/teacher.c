/* SPDX-License-Identifier: Apache-2.0 */
#include "data/teacher.h"

#include <fcntl.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/fs.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/sort.h"

/* Where a sample's rows are, and their checksum. */
struct entry {
    uint64_t hash, first, n, sum;
};

struct mt_teacher_out {
    int fd;
    size_t top;
    uint64_t n_samples;
    struct mt_teacher_header header;
    struct entry *entry; /* [n_samples] */
};

struct mt_teacher {
    int fd;
    char *path;
    const mt_dataset *data;
    struct mt_teacher_header header;
    size_t top, vocab;   /* of the model that learns */
    struct entry *entry; /* [samples of the data set] */
    char *rows;          /* of a sample, the longest */
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

static uint64_t sum_of_header(const struct mt_teacher_header *h)
{
    return XXH3_64bits(h, offsetof(struct mt_teacher_header, sum));
}

/* The entries of a data set's samples, without sums; *n_rows: of all. */
static int list_samples(struct entry **out, const mt_dataset *d, uint64_t *n_rows, struct mt_err *err)
{
    const struct mt_dataset_stats *s = mt_dataset_stats(d);
    MT_FREED uint8_t *mask = NULL;
    int rc = MT_NEW(&mask, s->max_len + 1, "samples of a teacher", err)
          ?: MT_NEW(out, s->n_samples + 1, "samples of a teacher", err);
    *n_rows = 0;
    for (uint64_t i = 0; i < s->n_samples && !rc; i++) {
        struct entry *e = &(*out)[i];
        *e = (struct entry){mt_dataset_sample_hash(d, i, true), *n_rows, count_rows(d, i, mask), 0};
        *n_rows += e->n;
    }
    return rc;
}

/* Whether the file was begun of the same samples; takes the sums of the rows that it has. */
static bool goes_on(mt_teacher_out *t)
{
    struct mt_teacher_header was = {0};
    struct stat st;
    size_t bytes = t->n_samples * sizeof(struct entry);
    MT_FREED struct entry *entry = mt_calloc(t->n_samples + 1, sizeof(*entry));
    bool same = entry && !fstat(t->fd, &st) && !mt_pread_all(t->fd, &was, sizeof(was), 0) &&
                (uint64_t)st.st_size == mt_teacher_bytes(t->n_samples, t->header.n_rows, t->top) &&
                !memcmp(&was, &t->header, sizeof(was)) && !mt_pread_all(t->fd, entry, bytes, sizeof(was));
    for (uint64_t i = 0; i < t->n_samples && same; i++) {
        uint64_t sum = entry[i].sum;
        entry[i].sum = 0;
        same = !memcmp(&entry[i], &t->entry[i], sizeof(*entry));
        entry[i].sum = sum;
    }
    if (same)
        memcpy(t->entry, entry, bytes);
    return same;
}

/* Begins the file, unless it is one of the same key. */
static int begin(mt_teacher_out *t, const struct mt_teacher_params *p, struct mt_err *err)
{
    if (goes_on(t))
        return 0;
    if (p->goes_on)
        return mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s does not hold what was computed before: give --force to start over",
                       p->path);
    int rc = ftruncate(t->fd, 0) ? -errno : 0;
    rc = rc ?: mt_pwrite_all(t->fd, t->entry, t->n_samples * sizeof(*t->entry), sizeof(t->header))
            ?: -posix_fallocate(t->fd, 0, (off_t)mt_teacher_bytes(t->n_samples, t->header.n_rows, t->top))
            ?: mt_pwrite_all(t->fd, &t->header, sizeof(t->header), 0);
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
        t->header = (struct mt_teacher_header){MT_TEACHER_MAGIC, (uint32_t)p->top, (uint32_t)p->vocab, t->n_samples,
                                               n_rows, p->key | 1, p->tokenizer, 0, 0};
        t->header.sum = sum_of_header(&t->header);
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
    struct entry *e = &t->entry[sample];
    size_t bytes = mt_teacher_row_bytes(t->top);
    MT_FREED char *rows = n == e->n ? mt_calloc(n, bytes) : NULL;
    if (!rows)
        return n == e->n ? mt_fail_nomem(err, "rows of a teacher", n * bytes)
                         : mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "sample %llu has %zu rows instead of %llu",
                                   (unsigned long long)sample, n, (unsigned long long)e->n);
    for (size_t i = 0; i < n; i++) {
        memcpy(rows + i * bytes, token + i * t->top, t->top * sizeof(*token));
        memcpy(rows + (i + 1) * bytes - sizeof(float), &rest[i], sizeof(float));
    }
    e->sum = XXH3_64bits(rows, n * bytes);
    int rc = mt_pwrite_all(t->fd, rows, n * bytes, rows_at(t->n_samples) + e->first * bytes)
          ?: mt_pwrite_all(t->fd, e, sizeof(*e), sizeof(t->header) + sample * sizeof(*e));
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
    t->header.entries = t->entry ? XXH3_64bits(t->entry, t->n_samples * sizeof(*t->entry)) : 0;
    t->header.sum = sum_of_header(&t->header);
    if (complete && (fdatasync(t->fd) || mt_pwrite_all(t->fd, &t->header, sizeof(t->header), 0) || fdatasync(t->fd)))
        rc = mt_fail(err, MT_ERR_RUNTIME, -EIO, "the teacher's file cannot be completed: %s", strerror(errno));
    mt_close_fd(&t->fd);
    free(t->entry);
    *teacher = NULL;
    free(t);
    return rc;
}

/* What the header promises is checked against the file before it is believed. */
static int read_header(mt_teacher *t, struct mt_err *err)
{
    struct mt_teacher_header *h = &t->header;
    struct stat st;
    if (fstat(t->fd, &st))
        return mt_fail(err, MT_ERR_RUNTIME, -errno, "%s: %s", t->path, strerror(errno));
    uint64_t size = (uint64_t)st.st_size;
    if (mt_pread_all(t->fd, h, sizeof(*h), 0) || memcmp(h->magic, MT_TEACHER_MAGIC, sizeof(h->magic)))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s is no file of megatrain score --top, or of another version of it",
                       t->path);
    if (h->sum != sum_of_header(h) || !h->top || !h->vocab)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: the header, its first %zu bytes, is damaged: make the file again",
                       t->path, sizeof(*h));
    if (h->key)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s is not complete: run megatrain score --top again, which goes on from there",
                       t->path);
    if (h->n_samples > size || h->n_rows > size || h->top > size ||
        mt_teacher_bytes(h->n_samples, h->n_rows, h->top) != size)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s has %llu bytes, but its header promises %llu samples of %llu rows: "
                       "it is not whole; make it again", t->path, (unsigned long long)size,
                       (unsigned long long)h->n_samples, (unsigned long long)h->n_rows);
    return 0;
}

static int check(const mt_teacher *t, const struct mt_teacher_params *p, struct mt_err *err)
{
    const struct mt_teacher_header *h = &t->header;
    bool known = h->tokenizer && p->tokenizer;
    if (h->top < p->top)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "distill.top = %zu: %s has %u tokens of each row: lower it", p->top,
                       p->path, h->top);
    if (known && h->tokenizer != p->tokenizer)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s is of a teacher with another tokenizer than the model's: they do not "
                       "speak of the same tokens", p->path);
    if (!known && h->vocab != p->vocab)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s is of a teacher with a vocabulary of %u tokens, the model has %zu, and "
                       "no tokenizer.json of both shows that they speak of the same tokens", p->path, h->vocab, p->vocab);
    if (h->vocab != p->vocab)
        mt_info("%s: the teacher's table has %u tokens, the model's %zu, of the same tokenizer: %s", p->path, h->vocab,
                p->vocab, h->vocab > p->vocab ? "those beyond count among all others" : "those beyond are left to the model");
    return 0;
}

static int read_entries(const mt_teacher *t, struct entry **out, struct mt_err *err)
{
    const struct mt_teacher_header *h = &t->header;
    size_t bytes = h->n_samples * sizeof(struct entry);
    struct entry *e = mt_calloc(h->n_samples + 1, sizeof(*e));
    if (!e)
        return mt_fail_nomem(err, t->path, bytes);
    *out = e;
    if (mt_pread_all(t->fd, e, bytes, sizeof(*h)) || XXH3_64bits(e, bytes) != h->entries)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: the list of samples, %zu bytes from byte %zu on, is damaged: make the "
                       "file again", t->path, bytes, sizeof(*h));
    qsort(e, h->n_samples, sizeof(*e), mt_compare_u64); /* by hash */
    return 0;
}

/* Finds the rows of the data set's samples, and makes room for the longest. */
static int find_samples(mt_teacher *t, struct mt_err *err)
{
    const struct mt_teacher_header *h = &t->header;
    MT_FREED struct entry *there = NULL;
    uint64_t n = mt_dataset_stats(t->data)->n_samples, n_rows, missing = 0, most = 0;
    char at[200] = "";
    int rc = list_samples(&t->entry, t->data, &n_rows, err) ?: read_entries(t, &there, err);
    for (uint64_t i = 0; i < n && !rc; i++) {
        const struct entry *e = bsearch(&t->entry[i], there, h->n_samples, sizeof(*there), mt_compare_u64);
        bool good = e && e->n == t->entry[i].n && e->first <= h->n_rows && e->n <= h->n_rows - e->first;
        if (!good && !missing++)
            mt_dataset_place(t->data, i, at, sizeof(at));
        if (good)
            t->entry[i] = *e;
        most = MT_MAX(most, t->entry[i].n);
    }
    if (!rc && missing)
        return mt_fail(err, MT_ERR_INPUT, -ENODATA, "%s does not have %llu of %llu samples, the first of them %s: it is of "
                       "other data, or was made with another tokenizer, chat template or data.seq_len", t->path,
                       (unsigned long long)missing, (unsigned long long)n, at);
    t->rows = rc ? NULL : mt_calloc(most + 1, mt_teacher_row_bytes(h->top));
    return rc || t->rows ? rc : mt_fail_nomem(err, t->path, most * mt_teacher_row_bytes(h->top));
}

int mt_teacher_open(mt_teacher **out, const struct mt_teacher_params *p, struct mt_err *err)
{
    mt_teacher *t = mt_calloc(1, sizeof(*t));
    if (!t)
        return mt_fail_nomem(err, p->path, sizeof(*t));
    *t = (mt_teacher){.fd = mt_open_regular(p->path, err), .path = strdup(p->path), .data = p->data, .top = p->top,
                      .vocab = p->vocab};
    int rc = t->fd < 0 ? mt_fail_prefix(err, t->fd, "distill.teacher, a file that megatrain score --top makes")
             : t->path ? 0
                       : mt_fail_nomem(err, p->path, strlen(p->path));
    rc = rc ?: read_header(t, err)
            ?: check(t, p, err)
            ?: find_samples(t, err);
    if (rc)
        mt_teacher_close_read(&t);
    *out = t;
    return rc;
}

void mt_teacher_close_read(mt_teacher **teacher)
{
    mt_teacher *t = *teacher;
    if (!t)
        return;
    mt_close_fd(&t->fd);
    free(t->path);
    free(t->entry);
    free(t->rows);
    free(t);
    *teacher = NULL;
}

size_t mt_teacher_top(const mt_teacher *t)
{
    return t->top;
}

/* Reads the rows of a sample. */
static int read_rows(mt_teacher *t, uint64_t sample, struct mt_err *err)
{
    const struct entry *e = &t->entry[sample];
    size_t of_row = mt_teacher_row_bytes(t->header.top), bytes = e->n * of_row;
    uint64_t at = rows_at(t->header.n_samples) + e->first * of_row;
    char place[200];
    int rc = mt_pread_all(t->fd, t->rows, bytes, at);
    if (!rc && XXH3_64bits(t->rows, bytes) == e->sum)
        return 0;
    mt_dataset_place(t->data, sample, place, sizeof(place));
    return mt_fail(err, MT_ERR_INPUT, -EIO, "%s: the rows of %s, %zu bytes from byte %llu on, %s: make the file again by "
                   "megatrain score --top", t->path, place, bytes, (unsigned long long)at,
                   !rc ? "are damaged (their checksum differs)" : "cannot be read: the file has shrunk, or its drive fails");
}

/* What is not among the model's first `top` tokens is among all others. */
static int take_row(const mt_teacher *t, const char *row, struct mt_top *top, double *rest)
{
    float others;
    memcpy(&others, row + t->header.top * sizeof(*top), sizeof(others));
    *rest = (double)others;
    for (size_t k = 0; k < t->header.top; k++) {
        struct mt_top of;
        memcpy(&of, row + k * sizeof(of), sizeof(of));
        bool beyond = of.id >= t->vocab;
        if (of.id >= t->header.vocab || !(of.logp <= 1))
            return -ERANGE;
        if (k < t->top)
            top[k] = beyond ? (struct mt_top){MT_NO_TOKEN, -INFINITY} : of;
        if (k >= t->top || beyond)
            *rest += exp((double)of.logp);
    }
    return 0;
}

int mt_teacher_fill(mt_teacher *t, struct mt_batch *b, struct mt_err *err)
{
    size_t of_row = mt_teacher_row_bytes(t->header.top);
    char place[200];
    int rc = 0;
    for (size_t d = 0; d < b->n_docs && !rc; d++) {
        uint64_t sample = (uint64_t)b->sample[d];
        size_t first = (size_t)b->doc_rows[d], n = (size_t)b->doc_rows[d + 1] - first;
        rc = n == t->entry[sample].n ? read_rows(t, sample, err)
                                     : mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "a sample has %zu rows, the teacher's %llu", n,
                                               (unsigned long long)t->entry[sample].n);
        for (size_t i = 0; i < n && !rc; i++)
            if (take_row(t, t->rows + i * of_row, b->top + (first + i) * t->top, &b->rest[first + i]))
                rc = mt_fail(err, MT_ERR_INPUT, -ERANGE, "%s: row %zu of %s holds a token beyond the teacher's vocabulary of "
                             "%u, or no log-probability: make the file again", t->path, i,
                             mt_dataset_place(t->data, sample, place, sizeof(place)), t->header.vocab);
    }
    return rc;
}

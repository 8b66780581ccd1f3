/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Each thread takes the next block of the oldest request of its drive, reads it, sums it and copies it to its place, so
 * that reads, sums and copies overlap.
 */
#include "store/file_weights.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/clock.h"
#include "base/mem.h"
#include "store/direct_file.h"

enum { ALIGN = MT_DISK_ALIGN, BUFFER = MT_SUM_BLOCK + 2 * ALIGN };

struct file {
    struct mt_direct_file f;
    size_t drive;
};

struct part {
    struct mt_file_part p;
    size_t bytes; /* of a lane */
    size_t first_sum, n_blocks, n_known; /* of lane l's block b: sum[first_sum + l * n_blocks + b] */
    bool expects[MT_FILE_LANES];         /* by tensor */
    uint64_t expected[MT_FILE_LANES];
};

/* What it takes to read a block. */
struct scratch {
    char *buf;
    XXH3_state_t *state[MT_FILE_LANES];
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
    struct mt_file_piece *pieces;
    struct tensor {
        size_t part;
        int i; /* of the part's tensors */
    } *tensors;
    size_t n_tensors;
    size_t *unit_first; /* [n_units + 1] parts of a unit */
    uint64_t *sum;
    bool *known; /* by first_sum + block: all lanes are read together */
    struct mt_file_weights_params params; /* only its functions and forms */
    struct drive drive[MT_FILE_MAX_DRIVES];
    size_t n_drives;
    struct reader {
        struct drive *drive;
        pthread_t thread;
        struct scratch s;
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
    return MT_MIN((size_t)MT_SUM_BLOCK, p->bytes - block * MT_SUM_BLOCK);
}

static const struct file *file_of(const mt_file_weights *f, const struct part *p)
{
    return &f->files[p->p.piece[0].file];
}

static int fail_changed(const struct mt_direct_file *f, const struct part *p, size_t block, struct mt_err *err)
{
    uint64_t at = p->p.piece[0].offset + (uint64_t)block * MT_SUM_BLOCK * (uint64_t)p->p.n_lanes;
    if (p->p.n_pieces > 1)
        return mt_fail(err, MT_ERR_INPUT, -EBADMSG,
                       "%s: tensor \"%s\" has changed: its codes or scales have another checksum than when they were "
                       "first read; the file was changed during the run, or its drive is failing", f->path, p->p.name);
    return mt_fail(err, MT_ERR_INPUT, -EBADMSG,
                   "%s: tensor \"%s\" has changed: bytes %llu to %llu of the file have another checksum than when "
                   "they were first read; the file was changed during the run, or its drive is failing",
                   f->path, p->p.name, (unsigned long long)at, (unsigned long long)(at + block_bytes(p, block)));
}

static int fail_expected(const struct mt_direct_file *f, const char *tensor, struct mt_err *err)
{
    return mt_fail(err, MT_ERR_INPUT, -EBADMSG,
                   "%s: tensor \"%s\" does not have the checksum in the checkpoint: it is not the model that the run was "
                   "made on, or it was changed since; set model.path to that model", f->path, tensor);
}

static uint64_t sum_of(const mt_file_weights *f, const struct part *p, int tensor)
{
    size_t lane = p->p.n_lanes > 1 ? (size_t)tensor : 0;
    return mt_tensor_sum(f->sum + p->first_sum + lane * p->n_blocks, p->n_blocks);
}

/* Keeps a block's sums, or compares them with those kept. */
static int check_block(mt_file_weights *f, struct part *p, size_t block, const uint64_t sum[MT_FILE_LANES],
                       struct mt_err *err)
{
    size_t at = p->first_sum + block;
    bool same = true;
    pthread_mutex_lock(&f->lock);
    bool known = f->known[at];
    for (int l = 0; l < p->p.n_lanes; l++) {
        uint64_t *kept = &f->sum[at + (size_t)l * p->n_blocks];
        same &= !known || *kept == sum[l];
        *kept = known ? *kept : sum[l];
    }
    f->known[at] = true;
    bool whole = (p->n_known += !known) == p->n_blocks;
    pthread_mutex_unlock(&f->lock);
    if (known)
        return same ? 0 : fail_changed(&file_of(f, p)->f, p, block, err);
    for (int i = 0; i < p->p.n_tensors && whole; i++)
        if (p->expects[i] && sum_of(f, p, i) != p->expected[i])
            return fail_expected(&file_of(f, p)->f, p->p.tensor[i], err);
    return 0;
}

/* A block that is being read. */
struct block {
    mt_file_weights *f;
    const struct part *p;
    struct scratch *s;
    const struct mt_file_target *to; /* NULL: only sums are wanted */
    size_t first, end; /* bytes of each lane */
    bool inspect, summed; /* summed: sum[0] is that of all its bytes */
    uint64_t sum[MT_FILE_LANES];
};

/* Bytes [at, at + n) of a lane of a piece, which begins at byte `before` of the lane. */
static int take_bytes(struct block *b, size_t piece, int lane, size_t before, size_t at, const char *data, size_t n,
                      struct mt_err *err)
{
    const struct mt_file_piece *q = &b->p->p.piece[piece];
    const struct mt_file_weights_params *call = &b->f->params;
    b->summed = n == b->end - b->first;
    if (b->summed)
        b->sum[lane] = mt_block_sum(data, n);
    else
        XXH3_64bits_update(b->s->state[lane], data, n);
    int rc = 0;
    if (b->inspect && call->inspect)
        rc = call->inspect(&b->p->p, piece, b->f->files[q->file].f.path, at, data, n, err);
    if (rc || !b->to)
        return rc;
    if (b->p->p.placed)
        call->place(&b->p->p, before + at, data, n, b->to);
    else
        mt_file_put(b->to, b->p->p.plane, q->at[lane] + at, data, n);
    return 0;
}

/* Reads bytes [from, end) of a piece that has one lane. */
static int read_run(struct block *b, size_t piece, size_t before, size_t from, size_t end, struct mt_err *err)
{
    const struct mt_file_piece *q = &b->p->p.piece[piece];
    char *data;
    int rc = mt_direct_file_read(&b->f->files[q->file].f, q->offset + from, end - from, b->s->buf, &data, err);
    return rc ? rc : take_bytes(b, piece, 0, before, from, data, end - from, err);
}

/* Reads bytes [from, end) of each lane, whose rows alternate in the file. */
static int read_rows(struct block *b, size_t piece, size_t before, size_t from, size_t end, struct mt_err *err)
{
    const struct mt_file_piece *q = &b->p->p.piece[piece];
    size_t lanes = (size_t)b->p->p.n_lanes, group = q->row * lanes, most = MT_MAX(MT_SUM_BLOCK / group, (size_t)1), n;
    char *data;
    int rc = 0;
    for (size_t r = from / q->row; r * q->row < end && !rc; r += n) {
        n = MT_MIN(most, mt_div_up(end, q->row) - r);
        rc = mt_direct_file_read(&b->f->files[q->file].f, q->offset + r * group, n * group, b->s->buf, &data, err);
        for (size_t i = 0; i < n * lanes && !rc; i++) {
            size_t row = (r + i / lanes) * q->row, first = MT_MAX(row, from), last = MT_MIN(row + q->row, end);
            rc = take_bytes(b, piece, (int)(i % lanes), before, first, data + i * q->row + (first - row),
                            last - first, err);
        }
    }
    return rc;
}

/* Bytes that no file has. */
static void put_literals(const struct part *p, const struct mt_file_target *to)
{
    for (size_t i = 0; i < p->p.n_pieces; i++)
        if (p->p.piece[i].file < 0)
            mt_file_put(to, p->p.plane, p->p.piece[i].at[0], &p->p.piece[i].offset, p->p.piece[i].bytes);
}

/* Reads a block, puts it to its place and checks it; what is wrong is put there, too. */
static int load_block(mt_file_weights *f, struct part *p, size_t block, struct scratch *s,
                      const struct mt_file_target *to, struct mt_err *err)
{
    struct block b = {.f = f, .p = p, .s = s, .to = to, .first = block * MT_SUM_BLOCK};
    b.end = b.first + block_bytes(p, block);
    pthread_mutex_lock(&f->lock);
    b.inspect = !f->known[p->first_sum + block];
    pthread_mutex_unlock(&f->lock);
    for (int l = 0; l < p->p.n_lanes; l++)
        XXH3_64bits_reset(s->state[l]);
    size_t at = 0;
    int rc = 0;
    for (size_t i = 0; i < p->p.n_pieces && !rc; i++) {
        const struct mt_file_piece *q = &p->p.piece[i];
        size_t n = q->file < 0 ? 0 : q->bytes, from = MT_MAX(at, b.first), end = MT_MIN(at + n, b.end);
        if (from < end)
            rc = q->row ? read_rows(&b, i, at, from - at, end - at, err)
                        : read_run(&b, i, at, from - at, end - at, err);
        at += n;
    }
    for (int l = 0; l < p->p.n_lanes && !b.summed; l++)
        b.sum[l] = XXH3_64bits_digest(s->state[l]);
    if (to && block == 0)
        put_literals(p, to);
    return rc ? rc : check_block(f, p, block, b.sum, err);
}

/* --- requests -------------------------------------------------------------------------------- */

static size_t drive_of(const mt_file_weights *f, size_t part)
{
    return file_of(f, &f->parts[part])->drive;
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
        while (!d->first && !f->quit)
            pthread_cond_wait(&d->work, &f->lock);
        if (!d->first)
            break;
        take_block(f, d, &r, &part, &block);
        int rc = r->rc; /* the rest of a failed request is not read */
        pthread_mutex_unlock(&f->lock);
        struct part *p = &f->parts[part];
        struct mt_file_target to = {.end = SIZE_MAX};
        memcpy(to.plane, r->plane, sizeof(to.plane));
        size_t n = rc ? 0 : block_bytes(p, block) * (size_t)p->p.n_lanes;
        if (!rc)
            rc = load_block(f, p, block, &me->s, &to, &err);
        end_block(f, r, rc, &err, n);
        pthread_mutex_lock(&f->lock);
    }
    pthread_mutex_unlock(&f->lock);
    return NULL;
}

static uint64_t bytes_of(const struct part *p)
{
    return (uint64_t)p->bytes * (uint64_t)p->p.n_lanes;
}

uint64_t mt_file_weights_wanted(const mt_file_weights *f, const struct mt_file_request *r)
{
    uint64_t bytes = 0;
    for (size_t i = f->unit_first[r->unit]; i < f->unit_first[r->unit + 1]; i++)
        bytes += r->plane[f->parts[i].p.plane] ? bytes_of(&f->parts[i]) : 0;
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

static void free_scratch(struct scratch *s)
{
    for (int l = 0; l < MT_FILE_LANES; l++)
        XXH3_freeState(s->state[l]);
    *s = (struct scratch){0};
}

static int make_states(struct scratch *s, struct mt_err *err)
{
    bool all = true;
    for (int l = 0; l < MT_FILE_LANES; l++)
        all &= (s->state[l] = XXH3_createState()) != NULL;
    return all ? 0 : mt_fail_nomem(err, "reading a model's files", MT_SUM_BLOCK);
}

/* With a buffer of its own. */
static int make_scratch(struct scratch *s, struct mt_err *err)
{
    void *p = NULL;
    *s = (struct scratch){0};
    if (posix_memalign(&p, ALIGN, BUFFER))
        return mt_fail_nomem(err, "reading a model's files", BUFFER);
    s->buf = p;
    return make_states(s, err);
}

static void finish_scratch(struct scratch *s)
{
    free(s->buf);
    free_scratch(s);
}

static bool overlap(size_t a, size_t a_end, size_t b, size_t b_end)
{
    return a < b_end && b < a_end;
}

/* Whether the part's block has bytes [first, end) of the plane. */
static bool has_bytes(const struct part *p, size_t block, enum mt_plane_kind k, size_t first, size_t end)
{
    size_t from = block * MT_SUM_BLOCK, to = from + block_bytes(p, block), at = 0;
    const struct mt_file_part *t = &p->p;
    if (t->placed && (k == t->plane || k == t->low))
        return t->elem ? overlap(t->at + from / t->elem * 2, t->at + mt_div_up(to, t->elem) * 2, first, end)
                       : overlap(t->at, t->at + t->bytes, first, end);
    for (size_t i = 0; i < t->n_pieces && k == t->plane; i++) {
        const struct mt_file_piece *q = &t->piece[i];
        size_t n = q->file < 0 ? 0 : q->bytes, a = MT_MAX(at, from), b = MT_MIN(at + n, to);
        for (int l = 0; l < t->n_lanes; l++)
            if ((q->file < 0 && block == 0) || (a < b && overlap(q->at[l] + a - at, q->at[l] + b - at, first, end)))
                return true;
        at += n;
    }
    return false;
}

int mt_file_weights_read(mt_file_weights *f, size_t unit, enum mt_plane_kind k, size_t first, size_t n, void *dst,
                         struct mt_err *err)
{
    struct scratch s;
    struct mt_file_target to = {.first = first, .end = first + n};
    to.plane[k] = dst;
    int rc = make_scratch(&s, err);
    memset(dst, 0, n); /* padding between parts */
    for (size_t i = f->unit_first[unit]; i < f->unit_first[unit + 1] && !rc; i++)
        for (size_t b = 0; b < f->parts[i].n_blocks && !rc; b++)
            if (has_bytes(&f->parts[i], b, k, first, first + n))
                rc = load_block(f, &f->parts[i], b, &s, &to, err);
    finish_scratch(&s);
    return rc;
}

int mt_file_weights_sum(mt_file_weights *f, size_t i, uint64_t *sum, struct mt_err *err)
{
    struct part *p = &f->parts[f->tensors[i].part];
    struct scratch s = {0};
    int rc = p->n_known < p->n_blocks ? make_scratch(&s, err) : 0;
    for (size_t b = 0; b < p->n_blocks && !rc; b++)
        if (!f->known[p->first_sum + b])
            rc = load_block(f, p, b, &s, NULL, err);
    finish_scratch(&s);
    if (!rc)
        *sum = sum_of(f, p, f->tensors[i].i);
    return rc;
}

void mt_file_weights_expect(mt_file_weights *f, size_t i, uint64_t sum)
{
    struct part *p = &f->parts[f->tensors[i].part];
    p->expects[f->tensors[i].i] = true;
    p->expected[f->tensors[i].i] = sum;
}

uint64_t mt_file_weights_total(const mt_file_weights *f)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < f->n_parts; i++)
        bytes += bytes_of(&f->parts[i]);
    return bytes;
}

size_t mt_file_weights_n_tensors(const mt_file_weights *f)
{
    return f->n_tensors;
}

const char *mt_file_weights_tensor(const mt_file_weights *f, size_t i)
{
    return f->parts[f->tensors[i].part].p.tensor[f->tensors[i].i];
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
        direct &= f->files[i].f.direct;
    *n_drives = f->n_drives;
    return direct;
}

/* --- set-up ---------------------------------------------------------------------------------- */

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
    for (int rc; f->n_files < p->n_paths;) {
        struct file *file = &f->files[f->n_files++];
        rc = mt_direct_file_open(&file->f, p->paths[f->n_files - 1], p->buffered, f->buffers, err);
        if (rc)
            return rc;
        file->drive = find_drive(f, file->f.dev);
    }
    return 0;
}

static void take_part(mt_file_weights *f, const struct mt_file_part *p, struct mt_file_piece *pieces, size_t n_sums)
{
    struct part *t = &f->parts[f->n_parts];
    *t = (struct part){.p = *p, .first_sum = n_sums};
    memcpy(pieces, p->piece, p->n_pieces * sizeof(*pieces));
    t->p.piece = pieces;
    for (size_t i = 0; i < p->n_pieces; i++)
        t->bytes += pieces[i].file < 0 ? 0 : pieces[i].bytes;
    t->n_blocks = mt_sum_blocks(t->bytes);
    for (int i = 0; i < p->n_tensors; i++)
        f->tensors[f->n_tensors++] = (struct tensor){f->n_parts, i};
    f->unit_first[p->unit + 1]++;
}

static int take_parts(mt_file_weights *f, const struct mt_file_weights_params *p, struct mt_err *err)
{
    size_t n_sums = 0, n_pieces = 0;
    for (size_t i = 0; i < p->n_parts; i++)
        n_pieces += p->parts[i].n_pieces;
    f->pieces = mt_calloc(n_pieces, sizeof(*f->pieces));
    if (!f->pieces)
        return mt_fail_nomem(err, "a model's files", n_pieces * sizeof(*f->pieces));
    n_pieces = 0;
    for (; f->n_parts < p->n_parts; f->n_parts++) {
        take_part(f, &p->parts[f->n_parts], f->pieces + n_pieces, n_sums);
        n_pieces += p->parts[f->n_parts].n_pieces;
        n_sums += f->parts[f->n_parts].n_blocks * (size_t)f->parts[f->n_parts].p.n_lanes;
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
        *r = (struct reader){.drive = &f->drive[f->n_readers % f->n_drives],
                             .s.buf = f->buffers + f->n_readers * BUFFER};
        int rc = make_states(&r->s, err);
        if (!rc)
            rc = -pthread_create(&r->thread, NULL, reader_main, r);
        if (rc)
            free_scratch(&r->s);
        if (rc == -ENOMEM)
            return rc;
        if (rc)
            return mt_fail(err, MT_ERR_RUNTIME, rc, "cannot start threads that read the model's files: %s",
                           strerror(-rc));
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
    f->params = (struct mt_file_weights_params){.inspect = p->inspect, .place = p->place};
    f->files = mt_calloc(p->n_paths, sizeof(*f->files));
    f->parts = mt_calloc(p->n_parts, sizeof(*f->parts));
    f->tensors = mt_calloc(p->n_parts * MT_FILE_LANES, sizeof(*f->tensors));
    f->unit_first = mt_calloc(p->n_units + 1, sizeof(*f->unit_first));
    f->readers = mt_calloc(depth, sizeof(*f->readers));
    int rc = f->files && f->parts && f->tensors && f->unit_first && f->readers
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
    f->params.forms = p->forms; /* the caller's, if this fails */
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
    for (size_t i = 0; i < f->n_readers; i++) {
        pthread_join(f->readers[i].thread, NULL);
        free_scratch(&f->readers[i].s);
    }
    for (size_t i = 0; i < f->n_drives; i++)
        pthread_cond_destroy(&f->drive[i].work);
    for (size_t i = 0; i < f->n_files; i++)
        mt_direct_file_close(&f->files[i].f);
    mt_host_free(f->buffers, f->buffer_bytes);
    pthread_mutex_destroy(&f->lock);
    free(f->files);
    free(f->parts);
    free(f->pieces);
    free(f->tensors);
    free(f->params.forms);
    free(f->unit_first);
    free(f->readers);
    free(f->sum);
    free(f->known);
    free(f);
    *file_weights = NULL;
}

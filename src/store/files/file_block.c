/* SPDX-License-Identifier: Apache-2.0 */
/* What a block of a part is: the runs of bytes that it is read in, its sums, and where its bytes go. */
#include <errno.h>
#include <xxhash.h>

#include "base/lock.h"
#include "base/mem.h"
#include "store/files/file_priv.h"

enum { AT_ONCE = 256 << 10 }; /* bytes that are summed, and then put while they are in a core's cache */

/* Of a part's block. */
static size_t block_bytes(const struct mt_summed_part *p, size_t index)
{
    return MT_MIN((size_t)MT_SUM_BLOCK, p->bytes - index * MT_SUM_BLOCK);
}

/* --- runs ------------------------------------------------------------------------------------ */

int mt_file_block_init(struct mt_file_block *b, mt_file_weights *f, struct mt_err *err)
{
    bool all = true;
    *b = (struct mt_file_block){.f = f};
    for (int l = 0; l < MT_FILE_LANES; l++)
        all &= (b->state[l] = XXH3_createState()) != NULL;
    return all ? 0 : mt_fail_nomem(err, "reading a model's files", MT_SUM_BLOCK);
}

void mt_file_block_finish(struct mt_file_block *b)
{
    for (int l = 0; l < MT_FILE_LANES; l++)
        XXH3_freeState(b->state[l]);
    *b = (struct mt_file_block){.f = NULL};
}

void mt_file_block_begin(struct mt_file_block *b, struct mt_summed_part *p, size_t index,
                         const struct mt_file_target *to)
{
    b->p = p;
    b->index = index;
    b->put = to != NULL;
    if (to)
        b->to = *to;
    b->at = b->first = index * MT_SUM_BLOCK;
    b->end = b->first + block_bytes(p, index);
    b->summed = b->changed = false;
    b->run = (struct mt_file_run){.piece = 0};
    for (int l = 0; l < p->p.n_lanes; l++)
        XXH3_64bits_reset(b->state[l]);
    MT_LOCKED(&b->f->lock);
    b->inspect = !b->f->known[p->first_sum + index];
}

static size_t bytes_in_file(const struct mt_file_piece *q)
{
    return q->file < 0 ? 0 : q->bytes;
}

bool mt_file_block_next(struct mt_file_block *b)
{
    struct mt_file_run *r = &b->run;
    const struct mt_file_piece *q = &b->p->p.piece[r->piece];
    if (b->at == b->end)
        return false;
    for (; b->at >= r->before + bytes_in_file(q); q = &b->p->p.piece[++r->piece])
        r->before += bytes_in_file(q);
    r->file = q->file;
    r->from = b->at - r->before;
    r->end = MT_MIN(b->end - r->before, q->bytes);
    r->offset = q->offset + r->from;
    r->bytes = r->end - r->from;
    if (q->row) { /* whole rows, of all lanes */
        size_t group = q->row * (size_t)b->p->p.n_lanes, most = MT_MAX(MT_SUM_BLOCK / group, (size_t)1);
        size_t first = r->from / q->row, n = MT_MIN(most, mt_div_up(r->end, q->row) - first);
        r->end = MT_MIN(r->end, (first + n) * q->row);
        r->offset = q->offset + first * group;
        r->bytes = n * group;
    }
    b->at = r->before + r->end;
    return true;
}

/* --- their bytes ----------------------------------------------------------------------------- */

/* Bytes [at, at + n) of a lane of the run's piece. */
static int take_bytes(struct mt_file_block *b, int lane, size_t at, const char *data, size_t n, struct mt_err *err)
{
    const struct mt_file_piece *q = &b->p->p.piece[b->run.piece];
    const struct mt_file_weights_params *call = &b->f->params;
    b->summed = n == b->end - b->first;
    if (b->summed)
        b->sum[lane] = mt_block_sum(data, n);
    else
        XXH3_64bits_update(b->state[lane], data, n);
    int rc = 0;
    if (b->inspect && call->inspect)
        rc = call->inspect(&b->p->p, b->run.piece, b->f->files[q->file].f.path, at, data, n, err);
    if (rc || !b->put)
        return rc;
    if (b->p->p.placed)
        call->place(&b->p->p, b->run.before + at, data, n, &b->to);
    else
        mt_file_put(&b->to, b->p->p.plane, q->at[lane] + at, data, n);
    return 0;
}

/* A run of one lane. */
static int take_pieces(struct mt_file_block *b, const char *data, struct mt_err *err)
{
    const struct mt_file_run *r = &b->run;
    const struct mt_file_part *p = &b->p->p;
    size_t most = p->placed && !p->elem ? MT_SUM_BLOCK : AT_ONCE; /* more at once is better put in another order */
    int rc = 0;
    for (size_t at = r->from, next; at < r->end && !rc; at = next) {
        next = MT_MIN(r->end, (at / most + 1) * most);
        rc = take_bytes(b, 0, at, data + (at - r->from), next - at, err);
    }
    return rc;
}

static int take_rows(struct mt_file_block *b, const char *data, struct mt_err *err)
{
    const struct mt_file_run *r = &b->run;
    size_t row = b->p->p.piece[r->piece].row, lanes = (size_t)b->p->p.n_lanes;
    int rc = 0;
    for (size_t i = 0; i < r->bytes / row && !rc; i++) {
        size_t at = (r->from / row + i / lanes) * row, first = MT_MAX(at, r->from), end = MT_MIN(at + row, r->end);
        rc = take_bytes(b, (int)(i % lanes), first, data + i * row + (first - at), end - first, err);
    }
    return rc;
}

int mt_file_block_take(struct mt_file_block *b, const char *data, struct mt_err *err)
{
    return b->p->p.piece[b->run.piece].row ? take_rows(b, data, err) : take_pieces(b, data, err);
}

/* Bytes that no file has. */
static void put_literals(const struct mt_summed_part *p, const struct mt_file_target *to)
{
    for (size_t i = 0; i < p->p.n_pieces; i++)
        if (p->p.piece[i].file < 0)
            mt_file_put(to, p->p.plane, p->p.piece[i].at[0], &p->p.piece[i].offset, p->p.piece[i].bytes);
}

static bool overlap(size_t a, size_t a_end, size_t b, size_t b_end)
{
    return a < b_end && b < a_end;
}

bool mt_file_block_has(const struct mt_summed_part *p, size_t index, enum mt_plane_kind k, size_t first, size_t end)
{
    size_t from = index * MT_SUM_BLOCK, to = from + block_bytes(p, index), at = 0;
    const struct mt_file_part *t = &p->p;
    if (t->placed && (k == t->plane || k == t->low))
        return t->elem ? overlap(t->at + from / t->elem * 2, t->at + mt_div_up(to, t->elem) * 2, first, end)
                       : overlap(t->at, t->at + t->bytes, first, end);
    for (size_t i = 0; i < t->n_pieces && k == t->plane; i++) {
        const struct mt_file_piece *q = &t->piece[i];
        size_t n = q->file < 0 ? 0 : q->bytes, a = MT_MAX(at, from), b = MT_MIN(at + n, to);
        for (int l = 0; l < t->n_lanes; l++)
            if ((q->file < 0 && index == 0) || (a < b && overlap(q->at[l] + a - at, q->at[l] + b - at, first, end)))
                return true;
        at += n;
    }
    return false;
}

/* --- sums ------------------------------------------------------------------------------------ */

static int fail_changed(const struct mt_direct_file *f, const struct mt_summed_part *p, size_t block,
                        struct mt_err *err)
{
    uint64_t at = p->p.piece[0].offset + (uint64_t)block * MT_SUM_BLOCK * (uint64_t)p->p.n_lanes;
    if (p->p.n_pieces > 1)
        return mt_fail(err, MT_ERR_RUNTIME, -EBADMSG,
                       "%s: tensor \"%s\" has changed: its codes or scales have another checksum than when they were "
                       "first read; the file was changed during the run, or its drive is failing", f->path, p->p.name);
    return mt_fail(err, MT_ERR_RUNTIME, -EBADMSG,
                   "%s: tensor \"%s\" has changed: bytes %llu to %llu of the file have another checksum than when "
                   "they were first read; the file was changed during the run, or its drive is failing",
                   f->path, p->p.name, (unsigned long long)at,
                   (unsigned long long)(at + block_bytes(p, block)));
}

static int fail_expected(const struct mt_direct_file *f, const char *tensor, struct mt_err *err)
{
    return mt_fail(err, MT_ERR_INPUT, -EBADMSG,
                   "%s: tensor \"%s\" does not have the checksum in the checkpoint: it is not the model that the run was "
                   "made on, or it was changed since; set model.path to that model", f->path, tensor);
}

uint64_t mt_file_sum_of(const mt_file_weights *f, const struct mt_summed_part *p, int tensor)
{
    size_t lane = p->p.n_lanes > 1 ? (size_t)tensor : 0;
    return mt_tensor_sum(f->sum + p->first_sum + lane * p->n_blocks, p->n_blocks);
}

int mt_file_block_end(struct mt_file_block *b, struct mt_err *err)
{
    mt_file_weights *f = b->f;
    struct mt_summed_part *p = b->p;
    size_t at = p->first_sum + b->index;
    bool same = true;
    for (int l = 0; l < p->p.n_lanes && !b->summed; l++)
        b->sum[l] = XXH3_64bits_digest(b->state[l]);
    if (b->put && b->index == 0)
        put_literals(p, &b->to);
    pthread_mutex_lock(&f->lock);
    bool known = f->known[at];
    for (int l = 0; l < p->p.n_lanes; l++) {
        uint64_t *kept = &f->sum[at + (size_t)l * p->n_blocks];
        same &= !known || *kept == b->sum[l];
        *kept = known ? *kept : b->sum[l];
    }
    f->known[at] = true;
    bool whole = (p->n_known += !known) == p->n_blocks;
    pthread_mutex_unlock(&f->lock);
    const struct mt_direct_file *file = &f->files[p->p.piece[0].file].f;
    b->changed = !same;
    if (known)
        return same ? 0 : fail_changed(file, p, b->index, err);
    for (int i = 0; i < p->p.n_tensors && whole; i++)
        if (p->expects[i] && mt_file_sum_of(f, p, i) != p->expected[i])
            return fail_expected(file, p->p.tensor[i], err);
    return 0;
}

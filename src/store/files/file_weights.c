/* SPDX-License-Identifier: Apache-2.0 */
/* What is known of the parts, opening and closing; file_reader.c reads, file_block.c sums and places. */
#include "store/files/file_weights.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/lock.h"
#include "base/mem.h"
#include "store/files/file_priv.h"

int mt_file_weights_read(mt_file_weights *f, size_t unit, enum mt_plane_kind k, size_t first, size_t n, void *dst,
                         struct mt_err *err)
{
    struct mt_file_request r = {.unit = unit, .of = k, .first = first, .end = first + n};
    r.plane[k] = dst;
    memset(dst, 0, n); /* padding between parts */
    return n ? mt_file_reader_run(f, &r, err) : 0;
}

int mt_file_weights_sum(mt_file_weights *f, size_t i, uint64_t *sum, struct mt_err *err)
{
    const struct mt_file_tensor *t = &f->tensors[i];
    struct mt_file_request r = {.unit = f->parts[t->part].p.unit, .sum_only = true, .part = t->part};
    int rc = mt_file_reader_run(f, &r, err);
    if (!rc)
        *sum = mt_file_sum_of(f, &f->parts[t->part], t->i);
    return rc;
}

uint64_t mt_file_weights_wanted(const mt_file_weights *f, const struct mt_file_request *r)
{
    uint64_t bytes = 0;
    for (size_t i = f->unit_first[r->unit]; i < f->unit_first[r->unit + 1]; i++)
        bytes += r->plane[f->parts[i].p.plane] ? mt_file_part_bytes(&f->parts[i]) : 0;
    return bytes;
}

void mt_file_weights_expect(mt_file_weights *f, size_t i, uint64_t sum)
{
    struct mt_summed_part *p = &f->parts[f->tensors[i].part];
    p->expects[f->tensors[i].i] = true;
    p->expected[f->tensors[i].i] = sum;
}

uint64_t mt_file_weights_total(const mt_file_weights *f)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < f->n_parts; i++)
        bytes += mt_file_part_bytes(&f->parts[i]);
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
    MT_LOCKED(&f->lock);
    *out = f->stats;
    if (f->n_under_way)
        out->busy_ns += mt_now_ns() - f->busy_since;
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
    f->drive[f->n_drives].dev = dev;
    return f->n_drives++;
}

static int open_files(mt_file_weights *f, const struct mt_file_weights_params *p, struct mt_err *err)
{
    for (int rc; f->n_files < p->n_paths;) {
        struct mt_file_source *file = &f->files[f->n_files++];
        rc = mt_direct_file_open(&file->f, p->paths[f->n_files - 1], p->buffered, f->buffers, err);
        if (rc)
            return rc;
        file->drive = find_drive(f, file->f.dev);
    }
    return 0;
}

static void take_part(mt_file_weights *f, const struct mt_file_part *p, struct mt_file_piece *pieces, size_t n_sums)
{
    struct mt_summed_part *t = &f->parts[f->n_parts];
    *t = (struct mt_summed_part){.p = *p, .first_sum = n_sums};
    memcpy(pieces, p->piece, p->n_pieces * sizeof(*pieces));
    t->p.piece = pieces;
    for (size_t i = 0; i < p->n_pieces; i++)
        t->bytes += pieces[i].file < 0 ? 0 : pieces[i].bytes;
    t->n_blocks = mt_sum_blocks(t->bytes);
    for (int i = 0; i < p->n_tensors; i++)
        f->tensors[f->n_tensors++] = (struct mt_file_tensor){f->n_parts, i};
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

static unsigned depth_of(unsigned depth)
{
    return depth ? MT_MAX(depth, (unsigned)MT_FILE_MAX_DRIVES) : MT_FILE_DEPTH;
}

size_t mt_file_weights_bytes(unsigned depth)
{
    return mt_align_up((size_t)depth_of(depth) * MT_FILE_BUFFER, MT_HUGE_PAGE);
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
    int rc = f->files && f->parts && f->tensors && f->unit_first ? 0 : mt_fail_nomem(err, "a model's files", p->n_parts * sizeof(*f->parts));
    void *buffers = NULL;
    rc = rc ?: mt_host_alloc(&buffers, mt_file_weights_bytes(depth), "reading a model's files", err);
    f->buffers = buffers;
    f->buffer_bytes = mt_file_weights_bytes(depth);
    rc = rc ?: open_files(f, p, err)
            ?: take_parts(f, p, err)
            ?: mt_file_reader_start(f, p, depth, err);
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
    *file_weights = NULL;
    if (!mt_file_reader_stop(f))
        return;
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
    free(f->sum);
    free(f->known);
    free(f);
}

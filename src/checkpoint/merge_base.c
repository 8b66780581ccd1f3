/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/merge_base.h"

#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/mem.h"
#include "base/packed.h"
#include "weights/sources.h"

/* The packed source whose codes a tensor of the files is; of experts that share them, the first one's. */
struct packed {
    const struct mt_tensor *of; /* NULL: the tensor is no codes */
    const struct mt_packed_source *src;
};

static const char *name_of(const struct mt_layout *l, const struct packed *p)
{
    return l->stored[p->of->place.stored].name; /* files' name, the layout's is a module's */
}

/* As a tensor of the files would be that is not packed. Of all experts: [experts, in, out]. */
static void decode(struct mt_merged *out, const struct mt_layout *l, const struct packed *p)
{
    const struct mt_stored *stored = &l->stored[p->of->place.stored];
    const int64_t *shape = p->src->codes->shape;
    out->t = (struct mt_st_tensor){.name = (char *)(uintptr_t)stored->name, .dtype = MT_ST_BF16, .n_elems = stored->n,
                                   .file = p->src->codes->file};
    if (stored->fused) {
        out->codes = p->src->codes;
        out->scales = p->src->scales;
        out->t.n_dims = 3;
        memcpy(out->t.shape, (int64_t[]){shape[0], shape[2] * MT_MXFP4_BLOCK, shape[1]}, 3 * sizeof(*shape));
        return;
    }
    out->of = p->of;
    out->src = *p->src;
    out->t.n_dims = p->of->n_dims;
    memcpy(out->t.shape, p->of->shape, sizeof(p->of->shape));
}

static void list_tensors(struct mt_merge_base *b, const struct mt_layout *l, const struct packed *packed,
                         mt_merge_changes changes, const void *ctx)
{
    for (size_t i = 0; i < b->st->n_tensors && !b->decodes; i++)
        b->decodes = packed[i].of && changes(ctx, name_of(l, &packed[i]));
    for (size_t i = 0; i < b->st->n_tensors; i++) {
        const struct mt_st_tensor *t = &b->st->tensors[i];
        if (b->decodes && !packed[i].of && mt_packed_is_piece(t->name))
            continue;
        struct mt_merged *to = &b->tensors[b->n++];
        to->t = *t;
        if (b->decodes && packed[i].of)
            decode(to, l, &packed[i]);
    }
}

int mt_merge_base_open(struct mt_merge_base *b, const struct mt_st_model *st, const struct mt_layout *l, bool all,
                       mt_merge_changes changes, const void *ctx, struct mt_err *err)
{
    struct mt_sources sources = {.st = *st};
    *b = (struct mt_merge_base){.st = st, .decodes = all, .tensors = mt_calloc(st->n_tensors, sizeof(*b->tensors))};
    struct packed *packed = mt_calloc(st->n_tensors, sizeof(*packed));
    int rc = b->tensors && packed ? mt_sources_find(&sources, l, err)
                                  : mt_fail_nomem(err, "an export", st->n_tensors * sizeof(*b->tensors));
    for (size_t i = 0; i < l->n_tensors && !rc; i++) {
        const struct mt_packed_source *src = &sources.of[i];
        struct packed *p = src->format ? &packed[src->codes - st->tensors] : NULL;
        if (p && !p->of)
            *p = (struct packed){&l->tensors[i], src};
    }
    if (!rc)
        list_tensors(b, l, packed, changes, ctx);
    b->decodes = false; /* unless something was packed */
    for (size_t i = 0; i < b->n; i++)
        b->decodes |= b->tensors[i].codes || b->tensors[i].src.format;
    free(packed);
    free(sources.of);
    return rc;
}

static void forget(struct mt_merge_base *b)
{
    if (b->now && b->now->src.format)
        mt_packed_reader_finish(&b->reader);
    free(b->values);
    b->values = NULL;
    b->now = NULL;
}

void mt_merge_base_close(struct mt_merge_base *b)
{
    forget(b);
    free(b->tensors);
    *b = (struct mt_merge_base){.st = NULL};
}

/* Decodes an expert of a packed tensor, unless it is the last that was. */
static int decode_expert(struct mt_merge_base *b, const struct mt_merged *x, size_t expert, struct mt_err *err)
{
    size_t in = (size_t)x->t.shape[1], n = in * (size_t)x->t.shape[2], n_scales = n / MT_MXFP4_BLOCK;
    if (b->now == x && b->expert == expert)
        return 0;
    forget(b);
    b->values = mt_calloc(n, sizeof(float));
    uint8_t *codes = malloc(n / 2 + n_scales), *exponents = codes ? codes + n / 2 : NULL;
    float *scales = mt_calloc(n_scales, sizeof(float));
    int rc = codes && scales && b->values ? 0 : mt_fail_nomem(err, x->t.name, n * sizeof(float));
    if (!rc)
        rc = mt_st_read_raw(b->st, x->codes, expert * (n / 2), n / 2, codes, err);
    if (!rc)
        rc = mt_st_read_raw(b->st, x->scales, expert * n_scales, n_scales, exponents, err);
    for (size_t i = 0; i < n_scales && !rc; i++)
        scales[i] = mt_e8m0_to_f32(exponents[i]);
    if (!rc) {
        mt_packed_values(MT_PACKED_MXFP4, in, codes, scales, 0, n, b->values);
        b->now = x;
        b->expert = expert;
    }
    free(codes);
    free(scales);
    return rc;
}

/* Rows of experts are columns of what was decoded. */
static int read_experts(struct mt_merge_base *b, const struct mt_merged *x, size_t first, size_t n, float *w,
                        struct mt_err *err)
{
    size_t in = (size_t)x->t.shape[1], out = (size_t)x->t.shape[2];
    int rc = 0;
    for (size_t i = 0, len; i < n && !rc; i += len) { /* a row, or what is wanted of it */
        size_t at = first + i, row = at / out, col = at % out;
        len = MT_MIN(out - col, n - i);
        rc = decode_expert(b, x, row / in, err);
        for (size_t k = 0; k < len && !rc; k++)
            w[i + k] = b->values[(col + k) * in + row % in];
    }
    return rc;
}

static int read_matrix(struct mt_merge_base *b, const struct mt_merged *x, size_t first, size_t n, float *w,
                       struct mt_err *err)
{
    if (b->now != x) {
        forget(b);
        int rc = mt_packed_reader_init(&b->reader, b->st, &x->src, x->of, NULL, err);
        if (rc) {
            mt_packed_reader_finish(&b->reader);
            return rc;
        }
        b->now = x;
    }
    return mt_packed_read_f32(&b->reader, first, n, w, err);
}

int mt_merge_base_read(struct mt_merge_base *b, const struct mt_merged *x, size_t first, size_t n, float *w,
                       struct mt_err *err)
{
    if (x->codes)
        return read_experts(b, x, first, n, w, err);
    return x->src.format ? read_matrix(b, x, first, n, w, err) : mt_st_read_f32(b->st, &x->t, first, n, w, err);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/merge_base.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/mem.h"
#include "base/packed.h"

#define BLOCKS "_blocks"

/* What codes and scales of all experts are decoded to: [experts, in, out], as in files that are not packed. */
static int take_experts(struct mt_merged *out, const struct mt_st_tensor *codes, const struct mt_st_tensor *scales,
                        struct mt_err *err)
{
    const int64_t *shape = codes->shape;
    if (!scales || codes->n_dims != 4 || scales->n_dims != 3 || scales->dtype != MT_ST_U8 ||
        shape[3] != MT_MXFP4_BLOCK / 2 || memcmp(shape, scales->shape, 3 * sizeof(*shape)))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "tensor \"%s\" is not the codes of experts in MXFP4, with scales", codes->name);
    char *name = strndup(codes->name, strlen(codes->name) - strlen(BLOCKS));
    *out = (struct mt_merged){.t = {.name = name, .dtype = MT_ST_BF16, .n_dims = 3,
                                    .shape = {shape[0], shape[2] * MT_MXFP4_BLOCK, shape[1]},
                                    .n_elems = codes->n_elems * 2}, .codes = codes, .scales = scales};
    return name ? 0 : mt_fail_nomem(err, codes->name, strlen(codes->name));
}

/* Whether it ends in "_blocks"; then stem[] is what precedes. */
static bool is_codes(const struct mt_st_tensor *t, char stem[MT_TENSOR_NAME])
{
    size_t n = strlen(t->name), k = strlen(BLOCKS);
    bool yes = t->dtype == MT_ST_U8 && n > k && n < MT_TENSOR_NAME && !strcmp(t->name + n - k, BLOCKS);
    snprintf(stem, MT_TENSOR_NAME, "%.*s", yes ? (int)(n - k) : 0, t->name);
    return yes;
}

static const struct mt_st_tensor *scales_of(const struct mt_st_model *st, const char *stem)
{
    char name[MT_STORED_NAME];
    snprintf(name, sizeof(name), "%s_scales", stem);
    return mt_st_find(st, name);
}

/* The layout's matrix of which the file's tensor is the codes in NF4, FP8 or INT4; NULL: it is another one. */
static const struct mt_tensor *matrix_of(const struct mt_layout *l, const struct mt_st_tensor *t)
{
    char name[MT_STORED_NAME];
    size_t n = strlen(t->name), k = t->dtype == MT_ST_I32 ? strlen(mt_packed_formats[MT_PACKED_INT4].codes_name) : 0;
    if ((t->dtype != MT_ST_U8 && t->dtype != MT_ST_I32 && t->dtype != MT_ST_F8_E4M3) || n >= sizeof(name) || n < k ||
        (k && strcmp(t->name + n - k, mt_packed_formats[MT_PACKED_INT4].codes_name)))
        return NULL;
    const struct mt_text_names *names = l->cfg.names; /* of a nested decoder, layouts have those of modules */
    size_t prefix = strlen(names->in_files);
    bool begins = n - k >= prefix && !strncmp(t->name, names->in_files, prefix);
    size_t from = begins ? prefix : 0;
    snprintf(name, sizeof(name), "%s%.*s", begins ? names->modules : "", (int)(n - k - from), t->name + from);
    const struct mt_tensor *of = mt_layout_find(l, name);
    return of && of->n_dims == 2 ? of : NULL;
}

static struct mt_st_tensor decoded(const struct mt_layout *l, const struct mt_st_tensor *codes,
                                   const struct mt_tensor *of)
{
    return (struct mt_st_tensor){.name = l->stored[of->place.stored].name, /* files' name, the layout's is a module's */
                                 .dtype = MT_ST_BF16, .n_dims = 2,
                                 .shape = {of->shape[0], of->shape[1]}, .n_elems = of->n, .file = codes->file};
}

static bool any_changes(const struct mt_st_model *st, const struct mt_layout *l, mt_merge_changes changes,
                        const void *ctx)
{
    char stem[MT_TENSOR_NAME];
    for (size_t i = 0; i < st->n_tensors; i++) {
        const struct mt_tensor *of = matrix_of(l, &st->tensors[i]);
        struct mt_st_tensor t = of ? decoded(l, &st->tensors[i], of) : (struct mt_st_tensor){.name = stem, .n_dims = 3};
        if ((of || is_codes(&st->tensors[i], stem)) && changes(ctx, &t))
            return true;
    }
    return false;
}

int mt_merge_base_open(struct mt_merge_base *b, const struct mt_st_model *st, const struct mt_layout *l, bool all,
                       mt_merge_changes changes, const void *ctx, struct mt_err *err)
{
    char stem[MT_TENSOR_NAME];
    int rc = 0;
    *b = (struct mt_merge_base){.st = st, .decodes = all || any_changes(st, l, changes, ctx)};
    if (!(b->tensors = mt_calloc(st->n_tensors, sizeof(*b->tensors))))
        return mt_fail_nomem(err, "an export", st->n_tensors * sizeof(*b->tensors));
    for (size_t i = 0; i < st->n_tensors && !rc; i++) {
        const struct mt_st_tensor *t = &st->tensors[i];
        bool codes = is_codes(t, stem);
        if (b->decodes && !codes && !matrix_of(l, t) && mt_packed_is_piece(t->name))
            continue;
        struct mt_merged *to = &b->tensors[b->n++];
        *to = (struct mt_merged){.t = *t, .of = b->decodes ? matrix_of(l, t) : NULL};
        if (b->decodes && codes)
            rc = take_experts(to, t, scales_of(st, stem), err);
        else if (to->of)
            rc = mt_packed_find(&to->src, st, l->cfg.nested ? l : NULL, to->of, err); /* found by the name in files */
        if (!rc && to->src.format)
            to->t = decoded(l, t, to->of);
    }
    b->decodes = false; /* unless something was packed */
    for (size_t i = 0; i < b->n; i++)
        b->decodes |= b->tensors[i].codes || b->tensors[i].src.format;
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
    for (size_t i = 0; i < b->n; i++)
        if (b->tensors[i].codes)
            free(b->tensors[i].t.name);
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

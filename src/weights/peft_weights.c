/* SPDX-License-Identifier: Apache-2.0 */
/* The tensors of PEFT's files: into planes, checked, compared with the model's. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "model/ranges.h"
#include "model/stored.h"
#include "weights/peft.h"
#include "weights/sources.h"

#define PREFIX "base_model.model."
enum { PIECE = 1 << 16 }; /* elements */

/* The file's tensor that is t or, of adapters, holds it. */
static int find_tensor(const struct mt_st_tensor **out, const struct mt_st_model *st, const struct mt_layout *l,
                       const struct mt_tensor *t, struct mt_err *err)
{
    char name[MT_PEFT_NAME];
    const struct mt_stored *s = &l->stored[t->place.stored];
    const int64_t *shape = t->adapter ? s->shape : t->shape;
    if (t->adapter)
        snprintf(name, sizeof(name), "%s", s->name);
    else
        mt_peft_whole_name(name, l->cfg.family, t->name);
    const struct mt_st_tensor *src = *out = mt_st_find(st, name);
    if (!src || src->n_dims != t->n_dims || src->shape[0] != shape[0] || (t->n_dims > 1 && src->shape[1] != shape[1]))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: tensor \"%s\" is missing or has another shape than [%lld, %lld]",
                       st->files[0].path, name, (long long)shape[0], (long long)shape[1]);
    return 0;
}

static int load_tensor(struct mt_stored_reader *r, const struct mt_tensor *t, mt_plane_set *planes, float *buf,
                       struct mt_err *err)
{
    const struct mt_st_model *st = r->st;
    const struct mt_st_tensor *src;
    int rc = find_tensor(&src, st, r->l, t, err);
    for (size_t at = 0; at < t->n && !rc; at += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, t->n - at);
        rc = t->adapter ? mt_stored_read_f32(r, src, t, at, n, buf, err) : mt_st_read_f32(st, src, at, n, buf, err);
        rc = rc ?: mt_sources_check_finite(st->files[0].path, src->name, at, buf, n, err)
                ?: mt_tensor_write_masters(planes, t, at, n, buf, err);
    }
    return rc;
}

/* *apart: the largest difference of two tensors of the same size. */
static int compare(double *apart, const struct mt_st_model *sa, const struct mt_st_tensor *a,
                   const struct mt_st_model *sb, const struct mt_st_tensor *b, struct mt_err *err)
{
    MT_FREED float *buf = mt_calloc((size_t)2 * PIECE, sizeof(float));
    int rc = buf ? 0 : mt_fail_nomem(err, a->name, 2 * PIECE * sizeof(float));
    *apart = 0;
    for (size_t at = 0; at < a->n_elems && !rc; at += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->n_elems - at);
        rc = mt_st_read_f32(sa, a, at, n, buf, err)
          ?: mt_st_read_f32(sb, b, at, n, buf + PIECE, err);
        for (size_t i = 0; i < n && !rc; i++) {
            double d = fabs((double)buf[i] - (double)buf[PIECE + i]);
            *apart = d <= *apart ? *apart : d; /* NaN counts, too */
        }
    }
    return rc;
}

#define TABLE PREFIX "model.embed_tokens.weight"
#define HEAD PREFIX "lm_head.weight"

int mt_peft_check_tied(const struct mt_st_model *st, struct mt_err *err)
{
    const struct mt_st_tensor *t[] = {mt_st_find(st, TABLE), mt_st_find(st, HEAD)};
    if (!t[0] || !t[1])
        return 0;
    double apart = 1;
    int rc = t[0]->n_elems == t[1]->n_elems ? compare(&apart, st, t[0], st, t[1], err) : 0;
    if (rc || apart == 0)
        return rc;
    return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: embed_tokens and lm_head, which this model shares, are two tables that differ: "
                   "PEFT trained a copy of each (without ensure_weight_tying), and one would be lost; train with "
                   "ensure_weight_tying, or on the model with tie_word_embeddings = false", st->files[0].path);
}

int mt_peft_load(const struct mt_layout *l, mt_plane_set *planes, const char *dir, struct mt_err *err)
{
    MT_CLOSED_BY(mt_st_close) struct mt_st_model st = {0};
    MT_CLOSED_BY(mt_stored_reader_finish) struct mt_stored_reader r = {.l = l, .st = &st};
    MT_FREED float *buf = mt_calloc(PIECE, sizeof(float));
    int rc = buf ? mt_peft_open_weights(&st, dir, err) : mt_fail_nomem(err, "an adapter", PIECE * sizeof(float));
    if (!rc && l->tied)
        rc = mt_peft_check_tied(&st, err);
    for (size_t i = 0; i < l->n_tensors && !rc; i++) /* by the files' tensors: one is read for many of ours */
        if (l->tensors[l->pieces[i]].trainable)
            rc = load_tensor(&r, &l->tensors[l->pieces[i]], planes, buf, err);
    return rc ?: mt_planes_settle(planes, err);
}

/* PEFT's copy of the matrix that t's module had when its adapter was saved; NULL: there is none. */
static const struct mt_st_tensor *find_copy(const struct mt_st_model *st, const struct mt_layout *l,
                                            const struct mt_tensor *t)
{
    static const char weight[] = ".weight", copy[] = ".base_layer.weight";
    char name[MT_PEFT_NAME + sizeof(copy)];
    mt_peft_whole_name(name, l->cfg.family, t->name);
    const struct mt_st_tensor *found = NULL;
    if (!t->adapter && t->n_dims == 2 && mt_ends_with(name, weight)) {
        snprintf(name + strlen(name) - strlen(weight), sizeof(copy), "%s", copy);
        found = mt_st_find(st, name);
    }
    return found || !l->tied || t != l->tensors ? found : mt_st_find(st, PREFIX "lm_head.base_layer.weight");
}

int mt_peft_compare_copies(const struct mt_layout *l, const char *dir, const char *model_dir, struct mt_err *err)
{
    MT_CLOSED_BY(mt_st_close) struct mt_st_model st = {0};
    struct mt_sources base = {.of = NULL};
    int rc = mt_peft_open_weights(&st, dir, err);
    for (size_t i = 0; i < l->n_tensors && !rc; i++) {
        const struct mt_st_tensor *copy = find_copy(&st, l, &l->tensors[i]);
        double apart = 0;
        if (!copy)
            continue;
        if (!base.of)
            rc = mt_sources_open(&base, l, model_dir, err);
        const struct mt_packed_source *src = rc ? NULL : &base.of[i];
        if (!src || !src->codes || src->format != MT_PACKED_NONE || src->codes->n_elems != copy->n_elems)
            continue; /* a packed one is not what PEFT stores */
        rc = compare(&apart, &st, copy, &base.st, src->codes, err);
        if (!rc && apart != 0)
            mt_warn("%s: \"%s\", the model's own matrix when the adapter was saved, is up to %.2g from %s in %s: PEFT would "
                    "load the adapter's copy over the model's, here the model's is used; see to it that the model is the "
                    "one that the adapter was trained on, in its dtype", st.files[0].path, copy->name, apart, src->codes->name,
                    model_dir);
    }
    if (base.of)
        mt_sources_close(&base);
    return rc;
}

int mt_peft_check(const struct mt_layout *l, const char *dir, struct mt_err *err)
{
    MT_CLOSED_BY(mt_st_close) struct mt_st_model st = {0};
    const struct mt_st_tensor *src;
    int rc = mt_peft_open_weights(&st, dir, err);
    for (size_t i = 0; i < l->n_tensors && !rc; i++)
        if (l->tensors[i].trainable)
            rc = find_tensor(&src, &st, l, &l->tensors[i], err);
    if (!rc && l->tied)
        rc = mt_peft_check_tied(&st, err);
    return rc;
}

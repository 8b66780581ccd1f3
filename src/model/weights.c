/* SPDX-License-Identifier: Apache-2.0 */
#include "model/weights.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/philox.h"
#include "base/pool.h"
#include "hf/safetensors.h"
#include "model/ranges.h"

enum { PIECE = 1 << 20 }; /* elements */

/* Index of the first value whose hi plane would not be finite, or n. */
static size_t first_unfit(const float *x, size_t n)
{
    size_t i = 0;
    while (i < n && (mt_f32_bits(x[i]) & 0x7fffffffu) < 0x7f7f8000u)
        i++;
    return i;
}

/* The name as the file has it: with or without one of the prefixes that exporters put before it. */
static const struct mt_st_tensor *find_source(const struct mt_st_model *st, const char *name)
{
    static const struct {
        const char *ours, *theirs;
    } prefix[] = {{"model.", "model."},
                  {"model.", "language_model.model."},
                  {"model.", "model.language_model."},
                  {"lm_head.", "language_model.lm_head."},
                  {"model.", ""}};
    const struct mt_st_tensor *t = mt_st_find(st, name);
    char other[256];
    for (size_t i = 0; !t && i < MT_ARRAY_LEN(prefix); i++) {
        size_t n = strlen(prefix[i].ours);
        if (strncmp(name, prefix[i].ours, n))
            continue;
        snprintf(other, sizeof(other), "%s%s", prefix[i].theirs, name + n);
        t = mt_st_find(st, other);
    }
    return t;
}

static int check_shape(const struct mt_tensor *t, const struct mt_st_tensor *src, const char *dir,
                       struct mt_err *err)
{
    bool same = src->n_dims == t->n_dims;
    for (int i = 0; same && i < t->n_dims; i++)
        same = src->shape[i] == t->shape[i];
    if (same)
        return 0;
    return mt_fail(err, MT_ERR_INPUT, -EINVAL,
                   "%s: tensor \"%s\" has shape [%lld, %lld]; config.json asks for [%lld, %lld]", dir,
                   t->name, (long long)(src->n_dims > 0 ? src->shape[0] : 0),
                   (long long)(src->n_dims > 1 ? src->shape[1] : 0), (long long)t->shape[0],
                   (long long)t->shape[1]);
}

static int load_tensor(const struct mt_st_model *st, const struct mt_st_tensor *src,
                       const struct mt_tensor *t, mt_plane_set *planes, float *buf,
                       struct mt_err *err)
{
    for (size_t at = 0; at < t->n; at += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, t->n - at);
        int rc = mt_st_read_f32(st, src, at, n, buf, err);
        if (rc)
            return rc;
        size_t bad = first_unfit(buf, n);
        if (bad < n)
            return mt_fail(err, MT_ERR_INPUT, -ERANGE,
                           "%s: tensor \"%s\" holds %g at element %zu: weights must be finite and "
                           "below 3.39e38",
                           st->files[src->file].path, t->name, (double)buf[bad], at + bad);
        rc = mt_tensor_write_masters(planes, t, at, n, buf, err);
        if (rc)
            return rc;
    }
    return 0;
}

static int refuse_unexpected(const struct mt_layout *l, const struct mt_st_model *st,
                             const char *dir, struct mt_err *err)
{
    bool *used = mt_calloc(st->n_tensors, sizeof(bool));
    int rc = 0;
    if (!used)
        return mt_fail_nomem(err, dir, st->n_tensors);
    for (size_t i = 0; i < l->n_tensors; i++)
        used[find_source(st, l->tensors[i].name) - st->tensors] = true;
    for (size_t i = 0; i < st->n_tensors && !rc; i++) {
        const char *name = st->tensors[i].name;
        size_t len = strlen(name);
        if (used[i] || (len >= 8 && !strcmp(name + len - 8, "inv_freq")))
            continue;
        if (l->tied && len >= 14 && !strcmp(name + len - 14, "lm_head.weight"))
            mt_info("%s: lm_head.weight is ignored, the embeddings are tied", dir);
        else
            rc = mt_fail(err, MT_ERR_INPUT, -EINVAL,
                         "%s: tensor \"%s\" is not part of a %s", dir, name, l->cfg.family->architecture);
    }
    free(used);
    return rc;
}

int mt_weights_load(const struct mt_layout *l, mt_plane_set *planes, const char *dir,
                    struct mt_err *err)
{
    struct mt_st_model st;
    int rc = mt_st_open_dir(&st, dir, err);
    if (rc)
        return rc;
    float *buf = mt_calloc(PIECE, sizeof(float));
    if (!buf)
        rc = mt_fail_nomem(err, "loading weights", PIECE * sizeof(float));
    for (size_t i = 0; i < l->n_tensors && !rc; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        const struct mt_st_tensor *src = find_source(&st, t->name);
        if (!src)
            rc = mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s: tensor \"%s\" is missing", dir, t->name);
        else
            rc = check_shape(t, src, dir, err);
    }
    if (!rc)
        rc = refuse_unexpected(l, &st, dir, err);
    for (size_t i = 0; i < l->n_tensors && !rc; i++)
        rc = load_tensor(&st, find_source(&st, l->tensors[i].name), &l->tensors[i], planes, buf, err);
    free(buf);
    mt_st_close(&st);
    return rc ? rc : mt_planes_settle(planes, err);
}

int mt_weights_mark_bf16(struct mt_layout *l, const char *dir, struct mt_err *err)
{
    struct mt_st_model st;
    struct mt_err unreadable = {0}; /* told when the weights are loaded */
    bool any = false, read = false;
    for (size_t i = 0; i < l->n_tensors; i++)
        any |= !l->tensors[i].trainable;
    if (any && dir)
        read = !mt_st_open_dir(&st, dir, &unreadable);
    for (size_t i = 0; any && i < l->n_tensors; i++) {
        const struct mt_st_tensor *src = read ? find_source(&st, l->tensors[i].name) : NULL;
        l->tensors[i].is_bf16 = src ? src->dtype == MT_ST_BF16 : !read && !strcmp(l->cfg.torch_dtype, "bfloat16");
    }
    if (read)
        mt_st_close(&st);
    return any ? mt_layout_set_ranges(l, err) : 0;
}

struct random_job {
    const struct mt_tensor *t;
    uint64_t seed, stream;
    float std, constant;
    float *dst; /* elements [at, at + n) */
    size_t at, n;
};

enum { BLOCK = 1 << 14 }; /* elements a thread makes at a time */

static void fill_block(void *ctx, size_t i, int thread)
{
    const struct random_job *j = ctx;
    size_t first = i * BLOCK, n = MT_MIN((size_t)BLOCK, j->n - first);
    (void)thread;
    if (j->t->n_dims == 2)
        mt_philox_normal(j->dst + first, n, j->at + first, j->seed, j->stream, j->std);
    else
        for (size_t k = 0; k < n; k++)
            j->dst[first + k] = j->constant;
}

static int init_tensor(const struct mt_layout *l, const struct mt_tensor *t, mt_plane_set *planes,
                       uint64_t seed, float *buf, mt_pool *pool, struct mt_err *err)
{
    struct random_job j = {.t = t,
                           .seed = seed,
                           .stream = XXH3_64bits(t->name, strlen(t->name)),
                           .std = (float)l->cfg.initializer_range,
                           .constant = strstr(t->name, "norm") ? 1 : 0,
                           .dst = buf};
    int rc = 0;
    for (j.at = 0; j.at < t->n && !rc; j.at += j.n) {
        j.n = MT_MIN((size_t)PIECE, t->n - j.at);
        mt_pool_run(pool, fill_block, &j, mt_div_up(j.n, BLOCK));
        rc = mt_tensor_write_masters(planes, t, j.at, j.n, buf, err);
    }
    return rc;
}

int mt_weights_init_random(const struct mt_layout *l, mt_plane_set *planes, uint64_t seed,
                           int n_threads, struct mt_err *err)
{
    mt_pool *pool = NULL;
    struct mt_pool_params p = {"init", n_threads, NULL, NULL};
    float *buf = mt_calloc(PIECE, sizeof(float));
    int rc = buf ? mt_pool_create(&pool, &p, err)
                 : mt_fail_nomem(err, "random weights", PIECE * sizeof(float));
    for (size_t i = 0; i < l->n_tensors && !rc; i++)
        rc = init_tensor(l, &l->tensors[i], planes, seed, buf, pool, err);
    mt_pool_destroy(&pool);
    free(buf);
    return rc ? rc : mt_planes_settle(planes, err);
}

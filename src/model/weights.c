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
#include "model/stored.h"

enum { PIECE = 1 << 20 }; /* elements */

/* Index of the first value whose hi plane would not be finite, or n. */
static size_t first_unfit(const float *x, size_t n)
{
    size_t i = 0;
    while (i < n && (mt_f32_bits(x[i]) & 0x7fffffffu) < 0x7f7f8000u)
        i++;
    return i;
}

static void shape_text(char *buf, size_t len, const int64_t *shape, int n_dims)
{
    size_t at = 0;
    for (int i = 0; i < n_dims && at < len; i++)
        at += (size_t)snprintf(buf + at, len - at, "%s%lld", i ? ", " : "", (long long)shape[i]);
}

static int check_shape(const struct mt_stored *s, const struct mt_st_tensor *src, const char *dir, struct mt_err *err)
{
    char have[96] = "", want[96] = "";
    bool same = src->n_dims == s->n_dims;
    for (int i = 0; same && i < s->n_dims; i++)
        same = src->shape[i] == s->shape[i];
    if (same)
        return 0;
    shape_text(have, sizeof(have), src->shape, src->n_dims);
    shape_text(want, sizeof(want), s->shape, s->n_dims);
    return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: tensor \"%s\" has shape [%s]; config.json asks for [%s]", dir,
                   s->name, have, want);
}

/* Elements [at, at + n) of a bf16 tensor, widened: the sums of its blocks. */
static void sum_piece(uint64_t *sums, uint16_t *raw, size_t at, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        raw[i] = (uint16_t)(mt_f32_bits(x[i]) >> 16);
    mt_block_sums(sums, at * sizeof(*raw), raw, n * sizeof(*raw));
}

_Static_assert(PIECE * sizeof(uint16_t) % MT_SUM_BLOCK == 0, "pieces are whole blocks");

/* What a tensor is read with; its sum, where it is wanted. */
struct loader {
    struct mt_stored_reader r;
    mt_plane_set *planes;
    const char *dir;
    float *buf;    /* [PIECE] */
    uint16_t *raw; /* [PIECE] */
};

static int read_tensor(struct loader *v, const struct mt_tensor *t, uint64_t *sums, struct mt_err *err)
{
    struct mt_stored_reader *r = &v->r;
    mt_plane_set *planes = v->planes;
    const char *dir = v->dir;
    float *buf = v->buf;
    for (size_t at = 0; at < t->n; at += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, t->n - at);
        int rc = mt_stored_read_f32(r, t, at, n, buf, err);
        if (rc)
            return rc;
        size_t bad = first_unfit(buf, n);
        if (bad < n)
            return mt_fail(err, MT_ERR_INPUT, -ERANGE,
                           "%s: tensor \"%s\" holds %g at element %zu: weights must be finite and "
                           "below 3.39e38",
                           dir, t->name, (double)buf[bad], at + bad);
        rc = mt_tensor_write_masters(planes, t, at, n, buf, err);
        if (rc)
            return rc;
        if (sums)
            sum_piece(sums, v->raw, at, buf, n);
    }
    return 0;
}

static int load_tensor(struct loader *v, const struct mt_tensor *t, uint64_t *sum, struct mt_err *err)
{
    size_t blocks = mt_sum_blocks(t->n * sizeof(uint16_t));
    uint64_t *sums = sum && t->in_base ? mt_calloc(blocks, sizeof(*sums)) : NULL;
    if (sum && t->in_base && !sums)
        return mt_fail_nomem(err, t->name, blocks * sizeof(*sums));
    int rc = read_tensor(v, t, sums, err);
    if (!rc && sums)
        *sum = mt_tensor_sum(sums, blocks);
    free(sums);
    return rc;
}

static int start_loader(struct loader *v, mt_plane_set *planes, const char *dir, struct mt_err *err)
{
    *v = (struct loader){.planes = planes, .dir = dir};
    v->buf = mt_calloc(PIECE, sizeof(*v->buf));
    v->raw = mt_calloc(PIECE, sizeof(*v->raw));
    return v->buf && v->raw ? 0 : mt_fail_nomem(err, "loading weights", PIECE * sizeof(float));
}

static void finish_loader(struct loader *v)
{
    free(v->buf);
    free(v->raw);
}

static int refuse_unexpected(const struct mt_layout *l, const struct mt_st_model *st,
                             const char *dir, struct mt_err *err)
{
    bool *used = mt_calloc(st->n_tensors, sizeof(bool));
    int rc = 0;
    if (!used)
        return mt_fail_nomem(err, dir, st->n_tensors);
    for (size_t i = 0; i < l->n_stored; i++)
        used[mt_stored_find(st, l->stored[i].name) - st->tensors] = true;
    for (size_t i = 0; i < st->n_tensors && !rc; i++) {
        const char *name = st->tensors[i].name;
        size_t len = strlen(name);
        if (used[i] || mt_stored_goes_along(l, name) || (len >= 8 && !strcmp(name + len - 8, "inv_freq")))
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

static bool is_of_one_expert(const char *experts)
{
    return experts[sizeof(".experts.") - 1] >= '0' && experts[sizeof(".experts.") - 1] <= '9';
}

/* Experts may be there in a form that other programs write: then it is named. */
static int fail_missing(const struct mt_st_model *st, const char *name, const char *dir, struct mt_err *err)
{
    const char *ours = strstr(name, ".experts.");
    for (size_t i = 0; ours && i < st->n_tensors; i++) {
        const char *theirs = strstr(st->tensors[i].name, ".experts.");
        if (theirs && is_of_one_expert(ours) != is_of_one_expert(theirs))
            return mt_fail(err, MT_ERR_INPUT, -ENOENT,
                           "%s: tensor \"%s\" is missing, but there is \"%s\": experts in another form than that of the "
                           "model's release are not read", dir, name, st->tensors[i].name);
    }
    return mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s: tensor \"%s\" is missing", dir, name);
}

static bool is_in_files(const mt_plane_set *planes, const struct mt_tensor *t)
{
    return mt_plane_in_files(planes, t->unit, mt_range_planes(t->kind).hi);
}

int mt_weights_load(const struct mt_layout *l, mt_plane_set *planes, const char *dir, uint64_t *sum,
                    struct mt_err *err)
{
    struct mt_st_model st;
    struct loader v;
    int rc = mt_st_open_dir(&st, dir, err);
    if (rc)
        return rc;
    rc = start_loader(&v, planes, dir, err);
    for (size_t i = 0; i < l->n_stored && !rc; i++) {
        const struct mt_st_tensor *src = mt_stored_find(&st, l->stored[i].name);
        rc = src ? check_shape(&l->stored[i], src, dir, err) : fail_missing(&st, l->stored[i].name, dir, err);
    }
    if (!rc)
        rc = refuse_unexpected(l, &st, dir, err);
    mt_stored_reader_init(&v.r, l, &st);
    for (size_t i = 0; i < l->n_tensors && !rc; i++)
        if (!is_in_files(planes, &l->tensors[i]))
            rc = load_tensor(&v, &l->tensors[i], sum ? &sum[i] : NULL, err);
    mt_stored_reader_finish(&v.r);
    finish_loader(&v);
    mt_st_close(&st);
    return rc ? rc : mt_planes_settle(planes, err);
}

/* --- the base of a run that goes on ---------------------------------------------------------------- */

/* name: the layout's own, which parts borrow. */
static void expect(mt_file_weights *files, const char *name, uint64_t sum)
{
    for (size_t i = 0; files && i < mt_file_weights_n_parts(files); i++)
        if (mt_file_weights_part(files, i, NULL)->name == name)
            mt_file_weights_expect(files, i, sum);
}

static int check_base(const struct mt_tensor *t, const struct mt_stored *s, const struct mt_st_model *st, uint64_t want,
                      uint64_t have, struct mt_err *err)
{
    const struct mt_st_tensor *src = mt_stored_find(st, s->name);
    if (have == want)
        return 0;
    return mt_fail(err, MT_ERR_INPUT, -EBADMSG,
                   "%s: tensor \"%s\" has another checksum than the checkpoint says: it is not the model that the run was "
                   "made on, or it was changed since; set model.path to that model", st->files[src->file].path, t->name);
}

int mt_weights_load_base(const struct mt_layout *l, mt_plane_set *planes, mt_file_weights *files, const char *dir,
                         const cJSON *want, uint64_t *sum, struct mt_err *err)
{
    struct mt_st_model st;
    struct loader v;
    if (!want || !want->child)
        return 0;
    int rc = mt_st_open_dir(&st, dir, err);
    if (rc)
        return rc;
    rc = start_loader(&v, planes, dir, err);
    mt_stored_reader_init(&v.r, l, &st);
    for (size_t i = 0; i < l->n_tensors && !rc; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        const cJSON *w = mt_json_get(want, t->name), *text = w ? mt_json_get(w, "xxh3") : NULL;
        uint64_t expected = cJSON_IsString(text) ? strtoull(text->valuestring, NULL, 16) : 0;
        if (!w)
            continue;
        if (!t->in_base) {
            rc = mt_fail(err, MT_ERR_INPUT, -EBADMSG, "%s: the checkpoint names tensor \"%s\" of the model that it was "
                         "made on, and this one has none such that is frozen: set model.path and model.freeze as they were",
                         dir, t->name);
        } else if (is_in_files(planes, t)) {
            expect(files, t->name, expected);
        } else {
            rc = load_tensor(&v, t, &sum[i], err);
            if (!rc)
                rc = check_base(t, &l->stored[t->place.stored], &st, expected, sum[i], err);
        }
    }
    mt_stored_reader_finish(&v.r);
    finish_loader(&v);
    mt_st_close(&st);
    return rc ? rc : mt_planes_settle(planes, err);
}

/* Do its elements lie in the file end to end, in its own order? */
static bool is_in_order(const struct mt_tensor *t)
{
    size_t cols = t->n_dims == 2 ? (size_t)t->shape[1] : 1;
    return !t->place.paired_rows && t->place.row_step == cols && (cols == 1 || t->place.col_step == 1);
}

int mt_weights_mark_bf16(struct mt_layout *l, const char *dir, const cJSON *only, struct mt_err *err)
{
    struct mt_st_model st;
    struct mt_err unreadable = {0}; /* told when the weights are loaded */
    bool any = false, read = false;
    for (size_t i = 0; i < l->n_tensors; i++)
        any |= !l->tensors[i].trainable;
    if (any && dir)
        read = !mt_st_open_dir(&st, dir, &unreadable);
    for (size_t i = 0; any && i < l->n_tensors; i++) {
        struct mt_tensor *t = &l->tensors[i];
        const struct mt_st_tensor *src = read ? mt_stored_find(&st, l->stored[t->place.stored].name) : NULL;
        if (only && !mt_json_get(only, t->name))
            continue;
        t->is_bf16 = src ? src->dtype == MT_ST_BF16 : !read && !strcmp(l->cfg.torch_dtype, "bfloat16");
        bool stands = !t->trainable && t->is_bf16 && is_in_order(t);
        t->in_base = stands && (!src || (src->n_elems == t->n && !strcmp(src->name, t->name)));
        t->in_file = stands && t->n * mt_dtype_size(MT_BF16) >= MT_IN_FILE_BYTES &&
                     (!src || src->n_elems == l->stored[t->place.stored].n);
    }
    if (read)
        mt_st_close(&st);
    return any ? mt_layout_set_ranges(l, err) : 0;
}

/* --- in place ------------------------------------------------------------------------------------ */

/* bf16 of a tensor's bytes [at, at + n). */
static int refuse_unfit(const struct mt_file_part *p, const char *path, size_t at, const void *data, size_t n,
                        struct mt_err *err)
{
    const size_t size = sizeof(uint16_t);
    for (size_t i = 0; i < n / size; i++) {
        uint16_t x;
        memcpy(&x, (const char *)data + i * size, size); /* a file need not align its tensors */
        if ((x & 0x7f80) == 0x7f80)
            return mt_fail(err, MT_ERR_INPUT, -ERANGE,
                           "%s: tensor \"%s\" holds %g at element %zu: weights must be finite and below 3.39e38", path,
                           p->name, (double)mt_bf16_to_f32(x), at / size + i);
    }
    return 0;
}

static int list_parts(struct mt_file_part *parts, size_t *n, const struct mt_layout *l, const struct mt_st_model *st,
                      struct mt_err *err)
{
    const size_t size = mt_dtype_size(MT_BF16);
    for (size_t i = 0; i < l->n_tensors; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        const struct mt_stored *stored = &l->stored[t->place.stored];
        const struct mt_st_tensor *src = mt_stored_find(st, stored->name);
        if (t->kind != MT_RANGE_IN_FILE)
            continue;
        if (!src || src->dtype != MT_ST_BF16 || src->n_elems != stored->n)
            return mt_fail(err, MT_ERR_INPUT, -EINVAL, "tensor \"%s\" is not in the model's files as it was", t->name);
        parts[(*n)++] = (struct mt_file_part){.unit = t->unit,
                                              .plane = mt_range_planes(t->kind).hi,
                                              .at = t->at * size,
                                              .bytes = t->n * size,
                                              .file = src->file,
                                              .offset = src->offset + t->place.first * size,
                                              .name = t->name};
    }
    return 0;
}

int mt_weights_open_files(mt_file_weights **out, const struct mt_layout *l, const char *dir, struct mt_err *err)
{
    struct mt_st_model st;
    size_t n = 0;
    int rc = mt_st_open_dir(&st, dir, err);
    if (rc)
        return rc;
    struct mt_file_part *parts = mt_calloc(l->n_tensors, sizeof(*parts));
    const char **paths = mt_calloc((size_t)st.n_files, sizeof(*paths));
    rc = parts && paths ? list_parts(parts, &n, l, &st, err) : mt_fail_nomem(err, dir, l->n_tensors * sizeof(*parts));
    for (int i = 0; i < st.n_files && paths; i++)
        paths[i] = st.files[i].path;
    if (!rc)
        rc = mt_file_weights_open(out,
                                  &(struct mt_file_weights_params){.n_units = l->n_units,
                                                                   .paths = paths,
                                                                   .n_paths = (size_t)st.n_files,
                                                                   .parts = parts,
                                                                   .n_parts = n,
                                                                   .inspect = refuse_unfit},
                                  err);
    free(parts);
    free(paths);
    mt_st_close(&st);
    return rc;
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

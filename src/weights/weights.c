/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/weights.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/log.h"
#include "base/mem.h"
#include "hf/safetensors.h"
#include "model/ranges.h"
#include "model/stored.h"
#include "weights/known.h"
#include "weights/packed_files.h"
#include "weights/packer.h"
#include "weights/sources.h"

enum { PIECE = 1 << 20 }; /* elements */

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

/* Loads tensors into planes, or reads them for their sums. */
struct loader {
    const struct mt_layout *l;
    mt_plane_set *planes; /* NULL: nothing is kept */
    const char *dir;
    struct mt_packing_cost *cost;
    const atomic_bool *stop; /* ends it with -ECANCELED; NULL: nothing does */
    struct mt_summer summer;
    struct mt_sources sources;
    const struct mt_packed_source *src; /* of the tensor that was read last */
    uint64_t *known;                    /* [n_tensors] sums that this machine knows, 0: none; or NULL */
    const struct mt_tensor *measured;   /* whose factor of NVFP4 follows from `largest`; NULL: none yet */
    float largest;
};

static int read_piece(void *ctx, const struct mt_tensor *t, size_t at, size_t n, float *buf, struct mt_err *err)
{
    struct loader *l = ctx;
    int rc = l->stop && atomic_load(l->stop) ? -ECANCELED : mt_sources_read_f32(&l->sources, t, at, n, buf, err);
    return rc ?: mt_sources_check_finite(l->dir, t->name, at, buf, n, err);
}

/* The tensors [first, end) of the unit's layer, whose units follow each other. */
struct span {
    size_t first, end;
};

static struct span layer_of(const struct mt_layout *l, size_t unit)
{
    const struct mt_unit *u = &l->units[unit], *last = u;
    while (u > l->units && u[-1].layer == u->layer)
        u--;
    while (last + 1 < l->units + l->n_units && last[1].layer == u->layer)
        last++;
    return (struct span){u->first_tensor, last->first_tensor + last->n_tensors};
}

/* Before a matrix is packed as NVFP4: the largest magnitude of it and of those that must have its factor, in a first
 * pass; once for all of them. */
static int find_largest(struct loader *l, const struct mt_tensor *t, struct mt_err *err)
{
    bool packs = l->planes && t->kind == MT_RANGE_PACKED && t->packed == MT_PACKED_NVFP4 && !l->src->format;
    if (!packs || (l->measured && mt_packing_share_factor(l->l, l->measured, t)))
        return 0;
    MT_FREED float *buf = NULL;
    int rc = MT_NEW(&buf, PIECE, t->name, err);
    mt_summer_begin(&l->summer);
    l->measured = t;
    l->largest = 0;
    const struct span near = layer_of(l->l, t->unit);
    for (const struct mt_tensor *of = l->l->tensors + near.first; of < l->l->tensors + near.end && !rc; of++)
        for (size_t at = 0; at < of->n && !rc && mt_packing_share_factor(l->l, t, of); at += PIECE) {
            size_t n = MT_MIN((size_t)PIECE, of->n - at);
            rc = read_piece(l, of, at, n, buf, err);
            for (size_t i = 0; i < n && !rc; i++)
                l->largest = MT_MAX(l->largest, fabsf(buf[i]));
        }
    return rc;
}

static void take_source(struct loader *l, const struct mt_tensor *t)
{
    l->src = &l->sources.of[t - l->l->tensors];
}

/* *sum: checksum of the bytes that it is made of (struct mt_base_sums). */
static int load_tensor(struct loader *l, const struct mt_tensor *t, uint64_t *sum, struct mt_err *err)
{
    if (t->adapter)
        return 0;
    take_source(l, t);
    bool as_it_is = t->kind == MT_RANGE_PACKED && l->src->format, share = !l->src->format && !mt_stored_is_in_order(t);
    int rc = find_largest(l, t, err);
    const struct mt_filling f = {.read = read_piece, .ctx = l, .largest = l->largest, .cost = l->cost};
    mt_summer_begin(&l->summer);
    rc = rc ?: as_it_is ? mt_packed_copy(&l->sources.st, l->src, t, l->planes, &l->summer, err)
                        : mt_tensor_fill(l->planes, t, &f, err);
    if (!rc)
        *sum = share ? l->sources.plain.share_sum : mt_summer_end(&l->summer);
    return rc;
}

/* Finish it in any case. */
static int start_loader(struct loader *v, const struct mt_layout *l, mt_plane_set *planes, const char *dir,
                        struct mt_err *err)
{
    *v = (struct loader){.l = l, .planes = planes, .dir = dir};
    int rc = mt_sources_open(&v->sources, l, dir, err);
    v->sources.plain.summer = &v->summer;
    return rc ?: mt_summer_init(&v->summer, err);
}

static void finish_loader(struct loader *v)
{
    mt_summer_finish(&v->summer);
    mt_sources_close(&v->sources);
    free(v->known);
}

/* AutoGPTQ writes a bias of zeros for layers that have none. */
static int check_bias(const struct mt_st_model *st, const struct mt_st_tensor *t, const char *dir, struct mt_err *err)
{
    MT_FREED float *x = NULL;
    int rc = MT_NEW(&x, t->n_elems, t->name, err) ?: mt_st_read_f32(st, t, 0, t->n_elems, x, err);
    for (size_t i = 0; i < t->n_elems && !rc; i++)
        if (x[i] != 0)
            rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: tensor \"%s\" is a bias that the model's class does not have, and "
                         "is not zero", dir, t->name);
    return rc;
}

static int refuse_unexpected(const struct mt_layout *l, const struct mt_st_model *st,
                             const char *dir, struct mt_err *err)
{
    MT_FREED bool *used = mt_calloc(st->n_tensors, sizeof(bool));
    int rc = 0;
    if (!used)
        return mt_fail_nomem(err, dir, st->n_tensors);
    for (size_t i = 0; i < l->n_stored; i++)
        if (mt_stored_find(st, l->stored[i].name))
            used[mt_stored_find(st, l->stored[i].name) - st->tensors] = true;
    for (size_t i = 0; i < st->n_tensors && !rc; i++) {
        const char *name = st->tensors[i].name;
        if (used[i] || mt_packed_is_piece(name) || mt_stored_goes_along(l, name) || mt_ends_with(name, "inv_freq"))
            continue;
        if (mt_packed_is_bias(st, &st->tensors[i]))
            rc = check_bias(st, &st->tensors[i], dir, err);
        else if (l->tied && mt_ends_with(name, "lm_head.weight"))
            mt_info("%s: lm_head.weight is ignored, the embeddings are tied", dir);
        else
            rc = mt_fail(err, MT_ERR_INPUT, -EINVAL,
                         "%s: tensor \"%s\" is not part of a %s", dir, name, l->cfg.family->architecture);
    }
    return rc;
}

static bool is_of_one_expert(const char *experts)
{
    return experts[sizeof(".experts.") - 1] >= '0' && experts[sizeof(".experts.") - 1] <= '9';
}

/* The files may have experts in a form that other programs write: then the message names one. */
static int fail_missing(const struct mt_st_model *st, const char *name, const char *dir, struct mt_err *err)
{
    const char *ours = strstr(name, ".experts.");
    for (size_t i = 0; ours && i < st->n_tensors; i++) {
        const char *theirs = strstr(st->tensors[i].name, ".experts.");
        if (theirs && is_of_one_expert(ours) != is_of_one_expert(theirs))
            return mt_fail(err, MT_ERR_INPUT, -ENOENT,
                           "%s: tensor \"%s\" is missing, but there is \"%s\": experts can only be read in the form of "
                           "the model's release", dir, name, st->tensors[i].name);
    }
    return mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s: tensor \"%s\" is missing", dir, name);
}

static bool is_in_files(const mt_plane_set *planes, const struct mt_tensor *t)
{
    return mt_plane_in_files(planes, t->unit, mt_range_planes(t->kind).hi);
}

/* Is the tensor in the files, packed, or plain in the shape that config.json asks for? */
static int check_stored(const struct loader *v, const struct mt_stored *s, struct mt_err *err)
{
    const struct mt_packed_source *src = &v->sources.of[v->l->pieces[s->first_piece]];
    if (src->format)
        return 0;
    return src->codes ? check_shape(s, src->codes, v->dir, err) : fail_missing(&v->sources.st, s->name, v->dir, err);
}

/* --- verifying the base ------------------------------------------------------------------------------ */

/* Sets the sum to expect of a tensor that is read in place. name: the layout's own pointer, which parts borrow; tensors
 * come in order, *part: where to continue. */
static void expect(mt_file_weights *files, size_t *part, const char *name, uint64_t sum)
{
    size_t n = files ? mt_file_weights_n_tensors(files) : 0;
    while (*part < n && mt_file_weights_tensor(files, *part) != name)
        ++*part;
    if (*part < n)
        mt_file_weights_expect(files, *part, sum);
}

static int check_base(const struct loader *v, const struct mt_tensor *t, uint64_t want, uint64_t have,
                      struct mt_err *err)
{
    const struct mt_st_model *st = &v->sources.st;
    if (have == want)
        return 0;
    return mt_fail(err, MT_ERR_INPUT, -EBADMSG,
                   "%s: tensor \"%s\" does not have the checksum in the checkpoint: it is not the model that the run was "
                   "made on, or it was changed since; set model.path to that model",
                   st->files[v->src->codes->file].path, t->name);
}

static int fail_not_in_base(const struct mt_tensor *t, const char *dir, struct mt_err *err)
{
    return mt_fail(err, MT_ERR_INPUT, -EBADMSG, "%s: the checkpoint takes tensor \"%s\" from the model that it was "
                   "made on, but it is not a frozen tensor of this model: set model.path and model.freeze as they were",
                   dir, t->name);
}

const char *mt_weights_form(const struct mt_tensor *t, const struct mt_st_tensor *src)
{
    return t->in_file && t->packed ? mt_packed_names[t->packed] : src ? mt_st_dtype_name(src->dtype) : NULL;
}

static const char *form_of(const struct mt_packed_source *src)
{
    return src->format ? mt_packed_names[src->format] : mt_st_dtype_name(src->codes->dtype);
}

/* Whether files have the tensor in another format than the checkpoint says: then its sum is no other's. Says so once. */
static bool has_other_form(const char *dir, const cJSON *w, const struct mt_packed_source *src, bool *said)
{
    const cJSON *form = mt_json_get(w, "form");
    bool other = src->codes && cJSON_IsString(form) && strcmp(form->valuestring, form_of(src)) != 0;
    if (other && !*said)
        mt_warn("%s: the adapters were trained on a model in %s, and this one is in %s: whether it is the same one is not checked",
                dir, form->valuestring, form_of(src));
    *said |= other;
    return other;
}

static uint64_t sum_in(const cJSON *w)
{
    const cJSON *text = mt_json_get(w, "xxh3");
    return cJSON_IsString(text) ? strtoull(text->valuestring, NULL, 16) : 0;
}

/* Whether packed files are decoded: then the sum is of other bytes than that of a tensor that stays packed. */
static bool is_decoded(const struct loader *v, const struct mt_tensor *t)
{
    return v->src->format && t->kind != MT_RANGE_PACKED;
}

int mt_weights_verify_base(const struct mt_layout *l, const char *dir, const cJSON *want, size_t *n_same,
                           struct mt_err *err)
{
    MT_CLOSED_BY(finish_loader) struct loader v = {.l = l};
    MT_JSON_INDEX_FREED struct mt_json_index wanted = {.object = want};
    bool said = false;
    size_t n = 0;
    int rc = start_loader(&v, l, NULL, dir, err);
    for (size_t i = 0; i < l->n_tensors && !rc; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        const cJSON *w = mt_json_index_get(&wanted, t->name);
        uint64_t have = 0;
        take_source(&v, t);
        if (w && !v.src->codes)
            rc = fail_missing(&v.sources.st, l->stored[t->place.stored].name, dir, err);
        if (rc || !w || is_decoded(&v, t) || has_other_form(dir, w, v.src, &said))
            continue;
        rc = load_tensor(&v, t, &have, err) ?: check_base(&v, t, sum_in(w), have, err);
        n += !rc;
    }
    if (!rc && n_same)
        *n_same = n;
    return rc;
}

/* Forgets what the page cache has of the files. */
static void drop_cached(const struct mt_st_model *st)
{
    for (int i = 0; i < st->n_files; i++)
        posix_fadvise(st->files[i].fd, 0, 0, POSIX_FADV_DONTNEED);
}

/* The file with the tensor that was read last. */
static const char *path_of(const struct loader *v)
{
    return v->src->codes ? v->sources.st.files[v->src->codes->file].path : v->dir;
}

/* The seal's item of the stored tensor that this one is, in order and whole; NULL: it has none, or cannot be compared. */
static cJSON *sealed_item(const struct loader *v, const struct mt_tensor *t, struct mt_json_index *sealed)
{
    bool whole = sealed->object && !t->adapter && v->src->codes && !v->src->format && mt_stored_is_in_order(t) &&
                 t->n == v->src->codes->n_elems;
    const cJSON *w = whole ? mt_json_index_get(sealed, v->src->codes->name) : NULL;
    return cJSON_IsString(w) ? (cJSON *)w : NULL;
}

/* Loads a tensor; if it has another sum than `want` (0: not known), once more. sealed: that of the model's seal; NULL: it is
 * what this machine knows. */
static int load_twice(struct loader *v, const struct mt_tensor *t, uint64_t want, cJSON *sealed, uint64_t *have,
                      struct mt_err *err)
{
    char record[4096];
    for (int tries = 0; tries < 2; tries++) {
        int rc = load_tensor(v, t, have, err);
        if (rc || (sealed ? mt_summer_plain(&v->summer) == want : !want || *have == want))
            return rc;
        if (tries)
            break;
        mt_warn("%s: tensor \"%s\" was not read as it was %s: it is read again (is the drive failing?)", path_of(v), t->name,
                sealed ? "written" : "before");
        drop_cached(&v->sources.st);
    }
    if (sealed)
        return mt_fail(err, MT_ERR_CHECKPOINT, -EBADMSG,
                       "%s: tensor \"%s\" is damaged: it has another checksum than was written (%s/megatrain holds its "
                       "checksums: remove that folder if the change is intended)", path_of(v), sealed->string, v->dir);
    mt_known_sums_path(record, sizeof(record), &v->sources.st);
    return mt_fail(err, MT_ERR_INPUT, -EBADMSG,
                   "%s: tensor \"%s\" is not what this machine has read before, but the file's size and time are the same: "
                   "a bit has changed on the drive, or the file was replaced; if it is meant to be so, remove %s",
                   path_of(v), t->name, record);
}

/* Loads all tensors, or only those that a checkpoint names. */
static int load_tensors(struct loader *v, const struct mt_base_sums *base, bool named_alone, struct mt_err *err)
{
    const struct mt_layout *l = v->l;
    MT_JSON_INDEX_FREED struct mt_json_index wanted = {.object = base ? base->want : NULL};
    MT_JSON_INDEX_FREED struct mt_json_index sealed = {.object = base ? base->sealed : NULL};
    size_t part = 0;
    bool said = false;
    int rc = 0;
    for (size_t i = 0; i < l->n_tensors && !rc; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        const cJSON *w = t->adapter ? NULL : mt_json_index_get(&wanted, t->name);
        uint64_t want = sum_in(w), have = 0;
        if (named_alone && !w)
            continue;
        take_source(v, t);
        if (w && base->other_forms && (!t->in_base || has_other_form(v->dir, w, v->src, &said)))
            w = NULL;
        if (w && !t->in_base && named_alone)
            return fail_not_in_base(t, v->dir, err);
        if (w && !t->in_base && v->src->format) /* it is decoded, in another order than it was summed in */
            w = NULL;
        if (is_in_files(v->planes, t)) {
            if (w)
                expect(base->files, &part, t->name, want);
            continue;
        }
        uint64_t known = v->known && !is_decoded(v, t) ? v->known[i] : 0;
        cJSON *seal = sealed_item(v, t, &sealed);
        rc = load_twice(v, t, seal ? strtoull(seal->valuestring, NULL, 16) : known, seal, &have, err);
        if (!rc && seal)
            seal->valueint = MT_SEAL_COMPARED;
        if (!rc && w)
            rc = check_base(v, t, want, have, err);
        if (!rc && base && t->in_base)
            base->sum[i] = have;
        if (!rc && base && base->all && !known && !seal)
            base->all[i] = have;
    }
    return rc;
}

int mt_weights_load(const struct mt_layout *l, mt_plane_set *planes, const char *dir, const struct mt_base_sums *base,
                    struct mt_err *err)
{
    MT_CLOSED_BY(finish_loader) struct loader v = {.l = l};
    struct mt_packing_cost cost = {.n = 0};
    char text[2048];
    mt_st_warn_of_two(dir);
    int rc = start_loader(&v, l, planes, dir, err);
    v.cost = &cost;
    for (size_t i = 0; i < l->n_stored && !rc; i++)
        rc = check_stored(&v, &l->stored[i], err);
    rc = rc ?: refuse_unexpected(l, &v.sources.st, dir, err);
    if (!rc && base && base->sealed)
        rc = mt_summer_want_plain(&v.summer, err);
    if (!rc && base && base->all) {
        v.known = mt_calloc(l->n_tensors, sizeof(*v.known));
        rc = v.known ? 0 : mt_fail_nomem(err, "known sums", l->n_tensors * sizeof(*v.known));
    }
    if (v.known)
        mt_known_sums_get(v.known, l, &v.sources.st);
    rc = rc ?: load_tensors(&v, base, false, err);
    if (!rc && cost.n)
        mt_info("relative L2 error of packing: %s", mt_packing_cost_format(&cost, text, sizeof(text)));
    return rc ?: mt_planes_settle(planes, err);
}

/* Are the files those that were loaded? */
static int check_unchanged(const struct mt_st_model *st, int64_t began_ns, struct mt_err *err)
{
    for (int i = 0; i < st->n_files; i++) {
        struct stat now;
        if (fstat(st->files[i].fd, &now))
            return mt_fail(err, MT_ERR_INPUT, -errno, "%s: %s", st->files[i].path, strerror(errno));
        if ((int64_t)now.st_ctim.tv_sec * 1000000000 + now.st_ctim.tv_nsec >= began_ns)
            return mt_fail(err, MT_ERR_INPUT, -ESTALE, "%s was changed since", st->files[i].path);
    }
    return 0;
}

int mt_weights_read_again(const struct mt_layout *l, const char *dir, const uint64_t *sum, int64_t began_ns,
                          const atomic_bool *stop, struct mt_err *err)
{
    MT_CLOSED_BY(finish_loader) struct loader v = {.l = l};
    uint64_t *known = mt_calloc(l->n_tensors, sizeof(*known)); /* without memory for it, nothing is known afterwards */
    int rc = start_loader(&v, l, NULL, dir, err);
    v.stop = stop;
    rc = rc ?: check_unchanged(&v.sources.st, began_ns, err);
    if (!rc)
        drop_cached(&v.sources.st);
    for (size_t i = 0; i < l->n_tensors && !rc; i++) {
        uint64_t have = 0;
        for (int tries = 0; sum[i] && tries < 2 && !rc && have != sum[i]; tries++)
            rc = load_tensor(&v, &l->tensors[i], &have, err);
        if (!rc && have != sum[i])
            rc = mt_fail(err, MT_ERR_INPUT, -EBADMSG,
                         "%s: tensor \"%s\" was not read as the file has it when the run began: a bit changed on its way, or "
                         "the drive is failing; nothing that was trained on it is saved: start the run again",
                         path_of(&v), l->tensors[i].name);
        if (known && sum[i] && !is_decoded(&v, &l->tensors[i]))
            known[i] = sum[i];
    }
    if (known && !rc && !check_unchanged(&v.sources.st, began_ns, NULL))
        mt_known_sums_keep(known, l, &v.sources.st);
    free(known);
    return rc;
}

int mt_weights_reload(const struct mt_layout *l, mt_plane_set *planes, const char *dir, size_t unit,
                      enum mt_plane_kind k, const struct mt_base_sums *base, struct mt_err *err)
{
    MT_CLOSED_BY(finish_loader) struct loader v = {.l = l};
    int rc = start_loader(&v, l, planes, dir, err);
    for (size_t i = 0; i < l->n_tensors && !rc; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        struct mt_range_planes has = mt_range_planes(t->kind);
        uint64_t sum = 0;
        if (t->unit != unit || t->trainable || t->adapter || (has.hi != k && has.lo != k))
            continue;
        rc = load_tensor(&v, t, &sum, err);
        if (!rc && t->in_base && sum != base->sum[i])
            rc = mt_fail(err, MT_ERR_RUNTIME, -EBADMSG, "%s: tensor \"%s\" is not what was read when the run began", dir,
                         t->name);
    }
    return rc ?: mt_planes_settle(planes, err);
}

int mt_weights_load_base(const struct mt_layout *l, mt_plane_set *planes, const char *dir,
                         const struct mt_base_sums *base, struct mt_err *err)
{
    if (!base->want || !base->want->child)
        return 0;
    MT_CLOSED_BY(finish_loader) struct loader v = {.l = l};
    int rc = start_loader(&v, l, planes, dir, err) ?: load_tensors(&v, base, true, err);
    return rc ?: mt_planes_settle(planes, err);
}

int mt_weights_load_packed(const struct mt_layout *l, mt_plane_set *planes, const char *dir, struct mt_err *err)
{
    MT_CLOSED_BY(mt_sources_close) struct mt_sources s = {.of = NULL};
    int rc = 0;
    for (size_t i = 0; i < l->n_tensors && !rc; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        if (t->kind != MT_RANGE_PACKED || t->in_base)
            continue;
        rc = s.of ? 0 : mt_sources_open(&s, l, dir, err);
        if (!rc)
            rc = s.of[i].format ? mt_packed_copy(&s.st, &s.of[i], t, planes, NULL, err)
                                : mt_fail(err, MT_ERR_CHECKPOINT, -EBADMSG, "%s: tensor \"%s\" is missing or not packed",
                                          dir, t->name);
    }
    return rc ?: mt_planes_settle(planes, err);
}

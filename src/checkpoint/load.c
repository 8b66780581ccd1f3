/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/dtype.h"
#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"
#include "checkpoint/save_priv.h"
#include "checkpoint/seal.h"
#include "hf/safetensors.h"
#include "model/ranges.h"
#include "model/stored.h"
#include "weights/weights.h"

/* --- the newest ----------------------------------------------------------------------------------- */

struct candidate {
    char path[4096];
    struct mt_checkpoint_id id;
    bool known;    /* id has been read */
    bool given_up; /* another one's run resumed from an earlier step */
};

static int no_good(const char *dir, bool weights, struct mt_err *err)
{
    return mt_fail(err, MT_ERR_CHECKPOINT, -EBADMSG,
                   "%s has checkpoints, but none can be resumed (%s): name another folder with --resume=DIR, or start "
                   "over with --force alone, which sets them aside",
                   dir, weights ? "there are only weights, which can be used as model.path" : "see the warnings above");
}

/* Newest first; those that were given up last. */
static int compare_candidates(const void *a, const void *b)
{
    const struct candidate *x = *(struct candidate *const *)a, *y = *(struct candidate *const *)b;
    if (x->given_up != y->given_up)
        return x->given_up ? 1 : -1;
    return (x->id.step < y->id.step) - (x->id.step > y->id.step);
}

static int identify(struct candidate *c, const char *dir, uint64_t step, bool pass, bool *weights, struct mt_err *err)
{
    struct mt_err why = {0};
    mt_path_printf(c->path, sizeof(c->path), "%s/checkpoint-%llu", dir, (unsigned long long)step);
    int rc = mt_checkpoint_identify(c->path, &c->id, &why);
    if (!rc && c->id.step != step) {
        mt_warn("passing over %s: it is a checkpoint of step %llu", c->path, (unsigned long long)c->id.step);
    } else if (!rc && !c->id.full) {
        *weights = true;
    } else if (!rc) {
        c->known = true;
    } else if (pass || mt_checkpoint_is_damage(rc)) {
        mt_warn("passing over %s: %s", c->path, why.msg);
        rc = 0;
    } else if (err) {
        *err = why;
    }
    c->id.step = step;
    return rc;
}

struct search {
    bool pass;  /* passes over what cannot be read */
    bool bytes; /* verifies every byte */
};

static int look_at(const struct candidate *c, const struct search *s, struct mt_err *err)
{
    if (!c->known)
        return -EBADMSG;
    return s->bytes ? mt_checkpoint_verify(c->path, err) : mt_checkpoint_check_whole(c->path, err);
}

/* *path: the first good one. */
static int first_good(struct candidate **list, size_t n, const struct search *s, char **path, struct mt_err *err)
{
    for (size_t i = 0; i < n; i++) {
        struct mt_err why = {0};
        int rc = look_at(list[i], s, &why);
        if (!rc) {
            *path = strdup(list[i]->path);
            return *path ? 0 : mt_fail_nomem(err, list[i]->path, strlen(list[i]->path));
        }
        if (!s->pass && !mt_checkpoint_is_damage(rc))
            return mt_fail(err, MT_ERR_CHECKPOINT, rc,
                           "%s cannot be read (%s), but may not be damaged: try again, name another with "
                           "--resume=DIR, or pass over it with --force",
                           list[i]->path, why.msg);
        if (list[i]->known)
            mt_warn("passing over %s: %s", list[i]->path, why.msg);
    }
    return 0;
}

/* The newest step of checkpoints with training state that a run with --force set aside; false: there are none. */
static bool find_set_aside(const char *dir, char newest[4096])
{
    MT_DIR_CLOSED DIR *d = opendir(dir);
    uint64_t most = 0;
    bool any = false;
    for (struct dirent *e; d && (e = readdir(d));) {
        const char *dot = strstr(e->d_name, ".abandoned-");
        struct mt_checkpoint_id id;
        uint64_t step;
        const char *path = MT_PATH("%s/%s", dir, e->d_name);
        if (!dot || !mt_checkpoint_parse_name(e->d_name, dot, &step) || (any && step <= most) ||
            mt_checkpoint_identify(path, &id, NULL))
            continue;
        if (id.full && strlen(path) < 4096) {
            any = true;
            most = step;
            memcpy(newest, path, strlen(path) + 1);
        }
        mt_checkpoint_id_finish(&id);
    }
    return any;
}

/* A run with --force ended before its first save: what it set aside is not forgotten in silence. */
static int fail_set_aside(const char *dir, struct mt_err *err)
{
    char path[4096];
    if (!find_set_aside(dir, path))
        return 0;
    return mt_fail(err, MT_ERR_CHECKPOINT, -ENOENT,
                   "%s has no checkpoint, but those of an earlier run, which one with --force set aside before it was ended "
                   "without a save: go on from them with --resume=%s, or start over with --force", dir, path);
}

static int find_newest(const char *dir, const struct search *s, char **path, struct mt_err *err)
{
    MT_FREED uint64_t *steps = NULL;
    size_t n;
    bool weights = false;
    *path = NULL;
    int rc = mt_checkpoint_list(dir, &steps, &n, err);
    if (rc || !n)
        return rc || s->pass ? rc : fail_set_aside(dir, err);
    MT_FREED struct candidate *c = mt_calloc(n, sizeof(*c)), **order = mt_calloc(n, sizeof(*order));
    rc = c && order ? 0 : mt_fail_nomem(err, dir, n * sizeof(*c));
    for (size_t i = 0; i < n && !rc; i++) {
        order[i] = &c[i];
        rc = identify(&c[i], dir, steps[i], s->pass, &weights, err);
    }
    for (size_t i = 0; i < n && !rc; i++)
        for (size_t k = 0; k < n && c[i].known; k++)
            c[i].given_up |= c[k].known && mt_lineage_gave_up(&c[k].id.lineage, c[i].id.lineage.run, c[i].id.step);
    if (!rc) {
        qsort(order, n, sizeof(*order), compare_candidates);
        rc = first_good(order, n, s, path, err);
    }
    if (!rc && !*path)
        rc = no_good(dir, weights, err);
    for (size_t i = 0; i < n && c; i++)
        mt_checkpoint_id_finish(&c[i].id);
    return rc;
}

int mt_checkpoint_find_newest(const char *dir, bool pass, char **path, struct mt_err *err)
{
    return find_newest(dir, &(struct search){.pass = pass, .bytes = true}, path, err);
}

char *mt_checkpoint_find_whole(const char *dir)
{
    char *path;
    find_newest(dir, &(struct search){.pass = true}, &path, NULL);
    return path;
}

/* The log-probabilities under the reference, where the checkpoint has them. */
static int read_reference(const char *dir, const cJSON *state, struct mt_train_state *st,
                          struct mt_err *err)
{
    const char *path = MT_PATH("%s/megatrain/" MT_REFERENCE_NAME, dir);
    MT_FREED char *text = NULL;
    size_t len = 0;
    int rc = mt_path_exists(path) ? mt_read_file(path, &text, &len, err) : 0;
    if (!rc && len) {
        st->n_reference = len / sizeof(double);
        st->reference = mt_calloc(st->n_reference, sizeof(double));
        if (st->reference)
            memcpy(st->reference, text, st->n_reference * sizeof(double));
        else
            rc = mt_fail_nomem(err, path, len);
    }
    const cJSON *named = mt_json_get(mt_json_get(state, "reference"), "xxh3");
    if (!rc && cJSON_IsString(named) &&
        strtoull(named->valuestring, NULL, 16) != mt_train_state_reference_hash(st))
        rc = mt_fail(err, MT_ERR_CHECKPOINT, -EBADMSG,
                     "%s is not the one that the checkpoint was saved with", path);
    return rc;
}

int mt_checkpoint_read_state(const char *dir, struct mt_train_state *out, struct mt_err *err)
{
    MT_SEALED_FREED struct mt_sealed state = {.json = NULL};
    int rc = mt_seal_read(dir, &state, err);
    if (!rc && !state.full)
        rc = mt_fail(err, MT_ERR_CHECKPOINT, -ENOENT,
                     "%s holds only weights, no training state: it cannot be resumed, but can be used as model.path", dir);
    rc = rc ?: mt_train_state_from_json(out, state.json, dir, err)
            ?: read_reference(dir, state.json, out, err);
    if (!rc)
        memcpy(out->sum, state.sum, sizeof(state.sum));
    return rc;
}

/* Reads state files. */
struct reader {
    struct mt_st_model st; /* of the block; units of one share it, and may be hundreds */
    int block;             /* -1: none yet */
    struct mt_json_index sums; /* checksums of its tensors when they were written */
    XXH3_state_t *hash;
    float *buf; /* [piece] */
    size_t piece;
    mt_plane_set *planes;
    int share;          /* mt_layout.share of the run that saved it */
    struct mt_json_index named; /* tensors that the checkpoint names instead of holding them */
};

static int load_piece(const struct reader *r, const struct mt_st_tensor *src, const struct mt_state_part *p, size_t at,
                      size_t n, struct mt_err *err)
{
    size_t size = mt_st_dtype_size(src->dtype);
    int rc = mt_st_read_raw(&r->st, src, at * size, n * size, r->buf, err);
    if (rc)
        return rc;
    XXH3_64bits_update(r->hash, r->buf, n * size);
    return p->kind == MT_PLANE_HI
               ? mt_tensor_write_masters(r->planes, p->t, at, n, r->buf, err)
               : mt_planes_write_bytes(r->planes, p->t->unit, p->kind, p->at + at * size, n * size, r->buf, err);
}

static int check_sum(struct reader *r, const char *name, struct mt_err *err)
{
    const cJSON *want = mt_json_index_get(&r->sums, name);
    char have[MT_SUM_TEXT];
    mt_sum_format(have, XXH3_64bits_digest(r->hash));
    if (cJSON_IsString(want) && !strcmp(want->valuestring, have))
        return 0;
    return mt_fail(err, MT_ERR_CHECKPOINT, -EBADMSG, "%s: the checksum of tensor \"%s\" is wrong: it is not what was "
                   "written", r->st.files[0].path, name);
}

static int load_part(struct reader *r, const struct mt_state_part *p, struct mt_err *err)
{
    const struct mt_st_tensor *src = mt_st_find(&r->st, p->name);
    if (!src || src->dtype != p->decl.dtype || src->n_bytes != p->bytes)
        return mt_fail(err, MT_ERR_CHECKPOINT, -EBADMSG, "%s: tensor \"%s\" is missing or has "
                       "another shape or dtype than the model and its optimizer", r->st.files[0].path, p->name);
    int rc = 0;
    XXH3_64bits_reset(r->hash);
    for (size_t at = 0; at < src->n_elems && !rc; at += r->piece)
        rc = load_piece(r, src, p, at, MT_MIN(r->piece, src->n_elems - at), err);
    return rc ?: check_sum(r, p->name, err);
}

static int load_tensor(struct reader *r, const struct mt_layout *l, const struct mt_tensor *t, struct mt_err *err)
{
    struct mt_state_part p;
    const struct mt_tensor from = mt_stored_as_shared(l, t, r->share);
    int rc = 0;
    for (int k = 0; k < MT_N_PLANES && !rc; k++)
        if (mt_state_part(&p, r->planes, &from, (enum mt_plane_kind)k))
            rc = load_part(r, &p, err);
    return rc;
}

/* Does the training state have its master and states? Not if it is only named, or packed. */
static bool is_in_state(struct reader *r, const struct mt_layout *l, const struct mt_tensor *t)
{
    return mt_checkpoint_holds(l, t) && t->kind != MT_RANGE_PACKED &&
           (t->adapter || !mt_json_index_get(&r->named, t->name));
}

static int open_block(struct reader *r, const char *dir, const cJSON *files, int block, struct mt_err *err)
{
    char path[4096], name[64];
    if (block == r->block)
        return 0;
    r->block = -1;
    mt_st_close(&r->st);
    mt_json_index_finish(&r->sums);
    snprintf(name, sizeof(name), "megatrain/state-%05d.safetensors", block);
    mt_path_printf(path, sizeof(path), "%s/%s", dir, name);
    r->sums.object = mt_json_get(mt_json_get(files, name), "tensors");
    if (!r->sums.object)
        return mt_checkpoint_damaged(err, path, "the checkpoint's list of files has no checksums for it");
    int rc = mt_st_open_file(&r->st, path, err);
    if (rc && err && rc != -ENOMEM)
        err->kind = MT_ERR_CHECKPOINT;
    r->block = rc ? -1 : block;
    return rc;
}

/* Loads a unit's tensors from the file of its block. */
static int load_unit(struct reader *r, const char *dir, const cJSON *files, const struct mt_layout *l,
                     const struct mt_unit *u, struct mt_err *err)
{
    int block = mt_block_of(u->kind, u->layer, l->cfg.n_layers, r->share), rc = 0;
    for (size_t i = 0; i < u->n_tensors && !rc; i++) {
        const struct mt_tensor *t = &l->tensors[u->first_tensor + i];
        if (is_in_state(r, l, t))
            rc = open_block(r, dir, files, block, err) ?: load_tensor(r, l, t, err);
    }
    return rc;
}

int mt_checkpoint_load(const char *dir, const struct mt_layout *l, mt_plane_set *planes,
                       struct mt_err *err)
{
    enum { PIECE = 1 << 20 };
    struct reader r = {.hash = XXH3_createState(), .buf = mt_calloc(PIECE, sizeof(float)), .piece = PIECE,
                       .planes = planes, .block = -1};
    MT_SEALED_FREED struct mt_sealed sealed = {.json = NULL};
    int rc = r.buf && r.hash ? mt_seal_read(dir, &sealed, err)
                             : mt_fail_nomem(err, "loading a checkpoint", PIECE * sizeof(float));
    r.share = rc ? 1 : mt_sealed_share(&sealed);
    if (!rc && l->share != 1 && l->share != r.share)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s has a set of weights for each group of %d layers, which cannot become groups of "
                     "%d: set model.share_layers to %d%s", dir, r.share, l->share, r.share, r.share > 1 ? ", or to 1" : "");
    r.named.object = rc ? NULL : mt_json_get(mt_json_get(sealed.json, "frozen"), "tensors");
    for (size_t u = 0; u < l->n_units && !rc; u++)
        rc = load_unit(&r, dir, mt_json_get(sealed.json, "files"), l, &l->units[u], err);
    mt_st_close(&r.st);
    mt_json_index_finish(&r.sums);
    mt_json_index_finish(&r.named);
    XXH3_freeState(r.hash);
    free(r.buf);
    if (!rc && !l->n_adapters) /* packed tensors are in the checkpoint's weights, which were verified as whole files */
        rc = mt_weights_load_packed(l, planes, dir, err);
    return rc ?: mt_planes_settle(planes, err);
}

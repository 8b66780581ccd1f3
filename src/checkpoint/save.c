/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/hf_dir.h"
#include "checkpoint/manifest.h"
#include "hw/hw.h"
#include "model/ranges.h"

struct saver {
    const struct mt_checkpoint_save *s;
    const struct mt_vfs *vfs;
    char tmp[4096];
    const char *prefix; /* of the names in the file list */
    const struct mt_st_decl *decls; /* of what is being written */
    cJSON *files, *tensors; /* tensors: of the file under way, NULL before its first */
    char sum[MT_SUM_TEXT]; /* of the sealed file */
};

/* What is saved of a tensor besides its bf16 weights: the master, and the kinds of planes that are states. */
enum { N_PARTS = MT_N_PLANES, MASTER = MT_PLANE_HI };

static bool has_part(const struct mt_plane_desc *d, int part, const struct mt_tensor *t)
{
    return part == MASTER || (d->saved_as && t->trainable);
}

uint64_t mt_checkpoint_bytes(const struct mt_layout *l, const struct mt_plane_desc desc[MT_N_PLANES], bool full)
{
    uint64_t n = 1 << 20;
    for (size_t i = 0; i < l->n_tensors; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        n += mt_plane_desc_bytes(&desc[MT_PLANE_HI], t->n);
        for (int k = 0; full && k < N_PARTS; k++)
            if (has_part(&desc[k], k, t))
                n += k == MASTER ? t->n * sizeof(float) : mt_plane_desc_bytes(&desc[k], t->n);
    }
    return n;
}

static int tensor_done(void *ctx, size_t index, unsigned long long sum, struct mt_err *err)
{
    struct saver *v = ctx;
    char text[MT_SUM_TEXT];
    (void)err;
    if (!v->tensors)
        v->tensors = cJSON_CreateObject();
    mt_sum_format(text, sum);
    cJSON_AddStringToObject(v->tensors, v->decls[index].name, text);
    return 0;
}

static int file_done(void *ctx, const char *name, const struct mt_out_file *f, struct mt_err *err)
{
    struct saver *v = ctx;
    char path[512], sum[MT_SUM_TEXT];
    cJSON *o = cJSON_CreateObject();
    snprintf(path, sizeof(path), "%s%s", v->prefix, name);
    mt_sum_format(sum, f->sum);
    cJSON_AddNumberToObject(o, "size", (double)f->bytes);
    cJSON_AddStringToObject(o, "xxh3", sum);
    if (v->tensors)
        cJSON_AddItemToObject(o, "tensors", v->tensors);
    v->tensors = NULL;
    cJSON_AddItemToObject(v->files, path, o);
    (void)err;
    return 0;
}

/* Of reading the planes: nothing that is tried again would mend it. */
static int noted(const struct saver *v, int rc)
{
    if (rc && v->s->lost)
        *v->s->lost = true;
    return rc;
}

static int hi_source(void *ctx, size_t i, size_t first, size_t n, void *dst, struct mt_err *err)
{
    const struct saver *v = ctx;
    const struct mt_tensor *t = &v->s->layout->tensors[i];
    return noted(v, mt_planes_read(v->s->planes, t->unit, mt_range_planes(t->kind).hi, t->at + first, n, dst, err));
}

static int write_weights(struct saver *v, struct mt_err *err)
{
    const struct mt_layout *l = v->s->layout;
    struct mt_st_decl *decls = mt_calloc(l->n_tensors, sizeof(*decls));
    if (!decls)
        return mt_fail_nomem(err, "a checkpoint", l->n_tensors * sizeof(*decls));
    for (size_t i = 0; i < l->n_tensors; i++)
        decls[i] = (struct mt_st_decl){.name = l->tensors[i].name, .dtype = MT_ST_BF16,
                                       .n_dims = l->tensors[i].n_dims,
                                       .shape = {l->tensors[i].shape[0], l->tensors[i].shape[1]}};
    v->prefix = "";
    v->decls = decls;
    int rc = mt_hf_dir_write(&(struct mt_hf_dir){.vfs = v->vfs, .dir = v->tmp,
                                                 .model_dir = v->s->model_dir,
                                                 .files = v->s->files, .decls = decls,
                                                 .n_decls = l->n_tensors, .torch_dtype = "bfloat16",
                                                 .shard_bytes = v->s->shard_bytes,
                                                 .source = hi_source,
                                                 .tensor_done = tensor_done, .done = file_done,
                                                 .ctx = v},
                             err);
    free(decls);
    return rc;
}

/* Index of a state tensor: tensor * N_PARTS + part. */
static int state_source(void *ctx, size_t index, size_t first, size_t n, void *dst,
                        struct mt_err *err)
{
    const struct saver *v = ctx;
    const struct mt_tensor *t = &v->s->layout->tensors[index / N_PARTS];
    int part = (int)(index % N_PARTS);
    enum mt_plane_kind kind = (enum mt_plane_kind)part;
    return noted(v, part == MASTER ? mt_tensor_read_masters(v->s->planes, t, first, n, dst, err)
                                   : mt_planes_read(v->s->planes, t->unit, kind, t->at + first, n, dst, err));
}

/* The units from *unit on that are of one block: a file, however layers are cut. */
static int write_block_state(struct saver *v, const struct mt_hf_dir *h, size_t *unit, struct mt_err *err)
{
    const struct mt_layout *l = v->s->layout;
    size_t first = l->units[*unit].first_tensor, end = first, n = 0;
    int block = l->units[*unit].block;
    char name[64];
    for (; *unit < l->n_units && l->units[*unit].block == block; ++*unit)
        end += l->units[*unit].n_tensors;
    size_t *which = mt_calloc((end - first) * N_PARTS, sizeof(size_t));
    if (!which)
        return mt_fail_nomem(err, "a checkpoint", (end - first) * N_PARTS * sizeof(size_t));
    for (size_t t = first; t < end; t++)
        for (int p = 0; p < N_PARTS; p++)
            if (has_part(mt_plane_desc_of(v->s->planes, (enum mt_plane_kind)p), p, &l->tensors[t]))
                which[n++] = t * N_PARTS + (size_t)p;
    snprintf(name, sizeof(name), "state-%05d.safetensors", block);
    int rc = mt_hf_write_file(h, name, which, n, err);
    free(which);
    return rc;
}

static int write_state(struct saver *v, struct mt_err *err)
{
    const struct mt_layout *l = v->s->layout;
    size_t n = l->n_tensors * N_PARTS;
    char dir[4200];
    struct mt_st_decl *decls = mt_calloc(n, sizeof(*decls));
    char(*names)[160] = mt_calloc(n, sizeof(*names));
    int rc = decls && names ? 0 : mt_fail_nomem(err, "a checkpoint", n * sizeof(*decls));
    snprintf(dir, sizeof(dir), "%s/megatrain", v->tmp);
    for (size_t i = 0; i < n && !rc; i++) {
        const struct mt_tensor *t = &l->tensors[i / N_PARTS];
        int part = (int)(i % N_PARTS);
        const struct mt_plane_desc *d = mt_plane_desc_of(v->s->planes, (enum mt_plane_kind)part);
        bool f32 = part == MASTER || d->dtype == MT_F32;
        snprintf(names[i], sizeof(names[i]), "%s.%s", t->name, part == MASTER ? "master" : d->saved_as ? d->saved_as : "");
        decls[i] = (struct mt_st_decl){.name = names[i], .dtype = f32 ? MT_ST_F32 : MT_ST_BF16, .n_dims = t->n_dims,
                                       .shape = {t->shape[0], t->shape[1]}};
    }
    struct mt_hf_dir h = {.vfs = v->vfs, .dir = dir, .decls = decls, .n_decls = n,
                          .source = state_source, .tensor_done = tensor_done, .done = file_done,
                          .ctx = v};
    v->prefix = "megatrain/";
    v->decls = decls;
    for (size_t u = 0; u < l->n_units && !rc;)
        rc = write_block_state(v, &h, &u, err);
    free(decls);
    free(names);
    return rc;
}

static int write_text(struct saver *v, const char *name, const char *text, struct mt_out_file *f,
                      struct mt_err *err)
{
    char path[4200];
    *f = (struct mt_out_file){.fd = -1};
    snprintf(path, sizeof(path), "%s/%s", v->tmp, name);
    int rc = mt_out_open(f, v->vfs, path, err);
    if (!rc)
        rc = mt_out_write(f, text, strlen(text), err);
    if (!rc)
        rc = mt_out_commit(f, err);
    mt_out_abort(f);
    return rc;
}

/* `json` is consumed. */
static int write_json(struct saver *v, const char *name, cJSON *json, struct mt_out_file *f,
                      struct mt_err *err)
{
    char *text = mt_json_print(json, true);
    int rc = text && mt_json_complete() ? write_text(v, name, text, f, err) : mt_fail_nomem(err, name, 0);
    cJSON_Delete(json);
    free(text);
    return rc;
}

/* What is known of a checkpoint without training state. */
static cJSON *manifest_json(const struct mt_train_state *s)
{
    cJSON *o = cJSON_CreateObject();
    char step[32];
    snprintf(step, sizeof(step), "%llu", (unsigned long long)s->step);
    cJSON_AddNumberToObject(o, "version", 1);
    cJSON_AddStringToObject(o, "step", step);
    mt_lineage_to_json(&s->lineage, o);
    return o;
}

/* The list of files, and the seal over it. */
static int write_seal(struct saver *v, struct mt_err *err)
{
    const char *name = v->s->full ? MT_STATE_NAME : MT_MANIFEST_NAME;
    cJSON *o = v->s->full ? mt_train_state_to_json(v->s->state) : manifest_json(v->s->state);
    char path[64];
    struct mt_out_file f;
    cJSON_AddItemToObject(o, "files", cJSON_Duplicate(v->files, 1));
    snprintf(path, sizeof(path), "megatrain/%s", name);
    int rc = write_json(v, path, o, &f, err);
    if (rc)
        return rc;
    mt_sum_format(v->sum, f.sum);
    char *text = mt_seal_text(name, f.sum);
    rc = text ? write_text(v, "megatrain/seal.json", text, &f, err)
              : mt_fail_nomem(err, "a checkpoint's seal", 64);
    free(text);
    return rc;
}

static int sync_dir(const struct saver *v, const char *dir, struct mt_err *err)
{
    int rc = v->vfs->sync_dir(v->vfs->ctx, dir);
    return rc ? mt_fail(err, MT_ERR_RUNTIME, rc, "cannot sync %s: %s", dir, strerror(-rc)) : 0;
}

static int write_all(struct saver *v, struct mt_err *err)
{
    char dir[4200];
    int rc = write_weights(v, err);
    struct mt_out_file f;
    v->prefix = "";
    if (!rc)
        rc = write_json(v, "trainer_state.json", mt_trainer_state_json(v->s->state), &f, err);
    if (!rc)
        rc = file_done(v, "trainer_state.json", &f, err);
    snprintf(dir, sizeof(dir), "%s/megatrain", v->tmp);
    if (rc)
        return rc;
    rc = v->vfs->make_dir(v->vfs->ctx, dir);
    if (rc)
        return mt_fail(err, MT_ERR_RUNTIME, rc, "cannot create %s: %s", dir, strerror(-rc));
    if (v->s->full)
        rc = write_state(v, err);
    if (!rc)
        rc = write_seal(v, err);
    if (!rc)
        rc = sync_dir(v, dir, err);
    if (!rc)
        rc = sync_dir(v, v->tmp, err);
    return rc;
}

static int check_space(const struct mt_checkpoint_save *s, struct mt_err *err)
{
    uint64_t need = mt_checkpoint_bytes(s->layout, mt_plane_desc_of(s->planes, MT_PLANE_HI), s->full), have;
    char a[32], b[32];
    int rc = mt_hw_disk_free(s->dir, &have, err);
    if (!rc && need > have)
        rc = mt_fail(err, MT_ERR_NO_FIT, -ENOSPC,
                     "a checkpoint takes %s, %s has %s free: make room, or set checkpoint.save = weights",
                     mt_format_bytes(a, sizeof(a), need), s->dir, mt_format_bytes(b, sizeof(b), have));
    return rc;
}

/* The .tmp gets its name; what has it is set aside. */
static int put_in_place(struct saver *v, const char *final, struct mt_err *err)
{
    const struct mt_checkpoint_save *s = v->s;
    char aside[4096] = "";
    int rc = 0;
    bool weaker = s->history && mt_history_holds(s->history, s->dir, s->state->step, false); /* own weights alone */
    if (mt_path_exists(final))
        rc = mt_history_set_aside(s->history, v->vfs, s->dir, s->state->step, aside, err);
    if (rc)
        return rc;
    rc = v->vfs->rename(v->vfs->ctx, v->tmp, final);
    if (rc) {
        mt_fail(err, MT_ERR_RUNTIME, rc, "cannot rename %s to %s: %s", v->tmp, final, strerror(-rc));
        if (aside[0])
            v->vfs->rename(v->vfs->ctx, aside, final);
        return rc;
    }
    if (weaker)
        v->vfs->remove_tree(v->vfs->ctx, aside);
    else if (aside[0])
        mt_warn("%s was there and is not of this run: it is now %s", final, aside);
    return 0;
}

/* Whatever fails from here on, the checkpoint is there. */
static int make_known(struct saver *v, const char *name, struct mt_err *err)
{
    const struct mt_checkpoint_save *s = v->s;
    char latest[4096];
    struct mt_err why;
    if (s->history) {
        s->history->has = true;
        s->history->full = s->full;
        s->history->step = s->state->step;
        memcpy(s->history->sum, v->sum, sizeof(v->sum));
    }
    snprintf(latest, sizeof(latest), "%.4080s/latest", s->dir);
    int rc = v->vfs->link(v->vfs->ctx, name, latest); /* a convenience: not needed to resume */
    if (rc)
        mt_warn("%s does not lead to %s: %s", latest, name, strerror(-rc));
    rc = sync_dir(v, s->dir, err);
    if (!rc && s->history && mt_history_settle(s->history, v->vfs, s->dir, &why))
        mt_warn("checkpoints of another history stay: %s", why.msg);
    return rc;
}

int mt_checkpoint_save(const struct mt_checkpoint_save *s, struct mt_err *err)
{
    struct saver v = {.s = s, .vfs = s->vfs ? s->vfs : &mt_vfs_posix};
    char final[4096], name[64];
    void *ctx = v.vfs->ctx;
    snprintf(name, sizeof(name), "checkpoint-%llu", (unsigned long long)s->state->step);
    if (snprintf(final, sizeof(final), "%s/%s", s->dir, name) >= 4000)
        return mt_fail(err, MT_ERR_RUNTIME, -ENAMETOOLONG, "path too long: %s", s->dir);
    snprintf(v.tmp, sizeof(v.tmp), "%.4080s.tmp", final);
    if (s->history && mt_history_holds(s->history, s->dir, s->state->step, s->full))
        return sync_dir(&v, s->dir, err); /* it may have failed when it was written */
    int rc = check_space(s, err);
    if (rc)
        return rc;
    v.vfs->remove_tree(ctx, v.tmp);
    mt_json_begin();
    v.files = cJSON_CreateObject();
    rc = v.vfs->make_dir(ctx, v.tmp);
    if (rc)
        mt_fail(err, MT_ERR_RUNTIME, rc, "cannot create %s: %s", v.tmp, strerror(-rc));
    if (!rc)
        rc = write_all(&v, err);
    if (!rc)
        rc = put_in_place(&v, final, err);
    cJSON_Delete(v.files);
    cJSON_Delete(v.tensors);
    if (rc) {
        v.vfs->remove_tree(ctx, v.tmp);
        return rc;
    }
    return make_known(&v, name, err);
}

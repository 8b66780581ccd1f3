/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"
#include "checkpoint/save_priv.h"
#include "checkpoint/seal.h"
#include "hw/hw.h"
#include "model/stored.h"
#include "weights/weights.h"

static const char PROGRESS[] = "trainer_state.json";

static int write_text(struct mt_saver *v, const char *name, const char *text, struct mt_out_file *f,
                      struct mt_err *err)
{
    return mt_out_put(f, v->vfs, MT_PATH("%s/%s", v->tmp, name), text, strlen(text), err);
}

/* `json` is consumed. */
static int write_json(struct mt_saver *v, const char *name, cJSON *json, struct mt_out_file *f,
                      struct mt_err *err)
{
    MT_FREED char *text = mt_json_print(json, true);
    cJSON_Delete(json);
    return text && mt_json_complete() ? write_text(v, name, text, f, err) : mt_fail_nomem(err, name, 0);
}

/* The log-probabilities under the reference: doubles, little-endian. */
static int write_reference(struct mt_saver *v, struct mt_err *err)
{
    const struct mt_train_state *st = v->s->state;
    struct mt_out_file f;
    if (!st->n_reference)
        return 0;
    int rc = mt_out_put(&f, v->vfs, MT_PATH("%s/megatrain/" MT_REFERENCE_NAME, v->tmp), st->reference,
                        st->n_reference * sizeof(*st->reference), err);
    if (!rc)
        mt_manifest_add_file(v->files, "megatrain/" MT_REFERENCE_NAME, &f, NULL);
    return rc;
}

/* The identity of a checkpoint without training state. */
static cJSON *manifest_json(const struct mt_train_state *s)
{
    cJSON *o = cJSON_CreateObject();
    char step[32];
    snprintf(step, sizeof(step), "%llu", (unsigned long long)s->step);
    mt_json_put(o, "version=%f, step=%s", 1.0, step);
    mt_lineage_to_json(&s->lineage, o);
    return o;
}

/* Describes the tensors that the checkpoint only names: their files and sums. */
static void add_named(const struct mt_saver *v, cJSON *o)
{
    const struct mt_layout *l = v->s->layout;
    const struct mt_st_model *base = v->s->base; /* NULL: only the folder is named */
    cJSON *frozen = NULL, *tensors = NULL;
    char sum[MT_SUM_TEXT];
    if (!v->s->full || !v->s->named)
        return;
    for (size_t i = 0; i < l->n_tensors; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        if (!mt_save_names_only(v->s, t))
            continue;
        if (!frozen) {
            frozen = cJSON_AddObjectToObject(o, "frozen");
            cJSON_AddStringToObject(frozen, "model", v->base_dir);
            tensors = cJSON_AddObjectToObject(frozen, "tensors");
        }
        const char *stored = l->stored[t->place.stored].name;
        const struct mt_st_tensor *src = base ? mt_stored_find(base, stored) : NULL;
        cJSON *one = cJSON_AddObjectToObject(tensors, t->name);
        if (strcmp(stored, t->name) != 0)
            cJSON_AddStringToObject(one, "stored", stored);
        mt_sum_format(sum, v->s->named[i]);
        if (src)
            cJSON_AddStringToObject(one, "file", base->files[src->file].name);
        cJSON_AddStringToObject(one, "xxh3", sum);
        if (mt_weights_form(t, src))
            cJSON_AddStringToObject(one, "form", mt_weights_form(t, src));
    }
}

/* Writes the list of files, and its seal. */
static int write_seal(struct mt_saver *v, struct mt_err *err)
{
    const char *name = v->s->full ? MT_STATE_NAME : MT_MANIFEST_NAME;
    cJSON *o = v->s->full ? mt_train_state_to_json(v->s->state) : manifest_json(v->s->state);
    struct mt_out_file f;
    add_named(v, o);
    if (v->frozen)
        mt_json_add(o, "frozen", cJSON_Duplicate(v->frozen, 1));
    mt_json_add(o, "files", cJSON_Duplicate(v->files, 1));
    int rc = write_json(v, MT_PATH("megatrain/%s", name), o, &f, err);
    if (rc)
        return rc;
    mt_sum_format(v->sum, f.sum);
    MT_FREED char *text = mt_seal_text(name, f.sum);
    return text ? write_text(v, "megatrain/seal.json", text, &f, err)
                : mt_fail_nomem(err, "a checkpoint's seal", 64);
}

static int sync_dir(const struct mt_saver *v, const char *dir, struct mt_err *err)
{
    int rc = v->vfs->sync_dir(v->vfs->ctx, dir);
    return rc ? mt_fail(err, MT_ERR_RUNTIME, rc, "cannot sync %s: %s", dir, strerror(-rc)) : 0;
}

static int make_dir(const struct mt_saver *v, const char *dir, struct mt_err *err)
{
    int rc = v->vfs->make_dir(v->vfs->ctx, dir);
    return rc ? mt_fail(err, MT_ERR_RUNTIME, rc, "cannot create %s: %s", dir, strerror(-rc)) : 0;
}

static int write_progress(struct mt_saver *v, struct mt_err *err)
{
    struct mt_out_file f;
    int rc = write_json(v, PROGRESS, mt_trainer_state_json(v->s->state), &f, err);
    if (!rc)
        mt_manifest_add_file(v->files, PROGRESS, &f, NULL);
    return rc;
}

/* What comes last, when all other files are there. dir: the folder megatrain/ in v->tmp. */
static int seal_and_sync(struct mt_saver *v, const char *dir, struct mt_err *err)
{
    return write_seal(v, err) ?: sync_dir(v, dir, err) ?: sync_dir(v, v->tmp, err);
}

static int write_all(struct mt_saver *v, struct mt_err *err)
{
    int rc = v->s->layout->n_adapters ? mt_save_adapter(v, err) : mt_save_weights(v, err);
    const char *dir = MT_PATH("%s/megatrain", v->tmp);
    rc = rc ?: write_progress(v, err) ?: make_dir(v, dir, err);
    if (v->s->full && !rc)
        rc = mt_save_state(v, err);
    if (v->s->full && !rc)
        rc = write_reference(v, err);
    return rc ?: seal_and_sync(v, dir, err);
}

static int check_space(const struct mt_saver *v, struct mt_err *err)
{
    const struct mt_checkpoint_save *s = v->s;
    const struct mt_plane_desc *desc = mt_plane_desc_of(s->planes, MT_PLANE_HI);
    uint64_t need = mt_checkpoint_bytes(s->layout, desc, s->full, s->named != NULL), have;
    char a[32], b[32];
    for (size_t i = 0; mt_save_copies(s) && i < s->base->n_tensors; i++)
        need += mt_stored_goes_along(s->layout, s->base->tensors[i].name) ? s->base->tensors[i].n_bytes : 0;
    if (mt_hw_disk_free(s->dir, &have, NULL)) /* unknown: the writes will tell */
        return 0;
    int rc = 0;
    if (need > have)
        rc = mt_fail(err, MT_ERR_NO_FIT, -ENOSPC,
                     "a checkpoint takes %s, %s has %s free: free some space, or set checkpoint.save = weights",
                     mt_format_bytes(a, sizeof(a), need), s->dir, mt_format_bytes(b, sizeof(b), have));
    return rc;
}

/* Renames the .tmp; a folder that has the name already is set aside. */
static int put_in_place(struct mt_saver *v, const char *final, struct mt_err *err)
{
    const struct mt_checkpoint_save *s = v->s;
    char aside[4096] = "";
    int rc = 0;
    bool weaker = s->history && mt_history_holds(s->history, s->dir, s->state->step, false); /* weights alone */
    bool ours = s->history && s->history->has && s->history->step == s->state->step;
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
        mt_warn("%s %s: renamed to %s", final, ours ? "is not what this run saved there" : "existed and is not of this run",
                aside);
    return 0;
}

/* The checkpoint is complete, even if something here fails. */
static int make_known(struct mt_saver *v, const char *name, struct mt_err *err)
{
    const struct mt_checkpoint_save *s = v->s;
    struct mt_err why;
    if (s->history) {
        s->history->has = true;
        s->history->full = s->full;
        s->history->step = s->state->step;
        memcpy(s->history->sum, v->sum, sizeof(v->sum));
    }
    const char *latest = MT_PATH("%s/latest", s->dir);
    int rc = v->vfs->link(v->vfs->ctx, name, latest); /* a convenience: not needed to resume */
    if (rc)
        mt_warn("cannot link %s to %s: %s", latest, name, strerror(-rc));
    rc = sync_dir(v, s->dir, err);
    if (!rc && s->history && mt_history_settle(s->history, v->vfs, s->dir, &why))
        mt_warn("checkpoints of another history are not set aside: %s", why.msg);
    return rc;
}

/* Writes to v->tmp and renames that to `final`. */
static int save_as(struct mt_saver *v, const char *final, struct mt_err *err)
{
    void *ctx = v->vfs->ctx;
    v->vfs->remove_tree(ctx, v->tmp);
    mt_json_begin();
    v->files = cJSON_CreateObject();
    int rc = make_dir(v, v->tmp, err) ?: write_all(v, err) ?: put_in_place(v, final, err);
    cJSON_Delete(v->files);
    if (rc)
        v->vfs->remove_tree(ctx, v->tmp);
    return rc;
}

int mt_checkpoint_write_adapters(const struct mt_checkpoint_save *s, const char *to, struct mt_err *err)
{
    struct mt_saver v = {.s = s, .vfs = &mt_vfs_posix};
    mt_path_printf(v.tmp, sizeof(v.tmp), "%s", to);
    mt_json_begin();
    v.files = cJSON_CreateObject();
    int rc = mt_mkdir_p(to, err) ?: mt_save_adapter(&v, err);
    cJSON_Delete(v.files);
    return rc;
}

/* A folder beside the checkpoint is named from there, so that both can be moved; another one by its absolute path. */
static void find_base(struct mt_saver *v)
{
    const struct mt_checkpoint_save *s = v->s;
    char out[PATH_MAX], path[PATH_MAX];
    size_t n;
    if (!s->base_dir)
        return;
    if (!realpath(s->base_dir, path))
        mt_path_printf(path, sizeof(path), "%s", s->base_dir);
    n = realpath(s->dir, out) ? strlen(out) : 0;
    bool beside = s->layout->by_blocks && n && !strncmp(path, out, n) && path[n] == '/' && !strchr(path + n + 1, '/');
    mt_path_printf(v->base_dir, sizeof(v->base_dir), "%s%s", beside ? ".." : "", beside ? path + n : path);
}

int mt_checkpoint_save(const struct mt_checkpoint_save *s, struct mt_err *err)
{
    struct mt_saver v = {.s = s, .vfs = s->vfs ? s->vfs : &mt_vfs_posix};
    char final[4096], name[64];
    snprintf(name, sizeof(name), "checkpoint-%llu", (unsigned long long)s->state->step);
    if (snprintf(final, sizeof(final), "%s/%s", s->dir, name) >= 4000)
        return mt_fail(err, MT_ERR_RUNTIME, -ENAMETOOLONG, "path too long: %s", s->dir);
    mt_path_printf(v.tmp, sizeof(v.tmp), "%s.tmp", final);
    if (s->history && mt_history_holds(s->history, s->dir, s->state->step, s->full))
        return sync_dir(&v, s->dir, err); /* the sync may have failed after it was written */
    find_base(&v);
    return check_space(&v, err) ?: save_as(&v, final, err) ?: make_known(&v, name, err);
}

/* --- adding to a checkpoint ------------------------------------------------------------------------------------ */

/* Files get a second name, or are copied where the file system has none. */
static int share_files(const struct mt_saver *v, const char *final, struct mt_err *err)
{
    int rc = 0;
    for (const cJSON *f = v->files->child; f && !rc; f = f->next) {
        char from[4400], to[4400];
        bool own = !strncmp(f->string, "megatrain/", 10); /* made before, and synced at the end */
        mt_path_printf(from, sizeof(from), "%s/%s", final, f->string);
        mt_path_printf(to, sizeof(to), "%s/%s", v->tmp, f->string);
        rc = own ? 0 : mt_out_make_folder(v->vfs, v->tmp, f->string, err);
        if (!rc && (!v->vfs->share || v->vfs->share(v->vfs->ctx, from, to)))
            rc = mt_out_copy(v->vfs, from, to, err);
        if (!rc && !own)
            rc = mt_out_sync_folder(v->vfs, v->tmp, f->string, err);
    }
    return rc;
}

/* The names of both folders are exchanged, or, where that is not possible, one is renamed after the other. */
static int take_place(struct mt_saver *v, const char *final, struct mt_err *err)
{
    if (!v->vfs->exchange || v->vfs->exchange(v->vfs->ctx, v->tmp, final))
        return put_in_place(v, final, err);
    int rc = sync_dir(v, v->s->dir, err);
    v->vfs->remove_tree(v->vfs->ctx, v->tmp); /* that is the old one now */
    return rc;
}

/* v->files: those of the checkpoint, of which this one is written anew. */
static int amend(struct mt_saver *v, const char *final, struct mt_err *err)
{
    const char *dir = MT_PATH("%s/megatrain", v->tmp);
    v->vfs->remove_tree(v->vfs->ctx, v->tmp);
    cJSON_DeleteItemFromObjectCaseSensitive(v->files, PROGRESS);
    int rc = make_dir(v, v->tmp, err)
          ?: make_dir(v, dir, err)
          ?: share_files(v, final, err)
          ?: write_progress(v, err)
          ?: seal_and_sync(v, dir, err)
          ?: take_place(v, final, err);
    if (rc)
        v->vfs->remove_tree(v->vfs->ctx, v->tmp);
    return rc;
}

int mt_checkpoint_amend(const struct mt_checkpoint_save *s, struct mt_err *err)
{
    struct mt_train_state state = *s->state;
    struct mt_checkpoint_save again = *s;
    struct mt_saver v = {.s = &again, .vfs = s->vfs ? s->vfs : &mt_vfs_posix};
    char final[4096];
    MT_SEALED_FREED struct mt_sealed old = {.json = NULL};
    mt_path_printf(final, sizeof(final), "%s/checkpoint-%llu", s->dir, (unsigned long long)s->state->step);
    mt_path_printf(v.tmp, sizeof(v.tmp), "%s.tmp", final);
    mt_json_begin();
    int rc = mt_seal_read(final, &old, err);
    if (rc)
        return rc;
    again.full = old.full;
    state.share_layers = (uint64_t)mt_sealed_share(&old); /* as its tensors have it, whatever the run has by now */
    again.state = &state;
    v.files = mt_json_get(old.json, "files") ? cJSON_DetachItemFromObjectCaseSensitive(old.json, "files") : NULL;
    v.frozen = cJSON_DetachItemFromObjectCaseSensitive(old.json, "frozen");
    rc = v.files ? amend(&v, final, err) : mt_fail(err, MT_ERR_CHECKPOINT, -EBADMSG, "%s does not list its files", final);
    if (!rc)
        memcpy(s->history->sum, v.sum, sizeof(v.sum));
    cJSON_Delete(v.files);
    cJSON_Delete(v.frozen);
    return rc ?: sync_dir(&v, s->dir, err);
}

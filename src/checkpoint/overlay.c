/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/overlay.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "base/sum64.h"
#include "checkpoint/layout_files.h"
#include "checkpoint/manifest.h"
#include "hf/safetensors.h"
#include "weights/packed_files.h"
#include "weights/peft.h"

#define PREFIX "overlay-"
#define INDEX "model.safetensors.index.json"
#define ALWAYS "always.safetensors"

/* An overlay while it is written. */
struct writer {
    const struct mt_overlay_write *o;
    char tmp[4096], base[4096];
    struct mt_layout_files files;
    struct mt_rounded one; /* of the tensor `of`, by this name */
    const char *name;
    const void *of;        /* NULL: none */
    float *now, *was;      /* a piece of it */
    size_t n_now, n_was;
    cJSON *mine;         /* name of a tensor that this phase trained -> file */
    cJSON *map;          /* the same of all tensors; consumed by the index */
    struct mt_str sums;  /* what its name is made of */
};

static bool is_trained(const struct mt_layout *l, const struct mt_stored *s)
{
    return l->tensors[l->pieces[s->first_piece]].trainable;
}

static bool is_always(const struct mt_overlay_write *o, const struct mt_stored *s)
{
    const char *name = o->layout->tensors[o->layout->pieces[s->first_piece]].name;
    bool hit = false;
    for (size_t i = 0; i < o->n_always; i++)
        hit |= !fnmatch(o->always[i], name, 0);
    return hit;
}

/* The tensor's name and dtype in the model's files, or as it is usually stored. */
static void declare(const struct writer *w, struct mt_st_decl *d)
{
    const struct mt_st_tensor *src = mt_stored_find(w->o->base, d->name);
    bool wide = src && (src->dtype == MT_ST_F32 || src->dtype == MT_ST_F16);
    if (src)
        d->name = src->name;
    if (wide)
        d->dtype = MT_ST_F32;
}

/* The tensor that is written now; NULL: no more. The one before is complete. */
static void note_rounding(struct writer *w, const struct mt_source *next)
{
    struct mt_overlay_rounding *r = w->o->rounding;
    double kept, error;
    if (next && w->of == next->of)
        return;
    if (r && mt_rounded_share(&w->one, &kept, &error) && (!r->worst || kept < r->least)) {
        r->worst = w->name;
        r->least = kept;
    }
    w->one = (struct mt_rounded){0};
    w->of = next ? next->of : NULL;
    w->name = next ? next->decl.name : NULL;
}

/* What it was, if the files before have it plain. */
static const struct mt_st_tensor *plain_before(const struct writer *w, const struct mt_st_decl *d)
{
    const struct mt_st_tensor *t = d->dtype == MT_ST_BF16 && w->o->rounding ? mt_st_find(w->o->base, d->name) : NULL;
    return t && t->dtype == MT_ST_BF16 && t->n_elems == mt_st_decl_bytes(d) / sizeof(uint16_t) ? t : NULL;
}

/* A trained tensor, with what rounding it leaves of its update. */
static int read_trained(const struct mt_source *s, size_t first, size_t n, void *dst, struct mt_err *err)
{
    struct writer *w = s->ctx;
    const struct mt_st_tensor *before = plain_before(w, &s->decl);
    struct mt_source own = *(const struct mt_source *)s->of;
    uint16_t *hi = dst, lo;
    note_rounding(w, s);
    own.decl.dtype = before ? MT_ST_F32 : s->decl.dtype;
    if (!before)
        return own.read(&own, first, n, dst, err);
    if (!mt_grow(&w->now, &w->n_now, n, sizeof(float)) || !mt_grow(&w->was, &w->n_was, n, sizeof(float)))
        return mt_fail_nomem(err, before->name, n * sizeof(float));
    int rc = own.read(&own, first, n, w->now, err)
          ?: mt_st_read_f32(w->o->base, before, first, n, w->was, err);
    for (size_t k = 0; k < n && !rc; k++)
        mt_master_split(w->now[k], &hi[k], &lo);
    if (!rc) {
        mt_rounded_add(&w->one, w->was, w->now, hi, n);
        mt_rounded_add(&w->o->rounding->all, w->was, w->now, hi, n);
    }
    return rc;
}

/* What was written is read past the page cache: the next phase rests on it. */
static int file_done(void *ctx, const char *name, const struct mt_out_file *f, struct mt_err *err)
{
    struct writer *w = ctx;
    uint64_t sum, size;
    char text[MT_SUM_TEXT];
    MT_FD_CLOSED int fd = open(f->path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0)
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    int rc = mt_sum_file(f->path, 0, UINT64_MAX, &sum, &size, err);
    if (!rc && sum != f->sum)
        rc = mt_fail(err, MT_ERR_RUNTIME, -EIO, "%s reads back other bytes than were written: the drive is failing", f->path);
    mt_sum_format(text, f->sum);
    mt_str_printf(&w->sums, "%s %s\n", name, text);
    return rc;
}

/* A file of the tensors [0, n), unless there are none. */
static int write_file(struct writer *w, const char *name, const struct mt_source *s, size_t n, struct mt_err *err)
{
    for (size_t i = 0; i < n; i++) {
        mt_json_add(w->mine, s[i].decl.name, cJSON_CreateString(name));
        mt_json_add(w->map, s[i].decl.name, cJSON_CreateString(name));
    }
    const struct mt_hf_dir h = {.vfs = &mt_vfs_posix, .dir = w->tmp, .done = file_done, .ctx = w};
    return n ? mt_hf_write_file(&h, name, s, n, err) : 0;
}

/* Those that every phase trains, and the others. */
static int write_trained(struct writer *w, struct mt_err *err)
{
    const struct mt_layout *l = w->o->layout;
    struct mt_source_list always = {.p = NULL}, others = {.p = NULL};
    bool *left = mt_calloc(l->n_stored, sizeof(*left));
    int first = -1, end = 0;
    char name[64];
    if (!left)
        return mt_fail_nomem(err, "an overlay", l->n_stored);
    for (size_t i = 0; i < l->n_stored; i++)
        left[i] = !is_trained(l, &l->stored[i]);
    int rc = mt_layout_files_init(&w->files, l, w->o->planes, left, err);
    free(left);
    for (size_t i = 0; i < w->files.list.n && !rc; i++) {
        const struct mt_source *own = &w->files.list.p[i];
        const struct mt_stored *stored = own->of;
        struct mt_source s = {own->decl, read_trained, w, own, 0};
        int layer = l->units[l->tensors[l->pieces[stored->first_piece]].unit].layer;
        declare(w, &s.decl);
        rc = mt_source_add(is_always(w->o, stored) ? &always : &others, s, err);
        if (is_always(w->o, stored))
            continue;
        first = first < 0 ? layer : MT_MIN(first, layer);
        end = MT_MAX(end, layer + 1);
    }
    snprintf(name, sizeof(name), "layers-%05d-%05d.safetensors", first, end);
    rc = rc ?: write_file(w, ALWAYS, always.p, always.n, err)
            ?: write_file(w, name, others.p, others.n, err);
    mt_source_list_finish(&always);
    mt_source_list_finish(&others);
    return rc;
}

/* The tensors that differ, in files of about shard_bytes, and the model's small files. */
static int write_merged(struct writer *w, struct mt_err *err)
{
    MT_CLOSED_BY(mt_source_list_finish) struct mt_source_list list = {.p = NULL};
    uint64_t bytes = 0;
    size_t first = 0;
    int rc = mt_merge_list(w->o->merge, true, &list, err), file = 0;
    for (size_t i = 0; i < list.n && !rc; i++) {
        char name[64];
        bytes += mt_st_decl_bytes(&list.p[i].decl);
        if (bytes < w->o->shard_bytes && i + 1 < list.n)
            continue;
        snprintf(name, sizeof(name), "merged-%05d.safetensors", file++);
        rc = write_file(w, name, list.p + first, i + 1 - first, err);
        first = i + 1;
        bytes = 0;
    }
    for (size_t i = 0; i < w->o->files->n && !rc; i++) {
        const struct mt_hf_file *f = &w->o->files->p[i];
        rc = mt_write_file(MT_PATH("%s/%s", w->tmp, f->name), f->text, f->len, err);
    }
    return rc;
}

/* Files are never changed once they are written: a link is as good as a copy. */
static int link_file(const char *from, const char *to, struct mt_err *err)
{
    int rc = link(from, to) && errno != EEXIST ? -errno : 0;
    if (rc == -EPERM || rc == -EXDEV || rc == -ENOTSUP || rc == -EMLINK)
        return mt_path_exists(to) ? 0 : mt_out_copy(&mt_vfs_posix, from, to, err); /* there: for another tensor */
    return rc ? mt_fail(err, MT_ERR_RUNTIME, rc, "cannot link %s to %s: %s", to, from, strerror(-rc)) : 0;
}

/* Takes over what the overlay before has, and this phase has not written. */
static int take_parent(struct writer *w, struct mt_err *err)
{
    MT_JSON_FREED cJSON *index = NULL;
    int rc = 0;
    if (!w->o->parent)
        return 0;
    mt_str_printf(&w->sums, "%s\n", w->o->parent);
    rc = mt_json_read_file(&index, MT_PATH("%s/%s/" INDEX, w->o->dir, w->o->parent), MT_ERR_CHECKPOINT, err);
    const cJSON *map = mt_json_get(index, "weight_map");
    for (const cJSON *v = map ? map->child : NULL; v && !rc; v = v->next) {
        if (!cJSON_IsString(v) || !strcmp(v->valuestring, MT_ST_IN_BASE) || mt_json_get(w->mine, v->string))
            continue;
        mt_json_add(w->map, v->string, cJSON_CreateString(v->valuestring));
        const char *from = MT_PATH("%s/%s/%s", w->o->dir, w->o->parent, v->valuestring);
        rc = link_file(from, MT_PATH("%s/%s", w->tmp, v->valuestring), err);
    }
    return rc;
}

static int compare(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static bool has(const char *const *sorted, size_t n, const char *name)
{
    return bsearch(&name, sorted, n, sizeof(*sorted), compare) != NULL;
}

/* Is it a piece of a packed tensor that is there unpacked? Its name begins with the tensor's, whole or without ".weight". */
static bool is_unpacked(const char *const *sorted, size_t n, const char *name)
{
    char stem[512], whole[520];
    if (!mt_packed_is_piece(name) || strlen(name) >= sizeof(stem))
        return false;
    strcpy(stem, name);
    for (size_t at = strlen(stem); at-- > 1;) {
        if (stem[at] != '.' && stem[at] != '_')
            continue;
        stem[at] = 0;
        snprintf(whole, sizeof(whole), "%s.weight", stem);
        if (has(sorted, n, stem) || has(sorted, n, whole))
            return true;
    }
    return false;
}

size_t mt_overlay_rest(const char **rest, const struct mt_st_model *model, const char **own, size_t n)
{
    size_t n_rest = 0;
    qsort(own, n, sizeof(*own), compare);
    for (size_t i = 0; i < model->n_tensors; i++) {
        const char *name = model->tensors[i].name;
        if (!has(own, n, name) && !is_unpacked(own, n, name))
            rest[n_rest++] = name;
    }
    return n_rest;
}

/* Tensors that are in the model alone. */
static int name_base(struct writer *w, struct mt_err *err)
{
    size_t n = (size_t)cJSON_GetArraySize(w->map), k = 0;
    MT_FREED const char **own = mt_calloc(n, sizeof(*own)), **rest = mt_calloc(w->o->base->n_tensors, sizeof(*rest));
    int rc = own && rest ? 0 : mt_fail_nomem(err, "an overlay", n * sizeof(*own));
    for (const cJSON *v = w->map->child; v && !rc; v = v->next)
        own[k++] = v->string;
    n = rc ? 0 : mt_overlay_rest(rest, w->o->base, own, n);
    for (size_t i = 0; i < n && !rc; i++)
        if (!mt_json_add(w->map, rest[i], cJSON_CreateString(MT_ST_IN_BASE)))
            rc = mt_fail_nomem(err, "an overlay", n);
    return rc;
}

/* Syncs the folder, too: it is written last. */
static int write_index(const char *dir, const char *base, cJSON *map, struct mt_err *err)
{
    cJSON *root = cJSON_CreateObject(), *meta = cJSON_AddObjectToObject(root, "metadata");
    cJSON_AddStringToObject(meta, MT_ST_BASE_KEY, base);
    mt_json_add(root, "weight_map", map);
    MT_FREED char *text = mt_json_print(root, true);
    const char *path = MT_PATH("%s/" INDEX, dir);
    int rc = text && mt_json_complete() ? mt_write_file(path, text, strlen(text), err) : mt_fail_nomem(err, path, 1);
    cJSON_Delete(root);
    return rc;
}

static int write_all(struct writer *w, struct mt_err *err)
{
    mt_json_begin();
    w->map = cJSON_CreateObject();
    w->mine = cJSON_CreateObject();
    int rc = w->o->merge ? write_merged(w, err) : write_trained(w, err);
    note_rounding(w, NULL);
    rc = rc ?: take_parent(w, err) ?: name_base(w, err);
    if (!rc) {
        rc = write_index(w->tmp, w->base, w->map, err);
        w->map = NULL;
    }
    cJSON_Delete(w->map);
    cJSON_Delete(w->mine);
    mt_layout_files_finish(&w->files);
    free(w->now);
    free(w->was);
    if (!rc && w->sums.failed)
        rc = mt_fail_nomem(err, "an overlay", w->sums.len);
    return rc;
}

/* One that is there already is the same: its name says so. */
static int put_in_place(struct writer *w, const char *name, struct mt_err *err)
{
    const char *final = MT_PATH("%s/%s", w->o->dir, name);
    return mt_is_dir(final) ? mt_remove_tree(w->tmp, err) : mt_rename(w->tmp, final, err);
}

int mt_overlay_write(const struct mt_overlay_write *o, char **name, struct mt_err *err)
{
    struct writer w = {.o = o};
    char text[64];
    int rc = mt_path_printf(w.tmp, sizeof(w.tmp), "%s/" PREFIX "%llu.tmp", o->dir, (unsigned long long)o->phase);
    if (!realpath(o->base_dir, w.base))
        rc = -errno;
    if (rc)
        return mt_fail(err, MT_ERR_INPUT, rc, "the model's folder %s cannot be found: %s. The next block needs it: go on with "
                       "--resume once it is there, or with --resume --force and its new place in model.path", o->base_dir,
                       strerror(-rc));
    rc = mt_remove_tree(w.tmp, err) ?: mt_mkdir_p(w.tmp, err) ?: write_all(&w, err);
    snprintf(text, sizeof(text), PREFIX "%llu-%016llx", (unsigned long long)o->phase,
             (unsigned long long)(rc ? 0 : mt_sum64(w.sums.p, w.sums.len, 0)));
    rc = rc ?: put_in_place(&w, text, err);
    mt_str_finish(&w.sums);
    if (rc) {
        mt_remove_tree(w.tmp, NULL);
        return rc;
    }
    *name = strdup(text);
    return *name ? 0 : mt_fail_nomem(err, text, sizeof(text));
}

int mt_overlay_of_adapters(char **name, const char *dir, struct mt_err *err)
{
    MT_FREED char *base = NULL;
    *name = NULL;
    int rc = mt_peft_is_folder(dir) ? mt_peft_base_model(&base, dir, err) : 0;
    const char *last = base ? strrchr(base, '/') : NULL;
    bool is_one = last && !strncmp(last + 1, PREFIX, sizeof(PREFIX) - 1);
    return is_one && !(*name = strdup(last + 1)) ? mt_fail_nomem(err, dir, strlen(last)) : rc;
}

/* Appends the overlay that a checkpoint goes on from, as a line; false: its state cannot be read, and may name any. One
 * of weights alone has no state: it is whole, or adapters. */
static bool add_named(const char *dir, const char *checkpoint, struct mt_str *named)
{
    MT_JSON_FREED cJSON *state = NULL;
    MT_FREED char *own = NULL;
    const char *path = MT_PATH("%s/%s/megatrain/" MT_STATE_NAME, dir, checkpoint);
    int rc = mt_json_read_file(&state, path, MT_ERR_CHECKPOINT, NULL);
    if (rc == -ENOENT || rc == -ENOTDIR)
        rc = mt_overlay_of_adapters(&own, MT_PATH("%s/%s", dir, checkpoint), NULL);
    const char *overlay = own ? own : mt_json_string(mt_json_get(state, "blocks"), "overlay", "");
    mt_str_printf(named, "%s\n", overlay);
    return !rc && !named->failed;
}

void mt_overlay_prune(const char *dir, const char *current)
{
    MT_STR_FREED struct mt_str named = {0};
    MT_DIR_CLOSED DIR *d = opendir(dir);
    bool sure = d != NULL;
    mt_str_printf(&named, "%s\n", current ? current : "");
    for (struct dirent *e; sure && (e = readdir(d));)
        if (!strncmp(e->d_name, "checkpoint-", 11))
            sure = add_named(dir, e->d_name, &named);
    if (d)
        rewinddir(d);
    for (struct dirent *e; sure && (e = readdir(d));) {
        char line[300];
        snprintf(line, sizeof(line), "%s\n", e->d_name);
        if (strncmp(e->d_name, PREFIX, sizeof(PREFIX) - 1) || strstr(named.p, line))
            continue;
        mt_remove_tree(MT_PATH("%s/%s", dir, e->d_name), NULL);
    }
}

/* Links all files of a folder into a new one, durably. */
static int link_all(const char *from, const char *to, struct mt_err *err)
{
    const char *tmp = MT_PATH("%s.tmp", to);
    int rc = mt_remove_tree(tmp, err) ?: mt_mkdir_p(tmp, err);
    MT_DIR_CLOSED DIR *d = rc ? NULL : opendir(from);
    if (!rc && !d)
        rc = mt_fail(err, MT_ERR_CHECKPOINT, -errno, "cannot read folder %s: %s", from, strerror(errno));
    for (struct dirent *e; !rc && (errno = 0, e = readdir(d));) {
        if (e->d_name[0] == '.')
            continue;
        const char *path = MT_PATH("%s/%s", from, e->d_name), *link = MT_PATH("%s/%s", tmp, e->d_name);
        rc = mt_is_dir(path) ? link_all(path, link, err) : link_file(path, link, err);
    }
    if (!rc && errno)
        rc = mt_fail(err, MT_ERR_CHECKPOINT, -errno, "cannot read folder %s: %s", from, strerror(errno));
    int failed = rc ? 0 : mt_sync_dir(tmp);
    if (failed)
        rc = mt_fail(err, MT_ERR_RUNTIME, failed, "cannot sync %s: %s", tmp, strerror(-failed));
    rc = rc ?: mt_rename(tmp, to, err);
    if (rc)
        mt_remove_tree(tmp, NULL);
    return rc;
}

/* Says where the model is, if it was elsewhere. The index is a new file: the old one may be linked from elsewhere. */
static int move_base(const char *overlay, const char *base_dir, struct mt_err *err)
{
    char base[PATH_MAX];
    MT_JSON_FREED cJSON *index = NULL;
    int rc = mt_json_read_file(&index, MT_PATH("%s/" INDEX, overlay), MT_ERR_CHECKPOINT, err);
    const cJSON *was = mt_json_get(mt_json_get(index, "metadata"), MT_ST_BASE_KEY);
    if (!rc && realpath(base_dir, base) && !(cJSON_IsString(was) && !strcmp(was->valuestring, base))) {
        mt_json_begin();
        rc = write_index(overlay, base, cJSON_DetachItemFromObject(index, "weight_map"), err);
    }
    return rc;
}

int mt_overlay_adopt(const char *checkpoint, const char *name, const char *dir, const char *base_dir, char **path,
                     struct mt_err *err)
{
    const char *own = MT_PATH("%s/%s", dir, name);
    const char *beside = MT_PATH("%s/../%s", checkpoint, name);
    int rc = 0;
    if (!mt_is_dir(own) && !mt_is_dir(beside))
        return mt_fail(err, MT_ERR_CHECKPOINT, -ENOENT, "%s needs %s beside it, the blocks that were trained before: it is not there",
                       checkpoint, name);
    if (!mt_is_dir(own))
        rc = link_all(beside, own, err);
    rc = rc ?: move_base(own, base_dir, err);
    if (rc)
        return rc;
    *path = strdup(own);
    return *path ? 0 : mt_fail_nomem(err, own, strlen(own));
}

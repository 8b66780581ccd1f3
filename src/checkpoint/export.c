/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/units.h"
#include "checkpoint/card.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/export_notes.h"
#include "checkpoint/fold.h"
#include "checkpoint/hf_dir.h"
#include "checkpoint/layout_files.h"
#include "checkpoint/manifest.h"
#include "checkpoint/merge.h"
#include "checkpoint/merge_packed.h"
#include "checkpoint/packed_model.h"
#include "checkpoint/seal.h"
#include "hf/safetensors.h"
#include "weights/packed_files.h"
#include "weights/peft.h"
#include "model/stored.h"
#include "weights/weights.h"

struct exporter {
    struct mt_st_model weights, *states;
    size_t n_states;
    bool f32;
    struct mt_layout_files out;     /* what is written */
    struct mt_layout *layout;       /* f32: of the checkpoint's model */
    int share;                      /* mt_layout.share of the run that made it */
    cJSON *named; /* tensors of the base model, which have no master; NULL: none */
    struct mt_stored_reader base;   /* f32: reads these, in the layout's order */
    struct mt_packed_model model;   /* if layers are to be packed, instead of all these */
    char *adapter_config;   /* of an adapter's folder, unchanged */
    struct mt_fold *fold;   /* of adapters, or NULL */
    struct mt_merge *merge; /* adapters to be added, or NULL */
    cJSON *files;                   /* written files: size and sum, and those of their tensors */
};

/* The FP32 master of a tensor of the layout; a named tensor of the base model is read from there. */
static int read_master(void *ctx, const struct mt_values *v, void *dst, struct mt_err *err)
{
    struct exporter *x = ctx;
    char name[160];
    if (mt_json_get(x->named, v->t->name))
        return mt_stored_read_f32(&x->base, mt_stored_source(&x->base, v->t), v->t, v->first, v->n, dst, err);
    snprintf(name, sizeof(name), "%s.master", mt_stored_as_shared(x->layout, v->t, x->share).name);
    for (size_t s = 0; s < x->n_states; s++) {
        const struct mt_st_tensor *master = mt_st_find(&x->states[s], name);
        if (master)
            return mt_st_read_f32(&x->states[s], master, v->first, v->n, dst, err);
    }
    return mt_fail(err, MT_ERR_CHECKPOINT, -ENOENT, "the checkpoint's training state has no tensor \"%s\"", name);
}

static bool can_be_f32(const struct mt_st_tensor *t)
{
    return (t->dtype == MT_ST_BF16 || t->dtype == MT_ST_F16 || t->dtype == MT_ST_F32) && !mt_packed_is_piece(t->name);
}

/* The weights: with f32, from masters where there is training state, else converted. What is packed, or copied from the
 * model, does not change. */
static int list_weights(struct exporter *x, struct mt_err *err)
{
    const struct mt_st_model *m = &x->weights;
    MT_FREED const struct mt_stored **of = mt_calloc(m->n_tensors, sizeof(*of)); /* of the layout */
    int rc = of ? 0 : mt_fail_nomem(err, "an export", m->n_tensors * sizeof(*of));
    for (size_t i = 0; !rc && x->layout && i < x->layout->n_stored; i++) {
        const struct mt_st_tensor *t = mt_stored_find(m, x->layout->stored[i].name);
        if (t)
            of[t - m->tensors] = &x->layout->stored[i];
    }
    for (size_t i = 0; i < m->n_tensors && !rc; i++) {
        const struct mt_st_tensor *t = &m->tensors[i];
        bool wide = x->f32 && can_be_f32(t) && (of[i] || !x->layout);
        struct mt_source s = wide ? mt_source_f32(m, t) : mt_source_raw(m, t);
        if (wide && x->layout)
            s = mt_layout_files_source(&x->out, of[i], s.decl);
        rc = mt_source_add(&x->out.list, s, err);
    }
    return rc;
}

static int open_layout(struct exporter *x, const char *from, struct mt_err *err)
{
    MT_SEALED_FREED struct mt_sealed sealed = {.json = NULL};
    int rc = mt_weights_layout(&x->layout, from, false, NULL, err) ?: mt_seal_read(from, &sealed, err);
    if (rc)
        return rc;
    x->share = mt_sealed_share(&sealed);
    mt_layout_files_begin(&x->out, (struct mt_stored_writer){.l = x->layout, .read = read_master, .ctx = x});
    x->base = (struct mt_stored_reader){.l = x->layout, .st = &x->weights};
    return 0;
}

/* The card of a model that a run with a checkpoint has trained. */
static int write_card(struct exporter *x, const struct mt_export *e, const char *dir, struct mt_err *err)
{
    struct mt_train_state s = {.step = 0};
    const char *slash = strrchr(e->to, '/');
    struct mt_card card = {.name = slash ? slash + 1 : e->to,
                           .adapters = x->adapter_config != NULL,
                           .merged = e->base != NULL,
                           .packed = e->base_dtype ? mt_packed_names[e->base_dtype] : NULL};
    bool known = !mt_checkpoint_read_state(e->from, &s, NULL);
    MT_FREED char *text = known ? mt_card_text(&card, &s) : NULL;
    if (known && !x->adapter_config && !e->base_dtype)
        mt_export_tell_dtype(e, &s, x->f32);
    mt_train_state_finish(&s);
    if (!known)
        return 0;
    const char *path = MT_PATH("%s/" MT_CARD_NAME, dir);
    int rc = text ? mt_write_file(path, text, strlen(text), err) : mt_fail_nomem(err, MT_CARD_NAME, 0);
    if (!rc) {
        const struct mt_out_file f = {.bytes = strlen(text), .sum = XXH3_64bits(text, strlen(text))};
        mt_manifest_add_file(x->files, MT_CARD_NAME, &f, NULL);
    }
    return rc;
}

/* The list of files and its seal, as in a checkpoint of weights alone. */
static int seal(struct exporter *x, const char *dir, struct mt_err *err)
{
    MT_JSON_FREED cJSON *o = cJSON_CreateObject();
    cJSON_AddNumberToObject(o, "version", 1);
    mt_json_add(o, "files", x->files);
    x->files = NULL;
    MT_FREED char *text = mt_json_print(o, true);
    MT_FREED char *sealed = text ? mt_seal_text(MT_MANIFEST_NAME, XXH3_64bits(text, strlen(text))) : NULL;
    int rc = sealed && mt_json_complete() ? 0 : mt_fail_nomem(err, "an export's list of files", 0);
    return rc ?: mt_mkdir_p(MT_PATH("%s/megatrain", dir), err)
              ?: mt_write_file(MT_PATH("%s/megatrain/" MT_MANIFEST_NAME, dir), text, strlen(text), err)
              ?: mt_write_file(MT_PATH("%s/megatrain/seal.json", dir), sealed, strlen(sealed), err);
}

static int open_states(struct exporter *x, const char *from, struct mt_err *err)
{
    size_t n = 0;
    while (mt_path_exists(MT_PATH("%s/megatrain/state-%05zu.safetensors", from, n)))
        n++;
    x->states = mt_calloc(n, sizeof(*x->states));
    if (!x->states)
        return mt_fail_nomem(err, "an export", n * sizeof(*x->states));
    for (; x->n_states < n; x->n_states++) {
        const char *path = MT_PATH("%s/megatrain/state-%05zu.safetensors", from, x->n_states);
        int rc = mt_st_open_file(&x->states[x->n_states], path, err);
        if (rc)
            return rc;
    }
    return 0;
}

/* The base's small files, with the chat template that the adapters' folder has: with that they were trained. */
static int read_merged_files(struct mt_hf_files *f, const struct mt_export *e, struct mt_err *err)
{
    const char *path = MT_PATH("%s/chat_template.jinja", e->from);
    MT_FREED char *text = NULL;
    size_t len;
    bool other = false;
    int rc = mt_hf_files_read(f, e->base, err);
    if (rc || !mt_path_exists(path))
        return rc;
    rc = mt_read_file(path, &text, &len, err);
    rc = rc ?: mt_hf_files_set_template(f, text, &other, err);
    if (other)
        mt_warn("%s is another chat template than %s has: the export has it in place of the model's", path, e->base);
    return rc;
}

static int export_to(struct exporter *x, const struct mt_export *e, const char *tmp, struct mt_err *err)
{
    MT_CLOSED_BY(mt_hf_files_finish) struct mt_hf_files files = {0};
    struct mt_hf_dir h = {.vfs = &mt_vfs_posix, .dir = tmp,
                          .model_dir = e->from,
                          .files = e->base ? &files : NULL,
                          .adapter_config = x->adapter_config,
                          .sources = x->out.list.p, .n_sources = x->out.list.n,
                          .torch_dtype = x->f32 ? "float32" : "bfloat16",
                          .quantization = x->merge && mt_merge_decodes(x->merge) ? "" /* nothing is packed */
                                                                                 : x->out.quantization,
                          .shard_bytes = e->shard_bytes, .listed = x->files};
    int rc = e->base ? read_merged_files(&files, e, err) : 0;
    return rc ?: mt_hf_dir_write(&h, err);
}

/* Removes folders that killed exports to `to` have left: those under way have their folders locked. */
static void remove_abandoned(const char *parent, const char *to)
{
    const char *slash = strrchr(to, '/'), *name = slash ? slash + 1 : to;
    MT_DIR_CLOSED DIR *d = opendir(parent);
    size_t n = strlen(name);
    for (struct dirent *e; d && (e = readdir(d));) {
        MT_FREED char *path = !strncmp(e->d_name, name, n) && !fnmatch(".tmp.??????", e->d_name + n, FNM_PERIOD)
                         ? mt_path_join(parent, e->d_name) : NULL;
        MT_FD_CLOSED int fd = path ? open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW) : -1;
        if (fd >= 0 && !mt_lock_file(fd, false) && !mt_remove_tree(path, NULL))
            mt_info("removed %s, which an export that was killed had left", path);
    }
}

/* Makes a folder beside `to` with a unique name; the caller frees *tmp. *lock: as long as it is open, it is in use. */
static int make_temporary(const char *to, char **tmp, int *lock, struct mt_err *err)
{
    char *parent = strdup(to), *slash = parent ? strrchr(parent, '/') : NULL;
    mode_t mask = umask(0);
    umask(mask);
    int rc = parent && asprintf(tmp, "%s.tmp.XXXXXX", to) > 0 ? 0 : mt_fail_nomem(err, to, strlen(to));
    if (!rc && slash && slash != parent) {
        *slash = 0;
        rc = mt_mkdir_p(parent, err);
    }
    if (!rc)
        remove_abandoned(!slash ? "." : slash == parent ? "/" : parent, to);
    free(parent);
    if (!rc && (!mkdtemp(*tmp) || chmod(*tmp, 0777 & ~mask)))
        rc = mt_fail(err, MT_ERR_RUNTIME, -errno, "cannot create %s: %s", *tmp, strerror(errno));
    *lock = rc ? -1 : open(*tmp, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (*lock >= 0 && mt_lock_file(*lock, false))
        mt_debug("%s cannot be locked", *tmp);
    return rc;
}

/* Verifies that the tensors that a checkpoint names are those that the run was made with, in any form that files may
 * have: packed, fused, in another order. *named: these, the caller's to delete; NULL: `from` is no checkpoint, or holds
 * all. */
static int verify_named(const char *from, cJSON **named, struct mt_err *err)
{
    MT_SEALED_FREED struct mt_sealed sealed = {.json = NULL};
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = NULL;
    *named = NULL;
    if (!mt_path_exists(from) || mt_seal_read(from, &sealed, NULL)) /* not a checkpoint */
        return 0;
    *named = cJSON_DetachItemFromObject(mt_json_get(sealed.json, "frozen"), "tensors");
    int rc = *named ? mt_weights_layout(&l, from, true, NULL, err) : 0;
    if (*named && !rc)
        rc = mt_weights_mark_stored(l, from, MT_PACKED_NONE, NULL, NULL, err);
    if (*named && !rc)
        rc = mt_weights_verify_base(l, from, *named, NULL, err);
    return rc;
}

/* One of three sources of an export: an adapter. */
static int open_adapter(struct exporter *x, const struct mt_export *e, struct mt_err *err)
{
    const char *from = e->from;
    size_t n;
    int rc = mt_read_file(MT_PATH("%s/" MT_PEFT_CONFIG, from), &x->adapter_config, &n, err);
    x->f32 = false; /* its tensors are f32 already */
    rc = rc ?: mt_st_open_file(&x->weights, MT_PATH("%s/" MT_PEFT_WEIGHTS, from), err);
    if (!rc && e->fold)
        rc = mt_fold_open(&x->fold, from, &x->weights, &x->adapter_config, err);
    rc = rc ?: x->fold ? mt_fold_list(x->fold, &x->out.list, err) : list_weights(x, err);
    if (!rc)
        mt_export_warn_of_vllm(x->adapter_config);
    return rc;
}

static int open_packed(struct exporter *x, const struct mt_export *e, struct mt_err *err);

/* The number of the run's value among "a|b|c"; 0: it is another. */
static int choice_of(const struct mt_train_state *s, const char *section, const char *key, const char *choices)
{
    char value[32];
    int i = mt_choice_find(choices, mt_train_state_value(s, section, key, value, sizeof(value)));
    return MT_MAX(i, 0);
}

/* Adapters of a run that was aware of the merge: the matrices that its last step had, in their format. */
static int open_aware(struct exporter *x, const struct mt_export *e, const struct mt_train_state *s, struct mt_err *err)
{
    enum mt_merge_aware mode = choice_of(s, "adapter", "merge_aware", MT_MERGE_AWARE_NAMES);
    enum mt_packed pack = choice_of(s, "model", "base_dtype", MT_PACKED_NAMES);
    enum mt_dtype dtype = choice_of(s, "model", "dtype", "bf16|f32") ? MT_F32 : MT_BF16;
    MT_CLOSED_BY(mt_adapter_spec_finish) struct mt_adapter_spec spec = {.on = false};
    if (mode == MT_MERGE_OFF)
        return 0;
    if (mode == MT_MERGE_BF16 && pack)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s was trained on a base that was packed when it was loaded: pack its files "
                       "first, megatrain export %s PACKED --quantize %s, and merge into that, --model PACKED", e->from, e->base,
                       mt_packed_names[pack]);
    if (mode == MT_MERGE_BF16) {
        mt_merge_as_trained(x->merge, dtype);
        return 0;
    }
    mt_merge_close(&x->merge);
    int rc = mt_peft_read_spec(&spec, e->from, err);
    spec.merge = mode;
    spec.merge_scale = choice_of(s, "adapter", "merge_scale", MT_MERGE_SCALE_NAMES);
    spec.dropout = 0;
    rc = rc ?: mt_packed_model_load(&x->model, e->base, pack, e->from, &spec, err)
            ?: mt_merge_packed(x->model.layout, x->model.planes, dtype, err);
    return rc ? rc : open_packed(x, e, err);
}

/* Refuses a base other than that of the checkpoint which the adapters are in, if they are in one. */
static int verify_merged(struct exporter *x, const struct mt_export *e, struct mt_err *err)
{
    struct mt_train_state s = {.step = 0};
    if (mt_checkpoint_read_state(e->from, &s, NULL))
        return 0;
    struct mt_layout *l = NULL;
    int rc = mt_weights_layout(&l, e->base, false, NULL, err);
    rc = rc ?: mt_weights_verify_base(l, e->base, s.frozen, NULL, err);
    mt_layout_destroy(&l);
    bool decodes = mt_merge_decodes(x->merge);
    rc = rc ?: open_aware(x, e, &s, err);
    if (!rc && x->merge && !decodes)
        mt_export_warn_of_packing(e, &s);
    mt_train_state_finish(&s);
    return rc;
}

/* A model with adapters merged into it. */
static int open_merge(struct exporter *x, const struct mt_export *e, struct mt_err *err)
{
    int rc = mt_checkpoint_verify_model(e->base, true, false, err);
    rc = rc ?: verify_named(e->base, &x->named, err)
            ?: mt_st_open_dir(&x->weights, e->base, err)
            ?: mt_merge_open(&x->merge, e->from, &x->weights, e->base, e->f32, err)
            ?: verify_merged(x, e, err);
    if (!rc && x->merge)
        rc = mt_merge_list(x->merge, false, &x->out.list, err);
    if (!rc && x->merge && mt_merge_decodes(x->merge))
        mt_info("the packed weights of %s are decoded: the merged model is not packed", e->base);
    return rc;
}

/* What is packed comes from the weights that the files have; masters are wider, and would give other codes. */
static int refuse_masters(const struct mt_export *e, struct mt_err *err)
{
    const char *path = MT_PATH("%s/megatrain/state-00000.safetensors", e->from);
    return !e->f32 || !mt_path_exists(path)
               ? 0
               : mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s is a checkpoint with master weights: --dtype f32 and --quantize "
                         "pack a model's folder; export it with --dtype f32 first, then pack that", e->from);
}

/* The packed files, and what else the model's folder has. */
static int open_packed(struct exporter *x, const struct mt_export *e, struct mt_err *err)
{
    int rc = e->base ? 0 : mt_st_open_dir(&x->weights, e->from, err);
    rc = rc ?: mt_layout_files_init(&x->out, x->model.layout, x->model.planes, NULL, err);
    for (size_t i = 0; !rc && x->f32 && i < x->out.list.n; i++)
        if (!x->out.list.p[i].part)
            x->out.list.p[i].decl.dtype = MT_ST_F32;
    return rc ? rc : mt_layout_files_add_copied(&x->out, &x->weights, err);
}

/* A model, for f32 with its masters; or one of the other sources. */
static int open_source(struct exporter *x, const struct mt_export *e, struct mt_err *err)
{
    bool adapter = mt_peft_is_folder(e->from);
    if (adapter && e->base_dtype)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s holds adapters, and only a model can be packed: first "
                       "megatrain export --merge, then --quantize of the folder that it writes", e->from);
    int rc = mt_checkpoint_verify_model(e->from, true, e->f32 && !e->base, err);
    if (!rc && adapter)
        return e->base ? open_merge(x, e, err) : open_adapter(x, e, err);
    if (!rc && e->base_dtype)
        rc = refuse_masters(e, err);
    if (!rc && e->base_dtype)
        rc = verify_named(e->from, &x->named, err);
    if (!rc && e->base_dtype) {
        rc = mt_packed_model_load(&x->model, e->from, e->base_dtype, NULL, NULL, err);
        if (!rc && e->base_dtype == MT_PACKED_FP8)
            mt_export_warn_of_blocks(x->model.layout);
        if (!rc && e->base_dtype == MT_PACKED_NF4)
            mt_export_warn_of_experts(x->model.layout);
        return rc ? rc : open_packed(x, e, err);
    }
    rc = rc ?: mt_st_open_dir(&x->weights, e->from, err)
            ?: verify_named(e->from, &x->named, err)
            ?: open_states(x, e->from, err);
    if (!rc && e->f32 && x->n_states)
        rc = open_layout(x, e->from, err);
    if (!rc && e->f32 && !x->n_states)
        mt_export_warn_of_weights(e->from);
    return rc ? rc : list_weights(x, err);
}

static int export_named(const struct mt_export *e, struct mt_err *err)
{
    const char *to = e->to;
    struct exporter x = {.f32 = e->f32};
    MT_FREED char *tmp = NULL;
    MT_FD_CLOSED int lock = -1;
    if (mt_path_exists(to))
        return mt_fail(err, MT_ERR_USAGE, -EEXIST, "%s exists already: name a new folder", to);
    int rc = open_source(&x, e, err);
    mt_json_begin();
    x.files = cJSON_CreateObject();
    bool made = !rc && !(rc = make_temporary(to, &tmp, &lock, err));
    rc = rc ?: export_to(&x, e, tmp, err);
    if (!rc)
        mt_export_tell_rounding(x.merge);
    rc = rc ?: write_card(&x, e, tmp, err)
            ?: seal(&x, tmp, err)
            ?: mt_rename(tmp, to, err); /* writing the last file synced the folder megatrain/ and its parent */
    if (rc && made)
        mt_remove_tree(tmp, NULL);
    for (size_t i = 0; i < x.n_states; i++)
        mt_st_close(&x.states[i]);
    free(x.states);
    mt_layout_files_finish(&x.out);
    mt_stored_reader_finish(&x.base);
    mt_layout_destroy(&x.layout);
    mt_packed_model_finish(&x.model);
    mt_st_close(&x.weights);
    mt_merge_close(&x.merge);
    mt_fold_close(&x.fold);
    free(x.adapter_config);
    cJSON_Delete(x.files);
    cJSON_Delete(x.named);
    return rc;
}

/* The folder's name without trailing slashes. */
int mt_checkpoint_export(const struct mt_export *e, struct mt_err *err)
{
    MT_FREED char *name = strdup(e->to);
    size_t n = name ? strlen(name) : 0;
    struct mt_export named = *e;
    mt_st_warn_of_two(e->base ? e->base : e->from);
    while (n > 1 && name[n - 1] == '/')
        name[--n] = 0;
    named.to = name;
    int rc = name ? export_named(&named, err) : mt_fail_nomem(err, e->to, strlen(e->to));
    return rc;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The tensors of a checkpoint: how many bytes they take, and their files. */
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
#include "checkpoint/layout_files.h"
#include "checkpoint/overlay.h"
#include "checkpoint/save_priv.h"
#include "weights/peft.h"
#include "model/ranges.h"
#include "model/stored.h"

/* Parts of a tensor that are saved besides its bf16 weights: the master, and the kinds of planes that are states. */
enum { N_PARTS = MT_N_PLANES, MASTER = MT_PLANE_HI };

enum { NAMED_BYTES = 192 }; /* bytes of a named tensor in state.json */

bool mt_save_names_only(const struct mt_checkpoint_save *s, const struct mt_tensor *t)
{
    return s->full && s->named && t->in_base;
}

static bool has_part(const struct mt_plane_desc *d, int part, const struct mt_tensor *t)
{
    return part == MASTER ? t->kind != MT_RANGE_PACKED
                          : d->saved_as && mt_tensor_span(t, d, (enum mt_plane_kind)part).bytes;
}

static uint64_t packed_bytes(const struct mt_tensor *t)
{
    struct mt_packed_piece piece[MT_MAX_PIECES];
    uint64_t n = 0;
    for (int i = mt_packed_pieces(piece, t); i-- > 0;)
        n += piece[i].bytes;
    return n;
}

bool mt_checkpoint_holds(const struct mt_layout *l, const struct mt_tensor *t)
{
    return t->trainable || !l->n_adapters;
}

uint64_t mt_checkpoint_bytes(const struct mt_layout *l, const struct mt_plane_desc desc[MT_N_PLANES], bool full,
                             bool named)
{
    uint64_t n = 1 << 20;
    for (size_t i = 0; i < l->n_tensors; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        if (full && named && t->in_base)
            n += NAMED_BYTES;
        if (!mt_checkpoint_holds(l, t) || (full && named && t->in_base))
            continue;
        n += t->kind == MT_RANGE_PACKED ? packed_bytes(t)
             : l->n_adapters            ? t->n * sizeof(float)
                                        : mt_plane_desc_bytes(&desc[MT_PLANE_HI], t->n);
        for (int k = 0; full && k < N_PARTS; k++)
            if (has_part(&desc[k], k, t))
                n += k == MASTER ? t->n * sizeof(float) : mt_tensor_span(t, &desc[k], (enum mt_plane_kind)k).bytes;
    }
    return n;
}

static int tensor_done(void *ctx, size_t index, unsigned long long sum, struct mt_err *err)
{
    struct mt_saver *v = ctx;
    char text[MT_SUM_TEXT];
    (void)err;
    if (!v->tensors)
        v->tensors = cJSON_CreateObject();
    mt_sum_format(text, sum);
    cJSON_AddStringToObject(v->tensors, v->decls[index].name, text);
    return 0;
}

int mt_save_file_done(void *ctx, const char *name, const struct mt_out_file *f, struct mt_err *err)
{
    struct mt_saver *v = ctx;
    char path[512], sum[MT_SUM_TEXT];
    cJSON *o = cJSON_CreateObject();
    snprintf(path, sizeof(path), "%s%s", v->prefix, name);
    mt_sum_format(sum, f->sum);
    cJSON_AddNumberToObject(o, "size", (double)f->bytes);
    cJSON_AddStringToObject(o, "xxh3", sum);
    mt_manifest_add_tensors(o, f->header, v->tensors);
    v->tensors = NULL;
    mt_json_add(v->files, path, o);
    (void)err;
    return 0;
}

struct mt_st_decl mt_state_decl(const struct mt_tensor *t, const struct mt_plane_desc *d, enum mt_plane_kind k)
{
    size_t bytes = mt_tensor_span(t, d, k).bytes, size = mt_dtype_size(d->dtype), block = d->block_bytes;
    struct mt_st_decl decl = {.dtype = d->dtype == MT_F32 ? MT_ST_F32 : MT_ST_BF16, .n_dims = 1};
    if (bytes == t->n * size) {
        decl.n_dims = t->n_dims;
        memcpy(decl.shape, t->shape, sizeof(t->shape));
    } else if (d->apart) {
        decl.shape[0] = (int64_t)(bytes / size);
    } else {
        decl = (struct mt_st_decl){.dtype = MT_ST_U8, .n_dims = 2, .shape = {(int64_t)(bytes / block), (int64_t)block}};
    }
    return decl;
}

/* The result of reading the planes: a later retry would fail again. */
static int noted(const struct mt_saver *v, int rc)
{
    if (rc && v->s->lost)
        *v->s->lost = true;
    return rc;
}

/* --- weights --------------------------------------------------------------------------------------- */

/* Tensors of the layout come first, then those that are copied. */
static int weight_source(void *ctx, size_t i, size_t first, size_t n, void *dst, struct mt_err *err)
{
    struct mt_saver *v = ctx;
    if (i < v->weights.n)
        return noted(v, mt_layout_files_read(&v->weights, i, first, n, dst, err));
    const struct mt_st_tensor *t = v->copied[i - v->weights.n];
    size_t size = mt_st_dtype_size(t->dtype);
    return mt_st_read_raw(v->s->base, t, first * size, n * size, dst, err);
}

int mt_save_find_copied(struct mt_saver *v, struct mt_err *err)
{
    const struct mt_layout *l = v->s->layout;
    const struct mt_st_model *m = v->s->base; /* NULL: random weights were trained */
    bool named = l->by_blocks && v->s->full;
    if ((!l->cfg.moe.n_experts && !l->cfg.nested) || !m || l->n_adapters || named)
        return 0;
    v->copied = mt_calloc(m->n_tensors, sizeof(*v->copied));
    if (!v->copied)
        return mt_fail_nomem(err, "a checkpoint", m->n_tensors * sizeof(*v->copied));
    for (size_t i = 0; i < m->n_tensors; i++)
        if (mt_stored_goes_along(l, m->tensors[i].name))
            v->copied[v->n_copied++] = &m->tensors[i];
    return 0;
}

/* The tensors of an adapter's file: indices in the layout, of the first tensor in each, and names. A tied model has its
 * table under both names. */
struct mt_adapter_files {
    struct mt_st_decl *decls;
    size_t *tensor, n;
    char (*names)[MT_PEFT_NAME];
    struct mt_stored_writer writer;
};

static int read_adapter(void *ctx, const struct mt_tensor *t, size_t first, size_t n, size_t size, void *dst,
                        struct mt_err *err)
{
    const struct mt_saver *v = ctx;
    (void)size;
    return noted(v, mt_tensor_read_masters(v->s->planes, t, first, n, dst, err));
}

static int adapter_source(void *ctx, size_t i, size_t first, size_t n, void *dst, struct mt_err *err)
{
    struct mt_saver *v = ctx;
    const struct mt_tensor *t = &v->s->layout->tensors[v->adapter->tensor[i]];
    if (!t->adapter)
        return read_adapter(v, t, first, n, sizeof(float), dst, err);
    return mt_stored_gather(&v->adapter->writer, t->place.stored, first, n, sizeof(float), dst, err);
}

/* name: of a tensor that is trained whole; NULL: the adapter's own. */
static void declare(struct mt_adapter_files *a, const struct mt_layout *l, size_t tensor, const char *name)
{
    const struct mt_tensor *t = &l->tensors[tensor];
    const struct mt_stored *s = &l->stored[t->place.stored];
    if (name)
        mt_peft_whole_name(a->names[a->n], l->cfg.family, name);
    else
        memcpy(a->names[a->n], s->name, sizeof(s->name));
    a->tensor[a->n] = tensor;
    a->decls[a->n] = (struct mt_st_decl){.name = a->names[a->n], .dtype = MT_ST_F32, .n_dims = s->n_dims,
                                         .shape = {s->shape[0], s->shape[1]}};
    a->n++;
}

/* Adapters with the first tensor that is in the same tensor of the file, and modules that are trained whole. */
static void declare_trained(struct mt_adapter_files *a, const struct mt_layout *l)
{
    for (size_t i = 0; i < l->n_tensors; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        if (t->adapter && l->pieces[l->stored[t->place.stored].first_piece] == i)
            declare(a, l, i, NULL);
        else if (!t->adapter && (t->trainable || t->saved_along))
            declare(a, l, i, t->name);
    }
    if (l->tied && l->tensors[0].trainable)
        declare(a, l, 0, "lm_head.weight");
}

int mt_save_adapter(struct mt_saver *v, struct mt_err *err)
{
    const struct mt_layout *l = v->s->layout;
    size_t most = l->n_tensors + 1;
    struct mt_adapter_files a = {mt_calloc(most, sizeof(*a.decls)), mt_calloc(most, sizeof(*a.tensor)), 0,
                              mt_calloc(most, sizeof(*a.names)), {.l = l, .read = read_adapter, .ctx = v}};
    char *base = mt_is_dir(v->s->base_model) ? mt_path_canonical(v->s->base_model) : strdup(v->s->base_model);
    char *config = base ? mt_peft_config_text(l, base) : NULL;
    int rc = a.decls && a.tensor && a.names && config ? 0 : mt_fail_nomem(err, "an adapter", most * sizeof(*a.decls));
    if (!rc)
        declare_trained(&a, l);
    v->prefix = "";
    v->decls = a.decls;
    v->adapter = &a;
    if (!rc)
        rc = mt_hf_dir_write(&(struct mt_hf_dir){.vfs = v->vfs, .dir = v->tmp, .model_dir = v->s->model_dir,
                                                 .files = v->s->files, .decls = a.decls, .n_decls = a.n,
                                                 .adapter_config = config, .source = adapter_source,
                                                 .tensor_done = tensor_done, .done = mt_save_file_done, .ctx = v},
                             err);
    mt_stored_writer_finish(&a.writer);
    free(a.decls);
    free(a.tensor);
    free(a.names);
    free(config);
    free(base);
    return rc;
}

/* Lists the tensors that the checkpoint only names. */
static size_t list_named(const struct mt_saver *v, const char **named, bool *left)
{
    const struct mt_layout *l = v->s->layout;
    size_t n = 0;
    for (size_t i = 0; i < l->n_tensors; i++)
        if (mt_save_names_only(v->s, &l->tensors[i])) {
            left[l->tensors[i].place.stored] = true;
            named[n++] = l->stored[l->tensors[i].place.stored].name; /* as the base model's files have it */
        }
    return n;
}

/* A run by blocks names all that it does not hold as the model's files have it: packed and fused tensors, too. */
static int name_rest(struct mt_saver *v, const char ***named, size_t *n, struct mt_err *err)
{
    const struct mt_st_model *base = v->s->base;
    size_t n_own = v->weights.n;
    int rc = 0;
    const char **own = mt_calloc(n_own, sizeof(*own)), **rest = mt_calloc(base->n_tensors, sizeof(*rest));
    for (size_t i = 0; own && i < n_own; i++) {
        const struct mt_st_tensor *t = mt_stored_find(base, v->weights.decls[i].name);
        v->weights.decls[i].name = t ? t->name : v->weights.decls[i].name; /* with the prefix that the files have */
        own[i] = v->weights.decls[i].name;
    }
    if (own && rest)
        *n = mt_overlay_rest(rest, base, own, n_own);
    else
        rc = mt_fail_nomem(err, "a checkpoint", base->n_tensors * sizeof(*rest));
    free(own);
    free(*named);
    *named = rest;
    return rc;
}

int mt_save_weights(struct mt_saver *v, struct mt_err *err)
{
    const struct mt_layout *l = v->s->layout;
    size_t n_named = 0;
    const char **named = mt_calloc(l->n_tensors, sizeof(*named));
    bool *left = mt_calloc(l->n_stored, sizeof(*left));
    int rc = named && left ? 0 : mt_fail_nomem(err, "a checkpoint", l->n_tensors * sizeof(*named));
    if (!rc) {
        n_named = list_named(v, named, left);
        rc = mt_layout_files_init(&v->weights, l, v->s->planes, left, v->n_copied, err);
    }
    if (!rc && l->by_blocks && v->s->full)
        rc = name_rest(v, &named, &n_named, err);
    for (size_t i = 0; i < v->n_copied && !rc; i++) {
        const struct mt_st_tensor *t = v->copied[i];
        struct mt_st_decl *decl = &v->weights.decls[v->weights.n + i];
        *decl = (struct mt_st_decl){.name = t->name, .dtype = t->dtype, .n_dims = t->n_dims};
        memcpy(decl->shape, t->shape, sizeof(t->shape));
    }
    v->prefix = "";
    v->decls = v->weights.decls;
    if (!rc)
        rc = mt_hf_dir_write(&(struct mt_hf_dir){.vfs = v->vfs, .dir = v->tmp,
                                                 .model_dir = v->s->model_dir,
                                                 .files = v->s->files, .decls = v->decls,
                                                 .n_decls = v->weights.n + v->n_copied,
                                                 .named = named, .n_named = n_named,
                                                 .base_dir = v->base_dir, .torch_dtype = "bfloat16",
                                                 .quantization = v->weights.quantization,
                                                 .shard_bytes = v->s->shard_bytes,
                                                 .source = weight_source,
                                                 .tensor_done = tensor_done, .done = mt_save_file_done,
                                                 .ctx = v},
                             err);
    mt_layout_files_finish(&v->weights);
    free(named);
    free(left);
    return rc;
}

/* --- training state -------------------------------------------------------------------------------- */

/* Index of a state tensor: tensor of the block * N_PARTS + part. */
static int state_source(void *ctx, size_t index, size_t first, size_t n, void *dst,
                        struct mt_err *err)
{
    const struct mt_saver *v = ctx;
    const struct mt_tensor *t = &v->s->layout->tensors[v->first_tensor + index / N_PARTS];
    int part = (int)(index % N_PARTS);
    enum mt_plane_kind kind = (enum mt_plane_kind)part;
    if (part == MASTER)
        return noted(v, mt_tensor_read_masters(v->s->planes, t, first, n, dst, err));
    size_t size = mt_st_dtype_size(v->decls[index].dtype);
    struct mt_tensor_span span = mt_tensor_span(t, mt_plane_desc_of(v->s->planes, kind), kind);
    return noted(v, mt_planes_read_bytes(v->s->planes, t->unit, kind, span.at + first * size, n * size, dst, err));
}

static void declare_state(const struct mt_saver *v, const struct mt_tensor *t, int part, struct mt_st_decl *decl,
                          char name[160])
{
    const struct mt_plane_desc *d = mt_plane_desc_of(v->s->planes, (enum mt_plane_kind)part);
    snprintf(name, 160, "%s.%s", t->name, part == MASTER ? "master" : d->saved_as);
    *decl = part == MASTER ? (struct mt_st_decl){.dtype = MT_ST_F32, .n_dims = t->n_dims,
                                                 .shape = {t->shape[0], t->shape[1]}}
                           : mt_state_decl(t, d, (enum mt_plane_kind)part);
    decl->name = name;
}

/* Writes the units of one block, from *unit on, to one file, whichever way layers are cut. */
static int write_block_state(struct mt_saver *v, const char *dir, size_t *unit, struct mt_err *err)
{
    const struct mt_layout *l = v->s->layout;
    size_t first = l->units[*unit].first_tensor, end = first, n = 0;
    int block = l->units[*unit].block;
    char name[64];
    for (; *unit < l->n_units && l->units[*unit].block == block; ++*unit)
        end += l->units[*unit].n_tensors;
    size_t most = (end - first) * N_PARTS;
    size_t *which = mt_calloc(most, sizeof(size_t));
    struct mt_st_decl *decls = mt_calloc(most, sizeof(*decls));
    char(*names)[160] = mt_calloc(most, sizeof(*names));
    int rc = which && decls && names ? 0 : mt_fail_nomem(err, "a checkpoint", most * sizeof(*decls));
    for (size_t t = first; t < end && !rc; t++)
        for (int p = 0; p < N_PARTS && !mt_save_names_only(v->s, &l->tensors[t]); p++) {
            size_t i = (t - first) * N_PARTS + (size_t)p;
            if (!mt_checkpoint_holds(l, &l->tensors[t]) ||
                !has_part(mt_plane_desc_of(v->s->planes, (enum mt_plane_kind)p), p, &l->tensors[t]))
                continue;
            declare_state(v, &l->tensors[t], p, &decls[i], names[i]);
            which[n++] = i;
        }
    v->first_tensor = first;
    v->decls = decls;
    snprintf(name, sizeof(name), "state-%05d.safetensors", block);
    if (!rc)
        rc = mt_hf_write_file(&(struct mt_hf_dir){.vfs = v->vfs, .dir = dir, .decls = decls, .n_decls = most,
                                                  .source = state_source, .tensor_done = tensor_done,
                                                  .done = mt_save_file_done, .ctx = v},
                              name, which, n, err);
    free(which);
    free(decls);
    free(names);
    return rc;
}

int mt_save_state(struct mt_saver *v, struct mt_err *err)
{
    char dir[4200];
    int rc = 0;
    snprintf(dir, sizeof(dir), "%s/megatrain", v->tmp);
    v->prefix = "megatrain/";
    for (size_t u = 0; u < v->s->layout->n_units && !rc;)
        rc = write_block_state(v, dir, &u, err);
    return rc;
}

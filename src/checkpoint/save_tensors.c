/* SPDX-License-Identifier: Apache-2.0 */
/* The tensors of a checkpoint: how many bytes they take, and their files. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/fs.h"
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
    uint64_t n = 1 << 20, copies = 0;
    for (const struct mt_stored *s = l->stored; s < l->stored + l->n_stored; s++)
        copies += &l->stored[s->source] != s ? s->n * mt_dtype_size(s->is_f32 ? MT_F32 : MT_BF16) : 0;
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
    return n + copies;
}

bool mt_state_part(struct mt_state_part *out, const mt_plane_set *planes, const struct mt_tensor *t,
                   enum mt_plane_kind kind)
{
    const struct mt_plane_desc *d = mt_plane_desc_of(planes, kind);
    struct mt_tensor_span span = mt_tensor_span(t, d, kind);
    bool master = kind == MT_PLANE_HI;
    size_t size = mt_dtype_size(d->dtype), block = d->block_bytes;
    struct mt_state_part p = {.t = t, .kind = kind, .at = span.at, .bytes = span.bytes};
    if (!has_part(d, (int)kind, t))
        return false;
    snprintf(p.name, sizeof(p.name), "%s.%s", t->name, master ? "master" : d->saved_as);
    p.decl = (struct mt_st_decl){.dtype = master || d->dtype == MT_F32 ? MT_ST_F32 : MT_ST_BF16, .n_dims = 1};
    if (master)
        p.bytes = t->n * sizeof(float);
    if (master || p.bytes == t->n * size) {
        p.decl.n_dims = t->n_dims;
        memcpy(p.decl.shape, t->shape, sizeof(t->shape));
    } else if (d->apart) {
        p.decl.shape[0] = (int64_t)(p.bytes / size);
    } else {
        p.decl = (struct mt_st_decl){.dtype = MT_ST_U8, .n_dims = 2,
                                     .shape = {(int64_t)(p.bytes / block), (int64_t)block}};
    }
    *out = p;
    return true;
}

/* --- weights --------------------------------------------------------------------------------------- */

bool mt_save_copies(const struct mt_checkpoint_save *s)
{
    const struct mt_layout *l = s->layout;
    bool named = l->by_blocks && s->full;
    return (l->cfg.moe.n_experts || l->cfg.nested) && s->base && !l->n_adapters && !named; /* no base: random weights */
}

/* Adapters with the first tensor that is in the same tensor of the file, and modules that are trained whole, of which
 * it makes the names. A tied model has its table under both. */
static int list_trained(struct mt_layout_files *f, char (*names)[MT_PEFT_NAME], struct mt_err *err)
{
    const struct mt_layout *l = f->writer.l;
    int rc = 0;
    for (size_t i = 0; i <= l->n_tensors && !rc; i++) {
        bool again = i == l->n_tensors; /* under its other name */
        const struct mt_tensor *t = &l->tensors[again ? 0 : i];
        const struct mt_stored *s = &l->stored[t->place.stored];
        struct mt_st_decl d = mt_stored_decl(s);
        bool listed = again ? l->tied && t->trainable
                            : t->adapter ? l->pieces[s->first_piece] == i : t->trainable || t->saved_along;
        d.dtype = MT_ST_F32;
        if (!t->adapter) {
            mt_peft_whole_name(names[i], l->cfg.family, again ? "lm_head.weight" : t->name);
            d.name = names[i];
        }
        rc = listed ? mt_source_add(&f->list, mt_layout_files_source(f, s, d), err) : 0;
    }
    return rc;
}

int mt_save_adapter(struct mt_saver *v, struct mt_err *err)
{
    const struct mt_layout *l = v->s->layout;
    MT_CLOSED_BY(mt_layout_files_finish) struct mt_layout_files f = {.lost = NULL};
    MT_FREED char(*names)[MT_PEFT_NAME] = mt_calloc(l->n_tensors + 1, sizeof(*names));
    MT_FREED char *base = mt_is_dir(v->s->base_model) ? mt_path_canonical(v->s->base_model) : strdup(v->s->base_model);
    MT_FREED char *config = base ? mt_peft_config_text(l, base) : NULL;
    mt_layout_files_of_planes(&f, l, v->s->planes);
    f.lost = v->s->lost;
    int rc = names && config ? list_trained(&f, names, err)
                             : mt_fail_nomem(err, "an adapter", l->n_tensors * sizeof(*names));
    const struct mt_hf_dir h = {.vfs = v->vfs, .dir = v->tmp, .model_dir = v->s->model_dir, .files = v->s->files,
                                .sources = f.list.p, .n_sources = f.list.n, .adapter_config = config,
                                .listed = v->files};
    return rc ?: mt_hf_dir_write(&h, err);
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
static int name_rest(const struct mt_saver *v, struct mt_layout_files *f, const char ***named, size_t *n,
                     struct mt_err *err)
{
    const struct mt_st_model *base = v->s->base;
    int rc = 0;
    const char **own = mt_calloc(f->list.n, sizeof(*own)), **rest = mt_calloc(base->n_tensors, sizeof(*rest));
    for (size_t i = 0; own && i < f->list.n; i++) {
        struct mt_st_decl *d = &f->list.p[i].decl;
        const struct mt_st_tensor *t = mt_stored_find(base, d->name);
        own[i] = d->name = t ? t->name : d->name; /* with the prefix that the files have */
    }
    if (own && rest)
        *n = mt_overlay_rest(rest, base, own, f->list.n);
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
    MT_CLOSED_BY(mt_layout_files_finish) struct mt_layout_files f = {.lost = NULL};
    size_t n_named = 0;
    MT_FREED const char **named = mt_calloc(l->n_tensors, sizeof(*named));
    MT_FREED bool *left = mt_calloc(l->n_stored, sizeof(*left));
    int rc = named && left ? 0 : mt_fail_nomem(err, "a checkpoint", l->n_tensors * sizeof(*named));
    if (!rc) {
        n_named = list_named(v, named, left);
        rc = mt_layout_files_init(&f, l, v->s->planes, left, err);
        f.lost = v->s->lost;
    }
    if (!rc && l->by_blocks && v->s->full)
        rc = name_rest(v, &f, &named, &n_named, err);
    if (!rc && mt_save_copies(v->s))
        rc = mt_layout_files_add_copied(&f, v->s->base, err);
    if (!rc)
        rc = mt_hf_dir_write(&(struct mt_hf_dir){.vfs = v->vfs, .dir = v->tmp,
                                                 .model_dir = v->s->model_dir,
                                                 .files = v->s->files, .sources = f.list.p, .n_sources = f.list.n,
                                                 .named = named, .n_named = n_named,
                                                 .base_dir = v->base_dir, .torch_dtype = "bfloat16",
                                                 .quantization = f.quantization,
                                                 .shard_bytes = v->s->shard_bytes, .listed = v->files}, err);
    return rc;
}

/* --- training state -------------------------------------------------------------------------------- */

static int read_state(const struct mt_source *s, size_t first, size_t n, void *dst, struct mt_err *err)
{
    const struct mt_saver *v = s->ctx;
    const struct mt_state_part *p = s->of;
    size_t size = mt_st_dtype_size(s->decl.dtype);
    int rc = p->kind == MT_PLANE_HI
                 ? mt_tensor_read_masters(v->s->planes, p->t, first, n, dst, err)
                 : mt_planes_read_bytes(v->s->planes, p->t->unit, p->kind, p->at + first * size, n * size, dst, err);
    if (rc && v->s->lost) /* a later try would fail again */
        *v->s->lost = true;
    return rc;
}

/* Adds the master and the states of a tensor. parts: [N_PARTS], for theirs. */
static int add_states(struct mt_saver *v, struct mt_source_list *list, const struct mt_tensor *t,
                      struct mt_state_part *parts, struct mt_err *err)
{
    int rc = 0;
    if (mt_save_names_only(v->s, t) || !mt_checkpoint_holds(v->s->layout, t))
        return 0;
    for (int k = 0; k < N_PARTS && !rc; k++) {
        struct mt_state_part *p = &parts[k];
        if (!mt_state_part(p, v->s->planes, t, (enum mt_plane_kind)k))
            continue;
        p->decl.name = p->name;
        rc = mt_source_add(list, (struct mt_source){.decl = p->decl, .read = read_state, .ctx = v, .of = p}, err);
    }
    return rc;
}

/* Writes the units of one block, from *unit on, to one file, whichever way layers are cut. */
static int write_block_state(struct mt_saver *v, size_t *unit, struct mt_err *err)
{
    const struct mt_layout *l = v->s->layout;
    size_t first = l->units[*unit].first_tensor, end = first;
    int block = l->units[*unit].block;
    MT_CLOSED_BY(mt_source_list_finish) struct mt_source_list list = {.p = NULL};
    for (; *unit < l->n_units && l->units[*unit].block == block; ++*unit)
        end += l->units[*unit].n_tensors;
    MT_FREED struct mt_state_part *parts = mt_calloc((end - first) * N_PARTS, sizeof(*parts));
    int rc = parts ? 0 : mt_fail_nomem(err, "a checkpoint", (end - first) * N_PARTS * sizeof(*parts));
    for (size_t t = first; t < end && !rc; t++)
        rc = add_states(v, &list, &l->tensors[t], parts + (t - first) * N_PARTS, err);
    const char *name = MT_PATH("megatrain/state-%05d.safetensors", block);
    return rc ?: mt_hf_write_file(&(struct mt_hf_dir){.vfs = v->vfs, .dir = v->tmp, .listed = v->files}, name, list.p,
                                  list.n, err);
}

int mt_save_state(struct mt_saver *v, struct mt_err *err)
{
    int rc = 0;
    for (size_t u = 0; u < v->s->layout->n_units && !rc;)
        rc = write_block_state(v, &u, err);
    return rc;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Which tensors of a layout are packed, read in place, or exact in bf16. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "model/packing.h"
#include "model/stored.h"
#include "weights/packer.h"
#include "weights/sources.h"
#include "weights/weights.h"

/* Without files, config.json says whether the tensor is packed. */
static enum mt_packed believed(const struct mt_layout *l, const struct mt_tensor *t)
{
    return mt_packing_takes(l, t, l->cfg.packed) ? l->cfg.packed : MT_PACKED_NONE;
}

/* Can it be converted and turned while it is read in place? */
static bool is_convertible(const struct mt_layout *l, const struct mt_tensor *t, const struct mt_st_tensor *src,
                           bool changed)
{
    bool plain = !src || src->dtype == MT_ST_BF16 || src->dtype == MT_ST_F16 || src->dtype == MT_ST_F32;
    return plain && !changed && !t->adapter && !l->stored[t->place.stored].is_f32;
}

/* With adapters, and where a block at a time is trained, what is frozen is the model's own, and stays so. */
static bool keeps_base(const struct mt_layout *l)
{
    return l->n_adapters || l->by_blocks;
}

/* What plain matrices are packed in: nothing where the model's others are of another kind of that format already. */
static enum mt_packed for_plain(const struct mt_layout *l, enum mt_packed wanted)
{
    bool same = l->cfg.packed == wanted && !mt_scale_has_zeros(l->cfg.packed_scale);
    return mt_packed_kind(l->cfg.packed) == wanted && !same ? MT_PACKED_NONE : wanted;
}

/* found: its source in the files; NULL: there are none. changed: its weights are not those of the files, and may need
 * all bits of f32. *split: set if it is not packed only because a tensor that is fused with it is trained. */
static int mark(struct mt_layout *l, struct mt_tensor *t, const struct mt_packed_source *found, enum mt_packed wanted,
                bool changed, bool *split, struct mt_err *err)
{
    struct mt_packed_source src = {.format = found ? MT_PACKED_NONE : believed(l, t), .scale = l->cfg.packed_scale};
    if (found)
        src = *found;
    enum mt_packed plain = for_plain(l, wanted);
    bool keeps = mt_packing_keeps(l, t), could = src.format || (plain && mt_packing_takes(l, t, plain));
    bool said_bf16 = !strcmp(l->cfg.torch_dtype, "bfloat16") && !l->stored[t->place.stored].is_f32;
    bool plain_bf16 = found ? src.codes && src.codes->dtype == MT_ST_BF16 : said_bf16;
    t->is_bf16 = !changed && (src.format ? src.format == MT_PACKED_MXFP4 : plain_bf16);
    bool same_bytes = !t->trainable && t->is_bf16 && mt_stored_is_in_order(t) && !(could && keeps) && !src.format;
    const char *stored = l->stored[t->place.stored].name;
    bool alone = !src.codes || (src.codes->n_elems == t->n && !strcmp(src.codes->name, stored));
    t->in_base = keeps_base(l) ? !t->trainable && !t->adapter && src.codes : same_bytes && alone;
    t->in_file = could && keeps ? keeps_base(l) && src.format && !src.wider_scales && !src.turned
                                : !t->trainable && !src.format && t->n * mt_dtype_size(MT_BF16) >= MT_IN_FILE_BYTES &&
                                      (same_bytes || (keeps_base(l) && is_convertible(l, t, src.codes, changed))) &&
                                      (!src.codes || src.codes->n_elems == l->stored[t->place.stored].n);
    t->file_elem = src.codes ? mt_st_dtype_size(src.codes->dtype) : !strcmp(l->cfg.torch_dtype, "float32") ? 4 : 2;
    if (wanted && src.format && mt_packed_kind(src.format) != wanted)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "model.base_dtype = %s, but tensor \"%s\" is %s in the model's files "
                       "already: remove the key", mt_packed_names[wanted], t->name, mt_packed_names[src.format]);
    if (src.turned && l->by_blocks)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "train.blocks: tensor \"%s\" is packed as GPTQ or AWQ, which checkpoints by "
                       "blocks cannot name: set train.blocks = off, or train the model in bf16", t->name);
    if (could && keeps)
        mt_packing_make(t, src.format ? src.format : plain);
    if (t->packed && src.format && (src.codes || mt_packed_kind(src.format) == MT_PACKED_INT4))
        t->scale = src.scale;
    if (t->packed && src.format && src.codes && !src.turned)
        t->note_bytes = src.note ? (uint16_t)src.note->n_bytes : 0;
    *split |= could && !keeps && !t->trainable;
    return 0;
}

/* Norms, routers and the like that are F32 in files of bf16 are also written as F32. */
static void mark_f32(struct mt_layout *l, const struct mt_st_model *st)
{
    const struct mt_st_tensor *embed = mt_stored_find(st, l->stored[0].name);
    for (size_t i = 0; embed && embed->dtype == MT_ST_BF16 && i < l->n_stored; i++) {
        const struct mt_st_tensor *t = mt_stored_find(st, l->stored[i].name);
        l->stored[i].is_f32 |= t && t->dtype == MT_ST_F32;
    }
}

int mt_weights_mark_random(struct mt_layout *l, enum mt_packed wanted, struct mt_err *err)
{
    for (size_t i = 0; i < l->n_tensors; i++)
        if (wanted && mt_packing_takes(l, &l->tensors[i], wanted) && mt_packing_keeps(l, &l->tensors[i]))
            mt_packing_make(&l->tensors[i], wanted);
    return wanted ? mt_layout_set_ranges(l, err) : 0;
}

int mt_weights_mark_stored(struct mt_layout *l, const char *dir, enum mt_packed wanted, const cJSON *only,
                           const cJSON *unpacked, struct mt_err *err)
{
    struct mt_sources s = {.of = NULL};
    struct mt_err unreadable = {0}; /* not reported here: loading the weights will report it */
    bool any = false, read = false, split = false;
    int rc = 0;
    for (size_t i = 0; i < l->n_tensors; i++)
        any |= !l->tensors[i].trainable;
    if (dir)
        read = !mt_st_open_dir(&s.st, dir, &unreadable);
    if (read)
        mark_f32(l, &s.st);
    if (read && any)
        rc = mt_sources_find(&s, l, err);
    MT_JSON_INDEX_FREED struct mt_json_index members = {.object = only}, plain = {.object = unpacked};
    for (size_t i = 0; any && i < l->n_tensors && !rc; i++) {
        bool changed = only && !mt_json_index_get(&members, l->tensors[i].name);
        if (unpacked && read && s.of[i].format && mt_json_index_get(&plain, l->tensors[i].name))
            l->tensors[i].is_bf16 = true;
        else
            rc = mark(l, &l->tensors[i], read ? &s.of[i] : NULL, wanted, changed, &split, err);
    }
    if (split && !rc)
        mt_info("a layer's experts are packed together or not at all: frozen ones in a layer with trained ones are kept as "
                "bf16, without loss");
    if (read)
        mt_sources_close(&s);
    return rc || !any ? rc : mt_layout_set_ranges(l, err);
}

int mt_weights_layout(struct mt_layout **out, const char *dir, bool frozen, struct mt_adapter_spec *adapters,
                      struct mt_err *err)
{
    char pattern[64];
    const char *const layers[] = {pattern};
    MT_FREED struct mt_hf_config *cfg = mt_calloc(1, sizeof(*cfg));
    int rc = cfg ? mt_hf_config_read(cfg, dir, err) : mt_fail_nomem(err, dir, sizeof(*cfg));
    if (!rc) {
        snprintf(pattern, sizeof(pattern), "%slayers.*", cfg->names->modules);
        const struct mt_layout_params p = {.freeze = layers, .n_freeze = frozen && !adapters,
                                           .adapter = adapters, .cut = mt_cut_layer};
        rc = mt_layout_create(out, cfg, &p, err);
    }
    return rc;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* A configuration's model, laid out to train, to generate, and for several learners. */
#include "base/mem.h"
#include "config/blocks.h"
#include "model/packing.h"
#include "plan/resolve.h"
#include "weights/adapter_keys.h"
#include "weights/weights.h"

/* Refuses a model.base_dtype without effect. */
static int check_packs(const struct mt_layout *l, enum mt_packed wanted, struct mt_err *err)
{
    for (size_t i = 0; i < l->n_tensors; i++)
        if (!wanted || l->tensors[i].kind == MT_RANGE_PACKED)
            return 0;
    return mt_fail(err, MT_ERR_USAGE, -EINVAL, "model.base_dtype = %s packs nothing, since only frozen matrices of layers are "
                   "packed, and these with rows of whole blocks alone: train adapters (adapter.kind), freeze some "
                   "(model.freeze), or remove the key",
                   mt_packed_names[wanted]);
}

/* Random weights are f32; so may be a checkpoint's weights that were trained before they were frozen. */
static int lay_out_marked(struct mt_layout **layout, const struct mt_lay_out *o, const struct mt_layout_params *p,
                          const cJSON *from_files, struct mt_err *err)
{
    const struct mt_config *c = o->cfg;
    const cJSON *unpacked = o->resumed ? o->resumed->unpacked : NULL;
    int rc = mt_layout_create(layout, o->hf, p, err);
    if (rc)
        return rc;
    rc = c->model.init == MT_INIT_WEIGHTS
             ? mt_weights_mark_stored(*layout, o->dir, c->model.base_dtype, from_files, unpacked, err)
             : mt_weights_mark_random(*layout, c->model.base_dtype, err);
    return rc ? rc : check_packs(*layout, c->model.base_dtype, err);
}

/* What stays packed, and so crosses the link in fewer bytes, is known once a layout is compared with the files. */
static int lay_out_once(struct mt_layout **layout, const struct mt_lay_out *o, const struct mt_layout_params *p,
                        const cJSON *from_files, struct mt_err *err)
{
    struct mt_layout_params again = *p;
    int rc = lay_out_marked(layout, o, p, from_files, err);
    if (rc || p->cut.expert_group)
        return rc;
    again.cut.expert_group = mt_packing_expert_group(*layout);
    if (again.cut.expert_group == (*layout)->cut.expert_group)
        return 0;
    mt_layout_destroy(layout);
    return lay_out_marked(layout, o, &again, from_files, err);
}

/* Refuses texts that the model's indexer would choose from. */
static int check_longest(const struct mt_lay_out *o, struct mt_err *err)
{
    const struct mt_hf_config *hf = o->hf;
    long long len = o->cfg->numerics.seq_len, most = hf->longest;
    if (!most || len <= most)
        return 0;
    return mt_fail(err, MT_ERR_USAGE, -EINVAL, "a text may have %lld tokens: in %s a token of a longer one than %s = %lld "
                   "attends to some of the earlier ones, which is not supported: set data.seq_len, or the longest text, to "
                   "at most %lld", len, o->dir ? o->dir : hf->family->architecture, hf->family->longest_key, most, most);
}

/* Does each layer have weights of its own from there on, by train.delink_at? */
static bool is_delinked(const struct mt_config *c, const struct mt_resumed *resumed)
{
    return c->train.delink_at && resumed && resumed->step >= (uint64_t)c->train.delink_at;
}

/* Refuses blocks without anything to train, before the first one is trained. p: of the one that is laid out. */
static int check_blocks(const struct mt_layout *l, const struct mt_blocks *b, const struct mt_layout_params *p,
                        struct mt_err *err)
{
    int first = 0, end = 0;
    bool any = true;
    for (uint64_t block = 0; block < b->n && any; block++) {
        mt_blocks_layers(b, block, &first, &end);
        any = false;
        for (const struct mt_tensor *t = l->tensors; t < l->tensors + l->n_tensors && !any; t++) {
            int layer = l->units[t->unit].layer;
            bool always = t->trainable && (layer < p->first_layer || layer >= p->end_layer);
            any = always || ((t->trainable || t->waits) && layer >= first && layer < end);
        }
    }
    return any ? 0 : mt_fail(err, MT_ERR_USAGE, -EINVAL, "model.freeze leaves nothing to train in layers %d to %d, a block of "
                             "train.blocks", first, end - 1);
}

/* Lays out for n specs of adapters. */
static int lay_out_specs(struct mt_layout **layout, struct mt_layout **halves, const struct mt_lay_out *o,
                         struct mt_adapter_spec *adapter, size_t n, struct mt_err *err)
{
    const struct mt_config *c = o->cfg;
    struct mt_blocks blocks;
    int rc = check_longest(o, err) ?: mt_blocks_init(&blocks, c, o->hf->n_layers, err);
    if (rc)
        return rc;
    /* the base of adapters, and that of a block, is always read from the model */
    const cJSON *only = c->adapter.kind != MT_ADAPTER_NONE || blocks.n || !o->resumed ? NULL : o->resumed->from_files;
    struct mt_layout_params p = {
        .freeze = (const char *const *)c->model.freeze.items,
        .n_freeze = (size_t)c->model.freeze.n,
        .matrices = (const char *const *)c->optimizer.matrices.items,
        .n_matrices = (size_t)c->optimizer.matrices.n,
        .decay_embeddings = c->numerics.decay_embeddings,
        .cut = c->placement.unit == MT_CUT_HALVES ? mt_cut_half : mt_cut_layer,
        .share = is_delinked(c, o->resumed) ? 1 : (int)c->model.share_layers,
        .adapter = adapter,
        .n_learners = n,
        .optimizer = mt_plan_optimizer(c),
        .master = c->numerics.master,
    };
    p.rank = (size_t)mt_optimizer_key(p.optimizer, c->numerics.optimizer_keys, "rank");
    if (blocks.n) {
        p.by_blocks = true;
        uint64_t block = o->resumed ? mt_blocks_at(&blocks, o->resumed->phase) : 0;
        mt_blocks_layers(&blocks, block, &p.first_layer, &p.end_layer);
        p.always = (const char *const *)c->train.blocks_always.items;
        p.n_always = (size_t)c->train.blocks_always.n;
    }
    if (c->placement.expert_group != MT_AUTO)
        p.cut.expert_group = (size_t)c->placement.expert_group;
    rc = lay_out_once(layout, o, &p, only, err) ?: check_blocks(*layout, &blocks, &p, err);
    if (!rc && c->placement.unit == MT_CUT_AUTO) {
        size_t group = p.cut.expert_group;
        p.cut = mt_cut_half;
        p.cut.expert_group = group;
        rc = lay_out_once(halves, o, &p, only, err);
    }
    return rc;
}

int mt_plan_lay_out_shared(struct mt_layout **layout, struct mt_layout **halves, const struct mt_lay_out *o, size_t n,
                           struct mt_err *err)
{
    MT_FREED struct mt_adapter_spec *adapter = NULL;
    int rc = MT_NEW(&adapter, n, "the adapters", err);
    *layout = *halves = NULL;
    for (size_t i = 0; i < n && !rc; i++)
        rc = mt_adapters_by_config(&adapter[i], o[i].cfg, o[i].resumed ? o[i].resumed->dir : NULL, err);
    rc = rc ?: lay_out_specs(layout, halves, o, adapter, n, err);
    for (size_t i = 0; adapter && i < n; i++)
        mt_adapter_spec_finish(&adapter[i]);
    return rc;
}

int mt_plan_lay_out_to_generate(struct mt_layout **layout, struct mt_layout **halves, const struct mt_config *cfg,
                                const struct mt_hf_config *hf, const char *dir, struct mt_err *err)
{
    struct mt_config whole = *cfg;
    struct mt_layout *none = NULL;
    bool packed = false;
    MT_FREED struct mt_hf_config *of = NULL;
    if (cfg->memory.latent_cache && cfg->numerics.compute == MT_COMPUTE_FP8)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "memory.latent_cache = on makes keys and values again in other products, which "
                       "model.compute = fp8 would give other scales: set memory.latent_cache = off, or model.compute = bf16");
    int rc = MT_NEW(&of, 1, "a layout", err);
    if (rc)
        return rc;
    *of = *hf;
    for (int i = 0; i < of->n_specs; i++)
        of->spec[i].latent_cache = of->spec[i].kv_latent && cfg->memory.latent_cache;
    rc = mt_plan_lay_out(layout, halves, cfg, of, dir, NULL, err);
    for (size_t u = 0; !rc && u < (*layout)->n_units; u++)
        packed |= (*layout)->units[u].n_in_planes[MT_RANGE_PACKED] > 0;
    if (rc || !packed || cfg->numerics.dtype != MT_BF16)
        return rc;
    mt_layout_destroy(halves);
    if (cfg->placement.unit == MT_CUT_AUTO)
        whole.placement.unit = MT_CUT_LAYERS;
    rc = mt_plan_lay_out(halves, &none, &whole, of, dir, NULL, err);
    if (!rc)
        mt_layout_keep_codes(*halves);
    return rc;
}

int mt_plan_check_trained(const struct mt_layout *l, struct mt_err *err)
{
    return l->n_trained ? 0 : mt_fail(err, MT_ERR_USAGE, -EINVAL, "model.freeze leaves nothing to train");
}

int mt_plan_lay_out(struct mt_layout **layout, struct mt_layout **halves, const struct mt_config *c,
                    const struct mt_hf_config *hf, const char *dir, const struct mt_resumed *resumed,
                    struct mt_err *err)
{
    return mt_plan_lay_out_shared(layout, halves, &(struct mt_lay_out){c, hf, dir, resumed}, 1, err);
}

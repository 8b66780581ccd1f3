/* SPDX-License-Identifier: Apache-2.0 */
#include "model/layout.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "device/ops.h"
#include "model/layout_builder.h"
#include "model/part.h"
#include "model/recipe.h"
#include "model/stored.h"

const struct mt_cut mt_cut_layer = {.name = "layer", .n_units = 1}, mt_cut_half = {.name = "half", .n_units = 2, .n_parts = {1}};

const struct mt_hf_config *mt_layout_builder_config(const struct mt_layout_builder *b)
{
    return &b->l->cfg;
}

static bool decays(const struct mt_layout_builder *b, const char *name)
{
    if (strstr(name, "bias") || strstr(name, "norm"))
        return false;
    if (strstr(name, "embed_tokens") || strstr(name, "lm_head"))
        return b->p->decay_embeddings;
    return true;
}

/* Does adapter.train_also name the tensor's module: as transformers does, or the files? inside: or one that it is in. */
static bool trained_also(struct mt_layout_builder *b, const char *name, bool inside)
{
    struct mt_adapter_list *also = &mt_layout_spec(b)->train_also;
    char module[MT_TENSOR_NAME], *dot;
    mt_layout_module_of(module, sizeof(module), name);
    bool hit = mt_adapter_match(also, module);
    mt_family_module(module, sizeof(module), b->l->cfg.family, name);
    hit |= mt_adapter_match(also, module) != NULL;
    while (inside && !hit && (dot = strrchr(module, '.'))) {
        *dot = 0;
        hit = mt_adapter_match(also, module);
    }
    return hit;
}

/* Of training by blocks: does the tensor belong to another one? */
static bool of_another_block(struct mt_layout_builder *b, const char *name, int layer)
{
    const struct mt_layout_params *p = b->p;
    bool hit = p->by_blocks && (layer < p->first_layer || layer >= p->end_layer);
    for (size_t i = 0; i < p->n_always; i++)
        if (!fnmatch(p->always[i], name, 0)) {
            b->always_used[i] = true;
            hit = false;
        }
    return hit;
}

static bool frozen(struct mt_layout_builder *b, const char *name)
{
    bool hit = false;
    if (mt_layout_has_adapters(b))
        return !trained_also(b, name, false);
    for (size_t i = 0; i < b->p->n_freeze; i++)
        if (!fnmatch(b->p->freeze[i], name, 0))
            hit = b->glob_used[i] = true;
    return hit;
}

static void add_tensor(struct mt_layout_builder *b, const struct mt_layout_place *at, int64_t cols,
                       const struct mt_param_tensor *tensor)
{
    struct mt_tensor *t = mt_layout_begin_tensor(b, at, tensor->rows, cols);
    if (!t)
        return;
    t->usual = tensor->usual;
    t->head_rows = tensor->head_rows;
    t->start = tensor->start;
    t->log_to = tensor->log_to;
    mt_stored_name(t, b->l, at->part->layer, tensor->usual);
    t->decay = decays(b, t->usual); /* as transformers' names have it */
    t->matrix = mt_layout_is_matrix(b, at, t);
    t->rank = b->p->rank;
    b->u->n_params += t->n;
    bool may = !tensor->constant && !frozen(b, t->name);
    t->waits = of_another_block(b, t->name, at->part->layer) && may;
    mt_layout_set_trainable(b, t, may && !t->waits);
    t->saved_along = tensor->constant && mt_layout_has_adapters(b) && trained_also(b, t->name, true);
}

static void add_param(struct mt_layout_builder *b, const struct mt_layout_place *at, int64_t cols, size_t n,
                      const struct mt_param_tensor *tensors)
{
    *at->param = (struct mt_param){.at = mt_align_up(b->u->n_elems, MT_PARAM_ALIGN)};
    for (size_t i = 0; i < n; i++)
        add_tensor(b, at, cols, &tensors[i]);
}

void mt_layout_add_param(struct mt_layout_builder *b, struct mt_part *p, int role, int64_t cols, size_t n,
                         const struct mt_param_tensor *tensors)
{
    add_param(b, &(struct mt_layout_place){p, &p->param[role], -1}, cols, n, tensors);
}

void mt_layout_add_tensor(struct mt_layout_builder *b, struct mt_part *p, int role, int64_t rows, int64_t cols,
                          const char *usual)
{
    mt_layout_add_param(b, p, role, cols, 1, &(struct mt_param_tensor){.usual = usual, .rows = rows});
}

void mt_layout_add_norm(struct mt_layout_builder *b, struct mt_part *p, int role, int64_t n, const char *usual,
                        const struct mt_norm_spec *norm)
{
    const struct mt_param_tensor w = {.usual = usual, .rows = n, .start = norm->plus_one ? 0 : 1};
    if (usual)
        mt_layout_add_param(b, p, role, 0, 1, &w);
}

void mt_layout_add_norm_bias(struct mt_layout_builder *b, struct mt_part *p, int role, int64_t n, const char *usual,
                             const struct mt_norm_spec *norm)
{
    const struct mt_param_tensor bias = {.usual = usual, .rows = n};
    if (norm->biased)
        add_tensor(b, &(struct mt_layout_place){p, &p->param[role], -1}, 0, &bias);
}

void mt_layout_add_expert_param(struct mt_layout_builder *b, struct mt_part *p, int i, int role, int64_t cols, size_t n,
                                const struct mt_param_tensor *tensors)
{
    add_param(b, &(struct mt_layout_place){p, &p->expert[i][role], p->first_expert + i}, cols, n, tensors);
}

/* --- units ------------------------------------------------------------------------------------------- */

static void open_unit(struct mt_layout_builder *b, enum mt_unit_kind kind, int layer)
{
    int block = mt_block_of(kind, layer, b->l->cfg.n_layers, b->l->share);
    b->u = &b->l->units[b->l->n_units];
    *b->u = (struct mt_unit){.kind = kind, .layer = layer, .block = block, .weights = b->l->n_units++,
                             .first_tensor = b->l->n_tensors, .first_part = b->l->n_parts,
                             .f32_tensor = MT_NO_TENSOR};
}

/* The recipe of a kind in layers like that. */
static const struct mt_recipe *recipe_of(struct mt_layout_builder *b, const struct mt_part_kind *kind,
                                         const struct mt_layer_spec *spec)
{
    struct mt_layout *l = b->l;
    for (size_t i = 0; i < l->n_recipes; i++)
        if (l->recipes[i]->kind == kind && l->recipes[i]->spec == spec)
            return l->recipes[i];
    struct mt_recipe *r = mt_recipe_create(kind, &l->cfg, spec);
    if (!r || !mt_grow(&l->recipes, &l->cap_recipes, l->n_recipes + 1, sizeof(*l->recipes))) {
        free(r);
        b->failed = true;
        return NULL;
    }
    r->index = l->n_recipes;
    return l->recipes[l->n_recipes++] = r;
}

static void add_part(struct mt_layout_builder *b, const struct mt_part_kind *kind, int first_expert, int n_experts)
{
    struct mt_part *p = &b->l->parts[b->l->n_parts++];
    *p = (struct mt_part){.kind = kind, .layer = b->u->layer,
                          .spec = b->u->layer < 0 ? NULL : mt_layer_of(&b->l->cfg, b->u->layer),
                          .first_expert = first_expert, .n_experts = n_experts,
                          .expert = n_experts ? b->l->experts + b->n_experts : NULL};
    size_t first = b->l->n_tensors;
    b->n_experts += (size_t)n_experts;
    b->u->n_parts++;
    b->u->per_step = kind->per_step;
    p->recipe = kind->recipe ? recipe_of(b, kind, p->spec) : NULL;
    if (kind->lay_out)
        kind->lay_out(b, p);
    unsigned linears = p->recipe ? p->recipe->linears : kind->adapted;
    for (int role = 0; role < MT_PART_MAX_PARAMS; role++)
        p->param[role].linear = linears >> role & 1;
    if (mt_layout_has_adapters(b))
        mt_layout_add_adapters(b, p, p->param, MT_PART_MAX_PARAMS, first);
}

/* "embed", "layer 7"; if the layer has several units: "layer 7 attention", "layer 7 experts 8-15". */
static void close_unit(struct mt_layout_builder *b, bool whole)
{
    struct mt_unit *u = b->u;
    const struct mt_part *p = &b->l->parts[u->first_part];
    char *name = u->name;
    size_t len = sizeof(u->name), at = (size_t)(u->layer < 0 ? snprintf(name, len, "%s", p->kind->name)
                                                             : snprintf(name, len, "layer %d", u->layer));
    for (size_t i = 0; !whole && i < u->n_parts && at < len; i++) {
        at += (size_t)snprintf(name + at, len - at, " %s", p[i].kind->name);
        if (p[i].n_experts && at < len)
            at += (size_t)snprintf(name + at, len - at, " %d-%d", p[i].first_expert,
                                   p[i].first_expert + p[i].n_experts - 1);
    }
    u->n_elems = mt_align_up(u->n_elems, MT_JOIN_BLOCK);
    b->l->n_params += u->n_params;
}

static void add_end(struct mt_layout_builder *b, enum mt_unit_kind kind, const struct mt_part_kind *part)
{
    open_unit(b, kind, -1);
    add_part(b, part, 0, 0);
    close_unit(b, true);
}

static size_t count_parts(const char *const *parts)
{
    size_t n = 0;
    while (n < MT_LAYER_MAX_PARTS && parts[n])
        n++;
    return n;
}

/* Number of parts from `first` on that run by micro-batch, up to one that runs once a group or to the end. */
static size_t count_by_micro(const char *const *parts, size_t first, size_t n)
{
    size_t i = first;
    while (i < n && !mt_part_find(parts[i])->per_step)
        i++;
    return i - first;
}

static void add_unit(struct mt_layout_builder *b, int layer, const char *const *parts, size_t n, bool whole)
{
    open_unit(b, MT_UNIT_LAYER, layer);
    for (size_t i = 0; i < n; i++)
        add_part(b, mt_part_find(parts[i]), 0, 0);
    close_unit(b, whole);
}

static void add_groups(struct mt_layout_builder *b, int layer, const struct mt_part_kind *kind)
{
    int n = (int)b->l->cfg.moe.n_experts, group = (int)b->l->cut.expert_group;
    for (int first = 0; first < n; first += group) {
        open_unit(b, MT_UNIT_LAYER, layer);
        add_part(b, kind, first, MT_MIN(group, n - first));
        close_unit(b, false);
    }
}

static void add_layer(struct mt_layout_builder *b, int layer)
{
    const char *const *parts = mt_layer_of(&b->l->cfg, layer)->parts;
    const struct mt_cut *cut = &b->l->cut;
    size_t n = count_parts(parts), lead = count_by_micro(parts, 0, n), next = 0;
    bool whole = cut->n_units == 1 && lead == n;
    for (size_t i = 0; i < cut->n_units && next < lead; i++) {
        size_t take = i + 1 < cut->n_units ? MT_MIN((size_t)cut->n_parts[i], lead - next) : lead - next;
        add_unit(b, layer, parts + next, take, whole);
        next += take;
    }
    while (next < n) {
        const struct mt_part_kind *kind = mt_part_find(parts[next]);
        size_t take = kind->per_step ? 1 : count_by_micro(parts, next, n);
        if (kind->per_group)
            add_groups(b, layer, kind);
        else
            add_unit(b, layer, parts + next, take, false);
        next += take;
    }
}

static bool tensors_alike(const struct mt_tensor *a, const struct mt_tensor *b)
{
    return !strcmp(a->usual, b->usual) && a->expert == b->expert && a->n_dims == b->n_dims && a->first == b->first &&
           a->shape[0] == b->shape[0] && a->shape[1] == b->shape[1] && a->trainable == b->trainable;
}

/* Whether unit b can have the weights of a. *differs: b's first tensor that is another, if there is one. */
static bool can_share(const struct mt_layout *l, const struct mt_unit *a, const struct mt_unit *b,
                      const struct mt_tensor **differs)
{
    bool same = a->n_parts == b->n_parts && a->n_tensors == b->n_tensors;
    for (size_t i = 0; i < a->n_parts && same; i++)
        same = l->parts[a->first_part + i].kind == l->parts[b->first_part + i].kind;
    for (size_t i = 0; i < MT_MIN(a->n_tensors, b->n_tensors); i++) {
        const struct mt_tensor *t = &l->tensors[b->first_tensor + i];
        if (tensors_alike(&l->tensors[a->first_tensor + i], t))
            continue;
        *differs = t;
        return false;
    }
    return same;
}

/* The units of the layer, from `first` on, get the tensors of those of an earlier layer, and have none. */
static void share_weights(struct mt_layout_builder *b, size_t first, int layer, int with)
{
    struct mt_layout *l = b->l;
    const struct mt_tensor *differs = NULL;
    size_t of = first;
    while (l->units[of - 1].layer >= with)
        of--;
    bool same = true;
    for (size_t u = first; u < l->n_units && same && !b->failed; u++)
        same = l->units[of + u - first].layer == with &&
               can_share(l, &l->units[of + u - first], &l->units[u], &differs);
    if (!same && !b->rc)
        b->rc = mt_fail(b->err, MT_ERR_USAGE, -EINVAL, "model.share_layers = %d: layer %d cannot have the weights of layer %d, "
                        "which has other parts or tensors%s%s: set it so that each group has layers of one kind, trained "
                        "alike (1: each layer has its own)", l->share, layer, with, differs ? ", beginning with " : "",
                        differs ? differs->name : "");
    l->n_tensors = l->units[first].first_tensor;
    for (size_t u = first; u < l->n_units; u++, of++) {
        struct mt_unit *unit = &l->units[u];
        l->n_params -= unit->n_params;
        for (size_t i = 0; i < unit->n_tensors; i++)
            l->n_trained -= l->tensors[unit->first_tensor + i].trainable ? l->tensors[unit->first_tensor + i].n : 0;
        unit->weights = of;
        unit->first_tensor = l->n_tensors;
        unit->n_elems = unit->n_params = unit->n_tensors = 0;
        unit->trainable = false;
    }
}

static void add_layers(struct mt_layout_builder *b)
{
    for (int i = 0; i < (int)b->l->cfg.n_layers; i++) {
        size_t first = b->l->n_units;
        int with = mt_layer_sharing(i, b->l->share);
        add_layer(b, i);
        if (with != i)
            share_weights(b, first, i, with);
    }
}

/* Parameters of an expert, without padding: near enough for the size of a group. */
static size_t expert_elems(const struct mt_hf_config *cfg)
{
    const struct mt_moe *m = &cfg->moe;
    int64_t row = (int64_t)mt_moe_row(cfg);
    return (size_t)((mt_moe_inner(m, m->width) + m->width) * row + (m->expert_bias ? 2 * m->width + row : 0));
}

static size_t group_of(const struct mt_hf_config *cfg, size_t asked)
{
    size_t n = (size_t)cfg->moe.n_experts, one = expert_elems(cfg) * mt_dtype_size(MT_BF16);
    if (!n)
        return 0;
    size_t group = asked ? asked : (size_t)MT_EXPERT_GROUP_BYTES / one;
    return MT_MIN(MT_MAX(group, (size_t)1), n);
}

static int check_globs(const struct mt_layout_builder *b, struct mt_err *err)
{
    for (size_t i = 0; i < b->p->n_freeze; i++)
        if (!b->glob_used[i])
            return mt_fail(err, MT_ERR_USAGE, -EINVAL,
                           "model.freeze: \"%s\" matches no tensor (names are like %s)",
                           b->p->freeze[i], b->l->tensors[b->l->n_tensors / 2].name);
    for (size_t i = 0; i < b->p->n_always; i++)
        if (!b->always_used[i])
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "train.blocks_always: \"%s\" matches no tensor (names are like %s)",
                           b->p->always[i], b->l->tensors[b->l->n_tensors / 2].name);
    return 0;
}

/* The sum of a mixture's experts has the hidden state in it: nothing can be between the two, unless the layer's end
 * adds that to an MLP beside them. A factor of what experts add is in their weights, and in a shared expert without a
 * gate. */
static int check_mixture(const struct mt_hf_config *cfg, const struct mt_layer_spec *s, struct mt_err *err)
{
    const char *after = mt_moe_adds_last(&cfg->moe) ? NULL : s->norms.mlp.after;
    bool scaled = s->residual == 1 || (cfg->moe.scale_is_residual && !cfg->moe.shared_gate);
    if (!s->is_mixture || (!after && scaled))
        return 0;
    return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "family %s: %s%s after a mixture of experts is not supported",
                   cfg->family->model_type, after ? "the norm " : "a residual factor other than 1", after ? after : "");
}

static int check_parts(const struct mt_hf_config *cfg, struct mt_err *err)
{
    for (int s = 0; s < cfg->n_specs; s++) {
        const char *const *parts = cfg->spec[s].parts;
        int rc = check_mixture(cfg, &cfg->spec[s], err);
        if (rc)
            return rc;
        for (size_t i = 0; i < count_parts(parts); i++)
            if (!mt_part_find(parts[i]))
                return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "family %s: unknown part \"%s\"", cfg->family->model_type,
                               parts[i]);
    }
    return 0;
}

/* Allocates upper bounds of units, parts, experts and adapters (n_learners: that have some): the arrays must not move
 * while they are filled. */
static int allocate(struct mt_layout *l, const struct mt_hf_config *cfg, size_t n_learners, struct mt_err *err)
{
    size_t groups = l->cut.expert_group ? mt_div_up((size_t)cfg->moe.n_experts, l->cut.expert_group) : 0;
    size_t n = 2, experts = 0;
    for (int64_t i = 0; i < cfg->n_layers; i++) {
        const struct mt_layer_spec *s = mt_layer_of(cfg, i);
        n += count_parts(s->parts) + (s->is_mixture ? groups : 0);
        experts += s->is_mixture ? (size_t)cfg->moe.n_experts : 0;
    }
    l->units = mt_arrays_add(&l->arrays, n, sizeof(*l->units));
    l->parts = mt_arrays_add(&l->arrays, n, sizeof(*l->parts));
    l->experts = mt_arrays_add(&l->arrays, experts, sizeof(*l->experts));
    if (n_learners)
        l->adapters = mt_arrays_add(
            &l->arrays, n_learners * (n * MT_PART_MAX_PARAMS + experts * MT_EXPERT_MAX_PARAMS), sizeof(*l->adapters));
    return l->arrays.failed ? mt_fail_nomem(err, "the model's layout", n * sizeof(*l->parts)) : 0;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp((*(const struct mt_tensor *const *)a)->name, (*(const struct mt_tensor *const *)b)->name);
}

static int sort_names(struct mt_layout *l, struct mt_err *err)
{
    l->by_name = mt_arrays_add(&l->arrays, l->n_tensors, sizeof(*l->by_name));
    if (!l->by_name)
        return mt_fail_nomem(err, "the model's layout", l->n_tensors * sizeof(*l->by_name));
    for (size_t i = 0; i < l->n_tensors; i++)
        l->by_name[i] = &l->tensors[i];
    qsort(l->by_name, l->n_tensors, sizeof(*l->by_name), compare_names);
    return 0;
}

static void count_active(struct mt_layout *l)
{
    const struct mt_moe *m = &l->cfg.moe;
    uint64_t of_experts = 0, rest = 0;
    for (size_t i = 0; i < l->n_tensors; i++)
        if (!l->tensors[i].adapter)
            *(l->tensors[i].expert < 0 ? &rest : &of_experts) += l->tensors[i].n;
    if (!l->tied)
        rest -= l->units[0].n_params;
    l->n_active = rest + (of_experts ? of_experts / (uint64_t)m->n_experts * (uint64_t)m->top_k : 0);
}

/* Only their matrices; biases for choosing experts are on the device as constants (select_bias.c). */
static void find_f32_routers(struct mt_layout *l)
{
    for (size_t i = 0; i < l->n_tensors; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        if (t->adapter || t->n_dims != 2 || !l->stored[t->place.stored].is_f32)
            continue;
        l->units[t->unit].f32_tensor = i;
        l->f32_routers = true;
    }
}

/* The kinds of segments of which any unit has some. */
static void list_segments(struct mt_layout *l)
{
    for (size_t u = 0; u < l->n_units; u++) {
        struct mt_segment s[MT_MAX_SEGMENTS];
        size_t n = mt_unit_segments(l, u, MT_BF16, 1, s);
        for (size_t i = 0; i < n; i++)
            if (s[i].bytes && mt_segment_find(l, &s[i]) == l->n_segments && l->n_segments < MT_MAX_SEGMENT_KINDS)
                l->segment[l->n_segments++] = s[i];
    }
}

/* A tensor of the files is trained or frozen as a whole, in later blocks, too: overlays and checkpoints have it so. */
static int check_whole(const struct mt_layout *l, struct mt_err *err)
{
    for (const struct mt_stored *s = l->stored; s < l->stored + l->n_stored; s++) {
        const struct mt_tensor *first = &l->tensors[l->pieces[s->first_piece]];
        for (size_t k = 1; k < s->n_pieces; k++) {
            const struct mt_tensor *t = &l->tensors[l->pieces[s->first_piece + k]];
            if (t->trainable != first->trainable || t->waits != first->waits)
                return mt_fail(err, MT_ERR_USAGE, -EINVAL, "train.blocks: the model's files have %s and %s in one tensor, %s: "
                               "name both or neither in model.freeze and train.blocks_always", first->name, t->name, s->name);
        }
    }
    return 0;
}

static int lay_out(struct mt_layout_builder *b, const struct mt_hf_config *cfg, struct mt_err *err)
{
    struct mt_layout *l = b->l;
    l->cfg = *cfg;
    l->cut = b->p->cut;
    l->share = MT_MAX(b->p->share, 1);
    l->optimizer = b->p->optimizer;
    l->master = b->p->master;
    l->by_blocks = b->p->by_blocks;
    l->cut.expert_group = group_of(cfg, b->p->cut.expert_group);
    l->tied = cfg->tied;
    if (mt_layout_has_adapters(b))
        l->adapter_default = *mt_layout_spec(b);
    int rc = check_parts(cfg, err)
          ?: allocate(l, cfg, mt_layout_has_adapters(b) ? mt_layout_n_learners(b) : 0, err);
    if (!rc && l->share > cfg->n_layers)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "model.share_layers = %d: the model has %lld layers", l->share,
                     (long long)cfg->n_layers);
    if (rc)
        return rc;
    add_end(b, MT_UNIT_EMBED, &mt_part_embed);
    add_layers(b);
    add_end(b, MT_UNIT_HEAD, &mt_part_head);
    if (b->failed)
        return mt_fail_nomem(err, "the model's layout", sizeof(*l));
    count_active(l);
    for (size_t i = 0; i < l->n_tensors; i++)
        l->n_partials += mt_div_up(l->tensors[i].n, MT_SUMSQ_BLOCK);
    list_segments(l);
    mt_layout_number_tensors(b);
    l->n_adapters = b->n_adapters;
    rc = b->rc ? b->rc : mt_layout_has_adapters(b) ? mt_layout_check_adapters(b, err) : check_globs(b, err);
    rc = rc ?: mt_layout_check_matrices(b, err)
            ?: sort_names(l, err)
            ?: mt_stored_place(l, err);
    if (!rc && l->by_blocks)
        rc = check_whole(l, err);
    if (!rc)
        find_f32_routers(l);
    return rc ?: mt_layout_set_ranges(l, err);
}

int mt_layout_create(struct mt_layout **out, const struct mt_hf_config *cfg, const struct mt_layout_params *p,
                     struct mt_err *err)
{
    struct mt_layout_builder b = {.l = mt_calloc(1, sizeof(struct mt_layout)),
                                  .p = p,
                                  .err = err,
                                  .glob_used = mt_calloc(p->n_freeze + p->n_always, sizeof(bool))};
    b.always_used = b.glob_used ? b.glob_used + p->n_freeze : NULL;
    int rc = b.l && b.glob_used ? lay_out(&b, cfg, err) : mt_fail_nomem(err, "the model's layout", sizeof(*b.l));
    free(b.glob_used);
    if (rc)
        mt_layout_destroy(&b.l);
    else
        *out = b.l;
    return rc;
}

void mt_layout_destroy(struct mt_layout **l)
{
    if (*l) {
        mt_arrays_finish(&(*l)->arrays);
        for (size_t i = 0; i < (*l)->n_recipes; i++)
            free((*l)->recipes[i]);
        free((*l)->recipes);
        free((*l)->tensors);
        free((*l)->stored);
        free((*l)->pieces);
        free((*l)->ranges);
        free(*l);
    }
    *l = NULL;
}

static int compare_name(const void *name, const void *t)
{
    return strcmp(name, (*(const struct mt_tensor *const *)t)->name);
}

const struct mt_tensor *mt_layout_find(const struct mt_layout *l, const char *name)
{
    const struct mt_tensor *const *t = bsearch(name, l->by_name, l->n_tensors, sizeof(*l->by_name), compare_name);
    return t ? *t : NULL;
}

const struct mt_tensor *mt_unit_tensor_at(const struct mt_layout *l, size_t unit, size_t at)
{
    const struct mt_tensor *t = &l->tensors[l->units[unit].first_tensor];
    while (at < t->first || at >= t->first + t->n)
        t++;
    return t;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Adapters: where their factors lie in a unit, and which names of targets are refused. */
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "base/mem.h"
#include "model/layout_builder.h"
#include "model/packing.h"
#include "model/peft_names.h"
#include "model/recipe.h"
#include "model/stored.h"

#define refuse(b, ...) ((b)->rc = (b)->rc ? (b)->rc : mt_fail((b)->err, MT_ERR_USAGE, -EINVAL, __VA_ARGS__))

/* Why a matrix of a part that computes with adapters has none: for a message. NULL: it may have one. */
static const char *why_not(const struct mt_family *f, const struct mt_tensor *t)
{
    if (f->peft_refuses && !strcmp(t->usual, f->peft_refuses))
        return " (PEFT 0.21 refuses those of this module)";
    return t->expert >= 0 && f->experts_unread ? " (PEFT 0.21 does not read those of this family's experts)" : NULL;
}

/* The parameter of all experts whose adapter holds the tensor's, as PEFT has it: always, where files have it as one
 * tensor; else if it is asked for by that parameter's name, and not by the name of the expert's own module. */
static const struct mt_fused_tensor *whole_of(struct mt_layout_builder *b, const struct mt_tensor *t)
{
    char name[MT_TENSOR_NAME];
    int part;
    const struct mt_fused_tensor *joined = t->expert >= 0 ? mt_family_joined(b->l->cfg.family, t->usual, &part) : NULL;
    if (!joined || mt_stored_fused(b->l, t))
        return joined;
    mt_stored_module(name, b->l, t);
    if (mt_adapter_match(&mt_layout_spec(b)->targets, name))
        return NULL;
    mt_stored_joined_name(name, b->l, t, joined);
    return mt_adapter_match(&mt_layout_spec(b)->targets, name) ? joined : NULL;
}

/* By which name PEFT adapts the tensor. */
static void module_of(char module[MT_TENSOR_NAME], const struct mt_layout *l, const struct mt_tensor *t,
                      const struct mt_fused_tensor *whole)
{
    if (whole)
        mt_stored_joined_name(module, l, t, whole);
    else
        mt_stored_module(module, l, t);
}

/* Does the tensor get an adapter? role: of its parameter, of the part or of an expert. whole: whole_of() it. */
static bool is_target(struct mt_layout_builder *b, const struct mt_part *part, const struct mt_tensor *t, int role,
                      const struct mt_fused_tensor *whole)
{
    struct mt_adapter_spec *s = mt_layout_spec(b);
    char module[MT_TENSOR_NAME], own[MT_TENSOR_NAME];
    const struct mt_adapter_item *item;
    if (t->n_dims != 2)
        return false;
    const char *why = whole ? NULL : why_not(b->l->cfg.family, t);
    unsigned adapted = part->recipe ? part->recipe->linears : part->kind->adapted;
    bool usual = adapted >> role & 1 && !why;
    bool served = usual || (part->kind->adapted_by_name >> role & 1 && !why);
    module_of(module, b->l, t, whole);
    mt_stored_module(own, b->l, t);
    item = mt_adapter_match(&s->targets, module);
    if (item && !served)
        refuse(b, "adapter.targets: \"%s\" also matches %s, which cannot have an adapter%s: %s", item->name, module, why ? why : "",
               part->layer < 0 ? "to train all of it put it in adapter.train_also, else use more specific names"
                               : "use more specific names");
    /* all-linear leaves out what PEFT has no DoRA for: the MLPs of a mixture */
    bool linear = usual && part->layer >= 0 && t->expert < 0 && !(s->dora && mt_peft_wraps_parameter(b->l, own));
    for (size_t i = 0; !item && linear && i < s->targets.n; i++)
        if (!strcmp(s->targets.items[i].name, MT_ALL_LINEAR)) {
            item = &s->targets.items[i];
            s->targets.items[i].used = true;
        }
    if (item && s->dora && (part->layer < 0 || !usual))
        refuse(b, "adapter.targets: \"%s\" matches %s, for which adapter.kind = dora is not supported: set kind = lora",
               item->name, module);
    if (item && s->dora && (t->expert >= 0 || mt_peft_wraps_parameter(b->l, own)))
        refuse(b, "adapter.targets: \"%s\" matches %s, for which PEFT has no DoRA in a mixture of experts: name others, or set "
               "adapter.kind = lora", item->name, module);
    if (item && t->trainable)
        refuse(b, "%s is matched by both adapter.targets and adapter.train_also (%s): train it with an adapter or whole",
               module, t->name);
    return item;
}

/* Where the next parameter begins. */
static size_t end_of(const struct mt_layout_builder *b)
{
    return mt_align_up(b->u->n_elems, MT_PARAM_ALIGN);
}

/* A, B (cols > 0) or the magnitudes of a target's adapter. */
static void add_factor(struct mt_layout_builder *b, const struct mt_adapter *ad, struct mt_param *p,
                       const struct mt_adapter_target *of, const char *factor, int64_t rows, int64_t cols)
{
    char module[MT_TENSOR_NAME];
    if (ad->whole)
        mt_layout_module_of(module, sizeof(module), b->l->tensors[of->tensor].name);
    else
        mt_stored_module(module, b->l, &b->l->tensors[of->tensor]);
    const struct mt_layout_place at = {.param = p, .expert = b->l->tensors[of->tensor].expert};
    struct mt_tensor *t = mt_layout_begin_tensor(b, &at, rows, cols);
    if (!t)
        return;
    if (ad->whole) /* "model.layers.N.mlp.experts.E" and ".gate_up_proj" */
        snprintf(strrchr(module, '.'), 40, "%.39s", strrchr(mt_fused_parameter(ad->whole), '.'));
    snprintf(t->name, sizeof(t->name), "%.90s.%s%s", module, factor, cols ? ".weight" : "");
    if (b->learner) /* names are a learner's own: in its layout alone they are without the number */
        snprintf(t->name + strlen(t->name), sizeof(t->name) - strlen(t->name), " %d", b->learner + 1);
    t->adapter = ad;
    t->learner = b->learner;
    t->decay = true;
    if (!strcmp(factor, MT_LORA_B))
        t->lr_scale = mt_layout_spec(b)->lr_ratio_b;
    mt_layout_set_trainable(b, t, true);
}

/* Adds the adapters of the tensors [first, end) of a linear layer: all A, then each B, then magnitudes. */
static void lay_out_adapter(struct mt_layout_builder *b, const struct mt_part *part, struct mt_param *p, size_t first,
                            size_t end, int role)
{
    const struct mt_layout *l = b->l;
    const struct mt_fused_tensor *whole = NULL;
    struct mt_adapter *ad = NULL;
    char module[MT_TENSOR_NAME];
    for (size_t i = first; i < end && !b->failed; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        if (i > first && (whole || mt_stored_fused(l, t)))
            continue;
        whole = i == first ? whole_of(b, t) : NULL;
        if (!is_target(b, part, t, role, whole) || b->rc)
            continue;
        if (!ad) {
            struct mt_adapter **last = &p->adapter;
            while (*last)
                last = &(*last)->next;
            *last = ad = &b->l->adapters[b->n_adapters++];
            *ad = (struct mt_adapter){.in = (size_t)t->shape[1], .out = p->n / (size_t)t->shape[1],
                                      .dora = mt_layout_spec(b)->dora, .whole = whole, .learner = b->learner,
                                      .merged = mt_layout_spec(b)->merge != MT_MERGE_OFF,
                                      .dropout = mt_layout_spec(b)->dropout};
        }
        module_of(module, l, t, whole);
        struct mt_adapter_shape s = mt_adapter_shape_of(mt_layout_spec(b), module);
        ad->target[ad->n_targets++] = (struct mt_adapter_target){
            .tensor = i, .col = (t->first - p->at) / ad->in, .out = whole ? ad->out : (size_t)t->shape[0],
            .row = ad->rank, .rank = (size_t)s.rank, .scale = (float)s.scale, .alpha = s.alpha,
            .key = (uint32_t)XXH3_64bits(module, strlen(module))};
        ad->rank += (size_t)s.rank;
    }
    if (!ad)
        return;
    ad->a.at = end_of(b);
    for (size_t i = 0; i < ad->n_targets; i++)
        add_factor(b, ad, &ad->a, &ad->target[i], MT_LORA_A, (int64_t)ad->target[i].rank, (int64_t)ad->in);
    for (struct mt_adapter_target *t = ad->target; t < ad->target + ad->n_targets; t++) {
        t->b.at = end_of(b);
        add_factor(b, ad, &t->b, t, MT_LORA_B, (int64_t)t->out, (int64_t)t->rank);
    }
    for (size_t i = 0; ad->dora && i < ad->n_targets; i++) {
        struct mt_adapter_target *t = &ad->target[i];
        t->norm = b->u->n_norms;
        b->u->n_norms += ad->merged ? t->out : 0;
        t->magnitude.at = end_of(b);
        add_factor(b, ad, &t->magnitude, t, MT_LORA_MAGNITUDE, (int64_t)t->out, 0);
    }
}

void mt_layout_add_adapters(struct mt_layout_builder *b, struct mt_part *part, struct mt_param *params, int n_params,
                         size_t first)
{
    size_t end = b->l->n_tensors;
    for (int role = 0; role < n_params; role++) {
        struct mt_param *p = &params[role];
        size_t from = first, to;
        while (from < end && b->l->tensors[from].first < p->at)
            from++;
        for (to = from; to < end && b->l->tensors[to].first < p->at + p->n;)
            to++;
        for (b->learner = 0; p->n && (size_t)b->learner < mt_layout_n_learners(b) && !b->failed; b->learner++)
            lay_out_adapter(b, part, p, from, to, role);
        b->learner = 0;
    }
}

void mt_layout_end_expert(struct mt_layout_builder *b, struct mt_part *p, int i)
{
    size_t first = b->l->n_tensors;
    if (!mt_layout_has_adapters(b))
        return;
    while (first > b->u->first_tensor && b->l->tensors[first - 1].expert == p->first_expert + i)
        first--;
    mt_layout_add_adapters(b, p, p->expert[i], MT_EXPERT_MAX_PARAMS, first);
    size_t n_outer = 0; /* PEFT wraps parameters in their order in the module */
    for (int role = MT_EXPERT_MAX_PARAMS; role-- > 0;)
        if (p->expert[i][role].adapter)
            p->expert[i][role].adapter->n_outer = n_outer++;
}

/* --- checks ------------------------------------------------------------------------------------------ */

static int check_used(const struct mt_adapter_list *list, const char *key, const char *like, struct mt_err *err)
{
    for (size_t i = 0; i < list->n; i++)
        if (!list->items[i].used)
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.%s: \"%s\" matches nothing (names are like %s)", key,
                           list->items[i].name, like);
    return 0;
}

/* A tied model's output matrix is the embedding. If modules_to_save has only one of them, PEFT trains a copy of it. */
static int check_tied(const struct mt_layout_builder *b, struct mt_err *err)
{
    struct mt_adapter_list *also = &mt_layout_spec(b)->train_also;
    bool head = mt_adapter_match(also, "lm_head"), table = mt_adapter_match(also, "model.embed_tokens");
    if (!b->l->tied || head == table)
        return 0;
    return mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.train_also (or modules_to_save in the adapter_config.json of adapter.path) "
                   "names %s alone, which this model shares with %s: name both",
                   head ? "lm_head" : "embed_tokens", head ? "embed_tokens" : "lm_head");
}

/* Adapters of experts one by one PEFT joins, gate and up together, of the default rank, and drops them if down has
 * none. Those of all experts together are as it has them. */
static int check_experts(const struct mt_layout_builder *b, struct mt_err *err)
{
    static const char *const kinds[] = {".gate_proj.weight", ".up_proj.weight", ".down_proj.weight"};
    const struct mt_adapter_spec *s = mt_layout_spec(b);
    size_t all = 0, n[3] = {0}, odd = 0, singles = 0;
    bool whole = false;
    for (size_t i = 0; i < b->l->n_parts; i++)
        all += (size_t)b->l->parts[i].n_experts;
    for (size_t i = 0; i < b->n_adapters; i++)
        for (size_t k = 0; k < b->l->adapters[i].n_targets; k++) {
            const struct mt_adapter_target *t = &b->l->adapters[i].target[k];
            const struct mt_tensor *of = &b->l->tensors[t->tensor];
            bool single = of->expert >= 0 && !b->l->adapters[i].whole;
            whole |= b->l->adapters[i].whole != NULL;
            for (int kind = 0; kind < 3 && single; kind++)
                n[kind] += strstr(of->usual, kinds[kind]) != NULL;
            singles += single;
            odd += single && ((int64_t)t->rank != s->rank || t->alpha != s->alpha);
        }
    if (whole && s->dropout > 0)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.dropout = %g: PEFT has no dropout in adapters of routed experts: "
                       "set it to 0, or leave experts out of adapter.targets", s->dropout);
    if (whole && n[0] + n[1] + n[2])
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.targets: routed experts have adapters either one by one or all "
                       "together (experts.gate_up_proj, experts.down_proj), not some of each");
    if (singles && s->rslora)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.rslora with adapters of routed experts one by one: PEFT joins those "
                       "of gate_proj and up_proj to one of twice the rank, which rsLoRA scales otherwise; name the experts "
                       "together (experts.gate_up_proj, experts.down_proj), or set rslora = off");
    bool some_lack = n[0] != n[1] || (n[0] && (n[0] != all || n[2] != all)) || (n[2] && n[2] != all);
    if (!odd && !some_lack && (s->dropout == 0 || n[0] + n[2] == 0))
        return 0;
    return mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.targets: PEFT has adapters of all routed experts of a model or of "
                   "none, of gate_proj and up_proj together and with down_proj, all of adapter.rank and adapter.alpha and "
                   "without dropout: add *.experts.* to the targets, name them together (experts.gate_up_proj, "
                   "experts.down_proj), or leave experts out");
}

/* What PEFT cannot have whole: it knows modules, and in transformers 5 the routed experts of a layer are one. */
static int check_whole(const struct mt_layout_builder *b, struct mt_err *err)
{
    for (const struct mt_tensor *t = b->l->tensors; t < b->l->tensors + b->l->n_tensors; t++) {
        const char *last = strrchr(t->name, '.');
        if (t->adapter || !t->trainable)
            continue;
        if (t->expert >= 0)
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.train_also matches %s: routed experts cannot be trained whole "
                           "beside adapters, since PEFT would not find them; give them adapters (adapter.targets = "
                           "experts.gate_up_proj, experts.down_proj), or train without adapters (model.freeze)", t->name);
        if (last && strcmp(last, ".weight") && strcmp(last, ".bias"))
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.train_also matches %s, which is not a module by itself: PEFT "
                           "cannot keep it; use more specific names, or train without adapters (model.freeze)", t->name);
        if (b->l->cfg.family->rope_pairs && t->head_rows)
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.train_also: %s, whose rows this family keeps in another order, "
                           "is not supported", t->name);
    }
    return 0;
}

/* What learners cannot share a base with. */
static int check_shared(const struct mt_layout_builder *b, struct mt_err *err)
{
    if (mt_layout_n_learners(b) == 1)
        return 0;
    if (b->l->cfg.moe.n_experts)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "several adapters at once on a mixture of experts are not supported: its "
                       "experts process the tokens of all of them together");
    if (mt_layout_spec(b)->train_also.n)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.train_also with several adapters at once is not supported: the "
                       "weights are shared");
    return mt_layout_spec(b)->on ? 0 : mt_fail(err, MT_ERR_USAGE, -EINVAL, "runs share a base if all of them train adapters "
                                               "(adapter.kind)");
}

/* What cannot be in the weights when they are loaded. */
static int check_merged(const struct mt_layout_builder *b, struct mt_err *err)
{
    const struct mt_adapter_spec *s = mt_layout_spec(b);
    const struct mt_layout *l = b->l;
    if (s->merge && s->dropout > 0)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.dropout = %g with adapter.merge_aware: weights that the adapters are "
                       "part of cannot drop their input; set it to 0", s->dropout);
    if (s->merge && mt_layout_n_learners(b) > 1)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.merge_aware with several adapters at once is not supported: each "
                       "would need weights of its own");
    for (size_t i = 0; s->merge && i < b->n_adapters; i++) {
        const struct mt_tensor *t = &l->tensors[l->adapters[i].target[0].tensor];
        if (l->units[t->unit].kind != MT_UNIT_LAYER || mt_packing_is_router(t->name))
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.targets matches %s, which adapter.merge_aware does not support: "
                           "name linear layers of attention, MLPs and experts alone", t->name);
    }
    return 0;
}

static int check_learner(const struct mt_layout_builder *b, struct mt_err *err)
{
    struct mt_adapter_spec *s = mt_layout_spec(b);
    const struct mt_layout *l = b->l;
    if (b->p->n_freeze)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL,
                       "model.freeze with adapters: all other tensors are frozen already; remove model.freeze");
    if (l->tied && mt_adapter_match(&s->targets, "lm_head"))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL,
                       "adapter.targets: an adapter of lm_head is not supported with tied embeddings");
    if (s->dora && s->dropout > 0)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.dropout = %g with adapter.kind = dora is not supported",
                       s->dropout);
    int rc = check_shared(b, err) ?: check_merged(b, err) ?: check_tied(b, err);
    if (!rc && l->cfg.moe.n_experts)
        rc = check_experts(b, err);
    rc = rc ?: check_whole(b, err)
            ?: check_used(&s->targets, "targets", "q_proj and model.layers.0.mlp.*; all-linear is every layer's attention and MLP", err)
            ?: check_used(&s->ranks, "rank_pattern", "q_proj:32", err)
            ?: check_used(&s->alphas, "alpha_pattern", "q_proj:32", err)
            ?: check_used(&s->train_also, "train_also", "lm_head and model.norm", err);
    return rc || b->n_adapters ? rc : mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.targets names no layer");
}

int mt_layout_check_adapters(struct mt_layout_builder *b, struct mt_err *err)
{
    int rc = 0;
    for (b->learner = 0; (size_t)b->learner < mt_layout_n_learners(b) && !rc; b->learner++)
        rc = check_learner(b, err);
    b->learner = 0;
    return rc;
}

/* --- learners that share a base ---------------------------------------------------------------------------- */

void mt_layout_number_tensors(const struct mt_layout_builder *b)
{
    for (int learner = 0; (size_t)learner < mt_layout_n_learners(b); learner++) {
        size_t n = 0;
        for (struct mt_tensor *t = b->l->tensors; t < b->l->tensors + b->l->n_tensors; t++) {
            if (t->adapter && t->learner != learner)
                continue;
            if (t->learner == learner)
                t->number = n;
            n++;
        }
    }
}

int mt_layout_share(struct mt_layout *alone, const struct mt_layout *shared, int learner, struct mt_err *err)
{
    size_t from = 0;
    for (struct mt_tensor *t = alone->tensors; t < alone->tensors + alone->n_tensors; t++) {
        const struct mt_tensor *s;
        do {
            s = from < shared->n_tensors ? &shared->tensors[from++] : NULL;
        } while (s && s->adapter && s->learner != learner);
        if (!s || s->unit != t->unit || s->n != t->n || !s->adapter != !t->adapter)
            return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "the layout of %s is not that of learner %d", t->name, learner + 1);
        t->kind = s->kind;
        t->at = s->at;
        t->aux = s->aux;
        memcpy(t->apart, s->apart, sizeof(t->apart));
    }
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "model/layout.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "device/ops.h"
#include "model/part.h"
#include "model/stored.h"

const struct mt_cut mt_cut_layer = {.name = "layer", .n_units = 1}, mt_cut_half = {.name = "half", .n_units = 2, .n_parts = {1}};

struct mt_layout_builder {
    struct mt_layout *l;
    struct mt_unit *u;
    const struct mt_layout_params *p;
    bool *glob_used;
    size_t cap_tensors, n_experts; /* n_experts: rows of l->experts in use */
    bool failed;
};

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

static bool frozen(struct mt_layout_builder *b, const char *name)
{
    bool hit = false;
    for (size_t i = 0; i < b->p->n_freeze; i++)
        if (!fnmatch(b->p->freeze[i], name, 0))
            hit = b->glob_used[i] = true;
    return hit;
}

/* Where a parameter's tensors are added. */
struct place {
    const struct mt_part *part;
    struct mt_param *param;
    int expert; /* or -1 */
};

static void add_tensor(struct mt_layout_builder *b, const struct place *at, int64_t cols,
                       const struct mt_param_tensor *tensor)
{
    struct mt_layout *l = b->l;
    struct mt_param *p = at->param;
    int64_t rows = tensor->rows;
    if (!mt_grow(&l->tensors, &b->cap_tensors, l->n_tensors + 1, sizeof(*l->tensors))) {
        b->failed = true;
        return;
    }
    struct mt_tensor *t = &l->tensors[l->n_tensors++];
    *t = (struct mt_tensor){.n_dims = cols ? 2 : 1, .shape = {rows, cols}, .param = p, .expert = at->expert,
                            .usual = tensor->usual, .head_rows = tensor->head_rows};
    mt_stored_name(t, l, at->part->layer, tensor->usual);
    t->unit = (size_t)(b->u - l->units);
    t->n = (size_t)rows * (size_t)MT_MAX(cols, (int64_t)1);
    t->first = p->at + p->n;
    t->trainable = !frozen(b, t->name) && !tensor->constant;
    t->decay = decays(b, t->name);
    p->n += t->n;
    p->trainable |= t->trainable;
    b->u->n_elems = t->first + t->n;
    b->u->n_params += t->n;
    b->u->n_tensors++;
    b->u->trainable |= t->trainable;
}

static void add_param(struct mt_layout_builder *b, const struct place *at, int64_t cols, size_t n,
                      const struct mt_param_tensor *tensors)
{
    *at->param = (struct mt_param){.at = mt_align_up(b->u->n_elems, MT_PARAM_ALIGN)};
    for (size_t i = 0; i < n; i++)
        add_tensor(b, at, cols, &tensors[i]);
}

void mt_layout_add_param(struct mt_layout_builder *b, struct mt_part *p, int role, int64_t cols, size_t n,
                         const struct mt_param_tensor *tensors)
{
    add_param(b, &(struct place){p, &p->param[role], -1}, cols, n, tensors);
}

void mt_layout_add_tensor(struct mt_layout_builder *b, struct mt_part *p, int role, int64_t rows, int64_t cols,
                          const char *usual)
{
    mt_layout_add_param(b, p, role, cols, 1, &(struct mt_param_tensor){.usual = usual, .rows = rows});
}

void mt_layout_add_expert_param(struct mt_layout_builder *b, struct mt_part *p, int i, int role, int64_t cols, size_t n,
                                const struct mt_param_tensor *tensors)
{
    add_param(b, &(struct place){p, &p->expert[i][role], p->first_expert + i}, cols, n, tensors);
}

static void open_unit(struct mt_layout_builder *b, enum mt_unit_kind kind, int layer, int block)
{
    b->u = &b->l->units[b->l->n_units++];
    *b->u = (struct mt_unit){.kind = kind, .layer = layer, .block = block,
                             .first_tensor = b->l->n_tensors, .first_part = b->l->n_parts};
}

static void add_part(struct mt_layout_builder *b, const struct mt_part_kind *kind, int first_expert, int n_experts)
{
    struct mt_part *p = &b->l->parts[b->l->n_parts++];
    *p = (struct mt_part){.kind = kind, .layer = b->u->layer, .first_expert = first_expert, .n_experts = n_experts,
                          .expert = n_experts ? b->l->experts + b->n_experts : NULL};
    b->n_experts += (size_t)n_experts;
    b->u->n_parts++;
    b->u->per_step = kind->per_step;
    kind->lay_out(b, p);
}

/* "embed", "layer 7"; where the layer has several units: "layer 7 attention", "layer 7 experts 8-15". */
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
    open_unit(b, kind, -1, kind == MT_UNIT_EMBED ? 0 : (int)b->l->cfg.n_layers + 1);
    add_part(b, part, 0, 0);
    close_unit(b, true);
}

static size_t count_parts(const char *const *parts)
{
    size_t n = 0;
    while (n < MT_FAMILY_MAX_PARTS && parts[n])
        n++;
    return n;
}

static const char *const *parts_of(const struct mt_hf_config *cfg, int64_t layer)
{
    return cfg->sparse[layer] ? cfg->family->sparse_parts : cfg->family->parts;
}

/* All of them by micro-batch, from `first` on, up to one that runs once a step or to the end. */
static size_t count_by_micro(const char *const *parts, size_t first, size_t n)
{
    size_t i = first;
    while (i < n && !mt_part_find(parts[i])->per_step)
        i++;
    return i - first;
}

static void add_unit(struct mt_layout_builder *b, int layer, const char *const *parts, size_t n, bool whole)
{
    open_unit(b, MT_UNIT_LAYER, layer, layer + 1);
    for (size_t i = 0; i < n; i++)
        add_part(b, mt_part_find(parts[i]), 0, 0);
    close_unit(b, whole);
}

static void add_groups(struct mt_layout_builder *b, int layer, const struct mt_part_kind *kind)
{
    int n = (int)b->l->cfg.moe.n_experts, group = (int)b->l->cut.expert_group;
    for (int first = 0; first < n; first += group) {
        open_unit(b, MT_UNIT_LAYER, layer, layer + 1);
        add_part(b, kind, first, MT_MIN(group, n - first));
        close_unit(b, false);
    }
}

static void add_layer(struct mt_layout_builder *b, int layer)
{
    const char *const *parts = parts_of(&b->l->cfg, layer);
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

/* Parameters of an expert, with the padding between them; near enough to count bytes by. */
static size_t expert_elems(const struct mt_moe *m, int64_t hidden)
{
    return (size_t)(3 * m->width * hidden + (m->expert_bias ? 2 * m->width + hidden : 0));
}

static size_t group_of(const struct mt_hf_config *cfg, size_t asked)
{
    size_t n = (size_t)cfg->moe.n_experts, one = expert_elems(&cfg->moe, cfg->hidden) * mt_dtype_size(MT_BF16);
    if (!n)
        return 0;
    size_t group = asked ? asked : (size_t)MT_EXPERT_GROUP_BYTES / one;
    return MT_MIN(MT_MAX(group, (size_t)1), n);
}

static int check_globs(const struct mt_layout_builder *b, struct mt_err *err)
{
    bool any = false;
    for (size_t i = 0; i < b->p->n_freeze; i++)
        if (!b->glob_used[i])
            return mt_fail(err, MT_ERR_USAGE, -EINVAL,
                           "model.freeze: \"%s\" matches no tensor (names are like %s)",
                           b->p->freeze[i], b->l->tensors[b->l->n_tensors / 2].name);
    for (size_t i = 0; i < b->l->n_tensors; i++)
        any |= b->l->tensors[i].trainable;
    return any ? 0 : mt_fail(err, MT_ERR_USAGE, -EINVAL, "model.freeze leaves nothing to train");
}

static int check_parts(const struct mt_family *f, const char *const *parts, struct mt_err *err)
{
    for (size_t i = 0; i < count_parts(parts); i++)
        if (!mt_part_find(parts[i]))
            return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "family %s: there is no part \"%s\"", f->model_type, parts[i]);
    return 0;
}

/* Units, parts and experts are never more than this, so that nothing moves that is pointed to. */
static int allocate(struct mt_layout *l, const struct mt_hf_config *cfg, struct mt_err *err)
{
    size_t groups = l->cut.expert_group ? mt_div_up((size_t)cfg->moe.n_experts, l->cut.expert_group) : 0;
    size_t n = 2, experts = 0;
    for (int64_t i = 0; i < cfg->n_layers; i++) {
        n += count_parts(parts_of(cfg, i)) + (cfg->sparse[i] ? groups : 0);
        experts += cfg->sparse[i] ? (size_t)cfg->moe.n_experts : 0;
    }
    l->units = mt_calloc(n, sizeof(*l->units));
    l->parts = mt_calloc(n, sizeof(*l->parts));
    l->experts = mt_calloc(experts, sizeof(*l->experts));
    return l->units && l->parts && l->experts ? 0 : mt_fail_nomem(err, "the model's layout", n * sizeof(*l->parts));
}

static int compare_names(const void *a, const void *b)
{
    return strcmp((*(const struct mt_tensor *const *)a)->name, (*(const struct mt_tensor *const *)b)->name);
}

static int sort_names(struct mt_layout *l, struct mt_err *err)
{
    l->by_name = mt_calloc(l->n_tensors, sizeof(*l->by_name));
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
        *(l->tensors[i].expert < 0 ? &rest : &of_experts) += l->tensors[i].n;
    if (!l->tied)
        rest -= l->units[0].n_params;
    l->n_active = rest + (of_experts ? of_experts / (uint64_t)m->n_experts * (uint64_t)m->top_k : 0);
}

static int lay_out(struct mt_layout_builder *b, const struct mt_hf_config *cfg, struct mt_err *err)
{
    struct mt_layout *l = b->l;
    l->cfg = *cfg;
    l->cut = b->p->cut;
    l->cut.expert_group = group_of(cfg, b->p->cut.expert_group);
    l->tied = cfg->tied;
    int rc = check_parts(cfg->family, cfg->family->parts, err);
    if (!rc)
        rc = check_parts(cfg->family, cfg->family->sparse_parts, err);
    if (!rc)
        rc = allocate(l, cfg, err);
    if (rc)
        return rc;
    add_end(b, MT_UNIT_EMBED, &mt_part_embed);
    for (int i = 0; i < (int)cfg->n_layers; i++)
        add_layer(b, i);
    add_end(b, MT_UNIT_HEAD, &mt_part_head);
    if (b->failed)
        return mt_fail_nomem(err, "the model's layout", sizeof(*l));
    count_active(l);
    rc = check_globs(b, err);
    if (!rc)
        rc = sort_names(l, err);
    if (!rc)
        rc = mt_stored_place(l, err);
    return rc ? rc : mt_layout_set_ranges(l, err);
}

int mt_layout_create(struct mt_layout **out, const struct mt_hf_config *cfg, const struct mt_layout_params *p,
                     struct mt_err *err)
{
    struct mt_layout_builder b = {.l = mt_calloc(1, sizeof(struct mt_layout)),
                                  .p = p,
                                  .glob_used = mt_calloc(p->n_freeze, sizeof(bool))};
    int rc = b.l && b.glob_used ? lay_out(&b, cfg, err) : mt_fail_nomem(err, "the model's layout", sizeof(*b.l));
    free(b.glob_used);
    if (rc) {
        mt_layout_destroy(&b.l);
        return rc;
    }
    *out = b.l;
    return 0;
}

void mt_layout_destroy(struct mt_layout **l)
{
    if (*l) {
        free((*l)->units);
        free((*l)->parts);
        free((*l)->tensors);
        free((*l)->by_name);
        free((*l)->stored);
        free((*l)->pieces);
        free((*l)->experts);
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

struct mt_param mt_layout_param(const struct mt_layout *l, size_t unit, const char *part, int role)
{
    const struct mt_unit *u = &l->units[unit];
    for (size_t i = u->first_part; i < u->first_part + u->n_parts; i++)
        if (!strcmp(l->parts[i].kind->name, part))
            return l->parts[i].param[role];
    return (struct mt_param){0};
}

static bool same_param(const struct mt_param *a, const struct mt_param *b)
{
    return a->at == b->at && a->n == b->n && a->trainable == b->trainable && a->grad == b->grad;
}

static bool parts_alike(const struct mt_hf_config *cfg, const struct mt_part *a, const struct mt_part *b)
{
    bool same = a->kind == b->kind && a->n_experts == b->n_experts;
    for (int i = 0; i < MT_PART_MAX_PARAMS; i++)
        same = same && same_param(&a->param[i], &b->param[i]);
    for (int e = 0; same && e < a->n_experts; e++)
        for (int i = 0; i < MT_EXPERT_MAX_PARAMS; i++)
            same = same && same_param(&a->expert[e][i], &b->expert[e][i]);
    return same && !(a->kind->layers_differ && a->kind->layers_differ(cfg, a->layer, b->layer));
}

bool mt_layout_alike(const struct mt_layout *l, size_t a, size_t b)
{
    const struct mt_unit *x = &l->units[a], *y = &l->units[b];
    bool same = x->kind == y->kind && x->n_elems == y->n_elems && x->trainable == y->trainable &&
                x->n_parts == y->n_parts;
    for (int k = 0; k < MT_N_RANGE_KINDS; k++)
        same = same && x->n_in_planes[k] == y->n_in_planes[k];
    for (size_t i = 0; same && i < x->n_parts; i++)
        same = parts_alike(&l->cfg, &l->parts[x->first_part + i], &l->parts[y->first_part + i]);
    return same;
}

size_t mt_layout_boundary_bytes(const struct mt_layout *l, enum mt_dtype dtype, size_t max_tokens)
{
    return mt_align_up(max_tokens * (size_t)l->cfg.hidden * mt_dtype_size(dtype), MT_RECORD_ALIGN);
}

size_t mt_unit_record_bytes(const struct mt_layout *l, size_t unit, enum mt_dtype dtype, size_t max_tokens)
{
    const struct mt_unit *u = &l->units[unit];
    const struct mt_part_shape shape = {&l->cfg, dtype, max_tokens};
    size_t bytes = 0;
    for (size_t i = u->first_part; i < u->first_part + u->n_parts; i++) {
        const struct mt_part_kind *k = l->parts[i].kind;
        bytes += k->record_bytes ? k->record_bytes(&shape) : 0;
        if (i > u->first_part) /* the hidden state between two parts */
            bytes += mt_layout_boundary_bytes(l, dtype, max_tokens);
    }
    return bytes;
}

double mt_layout_flops_per_token(const struct mt_layout *l, size_t seq_len)
{
    double macs = 0;
    for (size_t i = 0; i < l->n_parts; i++)
        if (l->parts[i].kind->macs_per_token)
            macs += l->parts[i].kind->macs_per_token(&l->cfg, &l->parts[i], seq_len);
    return 3 * 2 * macs; /* backward is twice forward */
}

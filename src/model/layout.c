/* SPDX-License-Identifier: Apache-2.0 */
#include "model/layout.h"

#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "device/ops.h"
#include "model/part.h"

const struct mt_cut mt_cut_layer = {"layer", 1, {0}}, mt_cut_half = {"half", 2, {1}};

struct mt_layout_builder {
    struct mt_layout *l;
    struct mt_unit *u;
    const struct mt_layout_params *p;
    bool *glob_used;
    size_t cap_tensors;
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

static void add_tensor(struct mt_layout_builder *b, const struct mt_part *part, struct mt_param *p, int64_t rows,
                       int64_t cols, const char *usual)
{
    struct mt_layout *l = b->l;
    if (!mt_grow(&l->tensors, &b->cap_tensors, l->n_tensors + 1, sizeof(*l->tensors))) {
        b->failed = true;
        return;
    }
    struct mt_tensor *t = &l->tensors[l->n_tensors++];
    *t = (struct mt_tensor){.n_dims = cols ? 2 : 1, .shape = {rows, cols}};
    if (part->layer >= 0)
        snprintf(t->name, sizeof(t->name), "model.layers.%d.%s", part->layer,
                 mt_family_tensor_name(l->cfg.family, usual));
    else
        snprintf(t->name, sizeof(t->name), "%s", usual);
    t->unit = (size_t)(b->u - l->units);
    t->n = (size_t)rows * (size_t)MT_MAX(cols, (int64_t)1);
    t->first = p->at + p->n;
    t->trainable = !frozen(b, t->name);
    t->decay = decays(b, t->name);
    p->n += t->n;
    p->trainable |= t->trainable;
    b->u->n_elems = t->first + t->n;
    b->u->n_params += t->n;
    b->u->n_tensors++;
    b->u->trainable |= t->trainable;
}

void mt_layout_add_param(struct mt_layout_builder *b, struct mt_part *p, int role, int64_t cols, size_t n,
                         const struct mt_param_tensor *tensors)
{
    p->param[role] = (struct mt_param){.at = mt_align_up(b->u->n_elems, MT_PARAM_ALIGN)};
    for (size_t i = 0; i < n; i++)
        add_tensor(b, p, &p->param[role], tensors[i].rows, cols, tensors[i].usual);
}

void mt_layout_add_tensor(struct mt_layout_builder *b, struct mt_part *p, int role, int64_t rows, int64_t cols,
                          const char *usual)
{
    mt_layout_add_param(b, p, role, cols, 1, &(struct mt_param_tensor){usual, rows});
}

static void open_unit(struct mt_layout_builder *b, enum mt_unit_kind kind, int layer, int block)
{
    b->u = &b->l->units[b->l->n_units++];
    *b->u = (struct mt_unit){.kind = kind, .layer = layer, .block = block,
                             .first_tensor = b->l->n_tensors, .first_part = b->l->n_parts};
}

static void add_part(struct mt_layout_builder *b, const struct mt_part_kind *kind)
{
    struct mt_part *p = &b->l->parts[b->l->n_parts++];
    *p = (struct mt_part){.kind = kind, .layer = b->u->layer};
    b->u->n_parts++;
    kind->lay_out(b, p);
}

/* "embed", "layer 7"; the parts of a layer that is cut: "layer 7 attention". */
static void close_unit(struct mt_layout_builder *b, bool cut)
{
    struct mt_unit *u = b->u;
    const struct mt_part *p = &b->l->parts[u->first_part];
    size_t at = (size_t)(u->layer < 0 ? snprintf(u->name, sizeof(u->name), "%s", p->kind->name)
                                      : snprintf(u->name, sizeof(u->name), "layer %d", u->layer));
    for (size_t i = 0; cut && i < u->n_parts && at < sizeof(u->name); i++)
        at += (size_t)snprintf(u->name + at, sizeof(u->name) - at, " %s", p[i].kind->name);
    u->n_elems = mt_align_up(u->n_elems, MT_JOIN_BLOCK);
    b->l->n_params += u->n_params;
}

static void add_end(struct mt_layout_builder *b, enum mt_unit_kind kind, const struct mt_part_kind *part)
{
    open_unit(b, kind, -1, kind == MT_UNIT_EMBED ? 0 : (int)b->l->cfg.n_layers + 1);
    add_part(b, part);
    close_unit(b, false);
}

static size_t count_parts(const struct mt_family *f)
{
    size_t n = 0;
    while (n < MT_FAMILY_MAX_PARTS && f->parts[n])
        n++;
    return n;
}

static void add_layer(struct mt_layout_builder *b, int layer)
{
    const struct mt_family *f = b->l->cfg.family;
    const struct mt_cut *cut = &b->l->cut;
    size_t n = count_parts(f), next = 0;
    for (size_t i = 0; i < cut->n_units && next < n; i++) {
        size_t end = i + 1 < cut->n_units ? MT_MIN(next + cut->n_parts[i], n) : n;
        open_unit(b, MT_UNIT_LAYER, layer, layer + 1);
        while (next < end)
            add_part(b, mt_part_find(f->parts[next++]));
        close_unit(b, cut->n_units > 1);
    }
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

static int lay_out(struct mt_layout_builder *b, const struct mt_hf_config *cfg, struct mt_err *err)
{
    struct mt_layout *l = b->l;
    size_t per_layer = count_parts(cfg->family), n_layers = (size_t)cfg->n_layers;
    l->units = mt_calloc(n_layers * b->p->cut.n_units + 2, sizeof(*l->units));
    l->parts = mt_calloc(n_layers * per_layer + 2, sizeof(*l->parts));
    if (!l->units || !l->parts)
        return mt_fail_nomem(err, "the model's layout", sizeof(*l));
    for (size_t i = 0; i < per_layer; i++)
        if (!mt_part_find(cfg->family->parts[i]))
            return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "family %s: there is no part \"%s\"",
                           cfg->family->model_type, cfg->family->parts[i]);
    l->cfg = *cfg;
    l->cut = b->p->cut;
    l->tied = cfg->tied;
    add_end(b, MT_UNIT_EMBED, &mt_part_embed);
    for (int i = 0; i < (int)cfg->n_layers; i++)
        add_layer(b, i);
    add_end(b, MT_UNIT_HEAD, &mt_part_head);
    if (b->failed)
        return mt_fail_nomem(err, "the model's layout", sizeof(*l));
    int rc = check_globs(b, err);
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
        free((*l)->ranges);
        free(*l);
    }
    *l = NULL;
}

const struct mt_tensor *mt_layout_find(const struct mt_layout *l, const char *name)
{
    for (size_t i = 0; i < l->n_tensors; i++)
        if (!strcmp(l->tensors[i].name, name))
            return &l->tensors[i];
    return NULL;
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
    bool same = a->kind == b->kind;
    for (int i = 0; i < MT_PART_MAX_PARAMS; i++)
        same = same && same_param(&a->param[i], &b->param[i]);
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
            macs += l->parts[i].kind->macs_per_token(&l->cfg, l->parts[i].layer, seq_len);
    return 3 * 2 * macs; /* backward is twice forward */
}

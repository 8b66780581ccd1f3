/* SPDX-License-Identifier: Apache-2.0 */
#include "model/layout.h"

#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "device/ops.h"

enum { PARAM_ALIGN = 64 };

struct builder {
    struct mt_layout *l;
    struct mt_unit *u;
    const struct mt_cfg_list *freeze;
    bool *glob_used;
    bool decay_embeddings;
    size_t cap_tensors;
    bool failed;
};

static bool decays(const struct builder *b, const char *name)
{
    if (strstr(name, "bias") || strstr(name, "norm"))
        return false;
    if (strstr(name, "embed_tokens") || strstr(name, "lm_head"))
        return b->decay_embeddings;
    return true;
}

static bool frozen(struct builder *b, const char *name)
{
    bool hit = false;
    for (int i = 0; b->freeze && i < b->freeze->n; i++)
        if (!fnmatch(b->freeze->items[i], name, 0))
            hit = b->glob_used[i] = true;
    return hit;
}

/* Begins a parameter; its tensors follow end to end. */
static struct mt_param begin(struct builder *b)
{
    return (struct mt_param){.at = mt_align_up(b->u->n_elems, PARAM_ALIGN)};
}

__attribute__((format(printf, 5, 6))) static void
add(struct builder *b, struct mt_param *p, int64_t rows, int64_t cols, const char *fmt, ...)
{
    struct mt_layout *l = b->l;
    if (!mt_grow(&l->tensors, &b->cap_tensors, l->n_tensors + 1, sizeof(*l->tensors))) {
        b->failed = true;
        return;
    }
    struct mt_tensor *t = &l->tensors[l->n_tensors++];
    *t = (struct mt_tensor){.n_dims = cols ? 2 : 1, .shape = {rows, cols}};
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(t->name, sizeof(t->name), fmt, ap);
    va_end(ap);
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

static struct mt_unit *open_unit(struct builder *b, enum mt_unit_kind kind, int block)
{
    b->u = &b->l->units[b->l->n_units++];
    *b->u = (struct mt_unit){.kind = kind, .layer = -1, .block = block, .first_tensor = b->l->n_tensors};
    if (kind != MT_UNIT_LAYER)
        snprintf(b->u->name, sizeof(b->u->name), "%s", kind == MT_UNIT_EMBED ? "embed" : "head");
    return b->u;
}

static struct mt_unit *open_layer(struct builder *b, int i, enum mt_layer_part part)
{
    static const char *const names[] = {[MT_PART_ATTENTION] = " attention", [MT_PART_MLP] = " mlp",
                                        [MT_PART_BOTH] = ""};
    struct mt_unit *u = open_unit(b, MT_UNIT_LAYER, i + 1);
    u->layer = i;
    u->part = part;
    snprintf(u->name, sizeof(u->name), "layer %d%s", i, names[part]);
    return u;
}

static void close_unit(struct builder *b)
{
    b->u->n_elems = mt_align_up(b->u->n_elems, MT_JOIN_BLOCK);
    b->l->n_params += b->u->n_params;
}

static struct mt_param single(struct builder *b, int64_t rows, int64_t cols, const char *name,
                              int layer)
{
    struct mt_param p = begin(b);
    if (layer >= 0)
        add(b, &p, rows, cols, "model.layers.%d.%s", layer, name);
    else
        add(b, &p, rows, cols, "%s", name);
    return p;
}

/* Tensors of the same width, one under the other: "self_attn.%s_proj.weight" for q, k, v. */
static struct mt_param stack(struct builder *b, int n, const char *const *parts, const int64_t *rows,
                             int64_t cols, const char *prefix, const char *suffix, int layer)
{
    struct mt_param p = begin(b);
    for (int i = 0; i < n; i++)
        add(b, &p, rows[i], cols, "model.layers.%d.%s.%s_proj.%s", layer, prefix, parts[i], suffix);
    return p;
}

static void add_attention(struct builder *b, int i)
{
    static const char *const qkv[] = {"q", "k", "v"};
    const struct mt_hf_config *c = &b->l->cfg;
    int64_t q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim, qkv_rows[] = {q, kv, kv};
    struct mt_unit *u = b->u;
    u->ln1 = single(b, c->hidden, 0, "input_layernorm.weight", i);
    u->qkv = stack(b, 3, qkv, qkv_rows, c->hidden, "self_attn", "weight", i);
    if (c->qkv_bias)
        u->qkv_b = stack(b, 3, qkv, qkv_rows, 0, "self_attn", "bias", i);
    if (c->qk_norm) {
        u->q_norm = single(b, c->head_dim, 0, "self_attn.q_norm.weight", i);
        u->k_norm = single(b, c->head_dim, 0, "self_attn.k_norm.weight", i);
    }
    u->o = single(b, c->hidden, q, "self_attn.o_proj.weight", i);
    if (c->o_bias)
        u->o_b = single(b, c->hidden, 0, "self_attn.o_proj.bias", i);
}

static void add_mlp(struct builder *b, int i)
{
    static const char *const gate_up[] = {"gate", "up"};
    const struct mt_hf_config *c = &b->l->cfg;
    int64_t ffn_rows[] = {c->ffn, c->ffn};
    struct mt_unit *u = b->u;
    u->ln2 = single(b, c->hidden, 0, "post_attention_layernorm.weight", i);
    u->gate_up = stack(b, 2, gate_up, ffn_rows, c->hidden, "mlp", "weight", i);
    if (c->mlp_bias)
        u->gate_up_b = stack(b, 2, gate_up, ffn_rows, 0, "mlp", "bias", i);
    u->down = single(b, c->hidden, c->ffn, "mlp.down_proj.weight", i);
    if (c->mlp_bias)
        u->down_b = single(b, c->hidden, 0, "mlp.down_proj.bias", i);
}

static void add_layer(struct builder *b, int i)
{
    bool halves = b->l->halves;
    open_layer(b, i, halves ? MT_PART_ATTENTION : MT_PART_BOTH);
    add_attention(b, i);
    if (halves) {
        close_unit(b);
        open_layer(b, i, MT_PART_MLP);
    }
    add_mlp(b, i);
    close_unit(b);
}

static void add_ends(struct builder *b, bool head)
{
    const struct mt_hf_config *c = &b->l->cfg;
    struct mt_unit *u = open_unit(b, head ? MT_UNIT_HEAD : MT_UNIT_EMBED, head ? (int)c->n_layers + 1 : 0);
    if (!head)
        u->table = single(b, c->vocab, c->hidden, "model.embed_tokens.weight", -1);
    else if (!c->tied)
        u->table = single(b, c->vocab, c->hidden, "lm_head.weight", -1);
    if (head)
        u->norm = single(b, c->hidden, 0, "model.norm.weight", -1);
    close_unit(b);
}

static int check_globs(const struct builder *b, struct mt_err *err)
{
    bool any = false;
    for (int i = 0; b->freeze && i < b->freeze->n; i++)
        if (!b->glob_used[i])
            return mt_fail(err, MT_ERR_USAGE, -EINVAL,
                           "model.freeze: \"%s\" matches no tensor (names are like %s)",
                           b->freeze->items[i], b->l->tensors[b->l->n_tensors / 2].name);
    for (size_t i = 0; i < b->l->n_tensors; i++)
        any |= b->l->tensors[i].trainable;
    return any ? 0 : mt_fail(err, MT_ERR_USAGE, -EINVAL, "model.freeze leaves nothing to train");
}

int mt_layout_create(struct mt_layout **out, const struct mt_hf_config *cfg,
                     const struct mt_cfg_list *freeze, bool decay_embeddings, bool halves, struct mt_err *err)
{
    struct builder b = {.l = mt_calloc(1, sizeof(struct mt_layout)),
                        .freeze = freeze,
                        .decay_embeddings = decay_embeddings,
                        .glob_used = mt_calloc((size_t)(freeze ? freeze->n : 0), sizeof(bool))};
    int rc = 0;
    if (!b.l || !b.glob_used ||
        !(b.l->units = mt_calloc((size_t)cfg->n_layers * (halves ? 2 : 1) + 2, sizeof(*b.l->units)))) {
        rc = mt_fail_nomem(err, "the model's layout", sizeof(*b.l));
    } else {
        b.l->cfg = *cfg;
        b.l->halves = halves;
        b.l->tied = cfg->tied;
        add_ends(&b, false);
        for (int i = 0; i < (int)cfg->n_layers; i++)
            add_layer(&b, i);
        add_ends(&b, true);
        rc = b.failed ? mt_fail_nomem(err, "the model's layout", sizeof(*b.l)) : check_globs(&b, err);
    }
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
        free((*l)->tensors);
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

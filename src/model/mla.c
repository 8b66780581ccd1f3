/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Multi-head latent attention (DeepSeek-AI 2024):
 *
 *   h = before(x);  [cq | c | kr] = h Win + b;  q = norm(cq) Wq; without a latent of queries: [q | c | kr] = h Win + b
 *   [k | v] = norm(c) Wkv;  the last part of each head of q, and kr, which all heads of keys share, are rotated
 *   o = attention(q, [k | kr], v);  y = x + after(o Wo)
 *
 * The record keeps, in two segments, the latents, which are a twentieth of queries, keys and values in DeepSeek-V3, and
 * o; backward makes queries, keys and values again from the latents. Queries without one are in the record, rotated.
 * Generation may do so, too, of earlier tokens (rules_attention.c).
 */
#include "model/layout_builder.h"
#include "model/rule.h"

/* Widths of a layer, in elements. */
struct dims {
    size_t heads, nope, rope, v; /* of a head: the part of queries and keys that is not rotated; that is; values */
    size_t q_latent, latent;     /* 0: queries have none */
    size_t first;                /* in a row of the first product: where the latent of keys and values begins */
    size_t in;                   /* the whole row */
    size_t qk, kv, o;            /* of all heads: queries, keys and values as one product makes them, outputs */
};

static struct dims dims_of(const struct mt_layer_spec *s)
{
    struct dims d = {.heads = (size_t)s->n_heads,
                     .nope = (size_t)s->nope_dim,
                     .rope = (size_t)s->rope_dim,
                     .v = (size_t)s->v_dim,
                     .q_latent = (size_t)s->q_latent,
                     .latent = (size_t)s->kv_latent};
    d.qk = d.heads * (d.nope + d.rope);
    d.kv = d.heads * (d.nope + d.v);
    d.o = d.heads * d.v;
    d.first = d.q_latent ? d.q_latent : d.qk;
    d.in = d.first + d.latent + d.rope;
    return d;
}

enum { LATENTS, OUT }; /* segments of the record */

/* The norms of latents, whose eps no configuration changes. */
static const struct mt_norm_spec latent_norm = {.eps = 1e-6};

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    const struct mt_layer_spec *c = p->spec;
    const struct mt_branch_norms *norms = &c->norms.attention;
    struct dims d = dims_of(c);
    int64_t hidden = mt_layout_builder_config(b)->hidden, qk = (int64_t)d.qk, kv = (int64_t)d.kv;
    const struct mt_param_tensor latents[] = {{"self_attn.q_a_proj.weight", c->q_latent},
                                              {"self_attn.kv_a_proj_with_mqa.weight", c->kv_latent + c->rope_dim}},
                                 queries[] = {{"self_attn.q_proj.weight", qk}, latents[1]},
                                 biases[] = {{"self_attn.q_a_proj.bias", c->q_latent},
                                             {"self_attn.kv_a_proj_with_mqa.bias", c->kv_latent + c->rope_dim}};
    mt_layout_add_norm(b, p, MT_MLA_NORM, hidden, norms->before, &c->norm);
    mt_layout_add_param(b, p, MT_MLA_IN, hidden, 2, c->q_latent ? latents : queries);
    if (c->qkv_bias)
        mt_layout_add_param(b, p, MT_MLA_IN_BIAS, 0, 2, biases);
    if (c->q_latent) {
        mt_layout_add_norm(b, p, MT_MLA_Q_NORM, c->q_latent, "self_attn.q_a_layernorm.weight", &latent_norm);
        mt_layout_add_tensor(b, p, MT_MLA_Q, qk, c->q_latent, "self_attn.q_b_proj.weight");
    }
    mt_layout_add_norm(b, p, MT_MLA_KV_NORM, c->kv_latent, "self_attn.kv_a_layernorm.weight", &latent_norm);
    mt_layout_add_tensor(b, p, MT_MLA_KV, kv, c->kv_latent, "self_attn.kv_b_proj.weight");
    mt_layout_add_tensor(b, p, MT_MLA_OUT, hidden, (int64_t)d.o, "self_attn.o_proj.weight");
    if (c->o_bias)
        mt_layout_add_tensor(b, p, MT_MLA_OUT_BIAS, hidden, 0, "self_attn.o_proj.bias");
    mt_layout_add_norm(b, p, MT_MLA_NORM_AFTER, hidden, norms->after, &c->norm);
}

/* The norm of a latent, in rows of its own. */
static struct mt_view norm_of_latent(struct mt_recipe *r, const char *name, struct mt_view latent, int role)
{
    struct mt_view y = mt_recipe_value(r, name, latent.dim, false, MT_UNKEPT);
    struct mt_node *n = mt_head_norm_of(r, (struct mt_pair){latent, mt_no_view()}, (struct mt_pair){y, mt_no_view()},
                                        latent_norm.eps, 0, LATENTS);
    n->param[0] = role;
    n->apart = true;
    return y;
}

/* The end of each query, of which a table rotates so many dimensions: all, if queries grow with their positions. */
static struct mt_view rotated(const struct mt_recipe *r, struct mt_view q)
{
    size_t rot = r->spec->q_rope == MT_NO_ROPE ? 0 : r->cfg->rope[r->spec->q_rope].dims;
    return rot ? mt_view_of(q, q.dim - rot, q.heads, rot, q.stride) : mt_no_view();
}

/* Keys: of each head a part of its own, and after it the part that all share, which is rotated, as queries are. */
static struct mt_view make_keys(struct mt_recipe *r, const struct dims *d, struct mt_view q, struct mt_view shared,
                                struct mt_view kv)
{
    size_t wide = d->nope + d->rope;
    struct mt_view rows = mt_recipe_value(r, "k", d->qk, false, MT_UNKEPT);
    struct mt_view turned = rotated(r, q), own = mt_view_of(rows, 0, d->heads, d->nope, wide);
    struct mt_node *rope = mt_rope_of(r, (struct mt_pair){turned, shared},
                                      (struct mt_pair){turned, mt_view_of(rows, d->nope, d->heads, d->rope, wide)},
                                      r->spec->rope, r->spec->q_rope);
    rope->pairs = rope->apart = true;
    struct mt_node *copy = mt_node_of(r, &mt_rule_copy);
    copy->in[0] = mt_view_of(kv, 0, d->heads, d->nope, d->nope + d->v);
    copy->out[0] = own;
    return mt_view_of(rows, 0, d->heads, wide, wide);
}

static struct mt_view recipe(struct mt_recipe *r)
{
    const struct mt_layer_spec *s = r->spec;
    struct dims d = dims_of(s);
    size_t wide = d.nope + d.rope;
    struct mt_view x = mt_recipe_x(r), h = x;
    if (s->norms.attention.before)
        h = mt_norm_of(r, "h", x, MT_MLA_NORM, 0, LATENTS);
    struct mt_view in = mt_linear_of(r, "latents", h, MT_MLA_IN, s->qkv_bias ? MT_MLA_IN_BIAS : -1, d.in, LATENTS),
                   q = in;
    if (d.q_latent)
        q = mt_linear_of(r, "q", norm_of_latent(r, "cq", mt_view_of(in, 0, 1, d.q_latent, d.q_latent), MT_MLA_Q_NORM),
                         MT_MLA_Q, -1, d.qk, MT_UNKEPT);
    q = mt_view_of(q, 0, d.heads, wide, wide);
    struct mt_view c = norm_of_latent(r, "c", mt_view_of(in, d.first, 1, d.latent, d.latent), MT_MLA_KV_NORM);
    struct mt_view kv = mt_linear_of(r, "kv", c, MT_MLA_KV, -1, d.kv, MT_UNKEPT);
    struct mt_view k = make_keys(r, &d, q, mt_view_of(in, d.first + d.latent, d.heads, d.rope, 0), kv);
    struct mt_view o = mt_attend_of(r, q, k, mt_view_of(kv, d.nope, d.heads, d.v, d.nope + d.v), OUT);
    if (s->latent_cache) {
        r->node[r->n_nodes - 1].in[3] = c;
        r->node[r->n_nodes - 1].param[0] = MT_MLA_KV;
    }
    return mt_leave(r, x, o, MT_MLA_OUT, s->o_bias ? MT_MLA_OUT_BIAS : -1,
                    s->norms.attention.after ? MT_MLA_NORM_AFTER : -1, OUT);
}

const struct mt_part_kind mt_part_mla = {
    .name = "mla",
    .port = {MT_PORTS_OF_HIDDEN_STATE},
    .segment = {[LATENTS] = "latents", [OUT] = "out"},
    .attends = true,
    .lay_out = lay_out,
    MT_PART_OF_RECIPE,
};

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The attention of a decoder layer:
 *
 *   h = before(x); qkv = h Wqkv + b; q, k = rope(qknorm(q, k)); o = attention(q, k, vnorm(v));  y = x + after(o Wo)
 *
 * The record keeps what is expensive to make again, in two segments (qkv, and o with its statistics). With QK-norm it
 * also keeps the q and k of attention, which a pass over qkv could make again, for 12% fewer bytes of a layer's record.
 * By the simulator that costs Qwen3's 8B and 32B 0.1 to 0.3% of a step, and gains nothing: where memory or the link is
 * short, attention's records are those that are recomputed anyway.
 */
#include "model/attention.h"

#include "base/mem.h"
#include "model/layout_builder.h"
#include "model/rule.h"

enum { QKV, OUT }; /* segments of the record */

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    const struct mt_layer_spec *c = p->spec;
    int64_t all = c->n_heads * c->head_dim, q = c->gate && !c->gate_name ? 2 * all : all;
    int64_t kv = c->n_kv_heads * c->head_dim, v = c->n_kv_heads * c->v_dim, out = c->n_heads * c->v_dim;
    int64_t hidden = mt_layout_builder_config(b)->hidden;
    const struct mt_branch_norms *norms = &c->norms.attention;
    const struct mt_param_tensor weights[] = {{"self_attn.q_proj.weight", q, .head_rows = c->head_dim},
                                              {"self_attn.k_proj.weight", kv, .head_rows = c->head_dim},
                                              {"self_attn.v_proj.weight", v},
                                              {c->gate_name, out}},
                                 biases[] = {{"self_attn.q_proj.bias", q, .head_rows = c->head_dim},
                                             {"self_attn.k_proj.bias", kv, .head_rows = c->head_dim},
                                             {"self_attn.v_proj.bias", v}};
    mt_layout_add_norm(b, p, MT_ATTENTION_NORM, hidden, norms->before, &c->norm);
    mt_layout_add_norm_bias(b, p, MT_ATTENTION_NORM, hidden, "input_layernorm.bias", &c->norm);
    if (c->qkv_name)
        mt_layout_add_tensor(b, p, MT_ATTENTION_QKV, q + 2 * kv, hidden, c->qkv_name);
    else
        mt_layout_add_param(b, p, MT_ATTENTION_QKV, hidden, c->v_is_k ? 2 : c->gate_name ? 4 : 3, weights);
    if (c->qkv_bias)
        mt_layout_add_param(b, p, MT_ATTENTION_QKV_BIAS, 0, c->v_is_k ? 2 : 3, biases);
    if (c->qk_norm && c->qk_norm != MT_QK_NORM_BARE) {
        bool whole = c->qk_norm == MT_QK_NORM_PROJECTION;
        mt_layout_add_norm(b, p, MT_ATTENTION_Q_NORM, whole ? all : c->head_dim, "self_attn.q_norm.weight", &c->norm);
        mt_layout_add_norm(b, p, MT_ATTENTION_K_NORM, whole ? kv : c->head_dim, "self_attn.k_norm.weight", &c->norm);
    }
    mt_layout_add_tensor(b, p, MT_ATTENTION_OUT, hidden, out, "self_attn.o_proj.weight");
    if (c->o_bias)
        mt_layout_add_tensor(b, p, MT_ATTENTION_OUT_BIAS, hidden, 0, "self_attn.o_proj.bias");
    if (c->sinks)
        mt_layout_add_tensor(b, p, MT_ATTENTION_SINKS, c->n_heads, 0, "self_attn.sinks");
    mt_layout_add_norm(b, p, MT_ATTENTION_NORM_AFTER, hidden, norms->after, &c->norm);
}

/* Columns of a row of the product [q | k | v]. With gates that of a head follows its query, or all are at the end. */
struct columns {
    struct mt_pair qk;
    struct mt_view v, gate;
};

static struct columns split(const struct mt_layer_spec *s, struct mt_view rows)
{
    bool within = s->gate && !s->gate_name;
    size_t n_q = (size_t)s->n_heads, n_kv = (size_t)s->n_kv_heads, d = (size_t)s->head_dim, dv = (size_t)s->v_dim;
    size_t q = n_q * (within ? 2 : 1), step = within ? 2 * d : d;
    return (struct columns){{mt_view_of(rows, 0, n_q, d, step), mt_view_of(rows, q * d, n_kv, d, d)},
                            mt_view_of(rows, (q + n_kv) * d, n_kv, dv, dv),
                            mt_view_of(rows, (within ? 1 : q + 2 * n_kv) * d, n_q, d, step)};
}

/* Does the norm of queries and keys run apart from the rotary embedding, whose operation includes the usual one? */
static bool norms_apart(const struct mt_layer_spec *s)
{
    bool usual = !s->norm.plus_one && !s->norm.round_once;
    bool alike = s->rope != MT_NO_ROPE && s->q_rope == s->rope && !s->v_norm;
    return s->qk_norm && !(s->qk_norm == MT_QK_NORM_HEADS && usual && alike);
}

static struct mt_node *rotate(struct mt_recipe *r, struct mt_pair from, struct mt_pair to)
{
    const struct mt_layer_spec *s = r->spec;
    struct mt_node *n = s->rope == MT_NO_ROPE ? NULL : mt_rope_of(r, from, to, s->rope, s->q_rope);
    if (n)
        n->number = s->norm.eps;
    return n;
}

/* Views of heads that are normalised together. */
static struct mt_view whole(struct mt_view v)
{
    return mt_view_of((struct mt_view){.value = v.value}, v.first, 1, v.heads * v.dim, v.heads * v.dim);
}

static void normalise(struct mt_recipe *r, struct mt_pair x, struct mt_pair y)
{
    const struct mt_layer_spec *s = r->spec;
    bool bare = s->qk_norm == MT_QK_NORM_BARE;
    int flags =
        (s->norm.plus_one && !bare ? MT_HEAD_NORM_PLUS_ONE : 0) | (s->norm.round_once ? MT_HEAD_NORM_ROUND_ONCE : 0);
    if (s->qk_norm == MT_QK_NORM_PROJECTION) {
        x = (struct mt_pair){whole(x.q), whole(x.k)};
        y = (struct mt_pair){whole(y.q), whole(y.k)};
    }
    struct mt_node *n = mt_head_norm_of(r, x, y, s->norm.eps, flags, QKV);
    n->param[0] = bare ? -1 : MT_ATTENTION_Q_NORM;
    n->param[1] = bare ? -1 : MT_ATTENTION_K_NORM;
}

/* Values without a weight's norm; they may be the keys' product. */
static struct mt_view normed_values(struct mt_recipe *r, struct columns x)
{
    const struct mt_layer_spec *s = r->spec;
    size_t n = (size_t)s->n_kv_heads, d = (size_t)s->head_dim;
    struct mt_view v = mt_view_of(mt_recipe_value(r, "v", n * d, false, QKV), 0, n, d, d);
    struct mt_pair from = {s->v_is_k ? x.qk.k : x.v, mt_no_view()}, to = {v, mt_no_view()};
    /* keys have a gradient there already */
    mt_head_norm_of(r, from, to, s->norm.eps, MT_HEAD_NORM_ROUND_ONCE, QKV)->apart = s->v_is_k;
    return v;
}

/* Queries and keys for attention, in qkv itself or with a norm in rows of their own; and values. */
static struct columns make_heads(struct mt_recipe *r, struct columns x)
{
    const struct mt_layer_spec *s = r->spec;
    struct columns y = x;
    size_t n_q = (size_t)s->n_heads, n_kv = (size_t)s->n_kv_heads, d = (size_t)s->head_dim;
    if (!s->qk_norm) {
        rotate(r, x.qk, x.qk);
        return x;
    }
    struct mt_view qk = mt_recipe_value(r, "qk", (n_q + n_kv) * d, false, QKV);
    y.qk = (struct mt_pair){mt_view_of(qk, 0, n_q, d, d), mt_view_of(qk, n_q * d, n_kv, d, d)};
    if (!norms_apart(s)) {
        struct mt_node *n = rotate(r, x.qk, y.qk);
        n->param[0] = MT_ATTENTION_Q_NORM;
        n->param[1] = MT_ATTENTION_K_NORM;
        n->out[2] = mt_recipe_value(r, "statistics of heads", n_q + n_kv, true, QKV);
    } else if (s->qk_norm == MT_QK_NORM_AFTER_ROPE) {
        rotate(r, x.qk, x.qk);
        normalise(r, x.qk, y.qk);
    } else {
        if (s->v_norm) /* before the keys': so its gradient is added to theirs after they have gone through that norm */
            y.v = normed_values(r, x);
        normalise(r, x.qk, y.qk);
        rotate(r, y.qk, y.qk);
    }
    return y;
}

/* Elements of a row of the product: q, k and v, and gates, or q and k alone. */
static size_t width_of(const struct mt_layer_spec *s)
{
    int64_t q = s->n_heads * (s->head_dim + (s->gate ? s->v_dim : 0));
    return (size_t)(q + s->n_kv_heads * (s->head_dim + (s->v_is_k ? 0 : s->v_dim)));
}

struct mt_view mt_attention_outputs(struct mt_recipe *r, struct mt_view h)
{
    const struct mt_layer_spec *s = r->spec;
    struct mt_view qkv = mt_linear_of(r, "qkv", h, MT_ATTENTION_QKV, s->qkv_bias ? MT_ATTENTION_QKV_BIAS : -1,
                                      width_of(s), QKV);
    struct columns x = split(s, qkv), y = make_heads(r, x);
    struct mt_view o = mt_attend_of(r, y.qk.q, y.qk.k, y.v, OUT);
    if (s->sinks) {
        struct mt_view lse = r->node[r->n_nodes - 1].out[1];
        struct mt_node *n = mt_node_of(r, &mt_rule_sink);
        n->in[0] = n->out[0] = o;
        n->in[1] = n->out[1] = lse;
        n->param[0] = MT_ATTENTION_SINKS;
    }
    if (s->o_scale != 1) {
        o = mt_other_of(r, &mt_rule_factor, "scaled", o, mt_no_view());
        r->node[r->n_nodes - 1].number = s->o_scale;
    } else if (s->gate) {
        o = mt_other_of(r, &mt_rule_gate, "gated", o, x.gate);
    }
    return o;
}

static struct mt_view recipe(struct mt_recipe *r)
{
    const struct mt_layer_spec *s = r->spec;
    struct mt_view x = mt_recipe_x(r), h = x;
    if (s->norms.attention.before)
        h = mt_norm_of(r, "h", x, MT_ATTENTION_NORM, 0, QKV);
    return mt_leave(r, x, mt_attention_outputs(r, h), MT_ATTENTION_OUT, s->o_bias ? MT_ATTENTION_OUT_BIAS : -1,
                    s->norms.attention.after ? MT_ATTENTION_NORM_AFTER : -1, OUT);
}

const struct mt_part_kind mt_part_attention = {
    .name = "attention",
    .port = {MT_PORTS_OF_HIDDEN_STATE},
    .segment = {[QKV] = "qkv", [OUT] = "out"},
    .attends = true,
    .lay_out = lay_out,
    MT_PART_OF_RECIPE,
};

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Linear attention by the gated delta rule (Yang et al. 2024) as in Qwen3-Next:
 *
 *   h = before(x);  [q' | k' | v' | z | b | a] = h Win;  q, k, v = silu(conv(q', k', v'))
 *   o = delta rule of q, k, v, beta(b), g(a);  y = x + after((norm(o) silu(z)) Wo)
 *
 * or, plain, by Mamba 2 (Dao and Gu 2024), where C is q, B is k, x is v, and the step dt is a:
 *
 *   [z | v' | k' | q' | a] = h Win;  q, k, v = silu(conv(q', k', v') + bias)
 *   o = plain rule of q, k, v, beta(a), g(a), and D v;  y = x + after(norm(o silu(z)) Wo)
 *
 * The record keeps the product's rows and o; backward makes the convolution, the gates and the states again.
 */
#include "model/layout_builder.h"
#include "model/rule.h"

/* Widths of a layer, in elements. */
struct dims {
    size_t k_heads, v_heads, k, v, taps; /* heads of queries and of keys, of values; their widths */
    size_t group;                        /* values of a key head */
    size_t conv, o, in;                  /* channels of the convolution; of the output; of a row of the product */
    bool joined, plain, conv_bias;
};

static struct dims dims_of(const struct mt_layer_spec *s)
{
    struct dims d = {.k_heads = (size_t)s->delta.k_heads,
                     .v_heads = (size_t)s->delta.v_heads,
                     .k = (size_t)s->delta.k_dim,
                     .v = (size_t)s->delta.v_dim,
                     .taps = (size_t)s->delta.taps,
                     .joined = s->delta.joined != 0,
                     .plain = s->delta.plain,
                     .conv_bias = s->delta.conv_bias};
    d.group = d.v_heads / d.k_heads * d.v;
    d.o = d.v_heads * d.v;
    d.conv = 2 * d.k_heads * d.k + d.o;
    d.in = d.conv + d.o + (d.plain ? 1 : 2) * d.v_heads;
    return d;
}

enum { IN, OUT }; /* segments of the record */

/* The product's tensors. */
static void lay_out_in(struct mt_layout_builder *b, struct mt_part *p, const struct dims *d)
{
    int64_t hidden = mt_layout_builder_config(b)->hidden, heads = (int64_t)d->v_heads, o = (int64_t)d->o;
    const struct mt_param_tensor apart[] = {{"linear_attn.in_proj_qkv.weight", (int64_t)d->conv},
                                            {"linear_attn.in_proj_z.weight", o},
                                            {"linear_attn.in_proj_b.weight", heads},
                                            {"linear_attn.in_proj_a.weight", heads}},
                                 joined[] = {{"linear_attn.in_proj_qkvz.weight", (int64_t)d->conv + o},
                                             {"linear_attn.in_proj_ba.weight", 2 * heads}};
    if (d->plain)
        mt_layout_add_tensor(b, p, MT_DELTA_IN, (int64_t)d->in, hidden, "linear_attn.in_proj.weight");
    else
        mt_layout_add_param(b, p, MT_DELTA_IN, hidden, d->joined ? 2 : 4, d->joined ? joined : apart);
}

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    const struct mt_layer_spec *c = p->spec;
    const struct mt_branch_norms *norms = &c->norms.attention;
    const struct mt_norm_spec ones = {.plus_one = false}; /* of the outputs: its weights begin at 1 */
    struct dims d = dims_of(c);
    int64_t hidden = mt_layout_builder_config(b)->hidden, heads = (int64_t)d.v_heads, o = (int64_t)d.o;
    const struct mt_param_tensor dt_bias = {.usual = "linear_attn.dt_bias", .rows = heads, .start = 1},
                                 a_log = {.usual = "linear_attn.A_log",
                                          .rows = heads,
                                          .start = d.plain ? 1 : 0.01f,
                                          .log_to = d.plain ? (float)(heads + 1) : 16},
                                 skip = {.usual = "linear_attn.D", .rows = heads, .start = 1},
                                 bias = {.usual = "linear_attn.conv1d.bias", .rows = (int64_t)d.conv};
    mt_layout_add_norm(b, p, MT_DELTA_NORM, hidden, norms->before, &c->norm);
    lay_out_in(b, p, &d);
    mt_layout_add_tensor(b, p, MT_DELTA_CONV, (int64_t)d.conv, (int64_t)d.taps, "linear_attn.conv1d.weight");
    if (d.conv_bias)
        mt_layout_add_param(b, p, MT_DELTA_CONV_BIAS, 0, 1, &bias);
    mt_layout_add_param(b, p, MT_DELTA_DT_BIAS, 0, 1, &dt_bias);
    mt_layout_add_param(b, p, MT_DELTA_A_LOG, 0, 1, &a_log);
    if (d.plain)
        mt_layout_add_param(b, p, MT_DELTA_SKIP, 0, 1, &skip);
    mt_layout_add_norm(b, p, MT_DELTA_OUT_NORM, d.plain ? o : (int64_t)d.v, "linear_attn.norm.weight", &ones);
    mt_layout_add_tensor(b, p, MT_DELTA_OUT, hidden, o, "linear_attn.out_proj.weight");
    mt_layout_add_norm(b, p, MT_DELTA_NORM_AFTER, hidden, norms->after, &c->norm);
}

/* Columns of a row of the product; each has k_heads heads: values are as wide as all those of a key head. */
struct columns {
    struct mt_view q, k, v, z, b, a;
};

static struct columns split(const struct dims *d, struct mt_view in)
{
    size_t n = d->k_heads, k = d->k, g = d->group, r = d->v_heads / n, rest = d->conv + d->o, all = 2 * (k + g);
    if (d->plain) /* b is not read */
        return (struct columns){mt_view_of(in, 2 * d->o + n * k, n, k, k),
                                mt_view_of(in, 2 * d->o, n, k, k),
                                mt_view_of(in, d->o, n, g, g),
                                mt_view_of(in, 0, n, g, g),
                                mt_no_view(),
                                mt_view_of(in, rest, n, r, r)};
    if (d->joined) /* a key head after the other */
        return (struct columns){mt_view_of(in, 0, n, k, all),      mt_view_of(in, k, n, k, all),
                                mt_view_of(in, 2 * k, n, g, all),  mt_view_of(in, 2 * k + g, n, g, all),
                                mt_view_of(in, rest, n, r, 2 * r), mt_view_of(in, rest + r, n, r, 2 * r)};
    return (struct columns){mt_view_of(in, 0, n, k, k),         mt_view_of(in, n * k, n, k, k),
                            mt_view_of(in, 2 * n * k, n, g, g), mt_view_of(in, d->conv, n, g, g),
                            mt_view_of(in, rest, n, r, r),      mt_view_of(in, rest + d->v_heads, n, r, r)};
}

/* Queries, keys and values after the convolution: its channels are in the order of its weights. */
static struct mt_node *convolve(struct mt_recipe *r, const struct dims *d, const struct columns *x)
{
    size_t keys = d->k_heads * d->k, q = d->plain ? d->o + keys : 0, k = d->plain ? d->o : keys,
           v = d->plain ? 0 : 2 * keys;
    struct mt_view y = mt_recipe_value(r, "conv", d->conv, false, MT_UNKEPT);
    struct mt_node *n = mt_node_of(r, &mt_rule_short_conv);
    n->in[0] = x->q;
    n->in[1] = x->k;
    n->in[2] = x->v;
    n->out[0] = mt_view_of(y, q, d->k_heads, d->k, d->k);
    n->out[1] = mt_view_of(y, k, d->k_heads, d->k, d->k);
    n->out[2] = mt_view_of(y, v, d->k_heads, d->group, d->group);
    n->param[0] = MT_DELTA_CONV;
    n->param[1] = d->conv_bias ? MT_DELTA_CONV_BIAS : -1;
    return n;
}

static struct mt_node *make_gates(struct mt_recipe *r, const struct dims *d, const struct columns *x)
{
    struct mt_node *n = mt_node_of(r, &mt_rule_delta_gates);
    n->in[0] = x->a;
    n->in[1] = x->b;
    n->out[0] = mt_recipe_value(r, "beta", d->v_heads, true, MT_UNKEPT);
    n->out[1] = mt_recipe_value(r, "g", d->v_heads, true, MT_UNKEPT);
    if (d->plain) {
        n->out[2] = mt_recipe_value(r, "skip", d->v_heads, true, MT_UNKEPT);
        r->value[n->out[2].value].ghost = true;
    }
    n->param[0] = MT_DELTA_A_LOG;
    n->param[1] = MT_DELTA_DT_BIAS;
    n->param[2] = MT_DELTA_SKIP;
    return n;
}

static struct mt_view recipe(struct mt_recipe *r)
{
    const struct mt_layer_spec *s = r->spec;
    struct dims d = dims_of(s);
    struct mt_view x = mt_recipe_x(r), h = x;
    if (s->norms.attention.before)
        h = mt_norm_of(r, "h", x, MT_DELTA_NORM, 0, IN);
    struct columns in = split(&d, mt_linear_of(r, "rows", h, MT_DELTA_IN, -1, d.in, IN));
    struct mt_node *conv = convolve(r, &d, &in), *gates = make_gates(r, &d, &in);
    struct mt_view o = mt_recipe_value(r, "o", d.o, false, OUT);
    struct mt_node *rule = mt_node_of(r, &mt_rule_delta);
    rule->in[0] = conv->out[0];
    rule->in[1] = conv->out[1];
    rule->in[2] = mt_view_of((struct mt_view){.value = conv->out[2].value}, conv->out[2].first, d.v_heads, d.v, d.v);
    rule->in[3] = gates->out[0];
    rule->in[4] = gates->out[1];
    rule->in[5] = gates->out[2];
    rule->out[0] = mt_view_of(o, 0, d.v_heads, d.v, d.v);
    rule->param[0] = MT_DELTA_SKIP;
    struct mt_view normed = d.plain ? mt_view_of(o, 0, d.k_heads, d.group, d.group) : rule->out[0];
    normed = mt_other_of(r, &mt_rule_gated_norm, "normed", normed, in.z);
    r->node[r->n_nodes - 1].param[0] = MT_DELTA_OUT_NORM;
    r->node[r->n_nodes - 1].number = s->norm.eps;
    return mt_leave(r, x, normed, MT_DELTA_OUT, -1, s->norms.attention.after ? MT_DELTA_NORM_AFTER : -1, OUT);
}

const struct mt_part_kind mt_part_delta = {
    .name = "delta",
    .port = {MT_PORTS_OF_HIDDEN_STATE},
    .segment = {[IN] = "rows", [OUT] = "out"},
    .attends = true,
    .lay_out = lay_out,
    MT_PART_OF_RECIPE,
};

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The MLP of a decoder layer:
 *
 *   h = before(x);  y = x + after((act(h Wgate) * (h Wup)) Wdown)       (Shazeer 2020)
 *                   y = x + after(act(h Wup) Wdown)                     without a gate
 *
 * and at last y is multiplied by the layer's number, if it has one.
 *
 * The record keeps gate and up, and the norm's statistics; backward makes the norm's output and the activation again:
 * a cheap pass each, the activation's together with its gradient.
 */
#include "model/mlp.h"
#include "base/mem.h"
#include "model/recipe.h"

void mt_mlp_lay_out(struct mt_layout_builder *b, struct mt_part *p, int roles)
{
    const struct mt_layer_spec *s = p->spec;
    int64_t hidden = mt_layout_builder_config(b)->hidden;
    const struct mt_param_tensor weights[] = {{"mlp.gate_proj.weight", s->ffn}, {"mlp.up_proj.weight", s->ffn}},
                                 biases[] = {{"mlp.gate_proj.bias", s->ffn}, {"mlp.up_proj.bias", s->ffn}};
    int gates = s->ungated ? 0 : 1;
    if (s->gate_up_name)
        mt_layout_add_tensor(b, p, roles + MT_MLP_GATE_UP, (int64_t)mt_mlp_width(s), hidden, s->gate_up_name);
    else
        mt_layout_add_param(b, p, roles + MT_MLP_GATE_UP, hidden, 1 + gates, weights + 1 - gates);
    if (s->mlp_bias)
        mt_layout_add_param(b, p, roles + MT_MLP_GATE_UP_BIAS, 0, 1 + gates, biases + 1 - gates);
    mt_layout_add_tensor(b, p, roles + MT_MLP_DOWN, hidden, s->ffn, "mlp.down_proj.weight");
    if (s->mlp_bias)
        mt_layout_add_tensor(b, p, roles + MT_MLP_DOWN_BIAS, hidden, 0, "mlp.down_proj.bias");
}

/* alpha_p and alpha_n, of which softplus is 0.8 and 0.3 in random weights, and two constants. */
static void lay_out_curve(struct mt_layout_builder *b, struct mt_part *p)
{
    static const struct mt_param_tensor curve[] = {{"mlp.act_fn.alpha_p", 1, .start = 0.20325218f},
                                                   {"mlp.act_fn.alpha_n", 1, .start = -1.0502256f},
                                                   {"mlp.act_fn.beta", 1, .constant = true, .start = 0.5f},
                                                   {"mlp.act_fn.eps", 1, .constant = true, .start = -1e-6f}};
    if (p->spec->activation == MT_ACTIVATION_XIELU)
        mt_layout_add_param(b, p, MT_MLP_CURVE, 0, MT_ARRAY_LEN(curve), curve);
}

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    const struct mt_layer_spec *s = p->spec;
    const struct mt_branch_norms *norms = &s->norms.mlp;
    int64_t hidden = mt_layout_builder_config(b)->hidden;
    mt_layout_add_norm(b, p, MT_MLP_NORM, hidden, norms->before, &s->norm);
    mt_layout_add_norm_bias(b, p, MT_MLP_NORM, hidden, "post_attention_layernorm.bias", &s->norm);
    mt_mlp_lay_out(b, p, 0);
    lay_out_curve(b, p);
    mt_layout_add_norm(b, p, MT_MLP_NORM_AFTER, hidden, norms->after, &s->norm);
    mt_layout_add_scalar(b, p, MT_MLP_SCALAR);
}

static struct mt_view recipe(struct mt_recipe *r)
{
    const struct mt_layer_spec *s = r->spec;
    struct mt_view x = mt_recipe_x(r), h = x;
    if (s->norms.mlp.before)
        h = mt_norm_of(r, "h", x, MT_MLP_NORM, 0, 0);
    struct mt_view gate_up =
        mt_linear_of(r, "gate_up", h, MT_MLP_GATE_UP, s->mlp_bias ? MT_MLP_GATE_UP_BIAS : -1, mt_mlp_width(s), 0);
    struct mt_view act = mt_activation_of(r, gate_up, MT_MLP_CURVE);
    struct mt_view y = mt_leave(r, x, act, MT_MLP_DOWN, s->mlp_bias ? MT_MLP_DOWN_BIAS : -1,
                                s->norms.mlp.after ? MT_MLP_NORM_AFTER : -1, 0);
    return s->scalar_name ? mt_scaled_of(r, y) : y;
}

const struct mt_part_kind mt_part_mlp = {
    .name = "mlp",
    .port = {MT_PORTS_OF_HIDDEN_STATE},
    .lay_out = lay_out,
    MT_PART_OF_RECIPE,
};

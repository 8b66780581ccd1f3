/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of a layer whose experts are beside an MLP (Gemma 4), each with norms of its own:
 *
 *   y = (x + after(norm1(MLP(before(x))) + norm2(sum)))       times the layer's number, if it has one
 *
 * x is the router's input, which it hands on, and the sum that of the experts' outputs in FP32. Rounded, the sum is
 * kept for backward: only experts could make it again.
 */
#include "model/layout_builder.h"
#include "model/mlp.h"
#include "model/moe.h"
#include "model/recipe.h"

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    const struct mt_layer_norms *norms = &p->spec->norms;
    int64_t hidden = mt_layout_builder_config(b)->hidden;
    mt_layout_add_norm(b, p, MT_MLP_NORM, hidden, norms->mlp.before, &p->spec->norm);
    mt_mlp_lay_out(b, p, 0);
    mt_layout_add_norm(b, p, MT_MLP_NORM_AFTER, hidden, norms->mlp.after, &p->spec->norm);
    mt_layout_add_norm(b, p, MT_BESIDE_NORM_MLP, hidden, norms->mlp_beside, &p->spec->norm);
    mt_layout_add_norm(b, p, MT_BESIDE_NORM_SUM, hidden, norms->experts.after, &p->spec->norm);
    mt_layout_add_scalar(b, p, MT_MLP_SCALAR);
}

static struct mt_view recipe(struct mt_recipe *r)
{
    const struct mt_layer_spec *s = r->spec;
    struct mt_view x = mt_moe_residual(r);
    struct mt_view h = mt_norm_of(r, "h", x, MT_MLP_NORM, 0, 0);
    struct mt_view gate_up =
        mt_linear_of(r, "gate_up", h, MT_MLP_GATE_UP, s->mlp_bias ? MT_MLP_GATE_UP_BIAS : -1, mt_mlp_width(s), 0);
    struct mt_view out = mt_linear_of(r, "out", mt_activation_of(r, gate_up, -1), MT_MLP_DOWN,
                                      s->mlp_bias ? MT_MLP_DOWN_BIAS : -1, x.dim, 0);
    struct mt_view sum = mt_moe_rounded(r);
    struct mt_view norm1 = mt_norm_of(r, "norm of the MLP", out, MT_BESIDE_NORM_MLP, 0, MT_UNKEPT);
    struct mt_view norm2 = mt_norm_of(r, "norm of the sum", sum, MT_BESIDE_NORM_SUM, 0, MT_UNKEPT);
    struct mt_view both = mt_norm_of(r, "norm of both", mt_sum_of(r, norm1, norm2, 1), MT_MLP_NORM_AFTER, 0, MT_UNKEPT);
    struct mt_view y = mt_sum_of(r, x, both, 1);
    return s->scalar_name ? mt_scaled_of(r, y) : y;
}

const struct mt_part_kind mt_part_beside = {
    .name = "beside",
    .adapted = 1u << MT_MLP_GATE_UP | 1u << MT_MLP_DOWN,
    .products = 1u << MT_MLP_GATE_UP | 1u << MT_MLP_DOWN,
    .port = {{MT_ROLE_WEIGHTS, MT_READ, MT_READ},
             {MT_ROLE_SUM, MT_READ, MT_NO_ACCESS},
             {MT_ROLE_RESIDUAL, MT_READ, MT_READ},
             {MT_ROLE_ROUNDED, MT_FILL, MT_READ, mt_rows_bytes},
             {MT_ROLE_Y, MT_WRITE, MT_NO_ACCESS, mt_hidden_bytes},
             {MT_ROLE_DX, MT_NO_ACCESS, MT_UPDATE, mt_hidden_bytes},
             {MT_ROLE_DY, MT_NO_ACCESS, MT_FILL},
             {MT_ROLE_GRAD, MT_NO_ACCESS, MT_SUM}},
    .lay_out = lay_out,
    MT_PART_OF_RECIPE,
};

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A layer whose attention and MLP read the same normalised input (Cohere; Wang and Komatsuzaki 2021):
 *
 *   h = before(x);  y = x + attention(h) + MLP(h)
 *
 * One part, with the parameters and the record of both: h has one gradient, the sum of two, and one backward of the
 * norm.
 */
#include "base/mem.h"
#include "model/attention.h"
#include "model/mlp.h"

/* Added to the roles of an MLP, of which the norm is attention's. */
enum { MLP_ROLES = MT_PARALLEL_GATE_UP - MT_MLP_GATE_UP };
enum { QKV, OUT, MLP }; /* segments of the record: attention's two, and the MLP's */

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    mt_part_attention.lay_out(b, p);
    mt_mlp_lay_out(b, p, MLP_ROLES);
}

static struct mt_view recipe(struct mt_recipe *r)
{
    const struct mt_layer_spec *s = r->spec;
    struct mt_view x = mt_recipe_x(r), h = x;
    if (s->norms.attention.before)
        h = mt_norm_of(r, "h", x, MT_ATTENTION_NORM, 0, QKV);
    struct mt_view o = mt_attention_outputs(r, h);
    struct mt_view y = mt_linear_add_of(r, o, MT_ATTENTION_OUT, s->o_bias ? MT_ATTENTION_OUT_BIAS : -1, x);
    r->value[y.value].in_y = true;
    struct mt_view gate_up = mt_linear_of(r, "gate_up", h, MT_PARALLEL_GATE_UP,
                                          s->mlp_bias ? MT_PARALLEL_GATE_UP_BIAS : -1, mt_mlp_width(s), MLP);
    return mt_linear_add_of(r, mt_activation_of(r, gate_up, -1), MT_PARALLEL_DOWN,
                            s->mlp_bias ? MT_PARALLEL_DOWN_BIAS : -1, y);
}

const struct mt_part_kind mt_part_parallel = {
    .name = "parallel",
    .port = {MT_PORTS_OF_HIDDEN_STATE},
    .segment = {[QKV] = "qkv", [OUT] = "out", [MLP] = "mlp"},
    .attends = true,
    .lay_out = lay_out,
    MT_PART_OF_RECIPE,
};

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of a layer whose experts are in a space of fewer dimensions (Nemotron 3 Super, modeling_nemotron_h.py):
 *
 *   y = r + sum Wup
 *
 * r is the router's input with the shared expert's output, which the router hands on, and the sum that of the experts'
 * outputs in FP32. Rounded, the sum is kept for backward: only experts could make it again.
 */
#include "model/layout_builder.h"
#include "model/moe.h"

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    const struct mt_hf_config *c = mt_layout_builder_config(b);
    mt_layout_add_tensor(b, p, MT_LATENT_UP, c->hidden, c->moe.latent, "mlp.fc2_latent_proj.weight");
}

static struct mt_view recipe(struct mt_recipe *r)
{
    struct mt_view x = mt_moe_residual(r), sum = mt_moe_rounded(r);
    return mt_linear_add_of(r, sum, MT_LATENT_UP, -1, x);
}

const struct mt_part_kind mt_part_latent = {
    .name = "latent",
    .adapted = 1u << MT_LATENT_UP,
    .products = 1u << MT_LATENT_UP,
    .port = {MT_PORTS_OF_MIXTURE_END},
    .lay_out = lay_out,
    MT_PART_OF_RECIPE,
};

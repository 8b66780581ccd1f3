/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of a layer with a norm after its mixture of experts (Trinity): y = x + norm(sum). x is the router's input,
 * which it hands on; the sum, that of experts and shared expert in FP32, is kept rounded for backward: only experts
 * could make it again.
 */
#include "model/layout_builder.h"
#include "model/moe.h"
#include "model/recipe.h"

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    int64_t hidden = mt_layout_builder_config(b)->hidden;
    mt_layout_add_norm(b, p, MT_NORMED_NORM, hidden, p->spec->norms.mlp.after, &p->spec->norm);
}

static struct mt_view recipe(struct mt_recipe *r)
{
    struct mt_view x = mt_moe_residual(r), sum = mt_moe_rounded(r);
    return mt_sum_of(r, x, mt_norm_of(r, "normed", sum, MT_NORMED_NORM, r->spec->after_eps, MT_UNKEPT), 1);
}

const struct mt_part_kind mt_part_normed = {
    .name = "normed",
    .port = {MT_PORTS_OF_MIXTURE_END},
    .lay_out = lay_out,
    MT_PART_OF_RECIPE,
};

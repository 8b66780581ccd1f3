/* SPDX-License-Identifier: Apache-2.0 */
/* RMSNorm of embeddings, without a weight, at the beginning of the first layer (Muse Glimmer). No parameters. */
#include "model/layout_builder.h"
#include "model/recipe.h"

static struct mt_view recipe(struct mt_recipe *r)
{
    struct mt_view x = mt_recipe_x(r), y = mt_recipe_value(r, "y", x.dim, false, MT_UNKEPT);
    mt_head_norm_of(r, (struct mt_pair){x, mt_no_view()}, (struct mt_pair){y, mt_no_view()}, r->spec->norm.eps,
                    MT_HEAD_NORM_ROUND_ONCE, 0);
    return y;
}

const struct mt_part_kind mt_part_embed_norm = {
    .name = "embed_norm",
    .port = {MT_PORTS_OF_HIDDEN_STATE},
    MT_PART_OF_RECIPE,
};

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/layout_builder.h"
#include "model/recipe.h"

/** Columns of gate and up, or of up alone. */
static inline size_t mt_mlp_width(const struct mt_layer_spec *s)
{
    return (s->ungated ? 1 : 2) * (size_t)s->ffn;
}
/** The parameters, without norms. */
void mt_mlp_lay_out(struct mt_layout_builder *b, struct mt_part *p, int roles);

/* SPDX-License-Identifier: Apache-2.0 */
/* Which rows of a step go to which expert: the routers' choices, sorted by expert. It has no parameters. */
#include "model/part.h"

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    (void)b;
    (void)p;
}

const struct mt_part_kind mt_part_lists = {
    .name = "lists",
    .per_step = true,
    .lay_out = lay_out,
};

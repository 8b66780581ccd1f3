/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check(const void *args)
{
    const struct mt_cap *a = args;
    MT_OP_NEED(a->c && a->ld >= a->c && a->cap > 0 && aligned(a->x));
    return NULL;
}

static void cost(const void *args, struct mt_metered *out)
{
    const struct mt_cap *a = args;
    out->dim[0] = a->n;
    out->dim[1] = a->c;
    out->bytes = 2 * mt_op_bytes(a->n, a->c, MT_F32);
}

static void fill(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    *(struct mt_cap *)args = (struct mt_cap){n, c, c, 30, mt_example_update(x, MT_F32, n * c)};
}

const struct mt_op mt_op_row_cap = {
    .name = {"cap"},
    .dim = {MT_SIZE_LOSS_ROWS, MT_SIZE_VOCAB},
    .f32_only = true,
    .args_bytes = sizeof(struct mt_cap),
    .count = offsetof(struct mt_cap, n),
    .check = check,
    .cost = cost,
    .fill = fill,
};

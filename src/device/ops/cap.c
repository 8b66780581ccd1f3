/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check_cap(const struct mt_cap *a)
{
    MT_OP_NEED(a->c && a->ld >= a->c && a->cap > 0 && aligned(a->x));
    return NULL;
}

static void cost_cap(const struct mt_cap *a, struct mt_metered *out)
{
    mt_op_count_rows(a->n, a->c, MT_F32, 2, out);
}

static void fill_cap(mt_example *x, const struct mt_metered *shape, struct mt_cap *a)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    *a = (struct mt_cap){n, c, c, 30, mt_example_update(x, MT_F32, n * c)};
}

MT_OP_ROW(cap, n, .dim = {MT_SIZE_LOSS_ROWS, MT_SIZE_VOCAB}, .f32_only = true);

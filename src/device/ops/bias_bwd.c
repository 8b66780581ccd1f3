/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check(const void *args)
{
    const struct mt_bias_bwd *a = args;
    MT_OP_NEED(a->c && a->ld >= a->c);
    MT_OP_NEED(a->dy && aligned(a->db) && a->workspace);
    MT_OP_NEED(a->x || !a->scale);
    return NULL;
}

static void cost(const void *args, struct mt_metered *out)
{
    const struct mt_bias_bwd *a = args;
    out->dtype = a->dtype;
    out->dim[0] = a->n;
    out->dim[1] = a->c;
    out->bytes = (a->x ? 2 : 1) * mt_op_bytes(a->n, a->c, a->dtype);
}

static void fill(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    struct mt_bias_bwd a = {.n = n, .c = c, .ld = c, .dtype = shape->dtype};
    a.dy = mt_example_fresh(x, a.dtype, n * c);
    a.db = mt_example_update(x, MT_F32, c);
    a.workspace = mt_example_workspace(x, mt_op_bias_bwd_workspace(mt_example_device(x), &a));
    *(struct mt_bias_bwd *)args = a;
}

const struct mt_op mt_op_row_bias_bwd = {
    .name = {"bias_bwd"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN},
    .args_bytes = sizeof(struct mt_bias_bwd),
    .count = offsetof(struct mt_bias_bwd, n),
    .check = check,
    .cost = cost,
    .fill = fill,
};

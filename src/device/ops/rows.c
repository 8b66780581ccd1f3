/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check(const void *args)
{
    const struct mt_rows *a = args;
    MT_OP_NEED(a->c && a->rows && aligned(a->src) && aligned(a->dst) && a->src != a->dst);
    return NULL;
}

static void cost_gather(const void *args, struct mt_metered *out)
{
    const struct mt_rows *a = args;
    out->dtype = a->dtype;
    out->dim[0] = a->n;
    out->dim[1] = a->c;
    out->bytes = 2 * mt_op_bytes(a->n, a->c, a->dtype);
}

static void cost_scatter(const void *args, struct mt_metered *out)
{
    const struct mt_rows *a = args;
    out->dtype = a->dtype;
    out->dim[0] = a->n_dst;
    out->dim[1] = a->c;
    out->bytes = 2 * mt_op_bytes(a->n_dst, a->c, a->dtype);
}

/* All rows, as if every token had a loss. */
static void fill(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    *(struct mt_rows *)args = (struct mt_rows){
        .n = n, .n_dst = n, .c = c, .dtype = shape->dtype, .rows = mt_example_ints(x, n, 1, 0),
        .src = mt_example_fresh(x, shape->dtype, n * c), .dst = mt_example_write(x, shape->dtype, n * c)};
}

const struct mt_op mt_op_row_gather_rows = {
    .name = {"gather_rows"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN},
    .args_bytes = sizeof(struct mt_rows),
    .count = offsetof(struct mt_rows, n),
    .check = check,
    .cost = cost_gather,
    .fill = fill,
};

const struct mt_op mt_op_row_scatter_rows = {
    .name = {"scatter_rows"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN},
    .args_bytes = sizeof(struct mt_rows),
    .count = offsetof(struct mt_rows, n_dst), /* with n = 0 all rows are still cleared */
    .check = check,
    .cost = cost_scatter,
    .fill = fill,
};

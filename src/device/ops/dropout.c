/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check(const void *args)
{
    const struct mt_dropout *a = args;
    MT_OP_NEED(a->c && a->p >= 0 && a->p < 1);
    MT_OP_NEED(a->out_dtype == a->dtype || (a->out_dtype == MT_F32 && a->out != a->x));
    MT_OP_NEED(aligned(a->x) && aligned_or_null(a->add) && aligned(a->out));
    MT_OP_NEED(a->first_row <= UINT32_MAX && a->n <= UINT32_MAX - a->first_row);
    return NULL;
}

static void cost(const void *args, struct mt_metered *out)
{
    const struct mt_dropout *a = args;
    out->dtype = a->dtype;
    out->dim[0] = a->n;
    out->dim[1] = a->c;
    out->bytes = mt_op_bytes(a->n, a->c, a->dtype) + (a->add ? 2 : 1) * mt_op_bytes(a->n, a->c, a->out_dtype);
}

static void fill(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    *(struct mt_dropout *)args = (struct mt_dropout){
        .n = n, .c = c, .dtype = shape->dtype, .out_dtype = shape->dtype, .p = 0.1f, .seed = 1, .stream = 2,
        .x = mt_example_fresh(x, shape->dtype, n * c), .out = mt_example_write(x, shape->dtype, n * c)};
}

const struct mt_op mt_op_row_dropout = {
    .name = {"dropout"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN},
    .args_bytes = sizeof(struct mt_dropout),
    .count = offsetof(struct mt_dropout, n),
    .check = check,
    .cost = cost,
    .fill = fill,
};

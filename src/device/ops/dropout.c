/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check_dropout(const struct mt_dropout *a)
{
    MT_OP_NEED(a->c && a->p >= 0 && a->p < 1);
    MT_OP_NEED(a->out_dtype == a->dtype || (a->out_dtype == MT_F32 && a->out != a->x));
    MT_OP_NEED(aligned(a->x) && aligned_or_null(a->add) && aligned(a->out));
    MT_OP_NEED(a->first_row <= UINT32_MAX && a->n <= UINT32_MAX - a->first_row);
    return NULL;
}

static void cost_dropout(const struct mt_dropout *a, struct mt_metered *out)
{
    mt_op_shape(out, a->dtype, MT_DIMS(a->n, a->c));
    out->bytes = mt_op_bytes(a->n, a->c, a->dtype) + (a->add ? 2 : 1) * mt_op_bytes(a->n, a->c, a->out_dtype);
}

static void fill_dropout(mt_example *x, const struct mt_metered *shape, struct mt_dropout *a)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    *a = (struct mt_dropout){
        .n = n, .c = c, .dtype = shape->dtype, .out_dtype = shape->dtype, .p = 0.1f, .seed = 1, .stream = 2,
        .x = mt_example_fresh(x, shape->dtype, n * c), .out = mt_example_write(x, shape->dtype, n * c)};
}

MT_OP_ROW(dropout, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

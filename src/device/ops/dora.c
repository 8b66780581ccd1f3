/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check_dora_scale(const struct mt_dora_scale *a)
{
    MT_OP_NEED(a->scale && a->inverse && a->scale != a->inverse);
    MT_OP_NEED(!a->magnitude || (a->c && a->r && a->w && a->b && a->wa && a->gram));
    return NULL;
}

static void cost_dora_scale(const struct mt_dora_scale *a, struct mt_metered *out)
{
    mt_op_shape(out, a->dtype, MT_DIMS(a->n, a->c));
    out->bytes = mt_op_bytes(a->n, a->c + a->r + 1, a->dtype) + mt_op_bytes(a->n + a->r, a->r, MT_F32) +
                 mt_op_bytes(a->n, 2, MT_F32);
}

static void fill_dora_scale(mt_example *x, const struct mt_metered *shape, struct mt_dora_scale *args)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1], r = 16;
    /* small beside the weights: a norm's square, of arrays that are no products, could be below 0 */
    *args = (struct mt_dora_scale){
        .n = n, .c = c, .r = r, .dtype = shape->dtype, .s = 0.03125f, .w = mt_example_read(x, shape->dtype, n * c),
        .b = mt_example_read(x, shape->dtype, n * r), .magnitude = mt_example_read(x, shape->dtype, n),
        .wa = mt_example_fresh(x, MT_F32, n * r), .gram = mt_example_fresh(x, MT_F32, r * r),
        .scale = mt_example_write(x, MT_F32, n), .inverse = mt_example_write(x, MT_F32, n)};
}

MT_OP_ROW(dora_scale, n, .dim = {MT_SIZE_FFN, MT_SIZE_HIDDEN});

static const char *check_scale_columns(const struct mt_scale_columns *a)
{
    MT_OP_NEED(a->out_dtype == a->dtype || a->out_dtype == MT_F32);
    MT_OP_NEED(a->c && aligned(a->x) && aligned(a->scale) && aligned_or_null(a->add) && aligned(a->out));
    return NULL;
}

static void cost_scale_columns(const struct mt_scale_columns *a, struct mt_metered *out)
{
    mt_op_shape(out, a->dtype, MT_DIMS(a->n, a->c));
    out->bytes = mt_op_bytes(a->n, a->c, a->dtype) + (a->add ? 2 : 1) * mt_op_bytes(a->n, a->c, a->out_dtype);
}

static void fill_scale_columns(mt_example *x, const struct mt_metered *shape, struct mt_scale_columns *a)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    *a = (struct mt_scale_columns){
        .n = n, .c = c, .dtype = shape->dtype, .out_dtype = shape->dtype,
        .x = mt_example_fresh(x, shape->dtype, n * c), .scale = mt_example_read(x, MT_F32, c),
        .out = mt_example_write(x, shape->dtype, n * c)};
}

MT_OP_ROW(scale_columns, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

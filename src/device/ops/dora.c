/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check_scale(const void *args)
{
    const struct mt_dora_scale *a = args;
    MT_OP_NEED(a->scale && a->inverse && a->scale != a->inverse);
    MT_OP_NEED(!a->magnitude || (a->c && a->r && a->w && a->b && a->wa && a->gram));
    return NULL;
}

static void cost_scale(const void *args, struct mt_metered *out)
{
    const struct mt_dora_scale *a = args;
    out->dtype = a->dtype;
    out->dim[0] = a->n;
    out->dim[1] = a->c;
    out->bytes = mt_op_bytes(a->n, a->c + a->r + 1, a->dtype) + mt_op_bytes(a->n + a->r, a->r, MT_F32) +
                 mt_op_bytes(a->n, 2, MT_F32);
}

static void fill_scale(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1], r = 16;
    /* small beside the weights: a norm's square, of arrays that are no products, could be below 0 */
    *(struct mt_dora_scale *)args = (struct mt_dora_scale){
        .n = n, .c = c, .r = r, .dtype = shape->dtype, .s = 0.03125f, .w = mt_example_read(x, shape->dtype, n * c),
        .b = mt_example_read(x, shape->dtype, n * r), .magnitude = mt_example_read(x, shape->dtype, n),
        .wa = mt_example_fresh(x, MT_F32, n * r), .gram = mt_example_fresh(x, MT_F32, r * r),
        .scale = mt_example_write(x, MT_F32, n), .inverse = mt_example_write(x, MT_F32, n)};
}

const struct mt_op mt_op_row_dora_scale = {
    .name = {"dora_scale"},
    .dim = {MT_SIZE_FFN, MT_SIZE_HIDDEN},
    .args_bytes = sizeof(struct mt_dora_scale),
    .count = offsetof(struct mt_dora_scale, n),
    .check = check_scale,
    .cost = cost_scale,
    .fill = fill_scale,
};

static const char *check_columns(const void *args)
{
    const struct mt_scale_columns *a = args;
    MT_OP_NEED(a->out_dtype == a->dtype || a->out_dtype == MT_F32);
    MT_OP_NEED(a->c && aligned(a->x) && aligned(a->scale) && aligned_or_null(a->add) && aligned(a->out));
    return NULL;
}

static void cost_columns(const void *args, struct mt_metered *out)
{
    const struct mt_scale_columns *a = args;
    out->dtype = a->dtype;
    out->dim[0] = a->n;
    out->dim[1] = a->c;
    out->bytes = mt_op_bytes(a->n, a->c, a->dtype) + (a->add ? 2 : 1) * mt_op_bytes(a->n, a->c, a->out_dtype);
}

static void fill_columns(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    *(struct mt_scale_columns *)args = (struct mt_scale_columns){
        .n = n, .c = c, .dtype = shape->dtype, .out_dtype = shape->dtype, .x = mt_example_fresh(x, shape->dtype, n * c),
        .scale = mt_example_read(x, MT_F32, c), .out = mt_example_write(x, shape->dtype, n * c)};
}

const struct mt_op mt_op_row_scale_columns = {
    .name = {"scale_columns"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN},
    .args_bytes = sizeof(struct mt_scale_columns),
    .count = offsetof(struct mt_scale_columns, n),
    .check = check_columns,
    .cost = cost_columns,
    .fill = fill_columns,
};

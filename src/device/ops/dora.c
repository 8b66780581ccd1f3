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

static void scale_columns(struct mt_op_walk *w, struct mt_scale_columns *a)
{
    size_t n = mt_op_dim(w, &a->n), c = mt_op_dim(w, &a->c);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_FILL(w, a->out_dtype = t);
    MT_ARRAY(w, a->x, FRESH, t, n * c, 1);
    MT_ARRAY(w, a->scale, READ, MT_F32, c, 0);
    MT_ARRAY(w, a->add, READ | ABSENT, a->out_dtype, n * c, 1);
    MT_ARRAY(w, a->out, WRITE, a->out_dtype, n * c, 1);
    MT_NEED(w, a->c && (a->out_dtype == a->dtype || a->out_dtype == MT_F32));
}

MT_OP_WALK(scale_columns, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

/* SPDX-License-Identifier: Apache-2.0 */
/* Operations on flat arrays: add, grad_cast, join, zero, cast. */
#include "base/mem.h"
#include "device/ops/row.h"

static const char *check_add(const struct mt_add *a)
{
    MT_OP_NEED(aligned_or_null(a->a) && aligned(a->b) && aligned(a->out));
    return NULL;
}

static void cost_add(const struct mt_add *a, struct mt_metered *out)
{
    mt_op_shape(out, a->dtype, MT_DIMS(a->n));
    out->bytes = (a->a ? 3 : 2) * mt_op_bytes(a->n, 1, a->dtype);
}

static void fill_add(mt_example *x, const struct mt_metered *shape, struct mt_add *args)
{
    size_t n = (size_t)shape->dim[0];
    *args = (struct mt_add){
        .n = n, .dtype = shape->dtype, .a = mt_example_fresh(x, shape->dtype, n),
        .b = mt_example_read(x, shape->dtype, n), .out = mt_example_write(x, shape->dtype, n)};
}

MT_OP_ROW(add, n, .dim = {MT_SIZE_ELEMENTS});

static const char *check_grad_cast(const struct mt_grad_cast *a)
{
    MT_OP_NEED(a->src && (a->dst || a->partials));
    MT_OP_NEED((const void *)a->src != a->dst || a->dst_dtype == MT_F32);
    return NULL;
}

static void cost_grad_cast(const struct mt_grad_cast *a, struct mt_metered *out)
{
    mt_op_shape(out, a->dst_dtype, MT_DIMS(a->n));
    out->bytes = mt_op_bytes(a->n, 1, MT_F32) + (a->dst ? mt_op_bytes(a->n, 1, a->dst_dtype) : 0);
}

static void fill_grad_cast(mt_example *x, const struct mt_metered *shape, struct mt_grad_cast *a)
{
    size_t n = (size_t)shape->dim[0];
    *a = (struct mt_grad_cast){
        .n = n, .src = mt_example_read(x, MT_F32, n), .dst_dtype = shape->dtype,
        .dst = mt_example_write(x, shape->dtype, n),
        .partials = mt_example_write(x, MT_F32, mt_div_up(n, MT_SUMSQ_BLOCK))};
}

MT_OP_ROW(grad_cast, n, .dim = {MT_SIZE_ELEMENTS});

static const char *check_join(const struct mt_join *a)
{
    MT_OP_NEED(aligned(a->buf) && a->n % MT_JOIN_BLOCK == 0);
    return NULL;
}

static void cost_join(const struct mt_join *a, struct mt_metered *out)
{
    mt_op_shape(out, MT_F32, MT_DIMS(a->n));
    out->bytes = 2 * mt_op_bytes(a->n, 1, MT_F32);
}

static void fill_join(mt_example *x, const struct mt_metered *shape, struct mt_join *a)
{
    size_t n = mt_align_up((size_t)shape->dim[0], MT_JOIN_BLOCK);
    *a = (struct mt_join){mt_example_update(x, MT_F32, n), n};
}

MT_OP_ROW(join, n, .dim = {MT_SIZE_ELEMENTS}, .f32_only = true);

static const char *check_zero(const struct mt_zero *a)
{
    MT_OP_NEED(a->ptr);
    return NULL;
}

static void cost_zero(const struct mt_zero *a, struct mt_metered *out)
{
    mt_op_shape(out, MT_F32, MT_DIMS(a->bytes));
    out->bytes = (double)a->bytes;
}

static void fill_zero(mt_example *x, const struct mt_metered *shape, struct mt_zero *a)
{
    size_t bytes = (size_t)shape->dim[0];
    *a = (struct mt_zero){mt_example_write(x, MT_F32, mt_div_up(bytes, 4)), bytes};
}

MT_OP_ROW(zero, bytes, .dim = {MT_SIZE_ELEMENTS}, .f32_only = true);

static const char *check_cast(const struct mt_cast *a)
{
    MT_OP_NEED(aligned(a->src) && aligned(a->dst) && a->src != a->dst);
    return NULL;
}

static void cost_cast(const struct mt_cast *a, struct mt_metered *out)
{
    mt_op_shape(out, a->src_dtype, MT_DIMS(a->n));
    out->bytes = mt_op_bytes(a->n, 1, a->src_dtype) + mt_op_bytes(a->n, 1, a->dst_dtype);
}

static void fill_cast(mt_example *x, const struct mt_metered *shape, struct mt_cast *a)
{
    size_t n = (size_t)shape->dim[0];
    enum mt_dtype to = shape->dtype == MT_F32 ? MT_BF16 : MT_F32;
    *a = (struct mt_cast){n, shape->dtype, to, mt_example_read(x, shape->dtype, n), mt_example_write(x, to, n)};
}

MT_OP_ROW(cast, n, .dim = {MT_SIZE_ELEMENTS});

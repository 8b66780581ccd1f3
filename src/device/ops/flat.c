/* SPDX-License-Identifier: Apache-2.0 */
/* Operations on flat arrays: add, grad_cast, join, zero, cast. */
#include "base/mem.h"
#include "device/ops/row.h"

static const char *check_add(const void *args)
{
    const struct mt_add *a = args;
    MT_OP_NEED(aligned_or_null(a->a) && aligned(a->b) && aligned(a->out));
    return NULL;
}

static void cost_add(const void *args, struct mt_metered *out)
{
    const struct mt_add *a = args;
    out->dtype = a->dtype;
    out->dim[0] = a->n;
    out->bytes = (a->a ? 3 : 2) * mt_op_bytes(a->n, 1, a->dtype);
}

static void fill_add(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0];
    *(struct mt_add *)args = (struct mt_add){.n = n, .dtype = shape->dtype,
                                             .a = mt_example_fresh(x, shape->dtype, n),
                                             .b = mt_example_read(x, shape->dtype, n),
                                             .out = mt_example_write(x, shape->dtype, n)};
}

const struct mt_op mt_op_row_add = {
    .name = {"add"},
    .dim = {MT_SIZE_ELEMENTS},
    .args_bytes = sizeof(struct mt_add),
    .count = offsetof(struct mt_add, n),
    .check = check_add,
    .cost = cost_add,
    .fill = fill_add,
};

static const char *check_grad_cast(const void *args)
{
    const struct mt_grad_cast *a = args;
    MT_OP_NEED(a->src && (a->dst || a->partials));
    MT_OP_NEED((const void *)a->src != a->dst || a->dst_dtype == MT_F32);
    return NULL;
}

static void cost_grad_cast(const void *args, struct mt_metered *out)
{
    const struct mt_grad_cast *a = args;
    out->dtype = a->dst_dtype;
    out->dim[0] = a->n;
    out->bytes = mt_op_bytes(a->n, 1, MT_F32) + (a->dst ? mt_op_bytes(a->n, 1, a->dst_dtype) : 0);
}

static void fill_grad_cast(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0];
    *(struct mt_grad_cast *)args = (struct mt_grad_cast){
        .n = n, .src = mt_example_read(x, MT_F32, n), .dst_dtype = shape->dtype,
        .dst = mt_example_write(x, shape->dtype, n),
        .partials = mt_example_write(x, MT_F32, mt_div_up(n, MT_SUMSQ_BLOCK))};
}

const struct mt_op mt_op_row_grad_cast = {
    .name = {"grad_cast"},
    .dim = {MT_SIZE_ELEMENTS},
    .args_bytes = sizeof(struct mt_grad_cast),
    .count = offsetof(struct mt_grad_cast, n),
    .check = check_grad_cast,
    .cost = cost_grad_cast,
    .fill = fill_grad_cast,
};

static const char *check_join(const void *args)
{
    const struct mt_join *a = args;
    MT_OP_NEED(aligned(a->buf) && a->n % MT_JOIN_BLOCK == 0);
    return NULL;
}

static void cost_join(const void *args, struct mt_metered *out)
{
    const struct mt_join *a = args;
    out->dim[0] = a->n;
    out->bytes = 2 * mt_op_bytes(a->n, 1, MT_F32);
}

static void fill_join(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = mt_align_up((size_t)shape->dim[0], MT_JOIN_BLOCK);
    *(struct mt_join *)args = (struct mt_join){mt_example_update(x, MT_F32, n), n};
}

const struct mt_op mt_op_row_join = {
    .name = {"join"},
    .dim = {MT_SIZE_ELEMENTS},
    .f32_only = true,
    .args_bytes = sizeof(struct mt_join),
    .count = offsetof(struct mt_join, n),
    .check = check_join,
    .cost = cost_join,
    .fill = fill_join,
};

static const char *check_zero(const void *args)
{
    const struct mt_zero *a = args;
    MT_OP_NEED(a->ptr);
    return NULL;
}

static void cost_zero(const void *args, struct mt_metered *out)
{
    const struct mt_zero *a = args;
    out->dim[0] = a->bytes;
    out->bytes = (double)a->bytes;
}

static void fill_zero(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t bytes = (size_t)shape->dim[0];
    *(struct mt_zero *)args = (struct mt_zero){mt_example_write(x, MT_F32, mt_div_up(bytes, 4)), bytes};
}

const struct mt_op mt_op_row_zero = {
    .name = {"zero"},
    .dim = {MT_SIZE_ELEMENTS},
    .f32_only = true,
    .args_bytes = sizeof(struct mt_zero),
    .count = offsetof(struct mt_zero, bytes),
    .check = check_zero,
    .cost = cost_zero,
    .fill = fill_zero,
};

static const char *check_cast(const void *args)
{
    const struct mt_cast *a = args;
    MT_OP_NEED(aligned(a->src) && aligned(a->dst) && a->src != a->dst);
    return NULL;
}

static void cost_cast(const void *args, struct mt_metered *out)
{
    const struct mt_cast *a = args;
    out->dtype = a->src_dtype;
    out->dim[0] = a->n;
    out->bytes = mt_op_bytes(a->n, 1, a->src_dtype) + mt_op_bytes(a->n, 1, a->dst_dtype);
}

static void fill_cast(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0];
    enum mt_dtype to = shape->dtype == MT_F32 ? MT_BF16 : MT_F32;
    *(struct mt_cast *)args = (struct mt_cast){n, shape->dtype, to, mt_example_read(x, shape->dtype, n),
                                               mt_example_write(x, to, n)};
}

const struct mt_op mt_op_row_cast = {
    .name = {"cast"},
    .dim = {MT_SIZE_ELEMENTS},
    .args_bytes = sizeof(struct mt_cast),
    .count = offsetof(struct mt_cast, n),
    .check = check_cast,
    .cost = cost_cast,
    .fill = fill_cast,
};

/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check(const void *args)
{
    const struct mt_xielu *a = args;
    MT_OP_NEED(a->f && aligned(a->x) && aligned(a->out) && a->x != a->out && a->shape);
    return NULL;
}

static void cost(const void *args, struct mt_metered *out)
{
    const struct mt_xielu *a = args;
    mt_op_count_rows(a->n, a->f, a->dtype, 2, out);
}

static void fill(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], f = (size_t)shape->dim[1];
    *(struct mt_xielu *)args = (struct mt_xielu){.n = n, .f = f, .dtype = shape->dtype,
                                                 .x = mt_example_fresh(x, shape->dtype, n * f),
                                                 .shape = mt_example_read(x, shape->dtype, 4),
                                                 .out = mt_example_write(x, shape->dtype, n * f)};
}

const struct mt_op mt_op_row_xielu = {
    .name = {"xielu"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_FFN},
    .args_bytes = sizeof(struct mt_xielu),
    .count = offsetof(struct mt_xielu, n),
    .check = check,
    .cost = cost,
    .fill = fill,
};

static const char *check_bwd(const void *args)
{
    const struct mt_xielu_bwd *a = args;
    MT_OP_NEED(a->f && a->shape && (!a->dshape || a->workspace));
    return mt_op_check_activation_bwd(a->x, a->dout, a->dx, a->out);
}

static void cost_bwd(const void *args, struct mt_metered *out)
{
    const struct mt_xielu_bwd *a = args;
    mt_op_count_rows(a->n, a->f, a->dtype, a->out ? 4 : 3, out);
}

/* As in a layer, the output overwrites its gradient. */
static void fill_bwd(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], f = (size_t)shape->dim[1];
    struct mt_xielu_bwd a = {.n = n, .f = f, .dtype = shape->dtype};
    a.x = mt_example_read(x, a.dtype, n * f);
    a.out = mt_example_take(x, MT_TAKE_READ | MT_TAKE_WRITE | MT_TAKE_FRESH, a.dtype, n * f);
    a.dout = a.out;
    a.dx = mt_example_write(x, a.dtype, n * f);
    a.shape = mt_example_read(x, a.dtype, 4);
    a.dshape = mt_example_update(x, MT_F32, 2);
    a.workspace = mt_example_workspace(x, mt_op_xielu_bwd_workspace(mt_example_device(x), &a));
    *(struct mt_xielu_bwd *)args = a;
}

const struct mt_op mt_op_row_xielu_bwd = {
    .name = {"xielu_bwd"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_FFN},
    .args_bytes = sizeof(struct mt_xielu_bwd),
    .count = offsetof(struct mt_xielu_bwd, n),
    .check = check_bwd,
    .cost = cost_bwd,
    .fill = fill_bwd,
};

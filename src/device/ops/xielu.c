/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check_xielu(const struct mt_xielu *a)
{
    MT_OP_NEED(a->f && aligned(a->x) && aligned(a->out) && a->x != a->out && a->shape);
    return NULL;
}

static void cost_xielu(const struct mt_xielu *a, struct mt_metered *out)
{
    mt_op_count_rows(a->n, a->f, a->dtype, 2, out);
}

static void fill_xielu(mt_example *x, const struct mt_metered *shape, struct mt_xielu *a)
{
    size_t n = (size_t)shape->dim[0], f = (size_t)shape->dim[1];
    *a = (struct mt_xielu){
        .n = n, .f = f, .dtype = shape->dtype, .x = mt_example_fresh(x, shape->dtype, n * f),
        .shape = mt_example_read(x, shape->dtype, 4), .out = mt_example_write(x, shape->dtype, n * f)};
}

MT_OP_ROW(xielu, n, .dim = {MT_SIZE_ROWS, MT_SIZE_FFN});

static const char *check_xielu_bwd(const struct mt_xielu_bwd *a)
{
    MT_OP_NEED(a->f && a->shape && (!a->dshape || a->workspace));
    return mt_op_check_activation_bwd(a->x, a->dout, a->dx, a->out);
}

static void cost_xielu_bwd(const struct mt_xielu_bwd *a, struct mt_metered *out)
{
    mt_op_count_rows(a->n, a->f, a->dtype, a->out ? 4 : 3, out);
}

/* As in a layer, the output overwrites its gradient. */
static void fill_xielu_bwd(mt_example *x, const struct mt_metered *shape, struct mt_xielu_bwd *a)
{
    size_t n = (size_t)shape->dim[0], f = (size_t)shape->dim[1];
    *a = (struct mt_xielu_bwd){.n = n, .f = f, .dtype = shape->dtype};
    a->x = mt_example_read(x, a->dtype, n * f);
    a->out = mt_example_take(x, MT_TAKE_READ | MT_TAKE_WRITE | MT_TAKE_FRESH, a->dtype, n * f);
    a->dout = a->out;
    a->dx = mt_example_write(x, a->dtype, n * f);
    a->shape = mt_example_read(x, a->dtype, 4);
    a->dshape = mt_example_update(x, MT_F32, 2);
    a->workspace = mt_example_workspace(x, mt_op_xielu_bwd_workspace(mt_example_device(x), a));
}

MT_OP_ROW(xielu_bwd, n, .dim = {MT_SIZE_ROWS, MT_SIZE_FFN});

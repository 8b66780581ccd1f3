/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check_activate(const struct mt_activate *a)
{
    MT_OP_NEED(a->f && aligned(a->x) && aligned(a->out) && a->x != a->out);
    return NULL;
}

static void cost_activate(const struct mt_activate *a, struct mt_metered *out)
{
    mt_op_count_rows(a->n, a->f, a->dtype, 2, out);
}

static void fill_activate(mt_example *x, const struct mt_metered *shape, struct mt_activate *args)
{
    size_t n = (size_t)shape->dim[0], f = (size_t)shape->dim[1];
    *args =
        (struct mt_activate){.n = n,
                             .f = f,
                             .dtype = shape->dtype,
                             .x = mt_example_fresh(x, shape->dtype, n * f),
                             .out = mt_example_write(x, shape->dtype, n * f)};
}

MT_OP_ROW(activate, n, .dim = {MT_SIZE_ROWS, MT_SIZE_FFN});

static const char *check_activate_bwd(const struct mt_activate_bwd *a)
{
    MT_OP_NEED(a->f);
    return mt_op_check_activation_bwd(a->x, a->dout, a->dx, a->out);
}

static void cost_activate_bwd(const struct mt_activate_bwd *a, struct mt_metered *out)
{
    mt_op_count_rows(a->n, a->f, a->dtype, a->out ? 4 : 3, out);
}

/* As in a layer, the output overwrites its gradient. */
static void fill_activate_bwd(mt_example *x, const struct mt_metered *shape, struct mt_activate_bwd *a)
{
    size_t n = (size_t)shape->dim[0], f = (size_t)shape->dim[1];
    *a = (struct mt_activate_bwd){.n = n, .f = f, .dtype = shape->dtype};
    a->x = mt_example_read(x, a->dtype, n * f);
    a->out = mt_example_take(x, MT_TAKE_READ | MT_TAKE_WRITE | MT_TAKE_FRESH, a->dtype, n * f);
    a->dout = a->out;
    a->dx = mt_example_write(x, a->dtype, n * f);
}

MT_OP_ROW(activate_bwd, n, .dim = {MT_SIZE_ROWS, MT_SIZE_FFN});

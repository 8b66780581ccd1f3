/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check_shared_gate(const struct mt_shared_gate *a)
{
    MT_OP_NEED(a->c && a->f && aligned(a->x) && aligned(a->w) && aligned(a->act) && a->gate && a->x != a->act);
    return NULL;
}

static void cost_shared_gate(const struct mt_shared_gate *a, struct mt_metered *out)
{
    mt_op_shape(out, a->dtype, MT_DIMS(a->n, a->c, a->f));
    out->bytes = mt_op_bytes(a->n, a->c, a->dtype) + 2 * mt_op_bytes(a->n, a->f, a->dtype);
}

static void fill_shared_gate(mt_example *x, const struct mt_metered *shape, struct mt_shared_gate *a)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1], f = (size_t)shape->dim[2];
    *a = (struct mt_shared_gate){
        .n = n, .c = c, .f = f, .dtype = shape->dtype, .x = mt_example_read(x, shape->dtype, n * c),
        .w = mt_example_read(x, shape->dtype, c),
        .act = mt_example_take(x, MT_TAKE_READ | MT_TAKE_WRITE | MT_TAKE_FRESH, shape->dtype, n * f),
        .gate = mt_example_write(x, MT_F32, n)};
}

MT_OP_ROW(shared_gate, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN, MT_SIZE_FFN});

static const char *check_shared_gate_bwd(const struct mt_shared_gate_bwd *a)
{
    MT_OP_NEED(a->c && aligned(a->x) && aligned(a->w) && a->gate && a->dgate && aligned(a->dx));
    MT_OP_NEED(!a->dw || a->workspace);
    return NULL;
}

static void cost_shared_gate_bwd(const struct mt_shared_gate_bwd *a, struct mt_metered *out)
{
    mt_op_shape(out, a->dtype, MT_DIMS(a->n, a->c));
    out->bytes = mt_op_bytes(a->n, a->c, a->dtype) + 2 * mt_op_bytes(a->n, a->c, MT_F32);
}

static void fill_shared_gate_bwd(mt_example *x, const struct mt_metered *shape, struct mt_shared_gate_bwd *a)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    *a = (struct mt_shared_gate_bwd){.n = n, .c = c, .dtype = shape->dtype};
    a->x = mt_example_read(x, a->dtype, n * c);
    a->w = mt_example_read(x, a->dtype, c);
    a->gate = mt_example_read(x, MT_F32, n);
    a->dgate = mt_example_read(x, MT_F32, n);
    a->dx = mt_example_update(x, MT_F32, n * c);
    a->dw = mt_example_update(x, MT_F32, c);
    a->workspace = mt_example_workspace(x, mt_op_shared_gate_bwd_workspace(mt_example_device(x), a));
}

MT_OP_ROW(shared_gate_bwd, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check(const void *args)
{
    const struct mt_shared_gate *a = args;
    MT_OP_NEED(a->c && a->f && aligned(a->x) && aligned(a->w) && aligned(a->act) && a->gate && a->x != a->act);
    return NULL;
}

static void cost(const void *args, struct mt_metered *out)
{
    const struct mt_shared_gate *a = args;
    out->dtype = a->dtype;
    out->dim[0] = a->n;
    out->dim[1] = a->c;
    out->dim[2] = a->f;
    out->bytes = mt_op_bytes(a->n, a->c, a->dtype) + 2 * mt_op_bytes(a->n, a->f, a->dtype);
}

static void fill(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1], f = (size_t)shape->dim[2];
    *(struct mt_shared_gate *)args = (struct mt_shared_gate){
        .n = n, .c = c, .f = f, .dtype = shape->dtype, .x = mt_example_read(x, shape->dtype, n * c),
        .w = mt_example_read(x, shape->dtype, c),
        .act = mt_example_take(x, MT_TAKE_READ | MT_TAKE_WRITE | MT_TAKE_FRESH, shape->dtype, n * f),
        .gate = mt_example_write(x, MT_F32, n)};
}

const struct mt_op mt_op_row_shared_gate = {
    .name = {"shared_gate"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN, MT_SIZE_FFN},
    .args_bytes = sizeof(struct mt_shared_gate),
    .count = offsetof(struct mt_shared_gate, n),
    .check = check,
    .cost = cost,
    .fill = fill,
};

static const char *check_bwd(const void *args)
{
    const struct mt_shared_gate_bwd *a = args;
    MT_OP_NEED(a->c && aligned(a->x) && aligned(a->w) && a->gate && a->dgate && aligned(a->dx));
    MT_OP_NEED(!a->dw || a->workspace);
    return NULL;
}

static void cost_bwd(const void *args, struct mt_metered *out)
{
    const struct mt_shared_gate_bwd *a = args;
    out->dtype = a->dtype;
    out->dim[0] = a->n;
    out->dim[1] = a->c;
    out->bytes = mt_op_bytes(a->n, a->c, a->dtype) + 2 * mt_op_bytes(a->n, a->c, MT_F32);
}

static void fill_bwd(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    struct mt_shared_gate_bwd a = {.n = n, .c = c, .dtype = shape->dtype};
    a.x = mt_example_read(x, a.dtype, n * c);
    a.w = mt_example_read(x, a.dtype, c);
    a.gate = mt_example_read(x, MT_F32, n);
    a.dgate = mt_example_read(x, MT_F32, n);
    a.dx = mt_example_update(x, MT_F32, n * c);
    a.dw = mt_example_update(x, MT_F32, c);
    a.workspace = mt_example_workspace(x, mt_op_shared_gate_bwd_workspace(mt_example_device(x), &a));
    *(struct mt_shared_gate_bwd *)args = a;
}

const struct mt_op mt_op_row_shared_gate_bwd = {
    .name = {"shared_gate_bwd"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN},
    .args_bytes = sizeof(struct mt_shared_gate_bwd),
    .count = offsetof(struct mt_shared_gate_bwd, n),
    .check = check_bwd,
    .cost = cost_bwd,
    .fill = fill_bwd,
};

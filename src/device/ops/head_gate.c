/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check_inputs(const struct mt_head_gate *a)
{
    MT_OP_NEED(heads_apart(&a->x) && heads_apart(&a->gate) && heads_alike(&a->x, &a->gate));
    return NULL;
}

static const char *check(const void *args)
{
    const struct mt_head_gate *a = args;
    MT_OP_NEED(heads_apart(&a->y) && heads_alike(&a->x, &a->y));
    return check_inputs(a);
}

static void cost(const void *args, struct mt_metered *out)
{
    const struct mt_head_gate *a = args;
    mt_op_count_heads(&a->x, a->n, a->dtype, 3, out);
}

static struct mt_head_gate example(mt_example *x, const struct mt_metered *shape)
{
    struct mt_head_gate a = {.n = (size_t)shape->dim[0], .dtype = shape->dtype};
    a.x = mt_op_take_heads(x, MT_TAKE_READ | MT_TAKE_FRESH, shape);
    a.gate = mt_op_take_heads(x, MT_TAKE_READ, shape);
    return a;
}

static void fill(mt_example *x, const struct mt_metered *shape, void *args)
{
    struct mt_head_gate a = example(x, shape);
    a.y = mt_op_take_heads(x, MT_TAKE_WRITE, shape);
    *(struct mt_head_gate *)args = a;
}

const struct mt_op mt_op_row_head_gate = {
    .name = {"head_gate"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_HEADS, MT_SIZE_HEAD_DIM},
    .args_bytes = sizeof(struct mt_head_gate),
    .count = offsetof(struct mt_head_gate, n),
    .check = check,
    .cost = cost,
    .fill = fill,
};

static const char *check_bwd(const void *args)
{
    const struct mt_head_gate_bwd *b = args;
    MT_OP_NEED(heads_apart(&b->dy) && heads_apart(&b->dx) && heads_apart(&b->dgate));
    MT_OP_NEED(heads_alike(&b->dy, &b->fwd.x) && heads_alike(&b->dx, &b->fwd.x) && heads_alike(&b->dgate, &b->fwd.x));
    return check_inputs(&b->fwd);
}

static void cost_bwd(const void *args, struct mt_metered *out)
{
    const struct mt_head_gate *a = &((const struct mt_head_gate_bwd *)args)->fwd;
    mt_op_count_heads(&a->x, a->n, a->dtype, 5, out);
}

static void fill_bwd(mt_example *x, const struct mt_metered *shape, void *args)
{
    struct mt_head_gate_bwd b = {.fwd = example(x, shape)};
    b.dx = b.dy = mt_op_take_heads(x, MT_TAKE_READ | MT_TAKE_WRITE | MT_TAKE_FRESH, shape);
    b.dgate = mt_op_take_heads(x, MT_TAKE_WRITE, shape);
    *(struct mt_head_gate_bwd *)args = b;
}

const struct mt_op mt_op_row_head_gate_bwd = {
    .name = {"head_gate_bwd"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_HEADS, MT_SIZE_HEAD_DIM},
    .args_bytes = sizeof(struct mt_head_gate_bwd),
    .count = offsetof(struct mt_head_gate_bwd, fwd.n),
    .check = check_bwd,
    .cost = cost_bwd,
    .fill = fill_bwd,
};

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

static void count(const struct mt_head_gate *a, double arrays, struct mt_metered *out)
{
    out->dtype = a->dtype;
    out->dim[0] = a->n;
    out->dim[1] = a->x.n;
    out->dim[2] = a->x.dim;
    out->bytes = arrays * mt_op_bytes(a->n, a->x.n * a->x.dim, a->dtype);
}

static void cost(const void *args, struct mt_metered *out)
{
    count(args, 3, out);
}

static struct mt_head_gate example(mt_example *x, const struct mt_metered *shape)
{
    size_t n = (size_t)shape->dim[0], heads = (size_t)shape->dim[1], d = (size_t)shape->dim[2];
    struct mt_head_gate a = {.n = n, .dtype = shape->dtype};
    a.x = mt_heads(mt_example_fresh(x, a.dtype, n * heads * d), heads * d, heads, d);
    a.gate = mt_heads(mt_example_read(x, a.dtype, n * heads * d), heads * d, heads, d);
    return a;
}

static void fill(mt_example *x, const struct mt_metered *shape, void *args)
{
    struct mt_head_gate a = example(x, shape);
    a.y = a.x;
    a.y.p = mt_example_write(x, a.dtype, a.n * a.x.ld);
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
    count(&((const struct mt_head_gate_bwd *)args)->fwd, 5, out);
}

static void fill_bwd(mt_example *x, const struct mt_metered *shape, void *args)
{
    struct mt_head_gate_bwd b = {.fwd = example(x, shape)};
    size_t all = b.fwd.n * b.fwd.x.ld;
    b.dy = b.dgate = b.fwd.x;
    b.dy.p = mt_example_take(x, MT_TAKE_READ | MT_TAKE_WRITE | MT_TAKE_FRESH, shape->dtype, all);
    b.dx = b.dy;
    b.dgate.p = mt_example_write(x, shape->dtype, all);
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

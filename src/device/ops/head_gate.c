/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check_inputs(const struct mt_head_gate *a)
{
    MT_OP_NEED(heads_apart(&a->x) && heads_apart(&a->gate) && heads_alike(&a->x, &a->gate));
    return NULL;
}

static const char *check_head_gate(const struct mt_head_gate *a)
{
    MT_OP_NEED(heads_apart(&a->y) && heads_alike(&a->x, &a->y));
    return check_inputs(a);
}

static void cost_head_gate(const struct mt_head_gate *a, struct mt_metered *out)
{
    mt_op_count_heads(&a->x, a->n, a->dtype, 3, out);
}

static struct mt_head_gate example(mt_example *x, const struct mt_metered *shape)
{
    struct mt_head_gate a = {.n = (size_t)shape->dim[0], .dtype = shape->dtype};
    a.x = mt_op_take_heads(x, MT_TAKE_READ | MT_TAKE_FRESH, shape);
    a.gate = mt_op_take_heads(x, MT_TAKE_READ, shape);
    return a;
}

static void fill_head_gate(mt_example *x, const struct mt_metered *shape, struct mt_head_gate *a)
{
    *a = example(x, shape);
    a->y = mt_op_take_heads(x, MT_TAKE_WRITE, shape);
}

MT_OP_ROW(head_gate, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HEADS, MT_SIZE_HEAD_DIM});

static const char *check_head_gate_bwd(const struct mt_head_gate_bwd *b)
{
    MT_OP_NEED(heads_apart(&b->dy) && heads_apart(&b->dx) && heads_apart(&b->dgate));
    MT_OP_NEED(heads_alike(&b->dy, &b->fwd.x) && heads_alike(&b->dx, &b->fwd.x) && heads_alike(&b->dgate, &b->fwd.x));
    return check_inputs(&b->fwd);
}

static void cost_head_gate_bwd(const struct mt_head_gate_bwd *b, struct mt_metered *out)
{
    const struct mt_head_gate *a = &b->fwd;
    mt_op_count_heads(&a->x, a->n, a->dtype, 5, out);
}

static void fill_head_gate_bwd(mt_example *x, const struct mt_metered *shape, struct mt_head_gate_bwd *b)
{
    *b = (struct mt_head_gate_bwd){.fwd = example(x, shape)};
    b->dx = b->dy = mt_op_take_heads(x, MT_TAKE_READ | MT_TAKE_WRITE | MT_TAKE_FRESH, shape);
    b->dgate = mt_op_take_heads(x, MT_TAKE_WRITE, shape);
}

MT_OP_ROW(head_gate_bwd, fwd.n, .dim = {MT_SIZE_ROWS, MT_SIZE_HEADS, MT_SIZE_HEAD_DIM});

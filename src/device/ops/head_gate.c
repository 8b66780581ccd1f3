/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static void inputs(struct mt_op_walk *w, struct mt_head_gate *a)
{
    size_t n = mt_op_dim(w, &a->n), heads = mt_op_dim(w, &a->x.n), dim = mt_op_dim(w, &a->x.dim);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_HEADS(w, a->x, FRESH, t, n, heads, dim, 1);
    MT_HEADS(w, a->gate, READ, t, n, heads, dim, 1);
    MT_NEED(w, heads_alike(&a->x, &a->gate));
}

static void head_gate(struct mt_op_walk *w, struct mt_head_gate *a)
{
    inputs(w, a);
    MT_HEADS(w, a->y, WRITE, a->dtype, a->n, a->x.n, a->x.dim, 1);
    MT_NEED(w, heads_alike(&a->x, &a->y));
}

MT_OP_WALK(head_gate, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HEADS, MT_SIZE_HEAD_DIM});

static void head_gate_bwd(struct mt_op_walk *w, struct mt_head_gate_bwd *b)
{
    struct mt_head_gate *a = &b->fwd;
    inputs(w, a);
    MT_HEADS(w, b->dy, IN_PLACE, a->dtype, a->n, a->x.n, a->x.dim, 1);
    MT_FILL(w, b->dx = b->dy);
    MT_HEADS(w, b->dx, WRITE, a->dtype, a->n, a->x.n, a->x.dim, 1);
    MT_HEADS(w, b->dgate, WRITE, a->dtype, a->n, a->x.n, a->x.dim, 1);
    MT_NEED(w, heads_alike(&b->dy, &a->x) && heads_alike(&b->dx, &a->x) && heads_alike(&b->dgate, &a->x));
}

MT_OP_WALK(head_gate_bwd, fwd.n, .dim = {MT_SIZE_ROWS, MT_SIZE_HEADS, MT_SIZE_HEAD_DIM});

/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

enum { MOST = 1024, MOST_GATED = 1 << 16 }; /* elements of a head; with the gate first */

static void inputs(struct mt_op_walk *w, struct mt_gated_norm *a)
{
    size_t n = mt_op_dim(w, &a->n), heads = mt_op_dim(w, &a->x.n), dim = mt_op_dim(w, &a->x.dim);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_FILL(w, a->gate_first = w->shape->flags & MT_METER_PLAIN; a->eps = 1e-6f);
    if (w->cost)
        w->cost->flags = a->gate_first ? MT_METER_PLAIN : 0;
    MT_HEADS(w, a->x, FRESH, t, n, heads, dim, 1);
    MT_HEADS(w, a->z, READ, t, n, heads, dim, 1);
    MT_ARRAY(w, a->w, READ, t, mt_gated_norm_weights(a), 0);
    MT_NEED(w, a->z.dim % a->x.dim == 0 && a->z.n * a->z.dim == a->x.n * a->x.dim);
    MT_NEED(w, a->x.dim <= (a->gate_first ? MOST_GATED : MOST) && a->eps >= 0);
}

static void gated_norm(struct mt_op_walk *w, struct mt_gated_norm *a)
{
    inputs(w, a);
    MT_HEADS(w, a->y, WRITE, a->dtype, a->n, a->x.n, a->x.dim, 1);
    MT_NEED(w, heads_alike(&a->y, &a->x));
}

MT_OP_WALK(gated_norm, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HEADS, MT_SIZE_HEAD_DIM}, .flags = {0, MT_METER_PLAIN});

/* In place, as in a layer. */
static void gated_norm_bwd(struct mt_op_walk *w, struct mt_gated_norm_bwd *b)
{
    struct mt_gated_norm *a = &b->fwd;
    inputs(w, a);
    MT_HEADS(w, b->dy, IN_PLACE, a->dtype, a->n, a->x.n, a->x.dim, 1);
    MT_FILL(w, b->dx = b->dy);
    MT_HEADS(w, b->dx, WRITE, a->dtype, a->n, a->x.n, a->x.dim, 1);
    MT_HEADS(w, b->dz, WRITE, a->dtype, a->n, a->x.n, a->x.dim, 1);
    MT_ARRAY(w, b->dw, UPDATE | OPTIONAL | LOOSE, MT_F32, mt_gated_norm_weights(a), 0);
    MT_NEED(w, heads_alike(&b->dy, &a->x) && heads_alike(&b->dx, &a->x) && heads_alike(&b->dz, &a->z));
    MT_WORKSPACE(w, b, b->dw);
}

MT_OP_WALK(gated_norm_bwd, fwd.n, .dim = {MT_SIZE_ROWS, MT_SIZE_HEADS, MT_SIZE_HEAD_DIM},
           .flags = {0, MT_METER_PLAIN});

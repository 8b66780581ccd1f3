/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static void shared_gate(struct mt_op_walk *w, struct mt_shared_gate *a)
{
    size_t n = mt_op_dim(w, &a->n), c = mt_op_dim(w, &a->c), f = mt_op_dim(w, &a->f);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_ARRAY(w, a->x, READ, t, n * c, 1);
    MT_ARRAY(w, a->w, READ, t, c, 0);
    MT_ARRAY(w, a->act, IN_PLACE, t, n * f, 2);
    MT_ARRAY(w, a->gate, WRITE | LOOSE, MT_F32, n, 0);
    MT_NEED(w, a->c && a->f && a->x != a->act);
}

MT_OP_WALK(shared_gate, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN, MT_SIZE_FFN});

static void shared_gate_bwd(struct mt_op_walk *w, struct mt_shared_gate_bwd *a)
{
    size_t n = mt_op_dim(w, &a->n), c = mt_op_dim(w, &a->c);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_ARRAY(w, a->x, READ, t, n * c, 1);
    MT_ARRAY(w, a->w, READ, t, c, 0);
    MT_ARRAY(w, a->gate, READ | LOOSE, MT_F32, n, 0);
    MT_ARRAY(w, a->dgate, READ | LOOSE, MT_F32, n, 0);
    MT_ARRAY(w, a->dx, UPDATE, MT_F32, n * c, 2);
    MT_ARRAY(w, a->dw, UPDATE | OPTIONAL | LOOSE, MT_F32, c, 0);
    MT_NEED(w, a->c);
    MT_WORKSPACE(w, a, a->dw);
}

MT_OP_WALK(shared_gate_bwd, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static void xielu(struct mt_op_walk *w, struct mt_xielu *a)
{
    size_t n = mt_op_dim(w, &a->n), f = mt_op_dim(w, &a->f);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_ARRAY(w, a->x, FRESH, t, n * f, 1);
    MT_ARRAY(w, a->shape, READ | LOOSE, t, 4, 0);
    MT_ARRAY(w, a->out, WRITE, t, n * f, 1);
    MT_NEED(w, a->f && a->x != a->out);
}

MT_OP_WALK(xielu, n, .dim = {MT_SIZE_ROWS, MT_SIZE_FFN});

/* As in a layer, the output overwrites its gradient. */
static void xielu_bwd(struct mt_op_walk *w, struct mt_xielu_bwd *a)
{
    size_t n = mt_op_dim(w, &a->n), f = mt_op_dim(w, &a->f);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_ARRAY(w, a->x, READ, t, n * f, 1);
    MT_ARRAY(w, a->out, IN_PLACE | OPTIONAL, t, n * f, 1);
    MT_FILL(w, a->dout = a->out);
    MT_ARRAY(w, a->dout, READ, t, n * f, 1);
    MT_ARRAY(w, a->dx, WRITE, t, n * f, 1);
    MT_ARRAY(w, a->shape, READ | LOOSE, t, 4, 0);
    MT_ARRAY(w, a->dshape, UPDATE | OPTIONAL | LOOSE, MT_F32, 2, 0);
    MT_NEED(w, a->f && a->x != a->dout && a->dout != a->dx && a->out != a->x && a->out != a->dx);
    MT_WORKSPACE(w, a, a->dshape);
}

MT_OP_WALK(xielu_bwd, n, .dim = {MT_SIZE_ROWS, MT_SIZE_FFN});

/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static void glu(struct mt_op_walk *w, struct mt_glu *a)
{
    size_t n = mt_op_dim(w, &a->n), f = mt_op_dim(w, &a->f);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_ARRAY(w, a->gate_up, FRESH, t, 2 * n * f, 1);
    MT_ARRAY(w, a->out, WRITE, t, n * f, 1);
    MT_NEED(w, a->f && a->gate_up != a->out);
    MT_NEED(w, a->kind != MT_GLU_RELU2 && (a->kind != MT_GLU_CLAMPED || a->limit > 0));
}

MT_OP_WALK(glu, n, .dim = {MT_SIZE_ROWS, MT_SIZE_FFN});

/* As in a layer, the output overwrites its gradient. */
static void glu_bwd(struct mt_op_walk *w, struct mt_glu_bwd *a)
{
    size_t n = mt_op_dim(w, &a->n), f = mt_op_dim(w, &a->f);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_ARRAY(w, a->gate_up, READ, t, 2 * n * f, 1);
    MT_ARRAY(w, a->out, IN_PLACE | OPTIONAL, t, n * f, 1);
    MT_FILL(w, a->dout = a->out);
    MT_ARRAY(w, a->dout, READ, t, n * f, 1);
    MT_ARRAY(w, a->dgate_up, WRITE, t, 2 * n * f, 1);
    MT_NEED(w, a->f && a->dout != a->dgate_up && a->out != a->gate_up && a->out != a->dgate_up);
    MT_NEED(w, a->kind != MT_GLU_RELU2 && (a->kind != MT_GLU_CLAMPED || a->limit > 0));
}

MT_OP_WALK(glu_bwd, n, .dim = {MT_SIZE_ROWS, MT_SIZE_FFN});

/* In place, as in a layer. */
static void expert_glu_bwd(struct mt_op_walk *w, struct mt_expert_glu_bwd *a)
{
    size_t n = mt_op_dim(w, &a->n_padded), f = mt_op_dim(w, &a->f), inputs = mt_glu_inputs(a->kind) * n * f;
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_FILL(w, a->n = n; a->k = 1);
    MT_ARRAY(w, a->dgate_up, UPDATE, t, inputs, 1);
    MT_FILL(w, a->gate_up = a->dgate_up);
    MT_ARRAY(w, a->gate_up, READ, t, inputs, 1);
    MT_ARRAY(w, a->out, IN_PLACE, t, n * f, 1);
    MT_FILL(w, a->dout = a->out; a->list = mt_example_ints(w->x, n, MT_OP_SCATTER, n));
    MT_ARRAY(w, a->dout, READ, t, n * f, 1);
    MT_ARRAY(w, a->weights, READ | LOOSE, MT_F32, n, 0);
    MT_ARRAY(w, a->dweights, WRITE | LOOSE, MT_F32, n, 0);
    MT_ARRAY(w, a->down_bias, READ | ABSENT, t, a->c, 0);
    MT_ARRAY(w, a->d_o, READ | ABSENT, t, a->n * a->c, 1);
    MT_NEED(w, a->f && a->k && a->n_padded >= a->n && a->weights != a->dweights);
    MT_NEED(w, a->dout != a->dgate_up && a->out != a->gate_up && a->out != a->dgate_up);
    MT_NEED(w, !a->down_bias == !a->d_o && (!a->down_bias || a->c));
    MT_NEED(w, a->kind != MT_GLU_CLAMPED || a->limit > 0);
}

MT_OP_WALK(expert_glu_bwd, n_padded, .dim = {MT_SIZE_ROWS, MT_SIZE_FFN});

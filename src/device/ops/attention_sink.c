/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static void attention_sink(struct mt_op_walk *w, struct mt_attention_sink *a)
{
    size_t n = mt_op_dim(w, &a->n), n_q = mt_op_dim(w, &a->o.n), d = mt_op_dim(w, &a->o.dim);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_NEED(w, a->o.n);
    MT_HEADS(w, a->o, IN_PLACE, t, n, n_q, d, 2);
    MT_ARRAY(w, a->sinks, READ | LOOSE, t, n_q, 0);
    MT_ARRAY(w, a->lse, UPDATE | LOOSE, MT_F32, n * n_q, 2);
}

MT_OP_WALK(attention_sink, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HEADS, MT_SIZE_HEAD_DIM});

static void attention_sink_bwd(struct mt_op_walk *w, struct mt_attention_sink_bwd *a)
{
    size_t n = mt_op_dim(w, &a->n), n_q = mt_op_dim(w, &a->o.n), d = mt_op_dim(w, &a->o.dim);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_NEED(w, a->o.n);
    MT_ARRAY(w, a->sinks, READ | LOOSE, t, n_q, 0);
    MT_HEADS(w, a->o, READ, t, n, n_q, d, 1);
    MT_HEADS(w, a->d_o, FRESH, t, n, n_q, d, 1);
    MT_NEED(w, heads_alike(&a->o, &a->d_o));
    MT_ARRAY(w, a->lse, READ | LOOSE, MT_F32, n * n_q, 1);
    MT_ARRAY(w, a->dsinks, UPDATE | LOOSE, MT_F32, n_q, 0);
    MT_WORKSPACE(w, a, a->dsinks);
}

MT_OP_WALK(attention_sink_bwd, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HEADS, MT_SIZE_HEAD_DIM});

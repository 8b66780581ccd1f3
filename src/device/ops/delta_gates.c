/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

/* All but what forward writes. Returns the number of heads. a counts for b, too, which plain gates do not have. */
static size_t inputs(struct mt_op_walk *w, struct mt_delta_gates *a)
{
    size_t n = mt_op_dim(w, &a->n), heads = a->a.n * a->a.dim;
    mt_op_dim(w, &heads);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_HEADS(w, a->a, FRESH, t, n, 1, heads, 2);
    if (!a->plain)
        MT_HEADS(w, a->b, FRESH, t, n, 1, heads, 0);
    MT_ARRAY(w, a->a_log, READ | LOOSE, t, heads, 0);
    MT_ARRAY(w, a->dt_bias, READ | LOOSE, t, heads, 0);
    MT_NEED(w, a->plain ? a->least <= a->most : heads_alike(&a->a, &a->b));
    return heads;
}

static void delta_gates(struct mt_op_walk *w, struct mt_delta_gates *a)
{
    size_t heads = inputs(w, a);
    MT_ARRAY(w, a->beta, WRITE | LOOSE, MT_F32, a->n * heads, 1);
    MT_ARRAY(w, a->g, WRITE | LOOSE, MT_F32, a->n * heads, 1);
    MT_NEED(w, a->beta != a->g);
}

MT_OP_WALK(delta_gates, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HEADS});

static void delta_gates_bwd(struct mt_op_walk *w, struct mt_delta_gates_bwd *b)
{
    struct mt_delta_gates *a = &b->fwd;
    size_t heads = inputs(w, a);
    MT_ARRAY(w, b->dbeta, FRESH | LOOSE, MT_F32, a->n * heads, 1);
    MT_ARRAY(w, b->dg, FRESH | LOOSE, MT_F32, a->n * heads, 1);
    MT_HEADS(w, b->da, WRITE, a->dtype, a->n, 1, heads, 2);
    if (!a->plain)
        MT_HEADS(w, b->db, WRITE, a->dtype, a->n, 1, heads, 0);
    MT_ARRAY(w, b->da_log, UPDATE | OPTIONAL | LOOSE, MT_F32, heads, 0);
    MT_ARRAY(w, b->ddt_bias, UPDATE | OPTIONAL | LOOSE, MT_F32, heads, 0);
    MT_NEED(w, heads_alike(&b->da, &a->a) && (a->plain || heads_alike(&b->db, &a->a)) && (!b->dd || b->dskip));
    MT_WORKSPACE(w, b, true);
}

MT_OP_WALK(delta_gates_bwd, fwd.n, .dim = {MT_SIZE_ROWS, MT_SIZE_HEADS});

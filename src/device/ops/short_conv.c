/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"
#include "device/ops/row.h"

/* All but the results. Returns the channels. */
static size_t inputs(struct mt_op_walk *w, struct mt_short_conv *a)
{
    size_t c = a->x.n * a->x.dim;
    mt_op_dim(w, &a->n);
    mt_op_dim(w, &c);
    mt_op_dim(w, &a->taps);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_FILL(w, a->taps = MT_MIN(a->taps, (size_t)MT_CONV_MAX_TAPS); a->n_docs = 1;
            a->cu_seqlens = mt_example_ints(w->x, 2, a->n, 0));
    MT_ARRAY(w, a->w, READ | LOOSE, t, c * a->taps, 0);
    MT_HEADS(w, a->x, FRESH, t, a->n, 1, c, 1);
    MT_NEED(w, a->taps && a->taps <= MT_CONV_MAX_TAPS && a->cu_seqlens && a->n_docs);
    MT_NEED(w, not_both(&a->carried, &a->handed));
    return c;
}

static void short_conv(struct mt_op_walk *w, struct mt_short_conv *a)
{
    size_t c = inputs(w, a);
    MT_HEADS(w, a->y, WRITE, a->dtype, a->n, 1, c, 1);
    MT_NEED(w, heads_alike(&a->x, &a->y) && a->x.p != a->y.p);
    MT_NEED(w, carried_or_none(&a->carried));
}

MT_OP_WALK(short_conv, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN, MT_SIZE_TOP_K});

static void short_conv_bwd(struct mt_op_walk *w, struct mt_short_conv_bwd *b)
{
    struct mt_short_conv *a = &b->fwd;
    size_t c = inputs(w, a);
    MT_HEADS(w, b->dy, FRESH, a->dtype, a->n, 1, c, 1);
    MT_HEADS(w, b->dx, WRITE, a->dtype, a->n, 1, c, 1);
    MT_ARRAY(w, b->dw, UPDATE | OPTIONAL | LOOSE, MT_F32, c * a->taps, 0);
    MT_NEED(w, heads_alike(&a->x, &b->dy) && heads_alike(&a->x, &b->dx) && b->dx.p != b->dy.p && b->dx.p != a->x.p);
    MT_NEED(w, !a->carried.after && !a->handed.to);
    MT_WORKSPACE(w, b, b->dw || b->dbias);
}

MT_OP_WALK(short_conv_bwd, fwd.n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN, MT_SIZE_TOP_K});

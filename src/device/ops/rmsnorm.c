/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

/* Rows that lie apart need not be aligned. */
static bool rows_lie(const void *p, const struct mt_row_groups *g, size_t c)
{
    return g->group ? p && (g->group == 1 || g->stride >= c) && g->ld >= (g->group - 1) * g->stride + c : aligned(p);
}

static void rmsnorm(struct mt_op_walk *w, struct mt_rmsnorm *a)
{
    size_t n = mt_op_dim(w, &a->n), c = mt_op_dim(w, &a->c);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_FILL(w, a->eps = 1e-6f);
    MT_ARRAY(w, a->x, FRESH | LOOSE, t, n * c, 1);
    MT_ARRAY(w, a->w, READ, t, c, 0);
    MT_ARRAY(w, a->y, WRITE | LOOSE, t, n * c, 1);
    MT_ARRAY(w, a->rstd, WRITE | LOOSE, MT_F32, n, 0);
    MT_NEED(w, a->c && a->eps >= 0);
    MT_NEED(w, rows_lie(a->x, &a->x_at, a->c) && rows_lie(a->y, &a->y_at, a->c));
}

MT_OP_WALK(rmsnorm, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

/* As in a layer, the gradient of the residual connection is added in place. */
static void rmsnorm_bwd(struct mt_op_walk *w, struct mt_rmsnorm_bwd *a)
{
    size_t n = mt_op_dim(w, &a->n), c = mt_op_dim(w, &a->c);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_ARRAY(w, a->x, READ | LOOSE, t, n * c, 1);
    MT_ARRAY(w, a->dx, UPDATE | LOOSE, t, n * c, 1);
    MT_FILL(w, a->dres = a->dx);
    MT_ARRAY(w, a->dres, READ | OPTIONAL | LOOSE, t, n * c, 1);
    MT_ARRAY(w, a->w, READ, t, c, 0);
    MT_ARRAY(w, a->rstd, READ | LOOSE, MT_F32, n, 0);
    MT_ARRAY(w, a->dy, FRESH | LOOSE, t, n * c, 1);
    MT_ARRAY(w, a->dw, UPDATE | OPTIONAL | LOOSE, MT_F32, c, 0);
    MT_NEED(w, a->c && rows_lie(a->x, &a->x_at, a->c) && rows_lie(a->dy, &a->dy_at, a->c));
    MT_NEED(w, rows_lie(a->dx, &a->dx_at, a->c) && (!a->dres || rows_lie(a->dres, &a->dx_at, a->c)));
    MT_WORKSPACE(w, a, a->dw);
}

MT_OP_WALK(rmsnorm_bwd, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

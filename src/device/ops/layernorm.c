/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static void layernorm(struct mt_op_walk *w, struct mt_layernorm *a)
{
    size_t n = mt_op_dim(w, &a->n), c = mt_op_dim(w, &a->c);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_FILL(w, a->eps = 1e-5f; a->biased = true);
    MT_ARRAY(w, a->x, FRESH, t, n * c, 1);
    MT_ARRAY(w, a->w, READ, t, a->biased ? 2 * c : c, 0);
    MT_ARRAY(w, a->y, WRITE, t, n * c, 1);
    MT_ARRAY(w, a->rstd, WRITE | LOOSE, MT_F32, n, 0);
    MT_NEED(w, a->c && a->eps >= 0);
}

MT_OP_WALK(layernorm, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

/* As in a layer, the gradient of the residual connection is added in place. */
static void layernorm_bwd(struct mt_op_walk *w, struct mt_layernorm_bwd *a)
{
    size_t n = mt_op_dim(w, &a->n), c = mt_op_dim(w, &a->c);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_FILL(w, a->biased = true);
    MT_ARRAY(w, a->x, READ, t, n * c, 1);
    MT_ARRAY(w, a->dx, UPDATE, t, n * c, 1);
    MT_FILL(w, a->dres = a->dx);
    MT_ARRAY(w, a->dres, READ | OPTIONAL, t, n * c, 1);
    MT_ARRAY(w, a->w, READ, t, a->biased ? 2 * c : c, 0);
    MT_ARRAY(w, a->rstd, READ | LOOSE, MT_F32, n, 0);
    MT_ARRAY(w, a->dy, FRESH, t, n * c, 1);
    MT_ARRAY(w, a->dw, UPDATE | OPTIONAL | LOOSE, MT_F32, a->biased ? 2 * c : c, 0);
    MT_NEED(w, a->c && a->dx != a->x);
    MT_WORKSPACE(w, a, a->dw);
}

MT_OP_WALK(layernorm_bwd, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

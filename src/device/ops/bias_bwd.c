/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static void bias_bwd(struct mt_op_walk *w, struct mt_bias_bwd *a)
{
    size_t n = mt_op_dim(w, &a->n), c = mt_op_dim(w, &a->c);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_FILL(w, a->ld = c);
    MT_ARRAY(w, a->dy, FRESH | LOOSE, t, n * c, 1);
    MT_ARRAY(w, a->x, READ | ABSENT | LOOSE, t, n * c, 1);
    MT_ARRAY(w, a->db, UPDATE, MT_F32, c, 0);
    MT_NEED(w, a->c && a->ld >= a->c && (a->x || !a->scale));
    MT_WORKSPACE(w, a, true);
}

MT_OP_WALK(bias_bwd, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

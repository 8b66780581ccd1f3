/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

/* Of a matrix that caches hold: what its rounds move there is no traffic. An example's is arbitrary, not even symmetric:
 * as many operations. */
static void eigen(struct mt_op_walk *w, struct mt_eigen *a)
{
    size_t n = mt_op_dim(w, &a->n);
    MT_FILL(w, a->sweeps = 1);
    MT_ARRAY(w, a->a, UPDATE | LOOSE, MT_F32, n * n, 2);
    MT_ARRAY(w, a->w, WRITE | LOOSE, MT_F32, n * n, 1);
    MT_ARRAY(w, a->workspace, LOOSE, MT_F32, mt_eigen_workspace(n), 0);
    MT_NEED(w, a->sweeps > 0 && a->least >= 0 && a->least < 1 && a->a != a->w);
}

MT_OP_WALK(eigen, n, .dim = {MT_SIZE_HIDDEN}, .f32_only = true);

/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static void perturb(struct mt_op_walk *w, struct mt_perturb *a)
{
    size_t n = mt_op_dim(w, &a->n);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_FILL(w, a->scale = 0.001f; a->limit = MT_NOISE_ALL; a->seed = 7; a->stream = 3; a->sample = 1);
    MT_ARRAY(w, a->x, FRESH | LOOSE, t, n, 1);
    MT_ARRAY(w, a->y, WRITE | LOOSE, t, n, 1);
}

MT_OP_WALK(perturb, n, .dim = {MT_SIZE_ELEMENTS});

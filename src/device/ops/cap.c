/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static void cap(struct mt_op_walk *w, struct mt_cap *a)
{
    size_t n = mt_op_dim(w, &a->n), c = mt_op_dim(w, &a->c);
    MT_FILL(w, a->ld = c; a->cap = 30);
    MT_ARRAY(w, a->x, UPDATE, MT_F32, n * c, 2);
    MT_NEED(w, a->c && a->ld >= a->c && a->cap > 0);
}

MT_OP_WALK(cap, n, .dim = {MT_SIZE_LOSS_ROWS, MT_SIZE_VOCAB}, .f32_only = true);

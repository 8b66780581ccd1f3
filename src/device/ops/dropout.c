/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static void dropout(struct mt_op_walk *w, struct mt_dropout *a)
{
    size_t n = mt_op_dim(w, &a->n), c = mt_op_dim(w, &a->c);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_FILL(w, a->out_dtype = t; a->p = 0.1f; a->seed = 1; a->stream = 2);
    MT_ARRAY(w, a->x, FRESH, t, n * c, 1);
    MT_ARRAY(w, a->add, READ | ABSENT, a->out_dtype, n * c, 1);
    MT_ARRAY(w, a->out, WRITE, a->out_dtype, n * c, 1);
    MT_NEED(w, a->c && a->p >= 0 && a->p < 1);
    MT_NEED(w, a->out_dtype == a->dtype || (a->out_dtype == MT_F32 && a->out != a->x));
    MT_NEED(w, a->first_row <= UINT32_MAX && a->n <= UINT32_MAX - a->first_row);
}

MT_OP_WALK(dropout, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

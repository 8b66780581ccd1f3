/* SPDX-License-Identifier: Apache-2.0 */
/* low_adam, unit_rows. */
#include "device/ops/row.h"

/* As in the first step: an example's old moments, of arbitrary values that could be below 0, do not count. low is read
 * twice. */
static void low_adam(struct mt_op_walk *w, struct mt_low_adam *a)
{
    size_t n = mt_op_dim(w, &a->n);
    MT_FILL(w, a->eps = 1e-6f);
    MT_ARRAY(w, a->low, UPDATE | LOOSE, MT_F32, n, 3);
    MT_ARRAY(w, a->m, UPDATE | LOOSE, MT_F32, n, 2);
    MT_ARRAY(w, a->v, UPDATE | LOOSE, MT_F32, n, 2);
    MT_ARRAY(w, a->workspace, LOOSE, MT_F32, mt_div_up(n, (size_t)MT_DIRECT_PIECE) + 1, 0);
    MT_NEED(w, a->beta1 >= 0 && a->beta1 < 1 && a->beta2 >= 0 && a->beta2 < 1 && a->eps >= 0);
}

MT_OP_WALK(low_adam, n, .dim = {MT_SIZE_ELEMENTS}, .f32_only = true);

static void unit_rows(struct mt_op_walk *w, struct mt_unit_rows *a)
{
    size_t rows = mt_op_dim(w, &a->rows), cols = mt_op_dim(w, &a->cols);
    MT_ARRAY(w, a->from, READ | LOOSE, MT_F32, rows * cols, 1);
    MT_ARRAY(w, a->to, UPDATE | LOOSE, MT_F32, rows * cols, 1);
    MT_NEED(w, a->cols && a->from != a->to);
}

MT_OP_WALK(unit_rows, rows, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN}, .f32_only = true);

/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

/* g is read three times and written twice, w is read. A matrix's row means and column sums each read it: the second finds
 * most of it in the cache. As in the first step: an example's old moments, of arbitrary values that could be below 0, do
 * not count. */
static void adafactor(struct mt_op_walk *w, struct mt_adafactor *a)
{
    size_t rows = mt_op_dim(w, &a->rows), cols = mt_op_dim(w, &a->cols);
    MT_FILL(w, a->eps = 1e-30f; a->clip = 1; a->least = 1e-3f);
    MT_ARRAY(w, a->g, UPDATE | LOOSE, MT_F32, rows * cols, 5);
    MT_ARRAY(w, a->w, READ | LOOSE, mt_op_dtype(w, &a->dtype), rows * cols, 1);
    MT_ARRAY(w, a->row, UPDATE | LOOSE, MT_F32, rows, 0);
    MT_ARRAY(w, a->col, UPDATE | LOOSE | (cols == 1 ? ABSENT : 0), MT_F32, cols, 0);
    MT_ARRAY(w, a->scale, WRITE | LOOSE, MT_F32, 1, 0);
    MT_FILL(w, a->workspace = mt_example_workspace(w->x, mt_adafactor_workspace(rows, cols)));
    MT_NEED(w, a->cols && aligned(a->workspace));
    MT_NEED(w, a->beta2 >= 0 && a->beta2 < 1 && a->eps > 0 && a->clip > 0);
}

MT_OP_WALK(adafactor, rows, .dim = {MT_SIZE_FFN, MT_SIZE_HIDDEN});

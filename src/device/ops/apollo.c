/* SPDX-License-Identifier: Apache-2.0 */
/* signs, apollo. */
#include "base/mem.h"
#include "device/ops/row.h"

static void signs(struct mt_op_walk *w, struct mt_signs *a)
{
    size_t n = mt_op_dim(w, &a->n);
    MT_FILL(w, a->scale = 0.25f; a->seed = 7; a->stream = 3);
    MT_ARRAY(w, a->x, WRITE | LOOSE, MT_F32, n, 1);
}

MT_OP_WALK(signs, n, .dim = {MT_SIZE_ELEMENTS}, .f32_only = true);

/* g is read twice and written; low and the moments are read twice, and the moments written. As in the first step: an
 * example's old moments, of arbitrary values that could be below 0, do not count. */
static void apollo(struct mt_op_walk *w, struct mt_apollo *a)
{
    size_t rows = mt_op_dim(w, &a->rows), cols = mt_op_dim(w, &a->cols);
    MT_FILL(w, a->rank = 4; a->eps = 1e-6f; a->growth = 1.01f; a->scale = 1);
    size_t n = mt_apollo_channels(a) * a->rank;
    MT_ARRAY(w, a->g, UPDATE | LOOSE, MT_F32, rows * cols, 3);
    MT_ARRAY(w, a->low, READ | LOOSE, MT_F32, n, 2);
    MT_ARRAY(w, a->m, UPDATE | LOOSE, MT_F32, n, 3);
    MT_ARRAY(w, a->v, UPDATE | LOOSE, MT_F32, n, 3);
    MT_ARRAY(w, a->norm, UPDATE | LOOSE, MT_F32, 1, 0);
    MT_ARRAY(w, a->workspace, LOOSE, MT_F32, mt_apollo_workspace(rows, cols), 0);
    MT_NEED(w, a->cols && a->rank && a->growth >= 0);
    MT_NEED(w, a->beta1 >= 0 && a->beta1 < 1 && a->beta2 >= 0 && a->beta2 < 1 && a->eps >= 0);
}

MT_OP_WALK(apollo, rows, .dim = {MT_SIZE_FFN, MT_SIZE_HIDDEN}, .f32_only = true);

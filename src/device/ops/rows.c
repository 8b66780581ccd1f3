/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

/* In examples all rows, as if every token had a loss. */
static void rows_of(struct mt_op_walk *w, struct mt_rows *a, size_t *dim)
{
    size_t n = mt_op_dim(w, dim), c = mt_op_dim(w, &a->c);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_FILL(w, a->n = a->n_dst = n; a->rows = mt_example_ints(w->x, n, 1, 0));
    MT_ARRAY(w, a->src, FRESH, t, n * c, 1);
    MT_ARRAY(w, a->dst, WRITE, t, n * c, 1);
    MT_NEED(w, a->c && a->rows && a->src != a->dst);
}

static void gather_rows(struct mt_op_walk *w, struct mt_rows *a)
{
    rows_of(w, a, &a->n);
}

MT_OP_WALK_OF(gather_rows, mt_rows, n, ("gather_rows"), .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

/* With n = 0 all rows are still cleared. */
static void scatter_rows(struct mt_op_walk *w, struct mt_rows *a)
{
    rows_of(w, a, &a->n_dst);
}

MT_OP_WALK_OF(scatter_rows, mt_rows, n_dst, ("scatter_rows"), .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check_gather_rows(const struct mt_rows *a)
{
    MT_OP_NEED(a->c && a->rows && aligned(a->src) && aligned(a->dst) && a->src != a->dst);
    return NULL;
}

static void cost_gather_rows(const struct mt_rows *a, struct mt_metered *out)
{
    mt_op_count_rows(a->n, a->c, a->dtype, 2, out);
}

/* All rows, as if every token had a loss. */
static void fill_gather_rows(mt_example *x, const struct mt_metered *shape, struct mt_rows *a)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    *a = (struct mt_rows){
        .n = n, .n_dst = n, .c = c, .dtype = shape->dtype, .rows = mt_example_ints(x, n, 1, 0),
        .src = mt_example_fresh(x, shape->dtype, n * c), .dst = mt_example_write(x, shape->dtype, n * c)};
}

MT_OP_ROW_OF(gather_rows, mt_rows, n, ("gather_rows"), .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

static void cost_scatter_rows(const struct mt_rows *a, struct mt_metered *out)
{
    mt_op_count_rows(a->n_dst, a->c, a->dtype, 2, out);
}

#define check_scatter_rows check_gather_rows
#define fill_scatter_rows fill_gather_rows
/* with n = 0 all rows are still cleared */
MT_OP_ROW_OF(scatter_rows, mt_rows, n_dst, ("scatter_rows"), .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

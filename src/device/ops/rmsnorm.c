/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

/* Rows that lie apart need not be aligned. */
static bool rows_lie(const void *p, const struct mt_row_groups *g, size_t c)
{
    return g->group ? p && (g->group == 1 || g->stride >= c) && g->ld >= (g->group - 1) * g->stride + c : aligned(p);
}

static const char *check_rmsnorm(const struct mt_rmsnorm *a)
{
    MT_OP_NEED(a->c && a->eps >= 0);
    MT_OP_NEED(rows_lie(a->x, &a->x_at, a->c) && aligned(a->w) && rows_lie(a->y, &a->y_at, a->c) && a->rstd);
    return NULL;
}

static void cost_rmsnorm(const struct mt_rmsnorm *a, struct mt_metered *out)
{
    mt_op_count_rows(a->n, a->c, a->dtype, 2, out);
}

static void fill_rmsnorm(mt_example *x, const struct mt_metered *shape, struct mt_rmsnorm *a)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    *a = (struct mt_rmsnorm){
        .n = n, .c = c, .dtype = shape->dtype, .eps = 1e-6f, .x = mt_example_fresh(x, shape->dtype, n * c),
        .w = mt_example_read(x, shape->dtype, c), .y = mt_example_write(x, shape->dtype, n * c),
        .rstd = mt_example_write(x, MT_F32, n)};
}

MT_OP_ROW(rmsnorm, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

static const char *check_rmsnorm_bwd(const struct mt_rmsnorm_bwd *a)
{
    MT_OP_NEED(a->c);
    MT_OP_NEED(rows_lie(a->x, &a->x_at, a->c) && rows_lie(a->dy, &a->dy_at, a->c) && rows_lie(a->dx, &a->dx_at, a->c));
    MT_OP_NEED(aligned(a->w) && a->rstd && (!a->dres || rows_lie(a->dres, &a->dx_at, a->c)));
    MT_OP_NEED(!a->dw || a->workspace);
    return NULL;
}

static void cost_rmsnorm_bwd(const struct mt_rmsnorm_bwd *a, struct mt_metered *out)
{
    mt_op_count_rows(a->n, a->c, a->dtype, a->dres ? 4 : 3, out);
}

/* As in a layer, the gradient of the residual connection is added in place. */
static void fill_rmsnorm_bwd(mt_example *x, const struct mt_metered *shape, struct mt_rmsnorm_bwd *a)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    *a = (struct mt_rmsnorm_bwd){.n = n, .c = c, .dtype = shape->dtype};
    a->x = mt_example_read(x, a->dtype, n * c);
    a->dx = mt_example_update(x, a->dtype, n * c);
    a->dres = a->dx;
    a->w = mt_example_read(x, a->dtype, c);
    a->rstd = mt_example_read(x, MT_F32, n);
    a->dy = mt_example_fresh(x, a->dtype, n * c);
    a->dw = mt_example_update(x, MT_F32, c);
    a->workspace = mt_example_workspace(x, mt_op_rmsnorm_bwd_workspace(mt_example_device(x), a));
}

MT_OP_ROW(rmsnorm_bwd, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

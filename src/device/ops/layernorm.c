/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check_layernorm(const struct mt_layernorm *a)
{
    MT_OP_NEED(a->c && a->eps >= 0);
    MT_OP_NEED(aligned(a->x) && aligned(a->w) && aligned(a->y) && a->rstd);
    return NULL;
}

static void cost_layernorm(const struct mt_layernorm *a, struct mt_metered *out)
{
    mt_op_count_rows(a->n, a->c, a->dtype, 2, out);
}

static void fill_layernorm(mt_example *x, const struct mt_metered *shape, struct mt_layernorm *a)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    *a = (struct mt_layernorm){
        .n = n, .c = c, .dtype = shape->dtype, .eps = 1e-5f, .biased = true,
        .x = mt_example_fresh(x, shape->dtype, n * c), .w = mt_example_read(x, shape->dtype, 2 * c),
        .y = mt_example_write(x, shape->dtype, n * c), .rstd = mt_example_write(x, MT_F32, n)};
}

MT_OP_ROW(layernorm, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

static const char *check_layernorm_bwd(const struct mt_layernorm_bwd *a)
{
    MT_OP_NEED(a->c && aligned(a->x) && aligned(a->dy) && aligned(a->dx) && a->dx != a->x);
    MT_OP_NEED(aligned(a->w) && a->rstd && aligned_or_null(a->dres));
    MT_OP_NEED(!a->dw || a->workspace);
    return NULL;
}

static void cost_layernorm_bwd(const struct mt_layernorm_bwd *a, struct mt_metered *out)
{
    mt_op_count_rows(a->n, a->c, a->dtype, a->dres ? 4 : 3, out);
}

/* As in a layer, the gradient of the residual connection is added in place. */
static void fill_layernorm_bwd(mt_example *x, const struct mt_metered *shape, struct mt_layernorm_bwd *a)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    *a = (struct mt_layernorm_bwd){.n = n, .c = c, .dtype = shape->dtype, .biased = true};
    a->x = mt_example_read(x, a->dtype, n * c);
    a->dx = mt_example_update(x, a->dtype, n * c);
    a->dres = a->dx;
    a->w = mt_example_read(x, a->dtype, 2 * c);
    a->rstd = mt_example_read(x, MT_F32, n);
    a->dy = mt_example_fresh(x, a->dtype, n * c);
    a->dw = mt_example_update(x, MT_F32, 2 * c);
    a->workspace = mt_example_workspace(x, mt_op_layernorm_bwd_workspace(mt_example_device(x), a));
}

MT_OP_ROW(layernorm_bwd, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

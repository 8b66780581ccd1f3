/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check(const void *args)
{
    const struct mt_layernorm *a = args;
    MT_OP_NEED(a->c && a->eps >= 0);
    MT_OP_NEED(aligned(a->x) && aligned(a->w) && aligned(a->y) && a->rstd);
    return NULL;
}

static void cost(const void *args, struct mt_metered *out)
{
    const struct mt_layernorm *a = args;
    mt_op_count_rows(a->n, a->c, a->dtype, 2, out);
}

static void fill(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    *(struct mt_layernorm *)args = (struct mt_layernorm){
        .n = n, .c = c, .dtype = shape->dtype, .eps = 1e-5f, .biased = true,
        .x = mt_example_fresh(x, shape->dtype, n * c), .w = mt_example_read(x, shape->dtype, 2 * c),
        .y = mt_example_write(x, shape->dtype, n * c), .rstd = mt_example_write(x, MT_F32, n)};
}

const struct mt_op mt_op_row_layernorm = {
    .name = {"layernorm"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN},
    .args_bytes = sizeof(struct mt_layernorm),
    .count = offsetof(struct mt_layernorm, n),
    .check = check,
    .cost = cost,
    .fill = fill,
};

static const char *check_bwd(const void *args)
{
    const struct mt_layernorm_bwd *a = args;
    MT_OP_NEED(a->c && aligned(a->x) && aligned(a->dy) && aligned(a->dx) && a->dx != a->x);
    MT_OP_NEED(aligned(a->w) && a->rstd && aligned_or_null(a->dres));
    MT_OP_NEED(!a->dw || a->workspace);
    return NULL;
}

static void cost_bwd(const void *args, struct mt_metered *out)
{
    const struct mt_layernorm_bwd *a = args;
    mt_op_count_rows(a->n, a->c, a->dtype, a->dres ? 4 : 3, out);
}

/* As in a layer, the gradient of the residual connection is added in place. */
static void fill_bwd(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    struct mt_layernorm_bwd a = {.n = n, .c = c, .dtype = shape->dtype, .biased = true};
    a.x = mt_example_read(x, a.dtype, n * c);
    a.dx = mt_example_update(x, a.dtype, n * c);
    a.dres = a.dx;
    a.w = mt_example_read(x, a.dtype, 2 * c);
    a.rstd = mt_example_read(x, MT_F32, n);
    a.dy = mt_example_fresh(x, a.dtype, n * c);
    a.dw = mt_example_update(x, MT_F32, 2 * c);
    a.workspace = mt_example_workspace(x, mt_op_layernorm_bwd_workspace(mt_example_device(x), &a));
    *(struct mt_layernorm_bwd *)args = a;
}

const struct mt_op mt_op_row_layernorm_bwd = {
    .name = {"layernorm_bwd"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN},
    .args_bytes = sizeof(struct mt_layernorm_bwd),
    .count = offsetof(struct mt_layernorm_bwd, n),
    .check = check_bwd,
    .cost = cost_bwd,
    .fill = fill_bwd,
};

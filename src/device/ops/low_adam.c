/* SPDX-License-Identifier: Apache-2.0 */
/* low_adam, unit_rows. */
#include "device/ops/row.h"

static const char *check_low_adam(const void *args)
{
    const struct mt_low_adam *a = args;
    MT_OP_NEED(a->low && a->m && a->v && a->workspace);
    MT_OP_NEED(a->beta1 >= 0 && a->beta1 < 1 && a->beta2 >= 0 && a->beta2 < 1 && a->eps >= 0);
    return NULL;
}

/* low is read twice. */
static void cost_low_adam(const void *args, struct mt_metered *out)
{
    const struct mt_low_adam *a = args;
    out->dtype = MT_F32;
    out->dim[0] = a->n;
    out->bytes = 7 * mt_op_bytes(a->n, 1, MT_F32);
}

/* As in the first step: the old moments, of arbitrary values that could be below 0, do not count. */
static void fill_low_adam(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0];
    *(struct mt_low_adam *)args = (struct mt_low_adam){
        .n = n, .eps = 1e-6f, .low = mt_example_update(x, MT_F32, n), .m = mt_example_update(x, MT_F32, n),
        .v = mt_example_update(x, MT_F32, n),
        .workspace = mt_example_workspace(x, (mt_div_up(n, (size_t)MT_DIRECT_PIECE) + 1) * sizeof(float))};
}

const struct mt_op mt_op_row_low_adam = {
    .name = {"low_adam"},
    .dim = {MT_SIZE_ELEMENTS},
    .f32_only = true,
    .args_bytes = sizeof(struct mt_low_adam),
    .count = offsetof(struct mt_low_adam, n),
    .check = check_low_adam,
    .cost = cost_low_adam,
    .fill = fill_low_adam,
};

static const char *check_unit_rows(const void *args)
{
    const struct mt_unit_rows *a = args;
    MT_OP_NEED(a->from && a->to && a->cols && a->from != a->to);
    return NULL;
}

static void cost_unit_rows(const void *args, struct mt_metered *out)
{
    const struct mt_unit_rows *a = args;
    mt_op_count_rows(a->rows, a->cols, MT_F32, 2, out);
}

static void fill_unit_rows(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t rows = (size_t)shape->dim[0], cols = (size_t)shape->dim[1];
    *(struct mt_unit_rows *)args = (struct mt_unit_rows){.rows = rows, .cols = cols,
                                                         .from = mt_example_read(x, MT_F32, rows * cols),
                                                         .to = mt_example_update(x, MT_F32, rows * cols)};
}

const struct mt_op mt_op_row_unit_rows = {
    .name = {"unit_rows"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN},
    .f32_only = true,
    .args_bytes = sizeof(struct mt_unit_rows),
    .count = offsetof(struct mt_unit_rows, rows),
    .check = check_unit_rows,
    .cost = cost_unit_rows,
    .fill = fill_unit_rows,
};

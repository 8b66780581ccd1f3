/* SPDX-License-Identifier: Apache-2.0 */
/* low_adam, unit_rows. */
#include "device/ops/row.h"

static const char *check_low_adam(const struct mt_low_adam *a)
{
    MT_OP_NEED(a->low && a->m && a->v && a->workspace);
    MT_OP_NEED(a->beta1 >= 0 && a->beta1 < 1 && a->beta2 >= 0 && a->beta2 < 1 && a->eps >= 0);
    return NULL;
}

/* low is read twice. */
static void cost_low_adam(const struct mt_low_adam *a, struct mt_metered *out)
{
    mt_op_shape(out, MT_F32, MT_DIMS(a->n));
    out->bytes = 7 * mt_op_bytes(a->n, 1, MT_F32);
}

/* As in the first step: the old moments, of arbitrary values that could be below 0, do not count. */
static void fill_low_adam(mt_example *x, const struct mt_metered *shape, struct mt_low_adam *a)
{
    size_t n = (size_t)shape->dim[0];
    *a = (struct mt_low_adam){
        .n = n, .eps = 1e-6f, .low = mt_example_update(x, MT_F32, n), .m = mt_example_update(x, MT_F32, n),
        .v = mt_example_update(x, MT_F32, n),
        .workspace = mt_example_workspace(x, (mt_div_up(n, (size_t)MT_DIRECT_PIECE) + 1) * sizeof(float))};
}

MT_OP_ROW(low_adam, n, .dim = {MT_SIZE_ELEMENTS}, .f32_only = true);

static const char *check_unit_rows(const struct mt_unit_rows *a)
{
    MT_OP_NEED(a->from && a->to && a->cols && a->from != a->to);
    return NULL;
}

static void cost_unit_rows(const struct mt_unit_rows *a, struct mt_metered *out)
{
    mt_op_count_rows(a->rows, a->cols, MT_F32, 2, out);
}

static void fill_unit_rows(mt_example *x, const struct mt_metered *shape, struct mt_unit_rows *a)
{
    size_t rows = (size_t)shape->dim[0], cols = (size_t)shape->dim[1];
    *a = (struct mt_unit_rows){
        .rows = rows, .cols = cols, .from = mt_example_read(x, MT_F32, rows * cols),
        .to = mt_example_update(x, MT_F32, rows * cols)};
}

MT_OP_ROW(unit_rows, rows, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN}, .f32_only = true);

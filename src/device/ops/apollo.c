/* SPDX-License-Identifier: Apache-2.0 */
/* signs, apollo. */
#include "device/ops/row.h"

static const char *check_signs(const struct mt_signs *a)
{
    MT_OP_NEED(a->x);
    return NULL;
}

static void cost_signs(const struct mt_signs *a, struct mt_metered *out)
{
    mt_op_shape(out, MT_F32, MT_DIMS(a->n));
    out->bytes = mt_op_bytes(a->n, 1, MT_F32);
}

static void fill_signs(mt_example *x, const struct mt_metered *shape, struct mt_signs *a)
{
    size_t n = (size_t)shape->dim[0];
    *a = (struct mt_signs){.n = n, .scale = 0.25f, .seed = 7, .stream = 3, .x = mt_example_write(x, MT_F32, n)};
}

MT_OP_ROW(signs, n, .dim = {MT_SIZE_ELEMENTS}, .f32_only = true);

static const char *check_apollo(const struct mt_apollo *a)
{
    MT_OP_NEED(a->g && a->low && a->m && a->v && a->norm && a->workspace);
    MT_OP_NEED(a->cols && a->rank);
    MT_OP_NEED(a->beta1 >= 0 && a->beta1 < 1 && a->beta2 >= 0 && a->beta2 < 1 && a->eps >= 0);
    MT_OP_NEED(a->growth >= 0);
    return NULL;
}

/* g is read twice and written; low and the moments are read twice, and the moments written. */
static void cost_apollo(const struct mt_apollo *a, struct mt_metered *out)
{
    mt_op_shape(out, MT_F32, MT_DIMS(a->rows, a->cols));
    out->bytes = 3 * mt_op_bytes(a->rows, a->cols, MT_F32) + 8 * mt_op_bytes(mt_apollo_channels(a), a->rank, MT_F32);
}

static void fill_apollo(mt_example *x, const struct mt_metered *shape, struct mt_apollo *a)
{
    size_t rows = (size_t)shape->dim[0], cols = (size_t)shape->dim[1], n = MT_MAX(rows, cols) * 4;
    /* as in the first step: the old moments, of arbitrary values that could be below 0, do not count */
    *a = (struct mt_apollo){
        .rows = rows, .cols = cols, .rank = 4, .eps = 1e-6f, .growth = 1.01f, .scale = 1,
        .g = mt_example_update(x, MT_F32, rows * cols), .low = mt_example_read(x, MT_F32, n),
        .m = mt_example_update(x, MT_F32, n), .v = mt_example_update(x, MT_F32, n),
        .norm = mt_example_update(x, MT_F32, 1),
        .workspace = mt_example_workspace(x, mt_apollo_workspace(rows, cols) * sizeof(float))};
}

MT_OP_ROW(apollo, rows, .dim = {MT_SIZE_FFN, MT_SIZE_HIDDEN}, .f32_only = true);

/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check_adafactor(const struct mt_adafactor *a)
{
    MT_OP_NEED(a->g && a->w && a->row && a->scale && aligned(a->workspace));
    MT_OP_NEED(a->cols && (a->col || a->cols == 1));
    MT_OP_NEED(a->beta2 >= 0 && a->beta2 < 1 && a->eps > 0 && a->clip > 0);
    return NULL;
}

/* g is read three times and written twice, w is read. A matrix's row means and column sums each read it: the second finds
 * most of it in the cache. */
static void cost_adafactor(const struct mt_adafactor *a, struct mt_metered *out)
{
    mt_op_shape(out, a->dtype, MT_DIMS(a->rows, a->cols));
    out->bytes = 5 * mt_op_bytes(a->rows, a->cols, MT_F32) + mt_op_bytes(a->rows, a->cols, a->dtype);
}

static void fill_adafactor(mt_example *x, const struct mt_metered *shape, struct mt_adafactor *a)
{
    size_t rows = (size_t)shape->dim[0], cols = (size_t)shape->dim[1], n = rows * cols;
    /* as in the first step: the old moments, of arbitrary values that could be below 0, do not count */
    *a = (struct mt_adafactor){
        .rows = rows, .cols = cols, .dtype = shape->dtype, .beta2 = 0, .eps = 1e-30f, .clip = 1, .least = 1e-3f,
        .g = mt_example_update(x, MT_F32, n), .w = mt_example_read(x, shape->dtype, n),
        .row = mt_example_update(x, MT_F32, rows), .col = cols > 1 ? mt_example_update(x, MT_F32, cols) : NULL,
        .scale = mt_example_write(x, MT_F32, 1),
        .workspace = mt_example_workspace(x, mt_adafactor_workspace(rows, cols))};
}

MT_OP_ROW(adafactor, rows, .dim = {MT_SIZE_FFN, MT_SIZE_HIDDEN});

/* SPDX-License-Identifier: Apache-2.0 */
/* The operands of products in FP8: largest magnitudes and codes. */
#include "device/ops/row.h"

static const char *check_amax(const struct mt_amax *a)
{
    MT_OP_NEED(aligned(a->x) && a->parts);
    return NULL;
}

static void cost_amax(const struct mt_amax *a, struct mt_metered *out)
{
    mt_op_shape(out, a->dtype, MT_DIMS(a->n));
    out->bytes = mt_op_bytes(a->n, 1, a->dtype);
}

static void fill_amax(mt_example *x, const struct mt_metered *shape, struct mt_amax *a)
{
    size_t n = (size_t)shape->dim[0];
    *a = (struct mt_amax){n, shape->dtype, mt_example_fresh(x, shape->dtype, n),
                          mt_example_write(x, MT_F32, MT_AMAX_PARTS)};
}

MT_OP_ROW(amax, n, .dim = {MT_SIZE_ELEMENTS});

static const char *check_quantise(const struct mt_quantise *a)
{
    MT_OP_NEED(a->cols && a->cols % 16 == 0);
    MT_OP_NEED(aligned(a->x) && a->parts && a->scale && (a->codes || a->codes_t));
    MT_OP_NEED(aligned_or_null(a->codes) && aligned_or_null(a->codes_t));
    return NULL;
}

enum { PLAIN, TRANSPOSED, BOTH };

static void cost_quantise(const struct mt_quantise *a, struct mt_metered *out)
{
    out->variant = !a->codes_t ? PLAIN : a->codes ? BOTH : TRANSPOSED;
    mt_op_shape(out, a->dtype, MT_DIMS(a->rows, a->cols));
    out->bytes = mt_op_bytes(a->rows, a->cols, a->dtype) +
                 (a->codes ? mt_op_bytes(a->rows, a->cols, MT_E4M3) : 0) +
                 (a->codes_t ? mt_op_bytes(mt_codes_ld(a->rows), a->cols, MT_E4M3) : 0);
}

/* n codes as whole words of f32. */
static uint8_t *codes(mt_example *x, size_t n)
{
    return mt_example_write(x, MT_F32, n / sizeof(float));
}

static void fill_quantise(mt_example *x, const struct mt_metered *shape, struct mt_quantise *a)
{
    size_t rows = (size_t)shape->dim[0], cols = mt_codes_ld((size_t)shape->dim[1]);
    *a = (struct mt_quantise){.rows = rows, .cols = cols, .dtype = shape->dtype};
    a->x = mt_example_read(x, shape->dtype, rows * cols);
    a->parts = mt_example_read(x, MT_F32, MT_AMAX_PARTS);
    a->codes = shape->variant == TRANSPOSED ? NULL : codes(x, rows * cols);
    a->codes_t = shape->variant == PLAIN ? NULL : codes(x, mt_codes_ld(rows) * cols);
    a->scale = mt_example_write(x, MT_F32, 1);
}

MT_OP_ROW_OF(quantise, mt_quantise, rows, ("quantise", "quantise_t", "quantise_both"),
             .dim = {MT_SIZE_ROWS, MT_SIZE_FFN});

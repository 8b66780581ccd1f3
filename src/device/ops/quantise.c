/* SPDX-License-Identifier: Apache-2.0 */
/* The operands of products in FP8: largest magnitudes and codes. */
#include "device/ops/row.h"

static const char *check_amax(const void *args)
{
    const struct mt_amax *a = args;
    MT_OP_NEED(aligned(a->x) && a->parts);
    return NULL;
}

static void cost_amax(const void *args, struct mt_metered *out)
{
    const struct mt_amax *a = args;
    out->dtype = a->dtype;
    out->dim[0] = a->n;
    out->bytes = mt_op_bytes(a->n, 1, a->dtype);
}

static void fill_amax(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0];
    *(struct mt_amax *)args = (struct mt_amax){n, shape->dtype, mt_example_fresh(x, shape->dtype, n),
                                               mt_example_write(x, MT_F32, MT_AMAX_PARTS)};
}

const struct mt_op mt_op_row_amax = {
    .name = {"amax"},
    .dim = {MT_SIZE_ELEMENTS},
    .args_bytes = sizeof(struct mt_amax),
    .count = offsetof(struct mt_amax, n),
    .check = check_amax,
    .cost = cost_amax,
    .fill = fill_amax,
};

static const char *check_quantise(const void *args)
{
    const struct mt_quantise *a = args;
    MT_OP_NEED(a->cols && a->cols % 16 == 0);
    MT_OP_NEED(aligned(a->x) && a->parts && a->scale && (a->codes || a->codes_t));
    MT_OP_NEED(aligned_or_null(a->codes) && aligned_or_null(a->codes_t));
    return NULL;
}

enum { PLAIN, TRANSPOSED, BOTH };

static void cost_quantise(const void *args, struct mt_metered *out)
{
    const struct mt_quantise *a = args;
    out->variant = !a->codes_t ? PLAIN : a->codes ? BOTH : TRANSPOSED;
    out->dtype = a->dtype;
    out->dim[0] = a->rows;
    out->dim[1] = a->cols;
    out->bytes = mt_op_bytes(a->rows, a->cols, a->dtype) +
                 (a->codes ? mt_op_bytes(a->rows, a->cols, MT_E4M3) : 0) +
                 (a->codes_t ? mt_op_bytes(mt_codes_ld(a->rows), a->cols, MT_E4M3) : 0);
}

/* n codes as whole words of f32. */
static uint8_t *codes(mt_example *x, size_t n)
{
    return mt_example_write(x, MT_F32, n / sizeof(float));
}

static void fill_quantise(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t rows = (size_t)shape->dim[0], cols = mt_codes_ld((size_t)shape->dim[1]);
    struct mt_quantise a = {.rows = rows, .cols = cols, .dtype = shape->dtype};
    a.x = mt_example_read(x, shape->dtype, rows * cols);
    a.parts = mt_example_read(x, MT_F32, MT_AMAX_PARTS);
    a.codes = shape->variant == TRANSPOSED ? NULL : codes(x, rows * cols);
    a.codes_t = shape->variant == PLAIN ? NULL : codes(x, mt_codes_ld(rows) * cols);
    a.scale = mt_example_write(x, MT_F32, 1);
    *(struct mt_quantise *)args = a;
}

const struct mt_op mt_op_row_quantise = {
    .name = {"quantise", "quantise_t", "quantise_both"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_FFN},
    .args_bytes = sizeof(struct mt_quantise),
    .count = offsetof(struct mt_quantise, rows),
    .check = check_quantise,
    .cost = cost_quantise,
    .fill = fill_quantise,
};

/* SPDX-License-Identifier: Apache-2.0 */
/* The operands of products in FP8: largest magnitudes and codes. */
#include "device/ops/row.h"

static void amax(struct mt_op_walk *w, struct mt_amax *a)
{
    size_t n = mt_op_dim(w, &a->n);
    MT_ARRAY(w, a->x, FRESH, mt_op_dtype(w, &a->dtype), n, 1);
    MT_ARRAY(w, a->parts, WRITE | LOOSE, MT_F32, MT_AMAX_PARTS, 0);
}

MT_OP_WALK(amax, n, .dim = {MT_SIZE_ELEMENTS});

enum { PLAIN, TRANSPOSED, BOTH };

/* Codes are taken as whole words of f32. */
static void quantise(struct mt_op_walk *w, struct mt_quantise *a)
{
    size_t rows = mt_op_dim(w, &a->rows);
    mt_op_dim(w, &a->cols);
    MT_FILL(w, a->cols = mt_codes_ld(a->cols));
    size_t n = rows * a->cols, n_t = mt_codes_ld(rows) * a->cols;
    MT_ARRAY(w, a->x, READ, mt_op_dtype(w, &a->dtype), n, 1);
    MT_ARRAY(w, a->parts, READ | LOOSE, MT_F32, MT_AMAX_PARTS, 0);
    if (w->x && w->shape->variant != TRANSPOSED)
        a->codes = mt_example_write(w->x, MT_F32, n / sizeof(float));
    if (w->x && w->shape->variant != PLAIN)
        a->codes_t = mt_example_write(w->x, MT_F32, n_t / sizeof(float));
    MT_ARRAY(w, a->codes, WRITE | ABSENT, MT_E4M3, n, 1);
    MT_ARRAY(w, a->codes_t, WRITE | ABSENT, MT_E4M3, n_t, 1);
    MT_ARRAY(w, a->scale, WRITE | LOOSE, MT_F32, 1, 0);
    MT_NEED(w, a->cols && a->cols % 16 == 0 && (a->codes || a->codes_t));
    if (w->cost)
        w->cost->variant = !a->codes_t ? PLAIN : a->codes ? BOTH : TRANSPOSED;
}

MT_OP_WALK_OF(quantise, mt_quantise, rows, ("quantise", "quantise_t", "quantise_both"),
              .dim = {MT_SIZE_ROWS, MT_SIZE_FFN});

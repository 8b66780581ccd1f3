/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of tokens are gathered for an expert, and outputs of experts are added to the tokens. */
#include <math.h>

#include "device/ops/row.h"

static const char *check_moe_gather(const struct mt_moe_gather *a)
{
    MT_OP_NEED(a->c && a->k && a->n_padded >= a->n);
    MT_OP_NEED(a->list && aligned(a->x) && aligned(a->out) && a->x != a->out);
    return NULL;
}

static void cost_moe_gather(const struct mt_moe_gather *a, struct mt_metered *out)
{
    mt_op_shape(out, a->dtype, MT_DIMS(a->n_padded, a->c));
    out->bytes = mt_op_bytes(a->n, a->c, a->dtype) + mt_op_bytes(a->n_padded, a->c, a->dtype);
}

/* All experts of a layer read the same rows, and each gathers to the scratch of the one before. */
static void fill_moe_gather(mt_example *x, const struct mt_metered *shape, struct mt_moe_gather *a)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    *a = (struct mt_moe_gather){
        .n = n, .n_padded = n, .c = c, .k = 1, .dtype = shape->dtype, .list = mt_example_ints(x, n, MT_OP_SCATTER, n),
        .x = mt_example_fresh(x, shape->dtype, n * c),
        .out = mt_example_take(x, MT_TAKE_WRITE | MT_TAKE_FRESH, shape->dtype, n * c)};
}

MT_OP_ROW(moe_gather, n_padded, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

static const char *check_moe_combine(const struct mt_moe_combine *a)
{
    MT_OP_NEED(a->c && a->k && a->rows && a->rows <= INT32_MAX && a->first <= INT32_MAX - a->rows);
    MT_OP_NEED(a->places && aligned(a->src) && aligned(a->sum));
    return NULL;
}

/* Tokens of which an entry is in src, if the entries that are were spread evenly. */
static double tokens_met(double n, double k, double rows)
{
    return n * (1 - pow(fmax(1 - rows / (n * k), 0), k));
}

/* Rows of src come first: they were all there was to say when an entry was added at a time. */
static void cost_moe_combine(const struct mt_moe_combine *a, struct mt_metered *out)
{
    double met = tokens_met((double)a->n, (double)a->k, (double)a->rows);
    mt_op_shape(out, a->dtype, MT_DIMS(a->rows, a->c, a->n, a->k));
    out->bytes = mt_op_bytes(a->rows, a->c, a->dtype) + 2 * met * (double)a->c * sizeof(float) +
                 (double)a->n * (double)a->k * sizeof(int32_t);
}

/* All experts of a layer add to the same sum. Weights of 0 leave it as it is: other examples read it, too. */
static void fill_moe_combine(mt_example *x, const struct mt_metered *shape, struct mt_moe_combine *a)
{
    size_t rows = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    size_t n = (size_t)shape->dim[2], k = (size_t)shape->dim[3];
    *a = (struct mt_moe_combine){
        .n = n, .c = c, .k = k, .rows = rows, .dtype = shape->dtype,
        .places = mt_example_ints(x, n * k, MT_OP_SCATTER, n * k),
        .weights = (const float *)(const void *)mt_example_ints(x, n * k, 0, 1),
        .src = mt_example_fresh(x, shape->dtype, rows * c),
        .sum = mt_example_take(x, MT_TAKE_READ | MT_TAKE_WRITE | MT_TAKE_FRESH, MT_F32, n * c)};
}

MT_OP_ROW(moe_combine, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN, MT_SIZE_ROWS, MT_SIZE_TOP_K});

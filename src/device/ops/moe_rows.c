/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of tokens are gathered for an expert, and outputs of experts are added to the tokens. */
#include <math.h>

#include "device/ops/row.h"

/* All experts of a layer read the same rows, and each gathers to the scratch of the one before. */
static void moe_gather(struct mt_op_walk *w, struct mt_moe_gather *a)
{
    size_t n_padded = mt_op_dim(w, &a->n_padded), c = mt_op_dim(w, &a->c);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_FILL(w, a->n = n_padded; a->k = 1; a->list = mt_example_ints(w->x, a->n, MT_OP_SCATTER, a->n));
    MT_ARRAY(w, a->x, FRESH, t, a->n * c, 1);
    MT_ARRAY(w, a->out, MT_TAKE_WRITE | MT_TAKE_FRESH, t, n_padded * c, 1);
    MT_NEED(w, a->c && a->k && a->n_padded >= a->n && a->list && a->x != a->out);
}

MT_OP_WALK(moe_gather, n_padded, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

/* Tokens of which an entry is in src, if the entries that are were spread evenly. */
static double tokens_met(double n, double k, double rows)
{
    return n * (1 - pow(fmax(1 - rows / (n * k), 0), k));
}

/* Rows of src come first: they were all there was to say when an entry was added at a time. All experts of a layer add
 * to the same sum; an example's weights of 0 leave it as it is, since other examples read it, too. */
static void moe_combine(struct mt_op_walk *w, struct mt_moe_combine *a)
{
    size_t rows = mt_op_dim(w, &a->rows), c = mt_op_dim(w, &a->c), n = mt_op_dim(w, &a->n), k = mt_op_dim(w, &a->k);
    MT_FILL(w, a->places = mt_example_ints(w->x, n * k, MT_OP_SCATTER, n * k);
            a->weights = (const float *)(const void *)mt_example_ints(w->x, n * k, 0, 1));
    MT_ARRAY(w, a->src, FRESH, mt_op_dtype(w, &a->dtype), rows * c, 1);
    MT_ARRAY(w, a->sum, IN_PLACE, MT_F32, n * c, 0);
    MT_NEED(w, a->c && a->k && a->rows && a->rows <= INT32_MAX && a->first <= INT32_MAX - a->rows && a->places);
    if (w->cost) {
        w->cost->bytes += 2 * tokens_met((double)n, (double)k, (double)rows) * (double)c * sizeof(float);
        w->cost->bytes += (double)n * (double)k * sizeof(int32_t);
    }
}

MT_OP_WALK(moe_combine, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN, MT_SIZE_ROWS, MT_SIZE_TOP_K});

/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check_cross_entropy(const struct mt_cross_entropy *a)
{
    MT_OP_NEED(a->vocab && a->ld >= a->vocab && aligned(a->logits) && a->targets && a->loss);
    MT_OP_NEED(!a->dlogits || a->ld_dlogits >= a->vocab);
    MT_OP_NEED(!a->n_few || (a->few && a->few_values));
    MT_OP_NEED(a->dlogits != (const void *)a->logits || a->ld_dlogits * mt_dtype_size(a->dtype) == a->ld * 4);
    return NULL;
}

/* Gradient and entropy each read the logits once more. */
static void cost_cross_entropy(const struct mt_cross_entropy *a, struct mt_metered *out)
{
    double read = mt_op_bytes(a->n, a->vocab, MT_F32);
    out->flags = a->dlogits ? 0 : MT_METER_LOSS_ONLY;
    mt_op_shape(out, a->dtype, MT_DIMS(a->n, a->vocab));
    out->bytes = (1 + (a->entropy != NULL)) * read + (a->dlogits ? read + mt_op_bytes(a->n, a->vocab, a->dtype) : 0);
}

/* Not in place, so that the logits stay the same however often it runs. */
static void fill_cross_entropy(mt_example *x, const struct mt_metered *shape, struct mt_cross_entropy *a)
{
    size_t n = (size_t)shape->dim[0], v = (size_t)shape->dim[1];
    *a = (struct mt_cross_entropy){.n = n, .vocab = v, .ld = v, .dtype = shape->dtype, .ld_dlogits = v,
                                 .scale = 1e-3f};
    a->logits = mt_example_fresh(x, MT_F32, n * v);
    a->targets = mt_example_ints(x, n, MT_OP_SCATTER, v);
    a->loss = mt_example_write(x, MT_F32, n);
    a->correct = mt_example_write(x, MT_F32, n);
    if (!(shape->flags & MT_METER_LOSS_ONLY))
        a->dlogits = mt_example_write(x, a->dtype, n * v);
}

MT_OP_ROW(cross_entropy, n, .dim = {MT_SIZE_LOSS_ROWS, MT_SIZE_VOCAB}, .flags = {0, MT_METER_LOSS_ONLY});

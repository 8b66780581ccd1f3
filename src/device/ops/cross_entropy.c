/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check(const void *args)
{
    const struct mt_cross_entropy *a = args;
    MT_OP_NEED(a->vocab && a->ld >= a->vocab && aligned(a->logits) && a->targets && a->loss);
    MT_OP_NEED(!a->dlogits || a->ld_dlogits >= a->vocab);
    MT_OP_NEED(!a->n_few || (a->few && a->few_values));
    MT_OP_NEED(a->dlogits != (const void *)a->logits || a->ld_dlogits * mt_dtype_size(a->dtype) == a->ld * 4);
    return NULL;
}

/* With a gradient, logits are read twice. */
static void cost(const void *args, struct mt_metered *out)
{
    const struct mt_cross_entropy *a = args;
    double read = mt_op_bytes(a->n, a->vocab, MT_F32);
    out->dtype = a->dtype;
    out->flags = a->dlogits ? 0 : MT_METER_LOSS_ONLY;
    out->dim[0] = a->n;
    out->dim[1] = a->vocab;
    out->bytes = a->dlogits ? 2 * read + mt_op_bytes(a->n, a->vocab, a->dtype) : read;
}

/* Not in place, so that the logits stay the same however often it runs. */
static void fill(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], v = (size_t)shape->dim[1];
    struct mt_cross_entropy a = {.n = n, .vocab = v, .ld = v, .dtype = shape->dtype, .ld_dlogits = v,
                                 .scale = 1e-3f};
    a.logits = mt_example_fresh(x, MT_F32, n * v);
    a.targets = mt_example_ints(x, n, MT_OP_SCATTER, v);
    a.loss = mt_example_write(x, MT_F32, n);
    a.correct = mt_example_write(x, MT_F32, n);
    if (!(shape->flags & MT_METER_LOSS_ONLY))
        a.dlogits = mt_example_write(x, a.dtype, n * v);
    *(struct mt_cross_entropy *)args = a;
}

const struct mt_op mt_op_row_cross_entropy = {
    .name = {"cross_entropy"},
    .dim = {MT_SIZE_LOSS_ROWS, MT_SIZE_VOCAB},
    .flags = {0, MT_METER_LOSS_ONLY},
    .args_bytes = sizeof(struct mt_cross_entropy),
    .count = offsetof(struct mt_cross_entropy, n),
    .check = check,
    .cost = cost,
    .fill = fill,
};

/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

/* Gradient and entropy each read the logits once more. In examples the gradient is not in place, so that the logits
 * stay the same however often it runs. */
static void cross_entropy(struct mt_op_walk *w, struct mt_cross_entropy *a)
{
    size_t n = mt_op_dim(w, &a->n), v = mt_op_dim(w, &a->vocab);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_FILL(w, a->ld = a->ld_dlogits = v; a->scale = 1e-3f);
    MT_ARRAY(w, a->logits, FRESH, MT_F32, n * v, 1 + (a->entropy != NULL) + (a->dlogits != NULL));
    MT_FILL(w, a->targets = mt_example_ints(w->x, n, MT_OP_SCATTER, v));
    MT_ARRAY(w, a->loss, WRITE | LOOSE, MT_F32, n, 0);
    MT_ARRAY(w, a->correct, WRITE | OPTIONAL | LOOSE, MT_F32, n, 0);
    if (w->x && !(w->shape->flags & MT_METER_LOSS_ONLY))
        a->dlogits = mt_example_write(w->x, t, n * v);
    MT_ARRAY(w, a->dlogits, WRITE | ABSENT | LOOSE, t, n * v, 1);
    MT_NEED(w, a->vocab && a->ld >= a->vocab && a->targets && (!a->n_few || (a->few && a->few_values)));
    MT_NEED(w, !a->dlogits || a->ld_dlogits >= a->vocab);
    MT_NEED(w, a->dlogits != (const void *)a->logits || a->ld_dlogits * mt_dtype_size(a->dtype) == a->ld * 4);
    if (w->cost)
        w->cost->flags = a->dlogits ? 0 : MT_METER_LOSS_ONLY;
}

MT_OP_WALK(cross_entropy, n, .dim = {MT_SIZE_LOSS_ROWS, MT_SIZE_VOCAB}, .flags = {0, MT_METER_LOSS_ONLY});

/* SPDX-License-Identifier: Apache-2.0 */
/* eigen. */
#include "device/ops/row.h"

static const char *check_eigen(const struct mt_eigen *a)
{
    MT_OP_NEED(a->sweeps > 0 && a->least >= 0 && a->least < 1);
    MT_OP_NEED(a->a && a->w && a->workspace && a->a != a->w);
    return NULL;
}

/* Of a matrix that caches hold: what its rounds move there is no traffic. */
static void cost_eigen(const struct mt_eigen *a, struct mt_metered *out)
{
    mt_op_shape(out, MT_F32, MT_DIMS(a->n));
    out->bytes = 3 * mt_op_bytes(a->n, a->n, MT_F32);
}

/* Of an arbitrary matrix that is not even symmetric: as many operations. */
static void fill_eigen(mt_example *x, const struct mt_metered *shape, struct mt_eigen *args)
{
    size_t n = (size_t)shape->dim[0];
    *args = (struct mt_eigen){
        .n = n, .sweeps = 1, .a = mt_example_update(x, MT_F32, n * n), .w = mt_example_write(x, MT_F32, n * n),
        .workspace = mt_example_workspace(x, mt_eigen_workspace(n) * sizeof(float))};
}

MT_OP_ROW(eigen, n, .dim = {MT_SIZE_HIDDEN}, .f32_only = true);

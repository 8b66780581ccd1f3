/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check_bias_bwd(const struct mt_bias_bwd *a)
{
    MT_OP_NEED(a->c && a->ld >= a->c);
    MT_OP_NEED(a->dy && aligned(a->db) && a->workspace);
    MT_OP_NEED(a->x || !a->scale);
    return NULL;
}

static void cost_bias_bwd(const struct mt_bias_bwd *a, struct mt_metered *out)
{
    mt_op_shape(out, a->dtype, MT_DIMS(a->n, a->c));
    out->bytes = (a->x ? 2 : 1) * mt_op_bytes(a->n, a->c, a->dtype);
}

static void fill_bias_bwd(mt_example *x, const struct mt_metered *shape, struct mt_bias_bwd *a)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    *a = (struct mt_bias_bwd){.n = n, .c = c, .ld = c, .dtype = shape->dtype};
    a->dy = mt_example_fresh(x, a->dtype, n * c);
    a->db = mt_example_update(x, MT_F32, c);
    a->workspace = mt_example_workspace(x, mt_op_bias_bwd_workspace(mt_example_device(x), a));
}

MT_OP_ROW(bias_bwd, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN});

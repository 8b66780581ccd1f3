/* SPDX-License-Identifier: Apache-2.0 */
/* muon, widen. */
#include "device/ops/row.h"

static const char *check_muon(const struct mt_muon *a)
{
    MT_OP_NEED(a->g && a->m && a->x && a->workspace && a->x != a->m);
    MT_OP_NEED(a->mu >= 0 && a->mu < 1);
    MT_OP_NEED(a->m_dtype == MT_F32 || a->m_dtype == MT_BF16);
    return NULL;
}

/* g and m are read twice. */
static void cost_muon(const struct mt_muon *a, struct mt_metered *out)
{
    mt_op_shape(out, a->dtype, MT_DIMS(a->n));
    out->bytes = 2 * mt_op_bytes(a->n, 1, MT_F32) + 3 * mt_op_bytes(a->n, 1, a->m_dtype) +
                 mt_op_bytes(a->n, 1, a->dtype);
}

static void fill_muon(mt_example *x, const struct mt_metered *shape, struct mt_muon *a)
{
    size_t n = (size_t)shape->dim[0];
    *a = (struct mt_muon){
        .n = n, .dtype = shape->dtype, .m_dtype = shape->dtype, .mu = 0.95f, .g = mt_example_read(x, MT_F32, n),
        .m = mt_example_update(x, shape->dtype, n), .x = mt_example_write(x, shape->dtype, n),
        .workspace = mt_example_workspace(x, (mt_div_up(n, (size_t)MT_DIRECT_PIECE) + 1) * sizeof(float))};
}

MT_OP_ROW(muon, n, .dim = {MT_SIZE_ELEMENTS});

static const char *check_widen(const struct mt_widen *a)
{
    MT_OP_NEED(a->x && a->y && a->x != (const void *)a->y);
    return NULL;
}

static void cost_widen(const struct mt_widen *a, struct mt_metered *out)
{
    mt_op_shape(out, a->dtype, MT_DIMS(a->n));
    out->bytes = mt_op_bytes(a->n, 1, a->dtype) + mt_op_bytes(a->n, 1, MT_F32);
}

static void fill_widen(mt_example *x, const struct mt_metered *shape, struct mt_widen *a)
{
    size_t n = (size_t)shape->dim[0];
    *a = (struct mt_widen){
        .n = n, .dtype = shape->dtype, .scale = 0.5f, .x = mt_example_read(x, shape->dtype, n),
        .y = mt_example_write(x, MT_F32, n)};
}

MT_OP_ROW(widen, n, .dim = {MT_SIZE_ELEMENTS});

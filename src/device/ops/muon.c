/* SPDX-License-Identifier: Apache-2.0 */
/* muon, widen. */
#include "device/ops/row.h"

/* g and m are read twice. */
static void muon(struct mt_op_walk *w, struct mt_muon *a)
{
    size_t n = mt_op_dim(w, &a->n);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_FILL(w, a->m_dtype = t; a->mu = 0.95f);
    MT_ARRAY(w, a->g, READ | LOOSE, MT_F32, n, 2);
    MT_ARRAY(w, a->m, UPDATE | LOOSE, a->m_dtype, n, 3);
    MT_ARRAY(w, a->x, WRITE | LOOSE, t, n, 1);
    MT_ARRAY(w, a->workspace, LOOSE, MT_F32, mt_div_up(n, (size_t)MT_DIRECT_PIECE) + 1, 0);
    MT_NEED(w, a->x != a->m && a->mu >= 0 && a->mu < 1);
    MT_NEED(w, a->m_dtype == MT_F32 || a->m_dtype == MT_BF16);
}

MT_OP_WALK(muon, n, .dim = {MT_SIZE_ELEMENTS});

static void widen(struct mt_op_walk *w, struct mt_widen *a)
{
    size_t n = mt_op_dim(w, &a->n);
    MT_FILL(w, a->scale = 0.5f);
    MT_ARRAY(w, a->x, READ | LOOSE, mt_op_dtype(w, &a->dtype), n, 1);
    MT_ARRAY(w, a->y, WRITE | LOOSE, MT_F32, n, 1);
    MT_NEED(w, a->x != (const void *)a->y);
}

MT_OP_WALK(widen, n, .dim = {MT_SIZE_ELEMENTS});

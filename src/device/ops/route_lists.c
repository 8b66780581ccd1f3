/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static void route_lists(struct mt_op_walk *w, struct mt_route_lists *a)
{
    size_t n = mt_op_dim(w, &a->n), e = mt_op_dim(w, &a->e), k = mt_op_dim(w, &a->k);
    MT_FILL(w, a->bucket = 1; a->ids = mt_example_choices(w->x, n, e, k));
    MT_ARRAY(w, a->ids, READ | LOOSE, MT_BF16, n * k, 1);
    MT_ARRAY(w, a->weights, READ | LOOSE, MT_F32, n * k, 1);
    MT_ARRAY(w, a->counts, WRITE | LOOSE, MT_F32, e + 1, 1);
    MT_ARRAY(w, a->starts, WRITE | LOOSE, MT_F32, e + 1, 1);
    MT_ARRAY(w, a->list, WRITE | LOOSE, MT_F32, n * k, 1);
    MT_ARRAY(w, a->places, WRITE | LOOSE, MT_F32, n * k, 1);
    MT_NEED(w, a->e && a->e <= MT_MAX_EXPERTS && a->k && a->n <= INT32_MAX / a->k);
    MT_NEED(w, a->bucket && a->n * a->k + a->e * a->bucket <= INT32_MAX);
    MT_WORKSPACE(w, a, true);
}

MT_OP_WALK(route_lists, n, .dim = {MT_SIZE_ROWS, MT_SIZE_EXPERTS, MT_SIZE_TOP_K}, .f32_only = true);

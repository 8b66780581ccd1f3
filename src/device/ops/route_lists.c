/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check_route_lists(const struct mt_route_lists *a)
{
    MT_OP_NEED(a->e && a->e <= MT_MAX_EXPERTS && a->k && a->n <= INT32_MAX / a->k);
    MT_OP_NEED(a->bucket && a->n * a->k + a->e * a->bucket <= INT32_MAX);
    MT_OP_NEED(a->ids && a->weights && a->counts && a->starts && a->list && a->places && a->workspace);
    return NULL;
}

static void cost_route_lists(const struct mt_route_lists *a, struct mt_metered *out)
{
    mt_op_shape(out, MT_F32, MT_DIMS(a->n, a->e, a->k));
    out->bytes = (double)a->n * (double)a->k * 14 + 8 * (double)(a->e + 1);
}

static void fill_route_lists(mt_example *x, const struct mt_metered *shape, struct mt_route_lists *a)
{
    size_t n = (size_t)shape->dim[0], e = (size_t)shape->dim[1], k = (size_t)shape->dim[2];
    *a = (struct mt_route_lists){.n = n, .e = e, .k = k, .bucket = 1};
    a->ids = mt_example_choices(x, n, e, k);
    a->weights = mt_example_read(x, MT_F32, n * k);
    a->counts = mt_example_write(x, MT_F32, e + 1);
    a->starts = mt_example_write(x, MT_F32, e + 1);
    a->list = mt_example_write(x, MT_F32, n * k);
    a->places = mt_example_write(x, MT_F32, n * k);
    a->workspace = mt_example_workspace(x, mt_op_route_lists_workspace(mt_example_device(x), a));
}

MT_OP_ROW(route_lists, n, .dim = {MT_SIZE_ROWS, MT_SIZE_EXPERTS, MT_SIZE_TOP_K}, .f32_only = true);

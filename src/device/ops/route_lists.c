/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check(const void *args)
{
    const struct mt_route_lists *a = args;
    MT_OP_NEED(a->e && a->e <= MT_MAX_EXPERTS && a->k && a->n <= INT32_MAX / a->k);
    MT_OP_NEED(a->bucket && a->n * a->k + a->e * a->bucket <= INT32_MAX);
    MT_OP_NEED(a->ids && a->weights && a->counts && a->starts && a->list && a->places && a->workspace);
    return NULL;
}

static void cost(const void *args, struct mt_metered *out)
{
    const struct mt_route_lists *a = args;
    out->dim[0] = a->n;
    out->dim[1] = a->e;
    out->dim[2] = a->k;
    out->bytes = (double)a->n * (double)a->k * 14 + 8 * (double)(a->e + 1);
}

static void fill(mt_example *x, const struct mt_metered *shape, void *args)
{
    size_t n = (size_t)shape->dim[0], e = (size_t)shape->dim[1], k = (size_t)shape->dim[2];
    struct mt_route_lists a = {.n = n, .e = e, .k = k, .bucket = 1};
    a.ids = mt_example_choices(x, n, e, k);
    a.weights = mt_example_read(x, MT_F32, n * k);
    a.counts = mt_example_write(x, MT_F32, e + 1);
    a.starts = mt_example_write(x, MT_F32, e + 1);
    a.list = mt_example_write(x, MT_F32, n * k);
    a.places = mt_example_write(x, MT_F32, n * k);
    a.workspace = mt_example_workspace(x, mt_op_route_lists_workspace(mt_example_device(x), &a));
    *(struct mt_route_lists *)args = a;
}

const struct mt_op mt_op_row_route_lists = {
    .name = {"route_lists"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_EXPERTS, MT_SIZE_TOP_K},
    .f32_only = true,
    .args_bytes = sizeof(struct mt_route_lists),
    .count = offsetof(struct mt_route_lists, n),
    .check = check,
    .cost = cost,
    .fill = fill,
};

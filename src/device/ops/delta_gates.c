/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static size_t n_heads(const struct mt_delta_gates *a)
{
    return a->a.n * a->a.dim;
}

static const char *check_inputs(const struct mt_delta_gates *a)
{
    MT_OP_NEED(heads_apart(&a->a) && a->a_log && a->dt_bias && (!a->plain || a->least <= a->most));
    MT_OP_NEED(a->plain || (heads_apart(&a->b) && heads_alike(&a->a, &a->b)));
    return NULL;
}

static const char *check(const void *args)
{
    const struct mt_delta_gates *a = args;
    MT_OP_NEED(a->beta && a->g && a->beta != a->g);
    return check_inputs(a);
}

static void count(const struct mt_delta_gates *a, int arrays, struct mt_metered *out)
{
    out->dtype = a->dtype;
    out->dim[0] = a->n;
    out->dim[1] = n_heads(a);
    out->bytes = arrays * mt_op_bytes(a->n, n_heads(a), a->dtype) + 2 * mt_op_bytes(a->n, n_heads(a), MT_F32);
}

static void cost(const void *args, struct mt_metered *out)
{
    count(args, 2, out);
}

static struct mt_delta_gates example(mt_example *x, const struct mt_metered *shape)
{
    size_t n = (size_t)shape->dim[0], heads = (size_t)shape->dim[1];
    struct mt_delta_gates a = {.n = n, .dtype = shape->dtype};
    a.a = mt_heads(mt_example_fresh(x, a.dtype, n * heads), heads, 1, heads);
    a.b = mt_heads(mt_example_fresh(x, a.dtype, n * heads), heads, 1, heads);
    a.a_log = mt_example_read(x, a.dtype, heads);
    a.dt_bias = mt_example_read(x, a.dtype, heads);
    return a;
}

static void fill(mt_example *x, const struct mt_metered *shape, void *args)
{
    struct mt_delta_gates a = example(x, shape);
    a.beta = mt_example_write(x, MT_F32, a.n * n_heads(&a));
    a.g = mt_example_write(x, MT_F32, a.n * n_heads(&a));
    *(struct mt_delta_gates *)args = a;
}

const struct mt_op mt_op_row_delta_gates = {
    .name = {"delta_gates"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_HEADS},
    .args_bytes = sizeof(struct mt_delta_gates),
    .count = offsetof(struct mt_delta_gates, n),
    .check = check,
    .cost = cost,
    .fill = fill,
};

static const char *check_bwd(const void *args)
{
    const struct mt_delta_gates_bwd *b = args;
    MT_OP_NEED(b->dbeta && b->dg && heads_apart(&b->da) && heads_alike(&b->da, &b->fwd.a));
    MT_OP_NEED(b->fwd.plain || (heads_apart(&b->db) && heads_alike(&b->db, &b->fwd.a)));
    MT_OP_NEED(b->workspace && (!b->dd || b->dskip));
    return check_inputs(&b->fwd);
}

static void cost_bwd(const void *args, struct mt_metered *out)
{
    count(&((const struct mt_delta_gates_bwd *)args)->fwd, 4, out);
}

static void fill_bwd(mt_example *x, const struct mt_metered *shape, void *args)
{
    struct mt_delta_gates_bwd b = {.fwd = example(x, shape)};
    size_t heads = n_heads(&b.fwd), all = b.fwd.n * heads;
    b.dbeta = mt_example_fresh(x, MT_F32, all);
    b.dg = mt_example_fresh(x, MT_F32, all);
    b.da = mt_heads(mt_example_write(x, shape->dtype, all), heads, 1, heads);
    b.db = mt_heads(mt_example_write(x, shape->dtype, all), heads, 1, heads);
    b.da_log = mt_example_update(x, MT_F32, heads);
    b.ddt_bias = mt_example_update(x, MT_F32, heads);
    b.workspace = mt_example_workspace(x, mt_op_delta_gates_bwd_workspace(mt_example_device(x), &b));
    *(struct mt_delta_gates_bwd *)args = b;
}

const struct mt_op mt_op_row_delta_gates_bwd = {
    .name = {"delta_gates_bwd"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_HEADS},
    .args_bytes = sizeof(struct mt_delta_gates_bwd),
    .count = offsetof(struct mt_delta_gates_bwd, fwd.n),
    .check = check_bwd,
    .cost = cost_bwd,
    .fill = fill_bwd,
};

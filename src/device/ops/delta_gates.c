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

static const char *check_delta_gates(const struct mt_delta_gates *a)
{
    MT_OP_NEED(a->beta && a->g && a->beta != a->g);
    return check_inputs(a);
}

static void count(const struct mt_delta_gates *a, int arrays, struct mt_metered *out)
{
    mt_op_shape(out, a->dtype, MT_DIMS(a->n, n_heads(a)));
    out->bytes = arrays * mt_op_bytes(a->n, n_heads(a), a->dtype) + 2 * mt_op_bytes(a->n, n_heads(a), MT_F32);
}

static void cost_delta_gates(const struct mt_delta_gates *a, struct mt_metered *out)
{
    count(a, 2, out);
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

static void fill_delta_gates(mt_example *x, const struct mt_metered *shape, struct mt_delta_gates *a)
{
    *a = example(x, shape);
    a->beta = mt_example_write(x, MT_F32, a->n * n_heads(a));
    a->g = mt_example_write(x, MT_F32, a->n * n_heads(a));
}

MT_OP_ROW(delta_gates, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HEADS});

static const char *check_delta_gates_bwd(const struct mt_delta_gates_bwd *b)
{
    MT_OP_NEED(b->dbeta && b->dg && heads_apart(&b->da) && heads_alike(&b->da, &b->fwd.a));
    MT_OP_NEED(b->fwd.plain || (heads_apart(&b->db) && heads_alike(&b->db, &b->fwd.a)));
    MT_OP_NEED(b->workspace && (!b->dd || b->dskip));
    return check_inputs(&b->fwd);
}

static void cost_delta_gates_bwd(const struct mt_delta_gates_bwd *b, struct mt_metered *out)
{
    count(&b->fwd, 4, out);
}

static void fill_delta_gates_bwd(mt_example *x, const struct mt_metered *shape, struct mt_delta_gates_bwd *b)
{
    *b = (struct mt_delta_gates_bwd){.fwd = example(x, shape)};
    size_t heads = n_heads(&b->fwd), all = b->fwd.n * heads;
    b->dbeta = mt_example_fresh(x, MT_F32, all);
    b->dg = mt_example_fresh(x, MT_F32, all);
    b->da = mt_heads(mt_example_write(x, shape->dtype, all), heads, 1, heads);
    b->db = mt_heads(mt_example_write(x, shape->dtype, all), heads, 1, heads);
    b->da_log = mt_example_update(x, MT_F32, heads);
    b->ddt_bias = mt_example_update(x, MT_F32, heads);
    b->workspace = mt_example_workspace(x, mt_op_delta_gates_bwd_workspace(mt_example_device(x), b));
}

MT_OP_ROW(delta_gates_bwd, fwd.n, .dim = {MT_SIZE_ROWS, MT_SIZE_HEADS});

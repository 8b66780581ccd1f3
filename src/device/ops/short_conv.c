/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"
#include "device/ops/row.h"

static const char *check(const void *args)
{
    const struct mt_short_conv *a = args;
    MT_OP_NEED(a->taps && a->taps <= MT_CONV_MAX_TAPS && a->w && a->cu_seqlens && a->n_docs);
    MT_OP_NEED(heads_apart(&a->x) && heads_apart(&a->y) && heads_alike(&a->x, &a->y) && a->x.p != a->y.p);
    return NULL;
}

static void count(const struct mt_short_conv *a, double arrays, struct mt_metered *out)
{
    out->dtype = a->dtype;
    out->dim[0] = a->n;
    out->dim[1] = a->x.n * a->x.dim;
    out->dim[2] = a->taps;
    out->bytes = arrays * mt_op_bytes(a->n, a->x.n * a->x.dim, a->dtype);
}

static void cost(const void *args, struct mt_metered *out)
{
    count(args, 2, out);
}

static struct mt_short_conv example(mt_example *x, const struct mt_metered *shape)
{
    size_t n = (size_t)shape->dim[0], c = (size_t)shape->dim[1];
    struct mt_short_conv a = {.n = n, .taps = MT_MIN((size_t)shape->dim[2], (size_t)MT_CONV_MAX_TAPS), .n_docs = 1,
                              .dtype = shape->dtype};
    a.cu_seqlens = mt_example_ints(x, 2, n, 0);
    a.w = mt_example_read(x, a.dtype, c * a.taps);
    a.x = mt_heads(mt_example_fresh(x, a.dtype, n * c), c, 1, c);
    return a;
}

static void fill(mt_example *x, const struct mt_metered *shape, void *args)
{
    struct mt_short_conv a = example(x, shape);
    a.y = a.x;
    a.y.p = mt_example_write(x, a.dtype, a.n * a.x.dim);
    *(struct mt_short_conv *)args = a;
}

const struct mt_op mt_op_row_short_conv = {
    .name = {"short_conv"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN, MT_SIZE_TOP_K},
    .args_bytes = sizeof(struct mt_short_conv),
    .count = offsetof(struct mt_short_conv, n),
    .check = check,
    .cost = cost,
    .fill = fill,
};

static const char *check_bwd(const void *args)
{
    const struct mt_short_conv_bwd *b = args;
    const struct mt_short_conv *a = &b->fwd;
    MT_OP_NEED(a->taps && a->taps <= MT_CONV_MAX_TAPS && a->w && a->cu_seqlens && a->n_docs && heads_apart(&a->x));
    MT_OP_NEED(heads_apart(&b->dy) && heads_apart(&b->dx) && heads_alike(&a->x, &b->dy) && heads_alike(&a->x, &b->dx));
    MT_OP_NEED(b->dx.p != b->dy.p && b->dx.p != a->x.p && ((!b->dw && !b->dbias) || b->workspace));
    return NULL;
}

static void cost_bwd(const void *args, struct mt_metered *out)
{
    count(&((const struct mt_short_conv_bwd *)args)->fwd, 3, out);
}

static void fill_bwd(mt_example *x, const struct mt_metered *shape, void *args)
{
    struct mt_short_conv_bwd b = {.fwd = example(x, shape)};
    b.dy = b.dx = b.fwd.x;
    b.dy.p = mt_example_fresh(x, shape->dtype, b.fwd.n * b.fwd.x.dim);
    b.dx.p = mt_example_write(x, shape->dtype, b.fwd.n * b.fwd.x.dim);
    b.dw = mt_example_update(x, MT_F32, b.fwd.x.dim * b.fwd.taps);
    b.workspace = mt_example_workspace(x, mt_op_short_conv_bwd_workspace(mt_example_device(x), &b));
    *(struct mt_short_conv_bwd *)args = b;
}

const struct mt_op mt_op_row_short_conv_bwd = {
    .name = {"short_conv_bwd"},
    .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN, MT_SIZE_TOP_K},
    .args_bytes = sizeof(struct mt_short_conv_bwd),
    .count = offsetof(struct mt_short_conv_bwd, fwd.n),
    .check = check_bwd,
    .cost = cost_bwd,
    .fill = fill_bwd,
};

/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"
#include "device/ops/row.h"

static const char *check_short_conv(const struct mt_short_conv *a)
{
    MT_OP_NEED(a->taps && a->taps <= MT_CONV_MAX_TAPS && a->w && a->cu_seqlens && a->n_docs);
    MT_OP_NEED(heads_apart(&a->x) && heads_apart(&a->y) && heads_alike(&a->x, &a->y) && a->x.p != a->y.p);
    return NULL;
}

static void count(const struct mt_short_conv *a, double arrays, struct mt_metered *out)
{
    mt_op_shape(out, a->dtype, MT_DIMS(a->n, a->x.n * a->x.dim, a->taps));
    out->bytes = arrays * mt_op_bytes(a->n, a->x.n * a->x.dim, a->dtype);
}

static void cost_short_conv(const struct mt_short_conv *a, struct mt_metered *out)
{
    count(a, 2, out);
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

static void fill_short_conv(mt_example *x, const struct mt_metered *shape, struct mt_short_conv *a)
{
    *a = example(x, shape);
    a->y = a->x;
    a->y.p = mt_example_write(x, a->dtype, a->n * a->x.dim);
}

MT_OP_ROW(short_conv, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN, MT_SIZE_TOP_K});

static const char *check_short_conv_bwd(const struct mt_short_conv_bwd *b)
{
    const struct mt_short_conv *a = &b->fwd;
    MT_OP_NEED(a->taps && a->taps <= MT_CONV_MAX_TAPS && a->w && a->cu_seqlens && a->n_docs && heads_apart(&a->x));
    MT_OP_NEED(heads_apart(&b->dy) && heads_apart(&b->dx) && heads_alike(&a->x, &b->dy) && heads_alike(&a->x, &b->dx));
    MT_OP_NEED(b->dx.p != b->dy.p && b->dx.p != a->x.p && ((!b->dw && !b->dbias) || b->workspace));
    return NULL;
}

static void cost_short_conv_bwd(const struct mt_short_conv_bwd *b, struct mt_metered *out)
{
    count(&b->fwd, 3, out);
}

static void fill_short_conv_bwd(mt_example *x, const struct mt_metered *shape, struct mt_short_conv_bwd *b)
{
    *b = (struct mt_short_conv_bwd){.fwd = example(x, shape)};
    b->dy = b->dx = b->fwd.x;
    b->dy.p = mt_example_fresh(x, shape->dtype, b->fwd.n * b->fwd.x.dim);
    b->dx.p = mt_example_write(x, shape->dtype, b->fwd.n * b->fwd.x.dim);
    b->dw = mt_example_update(x, MT_F32, b->fwd.x.dim * b->fwd.taps);
    b->workspace = mt_example_workspace(x, mt_op_short_conv_bwd_workspace(mt_example_device(x), b));
}

MT_OP_ROW(short_conv_bwd, fwd.n, .dim = {MT_SIZE_ROWS, MT_SIZE_HIDDEN, MT_SIZE_TOP_K});

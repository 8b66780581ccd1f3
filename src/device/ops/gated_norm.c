/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

enum { MOST = 1024, MOST_GATED = 1 << 16 }; /* elements of a head; with the gate first */

static const char *check_inputs(const struct mt_gated_norm *a)
{
    MT_OP_NEED(heads_apart(&a->x) && heads_apart(&a->z) && a->z.dim % a->x.dim == 0);
    MT_OP_NEED(a->x.dim <= (a->gate_first ? MOST_GATED : MOST));
    MT_OP_NEED(a->z.n * a->z.dim == a->x.n * a->x.dim && aligned(a->w) && a->eps >= 0);
    return NULL;
}

static const char *check_gated_norm(const struct mt_gated_norm *a)
{
    MT_OP_NEED(heads_apart(&a->y) && heads_alike(&a->y, &a->x));
    return check_inputs(a);
}

static void cost_gated_norm(const struct mt_gated_norm *a, struct mt_metered *out)
{
    mt_op_count_heads(&a->x, a->n, a->dtype, 3, out);
    out->flags = a->gate_first ? MT_METER_PLAIN : 0;
}

static struct mt_gated_norm example(mt_example *x, const struct mt_metered *shape)
{
    struct mt_gated_norm a = {.n = (size_t)shape->dim[0], .dtype = shape->dtype, .eps = 1e-6f,
                              .gate_first = shape->flags & MT_METER_PLAIN};
    a.x = mt_op_take_heads(x, MT_TAKE_READ | MT_TAKE_FRESH, shape);
    a.z = mt_op_take_heads(x, MT_TAKE_READ, shape);
    a.w = mt_example_read(x, a.dtype, mt_gated_norm_weights(&a));
    return a;
}

static void fill_gated_norm(mt_example *x, const struct mt_metered *shape, struct mt_gated_norm *a)
{
    *a = example(x, shape);
    a->y = mt_op_take_heads(x, MT_TAKE_WRITE, shape);
}

MT_OP_ROW(gated_norm, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HEADS, MT_SIZE_HEAD_DIM}, .flags = {0, MT_METER_PLAIN});

static const char *check_gated_norm_bwd(const struct mt_gated_norm_bwd *b)
{
    const struct mt_gated_norm *a = &b->fwd;
    MT_OP_NEED(heads_apart(&b->dy) && heads_apart(&b->dx) && heads_apart(&b->dz));
    MT_OP_NEED(heads_alike(&b->dy, &a->x) && heads_alike(&b->dx, &a->x) && heads_alike(&b->dz, &a->z));
    MT_OP_NEED(!b->dw || b->workspace);
    return check_inputs(a);
}

static void cost_gated_norm_bwd(const struct mt_gated_norm_bwd *b, struct mt_metered *out)
{
    const struct mt_gated_norm *a = &b->fwd;
    mt_op_count_heads(&a->x, a->n, a->dtype, 5, out);
    out->flags = a->gate_first ? MT_METER_PLAIN : 0;
}

/* In place, as in a layer. */
static void fill_gated_norm_bwd(mt_example *x, const struct mt_metered *shape, struct mt_gated_norm_bwd *b)
{
    *b = (struct mt_gated_norm_bwd){.fwd = example(x, shape)};
    b->dx = b->dy = mt_op_take_heads(x, MT_TAKE_READ | MT_TAKE_WRITE | MT_TAKE_FRESH, shape);
    b->dz = mt_op_take_heads(x, MT_TAKE_WRITE, shape);
    b->dw = mt_example_update(x, MT_F32, mt_gated_norm_weights(&b->fwd));
    b->workspace = mt_example_workspace(x, mt_op_gated_norm_bwd_workspace(mt_example_device(x), b));
}

MT_OP_ROW(gated_norm_bwd, fwd.n, .dim = {MT_SIZE_ROWS, MT_SIZE_HEADS, MT_SIZE_HEAD_DIM}, .flags = {0, MT_METER_PLAIN});

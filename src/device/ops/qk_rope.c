/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

/* What forward and backward need of positions and tables. */
static bool tables_fit(size_t rot, size_t dim, const void *positions, const void *cos_t, const void *sin_t)
{
    return rot <= dim && rot % 2 == 0 && (!rot || (positions && cos_t && sin_t));
}

/* Of queries, or of keys: the same heads in both places, or none. */
static bool side_fits(const struct mt_heads *from, const struct mt_heads *to, size_t dim)
{
    return heads_alike(from, to) && (!from->n || (from->dim == dim && heads_lie(from) && heads_lie(to)));
}

static size_t width(const struct mt_heads *q, const struct mt_heads *k)
{
    return q->n ? q->dim : k->dim;
}

/* A head that is shared has no norm, and is not written by several. */
static bool shares(const struct mt_heads *h)
{
    return h->n > 1 && !h->stride;
}

static const char *check_qk_rope(const struct mt_qk_rope *a)
{
    size_t dim = width(&a->q, &a->k);
    MT_OP_NEED(a->q.n + a->k.n && tables_fit(a->rot, dim, a->positions, a->cos_t, a->sin_t));
    MT_OP_NEED(side_fits(&a->q, &a->to_q, dim) && side_fits(&a->k, &a->to_k, dim));
    MT_OP_NEED(!shares(&a->to_q) && !shares(&a->to_k));
    MT_OP_NEED(!a->q_norm == !a->k_norm && !(a->q_norm && a->pairs));
    MT_OP_NEED(!a->q_norm || (a->q.n && a->k.n && a->rstd && a->q.p != a->to_q.p && a->k.p != a->to_k.p));
    MT_OP_NEED(!a->q_norm || (!shares(&a->q) && !shares(&a->k)));
    return NULL;
}

static void cost_qk_rope(const struct mt_qk_rope *a, struct mt_metered *out)
{
    size_t heads = a->q.n + a->k.n, dim = width(&a->q, &a->k);
    out->flags = a->q_norm ? MT_METER_NORM : 0;
    mt_op_shape(out, a->dtype, MT_DIMS(a->n, heads, dim));
    out->bytes = 2 * mt_op_bytes(a->n, heads * dim, a->dtype);
}

/* All but the last of the heads of a row are queries, the last is a key, and a value follows. */
static void sides(struct mt_heads *q, struct mt_heads *k, const struct mt_metered *shape, const char *row, size_t ld)
{
    size_t heads = (size_t)shape->dim[1], d = (size_t)shape->dim[2];
    *q = mt_heads(row, ld, heads - 1, d);
    *k = mt_heads(row ? row + (heads - 1) * d * mt_dtype_size(shape->dtype) : NULL, ld, 1, d);
}

/* In place without a norm, as in a layer. */
static void fill_qk_rope(mt_example *x, const struct mt_metered *shape, struct mt_qk_rope *a)
{
    size_t n = (size_t)shape->dim[0], heads = (size_t)shape->dim[1], d = (size_t)shape->dim[2], ld = (heads + 1) * d;
    *a = (struct mt_qk_rope){.n = n, .rot = d & ~(size_t)1, .dtype = shape->dtype, .eps = 1e-6f, .max_pos = n};
    a->positions = mt_example_ints(x, n, 1, 0);
    a->cos_t = a->sin_t = mt_example_read(x, MT_F32, n * d / 2);
    if (shape->flags & MT_METER_NORM) {
        sides(&a->q, &a->k, shape, mt_example_read(x, a->dtype, n * ld), ld);
        sides(&a->to_q, &a->to_k, shape, mt_example_write(x, a->dtype, n * heads * d), heads * d);
        a->q_norm = a->k_norm = mt_example_read(x, a->dtype, d);
        a->rstd = mt_example_write(x, MT_F32, n * heads);
    } else {
        sides(&a->q, &a->k, shape, mt_example_update(x, a->dtype, n * ld), ld);
        a->to_q = a->q;
        a->to_k = a->k;
    }
}

MT_OP_ROW(qk_rope, n, .dim = {MT_SIZE_ROWS, MT_SIZE_ALL_HEADS, MT_SIZE_HEAD_DIM}, .flags = {0, MT_METER_NORM});

static const char *check_qk_rope_bwd(const struct mt_qk_rope_bwd *a)
{
    size_t dim = width(&a->dq, &a->dk);
    MT_OP_NEED(a->dq.n + a->dk.n && tables_fit(a->fwd.rot, dim, a->fwd.positions, a->fwd.cos_t, a->fwd.sin_t));
    MT_OP_NEED(side_fits(&a->dq, &a->to_dq, dim) && side_fits(&a->dk, &a->to_dk, dim));
    MT_OP_NEED(!shares(&a->dq) && !shares(&a->dk));
    MT_OP_NEED(!a->fwd.q_norm == !a->fwd.k_norm && !(a->fwd.q_norm && a->fwd.pairs));
    MT_OP_NEED(!a->fwd.q_norm || (a->dq.n && a->dk.n && a->fwd.rstd && a->workspace));
    MT_OP_NEED(!a->fwd.q_norm || (side_fits(&a->fwd.q, &a->to_dq, dim) && side_fits(&a->fwd.k, &a->to_dk, dim)));
    MT_OP_NEED(!a->fwd.q_norm || (!shares(&a->to_dq) && !shares(&a->to_dk)));
    return NULL;
}

static void cost_qk_rope_bwd(const struct mt_qk_rope_bwd *a, struct mt_metered *out)
{
    size_t heads = a->dq.n + a->dk.n, dim = width(&a->dq, &a->dk);
    out->flags = a->fwd.q_norm ? MT_METER_NORM : 0;
    mt_op_shape(out, a->fwd.dtype, MT_DIMS(a->fwd.n, heads, dim));
    out->bytes = (a->fwd.q_norm ? 3 : 2) * mt_op_bytes(a->fwd.n, heads * dim, a->fwd.dtype);
}

static void fill_qk_rope_bwd(mt_example *x, const struct mt_metered *shape, struct mt_qk_rope_bwd *a)
{
    size_t n = (size_t)shape->dim[0], heads = (size_t)shape->dim[1], d = (size_t)shape->dim[2], ld = (heads + 1) * d;
    *a = (struct mt_qk_rope_bwd){.fwd = {.n = n, .rot = d & ~(size_t)1, .dtype = shape->dtype, .max_pos = n}};
    a->fwd.positions = mt_example_ints(x, n, 1, 0);
    a->fwd.cos_t = a->fwd.sin_t = mt_example_read(x, MT_F32, n * d / 2);
    sides(&a->to_dq, &a->to_dk, shape, mt_example_update(x, a->fwd.dtype, n * ld), ld);
    a->dq = a->to_dq;
    a->dk = a->to_dk;
    if (shape->flags & MT_METER_NORM) {
        sides(&a->fwd.q, &a->fwd.k, shape, mt_example_read(x, a->fwd.dtype, n * ld), ld);
        a->fwd.q_norm = a->fwd.k_norm = mt_example_read(x, a->fwd.dtype, d);
        a->fwd.rstd = mt_example_read(x, MT_F32, n * heads);
        a->dq_norm = mt_example_update(x, MT_F32, d);
        a->dk_norm = mt_example_update(x, MT_F32, d);
    }
    a->workspace = mt_example_workspace(x, mt_op_qk_rope_bwd_workspace(mt_example_device(x), a));
}

MT_OP_ROW(qk_rope_bwd, fwd.n, .dim = {MT_SIZE_ROWS, MT_SIZE_ALL_HEADS, MT_SIZE_HEAD_DIM}, .flags = {0, MT_METER_NORM});

/* SPDX-License-Identifier: Apache-2.0 */
/* Operations on flat arrays: add, grad_cast, join, zero, cast. */
#include "base/mem.h"
#include "device/ops/row.h"

static void add(struct mt_op_walk *w, struct mt_add *a)
{
    size_t n = mt_op_dim(w, &a->n);
    enum mt_dtype t = mt_op_dtype(w, &a->dtype);
    MT_ARRAY(w, a->a, FRESH | OPTIONAL, t, n, 1);
    MT_ARRAY(w, a->b, READ, t, n, 1);
    MT_ARRAY(w, a->out, WRITE, t, n, 1);
}

MT_OP_WALK(add, n, .dim = {MT_SIZE_ELEMENTS});

static void grad_cast(struct mt_op_walk *w, struct mt_grad_cast *a)
{
    size_t n = mt_op_dim(w, &a->n);
    enum mt_dtype t = mt_op_dtype(w, &a->dst_dtype);
    MT_ARRAY(w, a->src, READ | LOOSE, MT_F32, n, 1);
    MT_ARRAY(w, a->dst, WRITE | OPTIONAL | LOOSE, t, n, 1);
    MT_ARRAY(w, a->partials, WRITE | OPTIONAL | LOOSE, MT_F32, mt_div_up(n, MT_SUMSQ_BLOCK), 0);
    MT_NEED(w, a->dst || a->partials);
    MT_NEED(w, (const void *)a->src != a->dst || a->dst_dtype == MT_F32);
}

MT_OP_WALK(grad_cast, n, .dim = {MT_SIZE_ELEMENTS});

static void join(struct mt_op_walk *w, struct mt_join *a)
{
    mt_op_dim(w, &a->n);
    MT_FILL(w, a->n = mt_align_up(a->n, MT_JOIN_BLOCK));
    MT_ARRAY(w, a->buf, UPDATE, MT_F32, a->n, 2);
    MT_NEED(w, a->n % MT_JOIN_BLOCK == 0);
}

MT_OP_WALK(join, n, .dim = {MT_SIZE_ELEMENTS}, .f32_only = true);

static void zero(struct mt_op_walk *w, struct mt_zero *a)
{
    size_t bytes = mt_op_dim(w, &a->bytes);
    MT_ARRAY(w, a->ptr, WRITE | LOOSE, MT_F32, mt_div_up(bytes, 4), 0);
    if (w->cost)
        w->cost->bytes = (double)bytes;
}

MT_OP_WALK(zero, bytes, .dim = {MT_SIZE_ELEMENTS}, .f32_only = true);

static void cast(struct mt_op_walk *w, struct mt_cast *a)
{
    size_t n = mt_op_dim(w, &a->n);
    enum mt_dtype from = mt_op_dtype(w, &a->src_dtype);
    MT_FILL(w, a->dst_dtype = from == MT_F32 ? MT_BF16 : MT_F32);
    MT_ARRAY(w, a->src, READ, from, n, 1);
    MT_ARRAY(w, a->dst, WRITE, a->dst_dtype, n, 1);
    MT_NEED(w, a->src != a->dst);
}

MT_OP_WALK(cast, n, .dim = {MT_SIZE_ELEMENTS});

/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

static const char *check_attention_sink(const struct mt_attention_sink *a)
{
    MT_OP_NEED(a->o.n && a->sinks && heads_apart(&a->o) && a->lse);
    return NULL;
}

static void cost_attention_sink(const struct mt_attention_sink *a, struct mt_metered *out)
{
    mt_op_shape(out, a->dtype, MT_DIMS(a->n, a->o.n, a->o.dim));
    out->bytes = 2 * mt_op_bytes(a->n, a->o.n * a->o.dim, a->dtype) + 2 * mt_op_bytes(a->n, a->o.n, MT_F32);
}

static void fill_attention_sink(mt_example *x, const struct mt_metered *shape, struct mt_attention_sink *a)
{
    size_t n = (size_t)shape->dim[0], n_q = (size_t)shape->dim[1], d = (size_t)shape->dim[2];
    void *o = mt_example_take(x, MT_TAKE_READ | MT_TAKE_WRITE | MT_TAKE_FRESH, shape->dtype, n * n_q * d);
    *a = (struct mt_attention_sink){
        .n = n, .dtype = shape->dtype, .sinks = mt_example_read(x, shape->dtype, n_q),
        .o = mt_heads(o, n_q * d, n_q, d), .lse = mt_example_update(x, MT_F32, n * n_q)};
}

MT_OP_ROW(attention_sink, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HEADS, MT_SIZE_HEAD_DIM});

static const char *check_attention_sink_bwd(const struct mt_attention_sink_bwd *a)
{
    MT_OP_NEED(a->o.n && a->sinks && heads_apart(&a->o) && a->lse);
    MT_OP_NEED(heads_apart(&a->d_o) && heads_alike(&a->o, &a->d_o));
    MT_OP_NEED(a->dsinks && a->workspace);
    return NULL;
}

static void cost_attention_sink_bwd(const struct mt_attention_sink_bwd *a, struct mt_metered *out)
{
    mt_op_shape(out, a->dtype, MT_DIMS(a->n, a->o.n, a->o.dim));
    out->bytes = 2 * mt_op_bytes(a->n, a->o.n * a->o.dim, a->dtype) + mt_op_bytes(a->n, a->o.n, MT_F32);
}

static void fill_attention_sink_bwd(mt_example *x, const struct mt_metered *shape, struct mt_attention_sink_bwd *a)
{
    size_t n = (size_t)shape->dim[0], n_q = (size_t)shape->dim[1], d = (size_t)shape->dim[2];
    *a = (struct mt_attention_sink_bwd){.n = n, .dtype = shape->dtype};
    a->sinks = mt_example_read(x, a->dtype, n_q);
    a->o = mt_heads(mt_example_read(x, a->dtype, n * n_q * d), n_q * d, n_q, d);
    a->d_o = mt_heads(mt_example_fresh(x, a->dtype, n * n_q * d), n_q * d, n_q, d);
    a->lse = mt_example_read(x, MT_F32, n * n_q);
    a->dsinks = mt_example_update(x, MT_F32, n_q);
    a->workspace = mt_example_workspace(x, mt_op_attention_sink_bwd_workspace(mt_example_device(x), a));
}

MT_OP_ROW(attention_sink_bwd, n, .dim = {MT_SIZE_ROWS, MT_SIZE_HEADS, MT_SIZE_HEAD_DIM});

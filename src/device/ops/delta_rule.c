/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mem.h"
#include "device/ops/row.h"

static const char *check_inputs(const struct mt_delta_rule *a)
{
    if (!a->n)
        return NULL;
    MT_OP_NEED(a->q.n && a->q.n == a->k.n && a->q.dim == a->k.dim && a->v.n % a->k.n == 0);
    MT_OP_NEED(heads_apart(&a->q) && heads_apart(&a->k) && heads_apart(&a->v) && a->scale > 0);
    MT_OP_NEED(a->plain || a->eps > 0);
    MT_OP_NEED(not_both(&a->carried, &a->handed));
    MT_OP_NEED(a->beta && a->g && a->workspace && a->cu_seqlens && a->cu_seqlens_host && a->n_docs);
    MT_OP_NEED(a->cu_seqlens_host[0] == 0 && (size_t)a->cu_seqlens_host[a->n_docs] == a->n);
    for (size_t i = 0; i < a->n_docs; i++)
        MT_OP_NEED(a->cu_seqlens_host[i] < a->cu_seqlens_host[i + 1] &&
                   (size_t)(a->cu_seqlens_host[i + 1] - a->cu_seqlens_host[i]) <= a->max_len);
    return NULL;
}

static const char *check_delta_rule(const struct mt_delta_rule *a)
{
    MT_OP_NEED(!a->n || (heads_apart(&a->o) && heads_alike(&a->o, &a->v)));
    MT_OP_NEED(carried_or_none(&a->carried));
    return check_inputs(a);
}

static const char *check_delta_rule_bwd(const struct mt_delta_rule_bwd *b)
{
    const struct mt_delta_rule *a = &b->fwd;
    const char *wrong = check_inputs(a);
    if (wrong || !a->n)
        return wrong;
    MT_OP_NEED(heads_apart(&b->d_o) && heads_apart(&b->dq) && heads_apart(&b->dk) && heads_apart(&b->dv));
    MT_OP_NEED(heads_alike(&b->d_o, &a->v) && heads_alike(&b->dv, &a->v));
    MT_OP_NEED(heads_alike(&b->dq, &a->q) && heads_alike(&b->dk, &a->k) && b->dbeta && b->dg);
    MT_OP_NEED((!a->skip || b->dskip) && !a->carried.after && !a->handed.to);
    return NULL;
}

/* Multiply-adds of a token and a value head, by the equations of a chunk. */
static double work(const struct mt_delta_rule *a, bool bwd)
{
    double k = (double)a->k.dim, v = (double)a->v.dim, c = MT_DELTA_CHUNK;
    double shared = c * k / (double)mt_delta_jobs(a).heads; /* Q K^T */
    if (a->plain)
        return (2 * k * v + c * v + shared) * (bwd ? 2 : 1) + (bwd ? 3 * k * v + 2 * c * (v + k) : 0);
    double forward = 3 * k * v + 2.5 * c * k + 1.5 * c * v;
    return bwd ? 2 * forward + 6 * k * v + c * (3.5 * v + 5.5 * k) : forward;
}

static size_t n_handed(const struct mt_handed *x)
{
    return (size_t)(x->from != NULL) + (size_t)(x->to != NULL);
}

/* dim[1] is the longest document plus one, as of attention. n_states: those that documents begin with, or leave. */
static void count(const struct mt_delta_rule *a, size_t n_states, bool bwd, struct mt_metered *out)
{
    double heads = (double)(a->k.n * a->k.dim * 2 + a->v.n * a->v.dim * 2);
    out->flags = a->plain ? MT_METER_PLAIN : 0;
    mt_op_shape(out, a->dtype, MT_DIMS(a->n, a->max_len + 1, a->v.n, a->k.n, a->k.dim, a->v.dim));
    out->flops = 2 * (double)a->n * (double)a->v.n * work(a, bwd);
    out->bytes = (double)a->n * heads * (double)mt_dtype_size(a->dtype) * (bwd ? 2 : 1) +
                 (bwd ? 4 : 2) * mt_op_bytes(a->n, a->v.n, MT_F32) +
                 mt_op_bytes(n_states * a->v.n, a->k.dim * a->v.dim, MT_F32);
}

static void cost_delta_rule(const struct mt_delta_rule *a, struct mt_metered *out)
{
    count(a, a->carried.after ? 2 * a->n_docs : n_handed(&a->handed), false, out);
}

static void cost_delta_rule_bwd(const struct mt_delta_rule_bwd *b, struct mt_metered *out)
{
    count(&b->fwd, n_handed(&b->fwd.handed) + n_handed(&b->handed), true, out);
}

static struct mt_delta_rule example(mt_example *x, const struct mt_metered *shape)
{
    size_t n = (size_t)shape->dim[0], len = MT_MIN(MT_MAX((size_t)shape->dim[1], (size_t)2) - 1, n);
    size_t docs = mt_div_up(n, len), nv = (size_t)shape->dim[2], nk = (size_t)shape->dim[3];
    size_t dk = (size_t)shape->dim[4], dv = (size_t)shape->dim[5];
    struct mt_delta_rule a = {.n = n, .n_docs = docs, .max_len = len, .dtype = shape->dtype, .scale = 0.125f,
                              .eps = 1e-6f, .plain = shape->flags & MT_METER_PLAIN};
    int32_t *cu = mt_example_host_ints(x, docs + 1, len, 0);
    if (cu)
        cu[docs] = (int32_t)n;
    a.cu_seqlens_host = cu;
    a.cu_seqlens = mt_example_upload(x, cu, docs + 1);
    a.q = mt_heads(mt_example_fresh(x, a.dtype, n * nk * dk), nk * dk, nk, dk);
    a.k = mt_heads(mt_example_fresh(x, a.dtype, n * nk * dk), nk * dk, nk, dk);
    a.v = mt_heads(mt_example_fresh(x, a.dtype, n * nv * dv), nv * dv, nv, dv);
    a.beta = mt_example_fresh(x, MT_F32, n * nv);
    a.g = mt_example_fresh(x, MT_F32, n * nv);
    a.workspace = mt_example_workspace(x, mt_op_delta_rule_workspace(mt_example_device(x), &a));
    return a;
}

static void fill_delta_rule(mt_example *x, const struct mt_metered *shape, struct mt_delta_rule *a)
{
    *a = example(x, shape);
    a->o = a->v;
    a->o.p = mt_example_write(x, a->dtype, a->n * a->v.ld);
}

static void fill_delta_rule_bwd(mt_example *x, const struct mt_metered *shape, struct mt_delta_rule_bwd *b)
{
    *b = (struct mt_delta_rule_bwd){.fwd = example(x, shape)};
    const struct mt_delta_rule *a = &b->fwd;
    b->d_o = b->dv = a->v;
    b->dq = b->dk = a->q;
    b->d_o.p = mt_example_fresh(x, a->dtype, a->n * a->v.ld);
    b->dv.p = mt_example_write(x, a->dtype, a->n * a->v.ld);
    b->dq.p = mt_example_write(x, a->dtype, a->n * a->q.ld);
    b->dk.p = mt_example_write(x, a->dtype, a->n * a->q.ld);
    b->dbeta = mt_example_write(x, MT_F32, a->n * a->v.n);
    b->dg = mt_example_write(x, MT_F32, a->n * a->v.n);
}

MT_OP_ROW(delta_rule, n, .bound = MT_BOUND_DELTA,
          .dim = {MT_SIZE_ROWS, MT_SIZE_LENGTH, MT_SIZE_HEADS, MT_SIZE_KV_HEADS, MT_SIZE_HEAD_DIM, MT_SIZE_HEAD_DIM},
          .flags = {0, MT_METER_PLAIN});

MT_OP_ROW(delta_rule_bwd, fwd.n, .bound = MT_BOUND_DELTA,
          .dim = {MT_SIZE_ROWS, MT_SIZE_LENGTH, MT_SIZE_HEADS, MT_SIZE_KV_HEADS, MT_SIZE_HEAD_DIM, MT_SIZE_HEAD_DIM},
          .flags = {0, MT_METER_PLAIN});

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_MODEL_ATTENTION_H
#define MT_MODEL_ATTENTION_H

#include "base/mem.h"
#include "model/branch.h"

/** Does the norm of queries and keys run as an operation of its own (below), instead of with the rotary embedding? */
static inline bool mt_qk_norm_is_apart(const struct mt_layer_spec *s)
{
    bool usual = !s->norm.plus_one && !s->norm.round_once;
    bool alike = s->rope != MT_NO_ROPE && s->q_rope == s->rope && !s->v_norm;
    return s->qk_norm && !(s->qk_norm == MT_QK_NORM_HEADS && usual && alike);
}

/** Attention over a run's tokens and documents, by its layer's rule; its operands are yet to be set. */
static inline struct mt_attention mt_attention_of(const struct mt_part_run *r)
{
    const mt_model *m = r->m;
    const struct mt_layer_spec *s = r->part->spec;
    return (struct mt_attention){
        .n = r->in->n_tokens,
        .window = (size_t)s->window,
        .n_docs = r->in->n_docs,
        .max_len = r->in->max_len,
        .most_n = m->p.max_tokens,
        .most_len = m->p.max_len,
        .dtype = m->dt,
        .scale = (float)s->score_scale,
        .cap = (float)s->score_cap,
        .cu_seqlens = r->in->cu_seqlens,
        .cu_seqlens_host = r->in->cu_seqlens_host,
    };
}

/** The branch of a run of part attention, whose record holds the norm's statistics. */
struct mt_branch mt_attention_branch(const struct mt_part_run *r);
/** From the gradient of its output in run->dx to that of the branch's input, in m->dh; run->dx stays. */
int mt_attention_backward(const struct mt_part_run *r, struct mt_err *err);

/** Keys that a query sees, on average over documents of seq_len tokens. */
static inline double mt_attention_keys_seen(const struct mt_layer_spec *s, size_t seq_len)
{
    double len = (double)seq_len, window = s->window ? MT_MIN((double)s->window, len) : len;
    return (window * (window + 1) / 2 + (len - window) * window) / len;
}

/** The norms of queries and keys, and of values, of one run of attention, and their gradients (qk_norm.c). */
struct mt_qk_norm {
    const struct mt_part_run *run;
    const void *qkv; /* [n, qkv] what is normalised */
    void *qk;        /* forward: [n, qk] */
    float *rstd;     /* [n, n_heads + n_kv_heads]; backward reads it */
    void *dqkv;      /* backward: [n, qkv], its q and k in place */
    float *rstd_v;   /* of values: [n, n_kv_heads] */
    void *dv;        /* [n, kv] gradient of values that are keys, which is added to those of dqkv */
};
int mt_qk_norm(const struct mt_qk_norm *a, struct mt_err *err);
int mt_qk_norm_backward(const struct mt_qk_norm *a, struct mt_err *err);
/** Values, of qkv, or with v_is_k its keys, to the third part of qk. Backward: after that of the keys. */
int mt_v_norm(const struct mt_qk_norm *a, struct mt_err *err);
int mt_v_norm_backward(const struct mt_qk_norm *a, struct mt_err *err);
/** Bytes of m->own.workspace. */
size_t mt_qk_norm_workspace(const struct mt_model_params *p, const struct mt_layer_spec *s, mt_device *dev);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_MODEL_ATTENTION_H
#define MT_MODEL_ATTENTION_H

#include "model/model_priv.h"
#include "model/part.h"

/** Does the norm of queries and keys run as an operation of its own (below), instead of with the rotary embedding? */
static inline bool mt_qk_norm_is_apart(const struct mt_layer_spec *s)
{
    bool usual = !s->norm.plus_one && !s->norm.round_once;
    return s->qk_norm && !(s->qk_norm == MT_QK_NORM_HEADS && usual && s->rope != MT_NO_ROPE);
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
/** Bytes of m->workspace. */
size_t mt_qk_norm_workspace(const struct mt_model_params *p, const struct mt_layer_spec *s, mt_device *dev);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "device/device.h"

/**
 * Operations of units, gated or not, and mixtures of experts: a part of ops.h, which includes it; its rules apply.
 */

/* --- gated units -------------------------------------------------------------------------------- */

/**
 * With g = gate_up[i, j] and u = gate_up[i, f + j]: act(g) * u (Shazeer 2020). CLAMPED (gpt-oss): g is clamped to at
 * most `limit`, u to [-limit, limit]; (u + 1) * g * sigmoid(alpha * g); clamped values have gradient 0. RELU2 is of
 * mt_op_expert_glu_bwd() alone: there is no gate, gate_up is [n, f], and the unit's value MT_ACTIVATE_RELU2 of it.
 */
enum mt_glu_kind { MT_GLU_SILU, MT_GLU_GELU_TANH, MT_GLU_CLAMPED, MT_GLU_RELU2 };
/** Inputs of a unit: numbers of gate_up for each of its output. */
static inline size_t mt_glu_inputs(enum mt_glu_kind kind)
{
    return kind == MT_GLU_RELU2 ? 1 : 2;
}
/** out[i, j] as above. */
struct mt_glu {
    size_t n, f;
    enum mt_dtype dtype;
    enum mt_glu_kind kind;
    const void *gate_up; /* [n, 2f] */
    void *out;           /* [n, f] */
    float alpha, limit;  /* of MT_GLU_CLAMPED */
};
/** The gradient of gate and up; also computes the output of mt_op_glu() again. */
struct mt_glu_bwd {
    size_t n, f;
    enum mt_dtype dtype;
    enum mt_glu_kind kind;
    const void *gate_up, *dout;
    void *dgate_up; /* may be gate_up */
    void *out;      /* [n, f]; may be dout; NULL: not wanted */
    float alpha, limit; /* of MT_GLU_CLAMPED */
};

/* --- units without a gate ----------------------------------------------------------------------- */

/** relu(x)^2 (So et al. 2021); x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 (Hendrycks and Gimpel 2016). */
enum mt_activate_kind { MT_ACTIVATE_RELU2, MT_ACTIVATE_GELU_TANH };
/** out[i, j] = act(x[i, j]), in f32, rounded once. */
struct mt_activate {
    size_t n, f;
    enum mt_dtype dtype;
    enum mt_activate_kind kind;
    const void *x; /* [n, f] */
    void *out;     /* [n, f]; not x, which backward needs */
};
/** dx = dout act'(x); also computes the output of mt_op_activate() again. */
struct mt_activate_bwd {
    size_t n, f;
    enum mt_dtype dtype;
    enum mt_activate_kind kind;
    const void *x, *dout;
    void *dx;  /* may be x */
    void *out; /* [n, f]; may be dout; NULL: not wanted */
};

/**
 * xIELU (Huang and Schlag 2024): with shape = [alpha_p, alpha_n, beta, eps], p = softplus(alpha_p) and n = beta +
 * softplus(alpha_n),
 *
 *   out[i, j] = x > 0:  p x^2 + beta x;    else  n (expm1(min(x, eps)) - x) + beta x
 */
struct mt_xielu {
    size_t n, f;
    enum mt_dtype dtype;
    const void *x;     /* [n, f] */
    const void *shape; /* [4], only element-aligned */
    void *out;         /* [n, f]; not x, which backward needs */
};
/** dx = dout f'(x), where that of min() is 0 from eps on; also computes the output of mt_op_xielu() again. */
struct mt_xielu_bwd {
    size_t n, f;
    enum mt_dtype dtype;
    const void *x, *dout, *shape;
    void *dx;        /* may be x */
    void *out;       /* [n, f]; may be dout; NULL: not wanted */
    float *dshape;   /* [2] of alpha_p and alpha_n, accumulated; only element-aligned; NULL: not wanted */
    void *workspace; /* mt_op_xielu_bwd_workspace() bytes */
};

/* --- mixtures of experts ------------------------------------------------------------------------ */

/*
 * n tokens choose k of e experts each (Shazeer et al. 2017). A choice is an entry, with index token * k + slot; ids and
 * weights have n * k entries. A list holds the entries of an expert in ascending order, at most one for each token.
 */

enum {
    MT_MAX_EXPERTS = 1024,
    MT_NO_EXPERT = 0xffff, /* id of entries of padding rows */
};

/** Softmax over all experts; RAW: the logit itself. */
enum mt_router_score { MT_SCORE_SOFTMAX, MT_SCORE_SIGMOID, MT_SCORE_RAW };
/** Score of a group: the sum of its two largest, or its largest. */
enum mt_router_group { MT_GROUP_TOP2, MT_GROUP_MAX };
/** Weights are divided by their sum + eps, or by max(sum, eps). */
enum mt_router_renorm { MT_RENORM_NONE, MT_RENORM_SUM, MT_RENORM_MAX };

/**
 * How a row of logits x is turned into k experts and their weights. With s = score(x):
 *
 *   choose   the k largest of s + select_bias; of equals, the smallest index. With groups: experts form n_group groups
 *            of equal size, the score of a group is `group` of its s + select_bias, and only experts of the topk_group
 *            groups with the largest scores can be chosen (DeepSeek-AI 2024, 2.1.2).
 *   weigh    v = s of the chosen, without the bias; softmax_chosen: v = softmax(v) over the chosen;
 *            renorm; times scale; times expert_scale of the expert; round_weights: rounded to dtype.
 *
 * Models of transformers (models/X/modeling_X.py): Qwen, Mixtral and OLMoE are SOFTMAX, with norm_topk_prob RENORM_SUM
 * and eps 0; gpt-oss and Granite RAW with softmax_chosen; DeepSeek-V3, GLM-4.5 and dots1 SIGMOID with bias, RENORM_SUM,
 * eps 1e-20 and scale; MiniMax-M2 the same with eps 0; ERNIE-4.5 SOFTMAX with bias, RENORM_MAX.
 */
struct mt_router_rule {
    enum mt_router_score score;
    bool softmax_chosen;
    size_t n_group, topk_group; /* n_group 0 or 1: no groups */
    enum mt_router_group group;
    enum mt_router_renorm renorm;
    float eps, scale;
    bool round_weights;
};

/**
 * ids and weights of n rows by the rule; ids in descending order of s + select_bias. A row with a NaN or an infinity
 * has ids 0 .. k-1 and NaN weights. Rows n .. n_padded of ids and weights: MT_NO_EXPERT and 0.
 */
struct mt_router {
    size_t n, n_padded, e, k; /* k <= e <= MT_MAX_EXPERTS */
    enum mt_dtype dtype;        /* to which weights are rounded */
    enum mt_dtype logits_dtype; /* the same, or f32 */
    struct mt_router_rule rule;
    const void *logits;       /* [n, e] */
    const float *select_bias; /* [e] or NULL; only element-aligned */
    const void *expert_scale; /* [e] in dtype, by which the chosen experts' weights are multiplied at last, or NULL;
                                 only element-aligned */
    uint16_t *ids;            /* [n_padded, k]; only element-aligned */
    float *weights;           /* [n_padded, k]; only element-aligned */
};

/**
 * dlogits from the gradient of the weights, for the ids that the forward chose; writes whole rows. Rounding of the
 * weights counts as the identity. aux: adds aux_scale * q (F - sum(F q)) to each row, q = softmax(logits). That is the
 * gradient of aux_scale * sum over rows of sum(F q); with F_e the share of rows that chose e, it is the load-balancing
 * loss (Fedus et al. 2021, eq. 4). A row of MT_NO_EXPERT: 0; any other row with a NaN or an infinity: NaN.
 */
struct mt_router_bwd {
    size_t n, e, k;
    enum mt_dtype dtype; /* of dlogits */
    enum mt_dtype logits_dtype; /* the same, or f32 */
    struct mt_router_rule rule;
    const void *logits;    /* [n, e] */
    const uint16_t *ids;   /* [n, k]: in a row all below e, or all MT_NO_EXPERT; only element-aligned */
    const float *dweights; /* [n, k]; only element-aligned */
    const void *expert_scale; /* as in forward */
    float *dscale;         /* with expert_scale: [n, e] whole rows, whose column sums are its gradient; NULL: none */
    const float *aux;      /* F: [e], or NULL; only element-aligned */
    float aux_scale;
    void *dlogits; /* [n, e] */
};

/** prob_sum += sum over rows of softmax(logits): a factor of the load-balancing loss. */
struct mt_router_stats {
    size_t n, e;
    enum mt_dtype dtype; /* of logits */
    const void *logits;  /* [n, e] */
    float *prob_sum;     /* [e] accumulated; only element-aligned */
    void *workspace;     /* mt_op_router_stats_workspace() bytes */
};

/**
 * The lists of all experts, one after the other: list[starts[x] .. starts[x + 1]) are the entries with id x, in
 * ascending order; counts[x] is their number. Entries with an id of e or more are in no list. starts[e] is the total
 * length; what follows it in `list` is not written. counts[e]: number of rows with a weight that is not finite.
 *
 * places[i] is where entry i is if each expert's list is followed by padding to a multiple of `bucket`: so are rows that
 * are computed from it. -1: it is in no list.
 */
struct mt_route_lists {
    size_t n, e, k; /* n * k + e * bucket at most INT32_MAX, e at most MT_MAX_EXPERTS */
    size_t bucket;
    const uint16_t *ids;  /* [n, k]; this and what follows only element-aligned */
    const float *weights; /* [n, k] */
    int32_t *counts;      /* [e + 1] */
    int32_t *starts;      /* [e + 1] */
    int32_t *list;        /* [n * k] */
    int32_t *places;      /* [n, k] */
    void *workspace;      /* mt_op_route_lists_workspace() bytes */
};

/**
 * out[i,:] = x[list[i] / k,:] for i < n; if weights is not NULL, times weights[list[i]], rounded once. Rows
 * n .. n_padded of out are set to 0.
 */
struct mt_moe_gather {
    size_t n, n_padded, c, k;
    enum mt_dtype dtype;
    const int32_t *list;  /* [n]; only element-aligned */
    const void *x;        /* [tokens, c] */
    const float *weights; /* [tokens, k] or NULL */
    void *out;            /* [n_padded, c] */
};

/**
 * sum[t,:] += weights[t,j] * src[places[t,j] - first,:], in f32: the product rounds, then the sum; of those of the
 * token's entries that are in src, in the order of their places, or from the last to the first. A token without any
 * keeps its sum.
 */
struct mt_moe_combine {
    size_t n, c, k;
    size_t rows;           /* of src, with those of padding, which are not read; below INT32_MAX, as first + rows */
    size_t first;          /* place of src's first row */
    bool down;             /* from the last to the first */
    enum mt_dtype dtype;   /* of src */
    const int32_t *places; /* [n, k], of mt_op_route_lists(); only element-aligned; no two are the same, except -1 */
    const float *weights;  /* [n, k]; NULL: 1 */
    const void *src;       /* [rows, c] */
    float *sum;            /* [n, c] */
};

/**
 * Backward of an expert's unit and of its weight w = weights[list[i]]. With act = mt_op_glu() of the row, or RELU2's
 * mt_op_activate(), and dout = dO W_down, dO not multiplied by w:
 *
 *   dgate_up = w * (gradient of gate and up by dout);   out = w * act, for W_down's gradient dO^T out;
 *   dweights[list[i]] = sum of act * dout (+ sum of down_bias * d_o), which is <O, dO>, computed without O.
 *
 * act is not rounded in between. Rows n .. n_padded of dgate_up and out are set to 0.
 */
struct mt_expert_glu_bwd {
    size_t n, n_padded, f, k;
    enum mt_dtype dtype;
    enum mt_glu_kind kind;
    float alpha, limit;          /* of MT_GLU_CLAMPED */
    const void *gate_up;         /* [n_padded, 2f]; RELU2: [n_padded, f] */
    const void *dout;            /* [n_padded, f] */
    const int32_t *list;         /* [n]; only element-aligned; NULL: row i is entry i */
    const float *weights;        /* [tokens, k] */
    size_t c;                    /* used with down_bias */
    const void *down_bias, *d_o; /* [c], [n_padded, c]; or both NULL */
    void *dgate_up;              /* may be gate_up */
    void *out;                   /* [n_padded, f]; may be dout */
    float *dweights;             /* [tokens, k]; only the list's entries are written */
};

/**
 * The gate of a shared expert (Qwen2-MoE): gate[i] = sigmoid(sum of x[i,:] * w); act[i,:] *= gate[i]. The model scales
 * the output of the down product instead, which is the same.
 */
struct mt_shared_gate {
    size_t n, c, f;
    enum mt_dtype dtype;
    const void *x; /* [n, c] */
    const void *w; /* [c] */
    void *act;     /* [n, f], in place */
    float *gate;   /* [n] written; only element-aligned */
};
/**
 * Takes the gradient of gate, which mt_op_expert_glu_bwd() returns as dweights if weights = gate and list is NULL. With
 * d = dgate * gate * (1 - gate): dx[i,:] += d[i] * w and dw += sum over rows of d[i] * x[i,:].
 */
struct mt_shared_gate_bwd {
    size_t n, c;
    enum mt_dtype dtype;
    const void *x, *w;         /* as in forward */
    const float *gate, *dgate; /* [n]; only element-aligned */
    float *dx;                 /* [n, c] accumulated */
    float *dw;                 /* [c] accumulated; NULL: not wanted */
    void *workspace;           /* mt_op_shared_gate_bwd_workspace() bytes */
};

/** Their rows of the table. */
#define MT_DEVICE_OPS_MOE(X, W)                                                                    \
    X(ROUTER, router, struct mt_router)                                                            \
    X(ROUTER_BWD, router_bwd, struct mt_router_bwd)                                                \
    W(ROUTE_LISTS, route_lists, struct mt_route_lists)                                             \
    X(MOE_GATHER, moe_gather, struct mt_moe_gather)                                                \
    X(MOE_COMBINE, moe_combine, struct mt_moe_combine)                                             \
    X(EXPERT_GLU_BWD, expert_glu_bwd, struct mt_expert_glu_bwd)                                    \
    W(ROUTER_STATS, router_stats, struct mt_router_stats)                                          \
    X(SHARED_GATE, shared_gate, struct mt_shared_gate)                                             \
    W(SHARED_GATE_BWD, shared_gate_bwd, struct mt_shared_gate_bwd)

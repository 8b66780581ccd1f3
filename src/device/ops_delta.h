/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_DEVICE_OPS_DELTA_H
#define MT_DEVICE_OPS_DELTA_H

#include "device/device.h"
#include "device/heads.h"

/**
 * Operations of the gated delta rule (Yang et al. 2024) and what is around it in Qwen3-Next: a part of ops.h, whose
 * rules hold.
 */

/** Taps of a short convolution, at most. */
enum { MT_CONV_MAX_TAPS = 8 };
/** Tokens that the delta rule processes together; part of the numerics. */
enum { MT_DELTA_CHUNK = 64 };

/**
 * Causal convolution of each channel along each document, then SiLU: y[t] = silu(sum over j < taps of w[c, j] x[t -
 * taps + 1 + j]), where x is 0 before the document. Channel c is element c % dim of head c / dim.
 */
struct mt_short_conv {
    size_t n, taps, n_docs;
    enum mt_dtype dtype;
    const int32_t *cu_seqlens; /* [n_docs + 1] */
    struct mt_heads x, y;      /* as many heads, of one width */
    const void *w;             /* [channels, taps]; only element-aligned */
};
/** dx = gradient of x; dw += that of w. */
struct mt_short_conv_bwd {
    struct mt_short_conv fwd; /* y.p is not read */
    struct mt_heads dy, dx;   /* as x; dx is written */
    float *dw;                /* [channels, taps] accumulated; NULL: not wanted */
    void *workspace;          /* mt_op_short_conv_bwd_workspace() bytes */
};

/**
 * Of each token and head: beta = sigmoid(b), rounded to dtype; g = -exp(a_log) softplus(a + dt_bias), the logarithm of
 * the decay. Head h is element h % dim of head h / dim of the views.
 */
struct mt_delta_gates {
    size_t n;
    enum mt_dtype dtype;
    struct mt_heads a, b;
    const void *a_log, *dt_bias; /* [heads]; only element-aligned */
    float *beta, *g;             /* [n, heads] */
};
struct mt_delta_gates_bwd {
    struct mt_delta_gates fwd;
    const float *dbeta, *dg;  /* [n, heads] */
    struct mt_heads da, db;   /* as a and b; written */
    float *da_log, *ddt_bias; /* [heads] accumulated; NULL: not wanted */
    void *workspace;          /* mt_op_delta_gates_bwd_workspace() bytes */
};

/**
 * The gated delta rule (Yang et al. 2024, eq. 10), per document and head of v; S [dk, dv] is 0 where a document begins:
 *
 *   S = e^g_t S;  u = beta_t (v_t - S^T k_t);  S += k_t u^T;  o_t = S^T q_t
 *
 * with k = k' / sqrt(|k'|^2 + eps), and q of q' likewise, times scale. Head h of v goes with head h / (v.n / k.n) of q
 * and k. It is computed in chunks of MT_DELTA_CHUNK tokens (Yang et al. 2024, section 3.3) from the document's
 * beginning. g <= 0. Decays within a chunk are sums in double, so that strong decay loses nothing.
 */
struct mt_delta_rule {
    size_t n, n_docs, max_len;
    enum mt_dtype dtype;
    float scale, eps;
    const int32_t *cu_seqlens, *cu_seqlens_host; /* [n_docs + 1]; on the device, and on the host */
    struct mt_heads q, k, v, o;
    const float *beta, *g; /* [n, v.n] */
    void *workspace;       /* mt_op_delta_rule_workspace() bytes: for forward and backward of up to n tokens */
};
struct mt_delta_rule_bwd {
    struct mt_delta_rule fwd; /* o.p is not read */
    struct mt_heads d_o, dq, dk, dv; /* as o, q, k, v; written */
    float *dbeta, *dg;        /* [n, v.n], written */
};

/**
 * RMSNorm of each head, times a gate: y = w xhat silu(z), xhat = x / sqrt(mean(x^2) + eps). As in transformers, xhat
 * and w xhat are rounded to dtype. z has as many elements: head h of x goes with elements h * x.dim and on of all of z.
 */
struct mt_gated_norm {
    size_t n;
    enum mt_dtype dtype;
    float eps;
    struct mt_heads x, z, y; /* y as x; z.dim is a multiple of x.dim */
    const void *w;           /* [x.dim] */
};
struct mt_gated_norm_bwd {
    struct mt_gated_norm fwd; /* y.p is not read */
    struct mt_heads dy, dx, dz; /* as y, x, z; dx may be dy */
    float *dw;                /* [x.dim] accumulated; NULL: not wanted */
    void *workspace;          /* mt_op_gated_norm_bwd_workspace() bytes */
};

/** y = x sigmoid(gate), rounded once. */
struct mt_head_gate {
    size_t n;
    enum mt_dtype dtype;
    struct mt_heads x, gate, y; /* alike */
};
struct mt_head_gate_bwd {
    struct mt_head_gate fwd;      /* y.p is not read */
    struct mt_heads dy, dx, dgate; /* dx may be dy */
};

/** Their rows of the table. */
#define MT_DEVICE_OPS_DELTA(X, W)                                                                  \
    X(SHORT_CONV, short_conv, struct mt_short_conv)                                                \
    W(SHORT_CONV_BWD, short_conv_bwd, struct mt_short_conv_bwd)                                    \
    X(DELTA_GATES, delta_gates, struct mt_delta_gates)                                             \
    W(DELTA_GATES_BWD, delta_gates_bwd, struct mt_delta_gates_bwd)                                 \
    W(DELTA_RULE, delta_rule, struct mt_delta_rule)                                                \
    X(DELTA_RULE_BWD, delta_rule_bwd, struct mt_delta_rule_bwd)                                    \
    X(GATED_NORM, gated_norm, struct mt_gated_norm)                                                \
    W(GATED_NORM_BWD, gated_norm_bwd, struct mt_gated_norm_bwd)                                    \
    X(HEAD_GATE, head_gate, struct mt_head_gate)                                                   \
    X(HEAD_GATE_BWD, head_gate_bwd, struct mt_head_gate_bwd)

#endif

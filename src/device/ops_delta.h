/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/mem.h"
#include "device/device.h"
#include "device/heads.h"

/**
 * Operations of linear recurrences, the gated delta rule (Yang et al. 2024) and Mamba 2 (Dao and Gu 2024), and what is
 * around them in Qwen3-Next and Granite 4: a part of ops.h, whose rules hold.
 */

/** Taps of a short convolution, at most. */
enum { MT_CONV_MAX_TAPS = 8 };
/** Tokens that the delta rule processes together; part of the numerics. */
enum { MT_DELTA_CHUNK = 64 };
/** Value heads whose gradients of q and k are summed together, where the rule is plain; part of the numerics. */
enum { MT_PLAIN_HEADS = 8 };

/**
 * What documents that go on have from their earlier tokens: document d has past[d] of these, and begins with what
 * `before` has from byte place[d] * ld_bytes on; not read where past[d] is 0. What its next tokens are to begin with is
 * left at the same place of `after`, which may be `before`. Places differ. `after` NULL: documents begin and end here.
 * However a document is divided, results have the same bits.
 */
struct mt_carried {
    const void *before;
    void *after;
    size_t ld_bytes;
    const int32_t *past, *place; /* [n_docs], on the device */
};

/**
 * Where the rows are a piece of longer ones, what it takes over and hands on: the first document began in the piece
 * that `from` is of, and the last one goes on in the piece that `to` is for. NULL: it does not. Forward hands on to the
 * next piece, backward to the one before. Not with mt_carried.
 */
struct mt_handed {
    const void *from;
    void *to;
};

/**
 * Causal convolution of each channel along each document, then SiLU: y[t] = silu(bias[c] + sum over j < taps of w[c, j]
 * x[t - taps + 1 + j]), where x is 0 before the document. Channel c is element c % dim of head c / dim. What is carried
 * are the last taps - 1 rows of x, [taps - 1, channels] of dtype, the oldest first; handed on, too, with zeros for rows
 * before the document.
 */
struct mt_short_conv {
    size_t n, taps, n_docs;
    enum mt_dtype dtype;
    const int32_t *cu_seqlens; /* [n_docs + 1] */
    struct mt_heads x, y;      /* as many heads, of one width */
    const void *w;             /* [channels, taps]; only element-aligned */
    const void *bias;          /* [channels], likewise; NULL: none */
    struct mt_carried carried; /* forward alone */
    struct mt_handed handed;   /* to: forward alone */
};
/** dx = gradient of x; dw and dbias += those of w and of the bias. Handed on are gradients of the first taps - 1 rows
 * before SiLU, [taps - 1, channels] in FP32, with zeros for rows after the document. */
struct mt_short_conv_bwd {
    struct mt_short_conv fwd; /* y.p is not read */
    struct mt_heads dy, dx;   /* as x; dx is written */
    float *dw;                /* [channels, taps] accumulated; NULL: not wanted */
    float *dbias;             /* [channels] accumulated; NULL: not wanted */
    struct mt_handed handed;
    void *workspace;          /* mt_op_short_conv_bwd_workspace() bytes */
};

/**
 * Of each token and head: beta = sigmoid(b), rounded to dtype; g = -exp(a_log) softplus(a + dt_bias), the logarithm of
 * the decay. Plain: beta = softplus(a + dt_bias) within least and most, the step of Mamba 2, and g = -exp(a_log) beta.
 * Head h is element h % dim of head h / dim of the views.
 */
struct mt_delta_gates {
    size_t n;
    enum mt_dtype dtype;
    bool plain;
    float least, most;           /* of beta, if plain */
    struct mt_heads a, b;        /* plain: b is not read */
    const void *a_log, *dt_bias; /* [heads]; only element-aligned */
    float *beta, *g;             /* [n, heads] */
};
struct mt_delta_gates_bwd {
    struct mt_delta_gates fwd;
    const float *dbeta, *dg;  /* [n, heads] */
    const float *dskip;       /* [n, heads] of mt_delta_rule_bwd; NULL: none */
    struct mt_heads da, db;   /* as a and b; written */
    float *da_log, *ddt_bias; /* [heads] accumulated; NULL: not wanted */
    float *dd;                /* [heads] accumulated: sums of dskip; NULL: not wanted */
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
 *
 * Plain (Mamba 2): u = beta_t v_t, k = k' and q = q' times scale. With a skip, o_t = S^T q_t + skip v_t.
 *
 * What is carried is S before the document's present chunk, and the rows that this has (mt_delta_kept()). What is
 * handed on is S after the last row, [v.n, k.dim, v.dim] in FP32; backward hands on its gradient. A piece begins with a
 * new chunk: a document that is cut at multiples of MT_DELTA_CHUNK of its tokens has the bits of an uncut one.
 */
struct mt_delta_rule {
    size_t n, n_docs, max_len;
    enum mt_dtype dtype;
    bool plain;
    float scale, eps;         /* plain: eps is not read */
    const int32_t *cu_seqlens, *cu_seqlens_host; /* [n_docs + 1]; on the device, and on the host */
    struct mt_heads q, k, v, o;
    const float *beta, *g; /* [n, v.n] */
    const void *skip;      /* [v.n]; only element-aligned; NULL: none */
    struct mt_carried carried; /* forward alone */
    struct mt_handed handed;   /* to: forward alone */
    void *workspace;       /* mt_op_delta_rule_workspace() bytes: for forward and backward of up to n tokens */
};
/** Where what is carried begins, in bytes: S [v.n, k.dim, v.dim] in FP32; k and v of up to MT_DELTA_CHUNK rows, heads
 * side by side; beta and g of these. */
struct mt_delta_kept {
    size_t k, v, beta, g, bytes;
};
static inline struct mt_delta_kept mt_delta_kept(const struct mt_delta_rule *a)
{
    size_t e = mt_dtype_size(a->dtype), scalars = MT_DELTA_CHUNK * a->v.n * sizeof(float);
    struct mt_delta_kept r;
    r.k = mt_align_up(a->v.n * a->k.dim * a->v.dim * sizeof(float), (size_t)16);
    r.v = r.k + mt_align_up(MT_DELTA_CHUNK * a->k.n * a->k.dim * e, (size_t)16);
    r.beta = r.v + mt_align_up(MT_DELTA_CHUNK * a->v.n * a->v.dim * e, (size_t)16);
    r.g = r.beta + scalars;
    r.bytes = r.g + scalars;
    return r;
}
struct mt_delta_rule_bwd {
    struct mt_delta_rule fwd; /* o.p is not read */
    struct mt_heads d_o, dq, dk, dv; /* as o, q, k, v; written */
    float *dbeta, *dg;        /* [n, v.n], written */
    float *dskip;             /* [n, v.n], written, if there is a skip: the product of d_o and v */
    struct mt_handed handed;
};

/**
 * How value heads are divided: jobs, each with a document's value heads of one key head in order; plain ones have at
 * most MT_PLAIN_HEADS of them. If a key head has several jobs, their gradients of q and k are in FP32, and are added in
 * order, then rounded.
 */
struct mt_delta_jobs {
    size_t of_key, heads; /* jobs of a key head; most value heads of a job */
};
static inline struct mt_delta_jobs mt_delta_jobs(const struct mt_delta_rule *a)
{
    size_t all = a->v.n / a->k.n, heads = a->plain ? MT_MIN(all, (size_t)MT_PLAIN_HEADS) : all;
    struct mt_delta_jobs j = {mt_div_up(all, heads), heads};
    return j;
}
/** FP32 sums of dq, and as many of dk: [jobs of a key head][n][k.n][k.dim]; 0: there are none. */
static inline size_t mt_delta_partial_floats(const struct mt_delta_rule *a)
{
    size_t jobs = mt_delta_jobs(a).of_key;
    return jobs > 1 ? jobs * a->n * a->k.n * a->k.dim : 0;
}

/**
 * RMSNorm of each head, times a gate: y = w xhat silu(z), xhat = x / sqrt(mean(x^2) + eps). As in transformers, xhat
 * and w xhat are rounded to dtype. z has as many elements: head h of x goes with elements h * x.dim and on of all of z.
 * Gate first (Mamba 2): y = w xhat, xhat = u / sqrt(mean(u^2) + eps), u = x silu(z), and each head has weights of its
 * own.
 */
struct mt_gated_norm {
    size_t n;
    enum mt_dtype dtype;
    bool gate_first;
    float eps;
    struct mt_heads x, z, y; /* y as x; z.dim is a multiple of x.dim */
    const void *w;           /* [x.dim]; with the gate first [x.n, x.dim] */
};
/** Elements of w. */
static inline size_t mt_gated_norm_weights(const struct mt_gated_norm *a)
{
    return (a->gate_first ? a->x.n : 1) * a->x.dim;
}
struct mt_gated_norm_bwd {
    struct mt_gated_norm fwd; /* y.p is not read */
    struct mt_heads dy, dx, dz; /* as y, x, z; dx may be dy */
    float *dw;                /* as w, accumulated; NULL: not wanted */
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

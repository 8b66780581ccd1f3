/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/packed.h"
#include "device/device.h"
#include "device/heads.h"
#include "device/ops_delta.h"
#include "device/ops_direct.h"
#include "device/ops_e4m3.h"
#include "device/ops_mlp.h"

/**
 * Operations of a device, all on its COMPUTE stream: the arguments of each, and at the end the table of all. Those of
 * gated units and mixtures of experts are in ops_mlp.h, those of the gated delta rule in ops_delta.h, the operands of
 * products in FP8 in ops_e4m3.h, those of optimizers in ops_direct.h.
 * Rules for all of them, checked by ops.c before a device sees the arguments:
 *
 * Memory   device pointers, borrowed until an event recorded later has fired; 16-byte aligned unless the
 *          operation says otherwise. Outputs do not alias inputs unless it says so.
 * Layout   row-major; "ld" is the distance between rows in elements.
 * Dtypes   `dtype` is that of activations, weights and activation gradients (f32 or bf16); weight
 *          gradients, statistics and losses are f32. Sums are f32. Casts to bf16 round to nearest even.
 * Bits     The result depends on the arguments alone: not on threads, time or earlier calls.
 * Returns  0, -EINVAL (shape, dtype, alignment: names the operation and the condition), or the
 *          device's sticky error.
 */

/** out[i,:] = table[ids[i],:] * scale  (scale rounded to dtype first; 1 = plain copy). */
struct mt_embedding {
    size_t n, vocab, c;
    enum mt_dtype dtype;
    float scale;
    const int32_t *ids;   /* [n] */
    const void *table;    /* [vocab, c] */
    void *out;            /* [n, c] */
};

/**
 * dtable[id,:] += scale * sum of dout rows whose token is id, in the order given. The host has sorted the
 * tokens by id, so that no row needs atomics: run u covers order[starts[u] .. starts[u+1]).
 */
struct mt_embedding_bwd {
    size_t n, vocab, c, n_runs;
    enum mt_dtype dtype;
    float scale;
    const int32_t *run_ids; /* [n_runs], distinct */
    const int32_t *starts;  /* [n_runs + 1] */
    const int32_t *order;   /* [n] token indices */
    const void *dout;       /* [n, c] */
    float *dtable;          /* [vocab, c], accumulated */
};

/**
 * y = x * rstd * w, rstd = 1/sqrt(mean(x^2) + eps)  (Zhang and Sennrich 2019, eq. 4). The normalised value is
 * rounded to dtype before it is multiplied by w, as Hugging Face does.
 * plus_one: multiplies by (1 + w) in f32 and rounds once (Gemma). round_once: multiplies by w in f32 and rounds once
 * (gpt-oss).
 */
struct mt_rmsnorm {
    size_t n, c;
    enum mt_dtype dtype;
    float eps;
    bool plus_one, round_once;
    const void *x; /* [n, c] */
    const void *w; /* [c] */
    void *y;       /* [n, c] */
    float *rstd;   /* [n] written; with use_rstd read instead */
    bool use_rstd;
    struct mt_row_groups x_at, y_at; /* where rows of x and y are; 0: side by side */
};

/** dx = dres + J^T dy (dres NULL: 0); dw += sum over rows of dy * xhat, with xhat rounded as in the forward. */
struct mt_rmsnorm_bwd {
    size_t n, c;
    enum mt_dtype dtype;
    bool plus_one, round_once;
    const void *dy, *x; /* [n, c]; x is the forward's input */
    const void *w;
    const float *rstd;
    const void *dres; /* [n, c] or NULL; may alias dx */
    void *dx;         /* [n, c]; may alias dy or dres, if their rows are alike */
    float *dw;        /* [c] accumulated; NULL: not wanted */
    void *workspace;  /* mt_op_rmsnorm_bwd_workspace() bytes */
    struct mt_row_groups x_at, dy_at, dx_at; /* where rows of x, of dy, and of dres and dx are; 0: side by side */
};

/**
 * y = (x - mean) * rstd * w + b, rstd = 1/sqrt(mean((x - mean)^2) + eps)  (Ba, Kiros and Hinton 2016, eq. 4), in f32
 * with one rounding. plus_one: multiplies by (1 + w) (Nemotron-4). Both operations compute the mean of a row, of which
 * they read all, so that rstd is all that a record keeps.
 */
struct mt_layernorm {
    size_t n, c;
    enum mt_dtype dtype;
    float eps;
    bool plus_one, biased;
    const void *x; /* [n, c] */
    const void *w; /* [c]; if biased [2 c]: b follows w */
    void *y;       /* [n, c] */
    float *rstd;   /* [n] written; with use_rstd read instead */
    bool use_rstd;
};

/** dx = dres + J^T dy (dres NULL: 0); dw += sum over rows of dy * xhat; db += sum over rows of dy. */
struct mt_layernorm_bwd {
    size_t n, c;
    enum mt_dtype dtype;
    bool plus_one, biased;
    const void *dy, *x; /* [n, c]; x is the forward's input */
    const void *w;
    const float *rstd;
    const void *dres; /* [n, c] or NULL; may alias dx */
    void *dx;         /* [n, c]; may alias dy or dres */
    float *dw;        /* [c], if biased [2 c]: db follows dw; accumulated; NULL: not wanted */
    void *workspace;  /* mt_op_layernorm_bwd_workspace() bytes */
};

/**
 * D[m,n] = scale * op(A)[m,k] * op(B)[k,n] (+ bias[n]) (+ C[m,n]); f32 accumulation, one rounding to d_dtype.
 * A is [m,k], or [k,m] with trans_a; B is [k,n], or [n,k] with trans_b. C may be D (accumulate).
 * C and D are in dtype, or both f32. A linear layer uses trans_b; its input gradient neither; its weight gradient
 * trans_a with C = D in f32.
 * In E4M3 the product of the codes is also multiplied by both scales; A is [m,k], B is [n,k], n, k, lda and ldb are
 * multiples of 16, C and D are bf16 or f32. Products of codes are exact in f32.
 */
struct mt_gemm {
    size_t m, n, k;
    enum mt_dtype dtype;   /* of A, B and bias; E4M3: of A and B, a bias is in D's */
    enum mt_dtype d_dtype; /* of C and D */
    bool trans_a, trans_b;
    float scale;           /* of the product; 0: 1 */
    const void *a, *b;
    size_t lda, ldb, ldc, ldd;
    const void *bias; /* [n], only element-aligned; or NULL */
    const void *c;    /* or NULL */
    void *d;
    const float *a_scale, *b_scale; /* [1] with E4M3, else NULL; only element-aligned */
};

/** db[c] += scale[c] * sum over rows of dy[n, c] * x[n, c], each in f32; x NULL: 1, as
 * scale then. */
struct mt_bias_bwd {
    size_t n, c, ld;
    enum mt_dtype dtype;
    const void *dy, *x; /* only element-aligned */
    const float *scale; /* [c], only element-aligned */
    float *db;
    void *workspace; /* mt_op_bias_bwd_workspace() bytes */
};

/**
 * QK-norm (if the weights are not NULL) and rotary embedding (Su et al. 2021; pairs i and i + rot/2) of query and key
 * heads, each from one place to another. The heads are one width; of queries or of keys there may be none (n = 0).
 * Without QK-norm a result may be its input, of the same view. rot = 0 copies heads. A shared input (stride 0) is
 * written to every head of the result, if there is no QK-norm. With `pairs`, pairs are 2i and 2i + 1 of the dimensions
 * that are rotated (Su's own order), also without QK-norm only.
 */
struct mt_qk_rope {
    size_t n, rot; /* tokens; rot <= the width, even: dimensions that are rotated */
    bool pairs;
    enum mt_dtype dtype;
    float eps;
    struct mt_heads q, k;          /* inputs */
    struct mt_heads to_q, to_k;    /* results, as many heads of the same width */
    const int32_t *positions;      /* [n]; this and the tables: unless rot is 0 */
    const float *cos_t, *sin_t;    /* [max_pos, rot/2] */
    size_t max_pos;
    const void *q_norm, *k_norm;   /* [width], both or none */
    float *rstd;                   /* [n, heads of q and of k] written with QK-norm */
};

/**
 * Gradients of the inputs from those of the results (may be the same memory, in the same view); accumulates dq_norm and
 * dk_norm. Without QK-norm the gradient of a shared input (stride 0) is the sum over the heads, in order, in f32.
 */
struct mt_qk_rope_bwd {
    struct mt_qk_rope fwd;        /* only read, its inputs and rstd with QK-norm alone; its results are not used */
    struct mt_heads dq, dk;       /* of the results */
    struct mt_heads to_dq, to_dk; /* of the inputs, written */
    float *dq_norm, *dk_norm; /* [width]; NULL: not wanted */
    void *workspace;          /* mt_op_qk_rope_bwd_workspace() bytes */
};

/**
 * Causal attention with grouped queries, block-diagonal over documents: token i attends to tokens j <= i
 * of its own document, and of these to the last `window` (itself included; 0 = all). Head h of q attends to head
 * h / (q.n / k.n) of k and v. A score s is scale * q k, or with a cap: cap * tanh(scale * q k / cap) (Gemma 2).
 * lse[h, i] = log-sum-exp of the scores. Memory linear in the document's length.
 *
 * The first document may have begun before: k and v then have `past` more rows of it, before those of the n tokens.
 */
struct mt_attention {
    size_t n, window, past;
    size_t n_docs, max_len;  /* max_len: past tokens included */
    size_t most_n, most_len; /* n and max_len that the workspace was sized for; 0: those of this call */
    enum mt_dtype dtype;
    float scale;
    float cap;                      /* 0: none */
    const int32_t *cu_seqlens;      /* [n_docs + 1], device */
    const int32_t *cu_seqlens_host; /* the same on the host; read before the call returns */
    struct mt_heads q, k, v;        /* q and k of one width, k and v of one number; not shared */
    struct mt_heads o;              /* as many as q, as wide as v */
    float *lse;      /* [q.n, n] */
    void *workspace; /* mt_op_attention_workspace() bytes: for forward and backward of up to n tokens */
};

/**
 * With dk_sum and dv_sum what comes from these queries is added to all rows of those, and dk and dv are the sums of the
 * n tokens, rounded once: the tokens that go on with the last document have added theirs before.
 */
struct mt_attention_bwd {
    struct mt_attention fwd;    /* the forward's arguments; o and lse are read */
    struct mt_heads d_o;        /* as o */
    struct mt_heads dq, dk, dv; /* as q, k, v, of the n tokens: written, not accumulated */
    struct mt_heads dk_sum, dv_sum; /* FP32, as k and v with the past rows, accumulated, or none (past is 0) */
    bool sinks; /* lse includes attention sinks; without, a query's only key has weight 1 and score gradient 0 */
};

/**
 * Attention of new tokens whose documents began earlier. Document d has past[d] tokens before its new ones, whose keys
 * and values are in the cache; `of` has the new ones alone, n in all, at positions past[d] + i of document d. Their
 * keys and values are first added to the cache; then each result is what mt_op_attention() gives for that position of
 * the whole document: on the cpu device to the bit. Position i is row i % block of block table[d * table_ld + i / block
 * % table_ld] (Kwon et al. 2023): with a window a table may be as short as it and the new tokens of a document need,
 * and a block. A block holds keys [block, k.n * k.dim], and after them values [block, v.n * v.dim]. Blocks that are
 * written belong to one document; others may be shared.
 */
struct mt_attention_cached {
    struct mt_attention of; /* max_len: of old and new tokens of a document together, at most */
    size_t block, table_ld;
    const int32_t *past, *table;           /* [n_docs]; [n_docs, table_ld] */
    const int32_t *past_host, *table_host; /* the same on the host; read before the call returns */
    void *cache;                           /* of of.dtype; its blocks in any number */
};
/** Elements of a block. */
static inline size_t mt_cache_block_elems(const struct mt_attention_cached *a)
{
    return a->block * (a->of.k.n * a->of.k.dim + a->of.v.n * a->of.v.dim);
}

/**
 * Attention sinks: each head has a logit that takes part in the softmax and has no value (gpt-oss). Applied after
 * mt_op_attention(), with s = sinks[h]: o[i, h] *= sigmoid(lse[h, i] - s); lse[h, i] = log(e^lse[h, i] + e^s).
 * mt_op_attention_bwd() then takes this o and lse, with `sinks` set.
 */
struct mt_attention_sink {
    size_t n;
    enum mt_dtype dtype;
    const void *sinks; /* [o.n] */
    struct mt_heads o; /* in place */
    float *lse;        /* [o.n, n], in place */
};
/** dsinks[h] -= sum over i of e^(s - lse[h, i]) * sum of d_o[i, h] * o[i, h], with o and lse after the sinks. */
struct mt_attention_sink_bwd {
    size_t n;
    enum mt_dtype dtype;
    const void *sinks;
    struct mt_heads o, d_o; /* of one number and width */
    const float *lse;
    float *dsinks;   /* [o.n] accumulated */
    void *workspace; /* mt_op_attention_sink_bwd_workspace() bytes */
};

/**
 * Softmax cross-entropy of logits rows against targets, and its gradient in place:
 * loss[i] = log-sum-exp(logits[i,:]) - logits[i, target]; dlogits = (softmax - onehot) * scale, or * row_scale[i].
 * cap: the logits are results of mt_op_cap(), through which dlogits goes back: it has the factor 1 - (logit / cap)^2.
 * few: further ids of each row, or -1. Without dlogits their logits are written to few_values; with it their gradients
 * are those values, instead of what the formula says. Ids of a row that has a target, each once.
 * A target < 0 is ignored: loss 0, gradient 0. dlogits (of `dtype`) may be the memory of logits: row i
 * of dlogits then starts where row i of logits does, so ld_dlogits * sizeof(dtype) == ld * 4.
 */
struct mt_cross_entropy {
    size_t n, vocab, ld;
    enum mt_dtype dtype; /* of dlogits */
    const float *logits; /* [n, vocab] */
    const int32_t *targets;
    float *loss;      /* [n] */
    int32_t *correct; /* [n] 1 if the largest logit (the first of equals) is the target, else 0; or NULL */
    float *entropy;   /* [n] of the softmax, in nats, 0 without a target; or NULL */
    void *dlogits;    /* NULL: loss only */
    size_t ld_dlogits;
    float scale;            /* factor of every row's gradient */
    const float *row_scale; /* [n] a factor for each row, instead of `scale`; or NULL */
    float cap;              /* 0: none */
    size_t n_few;           /* 0: none */
    const int32_t *few;     /* [n, n_few] */
    float *few_values;      /* [n, n_few] */
};

/** x = cap * tanh(x / cap), in place (Gemma 2). */
struct mt_cap {
    size_t n, c, ld;
    float cap; /* above 0 */
    float *x;  /* [n, c] */
};

/** gather: dst[i,:] = src[rows[i],:] for i < n. scatter: dst[rows[i],:] = src[i,:], and all other of the n_dst rows of
 * dst are set to 0. `rows` is strictly ascending. */
struct mt_rows {
    size_t n, n_dst, c;
    enum mt_dtype dtype;
    const int32_t *rows;
    const void *src;
    void *dst;
};

/** out = a + scale * b, rounded once; may alias either. */
struct mt_add {
    size_t n;
    enum mt_dtype dtype;
    const void *a, *b; /* a NULL: 0 */
    void *out;
    float scale;       /* 0: 1 */
};

/** Elements of a block of mt_op_grad_cast(); part of the numerics, since it fixes the order of sums. */
enum { MT_SUMSQ_BLOCK = 16384 };
/**
 * Casts a weight gradient, and sums the squares of the cast values: partials[b] = sum over block b, in f32.
 * partials has mt_div_up(n, MT_SUMSQ_BLOCK) entries. dst may be src if dst_dtype is f32. Either may be NULL: then the
 * values are not stored, or not summed.
 */
struct mt_grad_cast {
    size_t n;
    const float *src; /* src, dst and partials: only element-aligned */
    enum mt_dtype dst_dtype;
    void *dst;
    float *partials;
};

/** Elements of a block of mt_op_join(). */
enum { MT_JOIN_BLOCK = 8192 };
/**
 * Joins hi and lo to f32 in place. `buf` holds blocks of 4 * MT_JOIN_BLOCK bytes: the block's MT_JOIN_BLOCK hi values,
 * then its lo values (one 2D copy per plane fills them); n is a multiple of MT_JOIN_BLOCK. Afterwards buf[i] is the
 * FP32 master of element i. no_lo: lo counts as zero, whatever the buffer holds in its place.
 */
struct mt_join {
    void *buf;
    size_t n;
    bool no_lo;
};

/** Sets bytes to zero. */
struct mt_zero {
    void *ptr;
    size_t bytes;
};

/** dst = src, cast to dst_dtype, which may be src_dtype. */
struct mt_cast {
    size_t n;
    enum mt_dtype src_dtype, dst_dtype;
    const void *src;
    void *dst;
};

/**
 * Decodes a packed matrix (base/packed.h): code times scale in f32, rounded once to `dtype`. NF4 and MXFP4 are read as
 * one row: only rows * cols counts, for MXFP4 a multiple of its block. With nested NF4, scales are bytes, and the scale
 * of block b is nested_map[scales[b]] * nested_scales[b / 256] + *nested_offset: a product and a sum, each rounded to
 * f32. To decode a part of a matrix, pass pointers to its beginning, which must be a multiple of 128 rows for FP8,
 * INT4R and zero points, of its block for MXFP4, NVFP4 and other INT4, and of 16384 elements for NF4. Columns of INT4R
 * and of matrices with zero points are whole blocks, and multiples of 32.
 */
struct mt_decode {
    size_t rows, cols;
    enum mt_dtype dtype; /* of out */
    enum mt_packed format;
    enum mt_scale scale; /* NF4: f32 or nested; MXFP4: E8M0; FP8 of all kinds: f32, bf16 or E8M0; INT4 of all kinds:
                            bf16 or f16, with zero points or not; NVFP4: E4M3, of either kind */
    const uint8_t *codes;
    const void *scales; /* of that type; this and what follows only element-aligned */
    const float *nested_scales, *nested_map, *nested_offset; /* the map has 256 values; all or none of the three */
    const float *factor; /* E4M3 scales: one number for the matrix */
    const uint32_t *zeros; /* scales with zero points: mt_packed_n_zeros() words; NULL: it has none */
    void *out; /* [rows, cols] */
};

/**
 * D[m,n] = A[m,k] decode(B)[n,k]' (+ bias[n]) (+ C[m,n]): a linear layer of few rows whose weight stays packed, in bf16.
 * B's elements are rounded as decode rounds them; f32 accumulation, one rounding to d_dtype. An element of D has the
 * same bits for any m and n. Only for rows up to limits.coded_rows is it what a device is good at.
 */
struct mt_packed_gemm {
    size_t m;
    enum mt_dtype d_dtype; /* of C and D: bf16 or f32 */
    const void *a;         /* [m, k] bf16 */
    struct mt_decode b;    /* [n, k]: rows n; cols k, a multiple of 64; of dtype bf16; its `out` is not used */
    const void *bias;      /* [n] bf16, only element-aligned; or NULL */
    const void *c;         /* [m, n]; or NULL; may be d */
    void *d;               /* [m, n] */
    size_t lda, ldc, ldd;  /* lda is a multiple of 8 */
    void *workspace;       /* mt_op_packed_gemm_workspace() bytes */
};

/**
 * Merges an adapter into a matrix W [rows, cols] in place, as the merged model has it in its files: W = Q(g (W + s B
 * A)). Q encodes in the format of `of` and decodes again; without a format it rounds to bf16. g is 1, or with DoRA
 * magnitude / |W + s B A| by rows. All in f32: each element of B A is a sum of r products in their order, each
 * rounded, and squares of a row are summed in 32 lanes, which are added as a tree. So all devices give the same bits,
 * and mt_merge_adapter_job() gives the codes.
 */
struct mt_merge_adapter {
    struct mt_decode of;   /* how W, `out`, was decoded, without codes; format NONE: rows, cols, dtype and out alone */
    bool rescale;          /* blocks have scales of their own values; else those of `of` */
    size_t r;
    float s;
    const void *a, *b;     /* [r, cols], [rows, r] of its dtype; this and what follows only element-aligned */
    const void *magnitude; /* [rows] of its dtype; NULL: not DoRA */
    float *scale, *inverse; /* [rows] with DoRA: g, and 1 / magnitude (0 if that is 0) */
};

/**
 * Dropout (Srivastava et al. 2014): out[i, j] = add[i, j] + (kept ? x[i, j] / (1 - p) : 0), in f32, rounded once.
 * Whether an element is kept is a pure function of (seed, stream, row, column), so that backward finds it again: column
 * j of row r = first_row + i, or first_row + rows[i], is dropped where word j % 4 of Philox4x32-10 with key `seed` and
 * counter (j / 4, r, stream) is below p * 2^32 (base/philox.h: index = r << 32 | j / 4).
 */
struct mt_dropout {
    size_t n, c;
    enum mt_dtype dtype, out_dtype; /* of x; of add and out: the same, or f32 */
    float p; /* in [0, 1) */
    uint64_t seed, stream;
    size_t first_row;    /* and rows' indices, below 2^32 together */
    const int32_t *rows; /* [n], only element-aligned; NULL: row i is i */
    const void *x;       /* [n, c] */
    const void *add;     /* [n, c] or NULL: 0 */
    void *out;           /* [n, c]; may be add, and of its dtype x */
};

/**
 * Of DoRA (Liu et al. 2024, eq. 5), where W' = magnitude (W + s B A) / |W + s B A| by rows, for each row: inverse =
 * 1 / |W + s B A| and scale = magnitude * inverse. With wa = W A^T and gram = A A^T, which are thin, W + s B A need
 * not be made: |W + s B A|^2 = |W|^2 + sum over k of B_k (2 s wa_k + s^2 (gram B)_k). All in f32.
 */
struct mt_dora_scale {
    size_t n, c, r;
    enum mt_dtype dtype;   /* of w, b, magnitude */
    float s;
    const void *w;         /* [n, c]; this and what follows only element-aligned */
    const void *b;         /* [n, r] */
    const void *magnitude; /* [n]; NULL, as w, b, wa and gram then: rows without DoRA, scale 1, inverse 0 */
    const float *wa;       /* [n, r] */
    const float *gram;     /* [r, r] */
    float *scale, *inverse; /* [n] */
};

/** out[i, j] = add[i, j] + bias[j] + scale[j] * x[i, j], in f32, rounded once. */
struct mt_scale_columns {
    size_t n, c;
    enum mt_dtype dtype, out_dtype; /* of x and bias; of add and out: the same, or f32 */
    const void *x;      /* [n, c] */
    const float *scale; /* [c] */
    const void *bias;   /* [c], only element-aligned; NULL: 0 */
    const void *add;    /* [n, c]; NULL: 0 */
    void *out;          /* [n, c]; may be add, and of its dtype x */
};

/* --- the table ---------------------------------------------------------------------------------- */

/**
 * Every operation: X(ID, name, arguments), or W if it has a workspace. A new one is its arguments above and a row
 * here, its description in ops/<name>.c (device/op.h), its code in cpu/<name>.c, and a kernel in cuda/<name>.cu.
 * Checks, messages, faults, costs, measuring, benchmark and conformance tests use the table.
 */
#define MT_DEVICE_OPS(X, W)                                                                        \
    MT_DEVICE_OPS_PRODUCTS(X, W)                                                                   \
    MT_DEVICE_OPS_OTHERS(X, W)
/** Those that a device may leave to a library. */
#define MT_DEVICE_OPS_PRODUCTS(X, W)                                                               \
    X(GEMM, gemm, struct mt_gemm)                                                                  \
    W(ATTENTION, attention, struct mt_attention)                                                   \
    X(ATTENTION_BWD, attention_bwd, struct mt_attention_bwd)
#define MT_DEVICE_OPS_OTHERS(X, W)                                                                 \
    W(ATTENTION_CACHED, attention_cached, struct mt_attention_cached)                              \
    X(ATTENTION_SINK, attention_sink, struct mt_attention_sink)                                    \
    W(ATTENTION_SINK_BWD, attention_sink_bwd, struct mt_attention_sink_bwd)                        \
    X(EMBEDDING, embedding, struct mt_embedding)                                                   \
    X(EMBEDDING_BWD, embedding_bwd, struct mt_embedding_bwd)                                       \
    X(RMSNORM, rmsnorm, struct mt_rmsnorm)                                                         \
    W(RMSNORM_BWD, rmsnorm_bwd, struct mt_rmsnorm_bwd)                                             \
    X(LAYERNORM, layernorm, struct mt_layernorm)                                                   \
    W(LAYERNORM_BWD, layernorm_bwd, struct mt_layernorm_bwd)                                       \
    W(BIAS_BWD, bias_bwd, struct mt_bias_bwd)                                                      \
    X(QK_ROPE, qk_rope, struct mt_qk_rope)                                                         \
    W(QK_ROPE_BWD, qk_rope_bwd, struct mt_qk_rope_bwd)                                             \
    X(GLU, glu, struct mt_glu)                                                                     \
    X(GLU_BWD, glu_bwd, struct mt_glu_bwd)                                                         \
    X(ACTIVATE, activate, struct mt_activate)                                                      \
    X(ACTIVATE_BWD, activate_bwd, struct mt_activate_bwd)                                          \
    X(CROSS_ENTROPY, cross_entropy, struct mt_cross_entropy)                                       \
    X(CAP, cap, struct mt_cap)                                                                     \
    X(GATHER_ROWS, gather_rows, struct mt_rows)                                                    \
    X(SCATTER_ROWS, scatter_rows, struct mt_rows)                                                  \
    X(ADD, add, struct mt_add)                                                                     \
    X(GRAD_CAST, grad_cast, struct mt_grad_cast)                                                   \
    X(JOIN, join, struct mt_join)                                                                  \
    X(ZERO, zero, struct mt_zero)                                                                  \
    X(CAST, cast, struct mt_cast)                                                                  \
    X(DECODE, decode, struct mt_decode)                                                            \
    W(PACKED_GEMM, packed_gemm, struct mt_packed_gemm)                                             \
    X(MERGE_ADAPTER, merge_adapter, struct mt_merge_adapter)                                       \
    X(DROPOUT, dropout, struct mt_dropout)                                                         \
    X(DORA_SCALE, dora_scale, struct mt_dora_scale)                                                \
    X(SCALE_COLUMNS, scale_columns, struct mt_scale_columns)                                       \
    X(XIELU, xielu, struct mt_xielu)                                                               \
    W(XIELU_BWD, xielu_bwd, struct mt_xielu_bwd)                                                   \
    MT_DEVICE_OPS_DIRECT(X)                                                                        \
    MT_DEVICE_OPS_DELTA(X, W)                                                                      \
    MT_DEVICE_OPS_E4M3(X)                                                                          \
    MT_DEVICE_OPS_MOE(X, W)

enum mt_dev_op {
#define MT_DEV_OP_ID(ID, name, type) MT_DEV_##ID,
    MT_DEVICE_OPS(MT_DEV_OP_ID, MT_DEV_OP_ID)
#undef MT_DEV_OP_ID
    MT_N_DEV_OPS,
};

/** Checks the arguments (a pointer to the struct of the table) and submits the operation. */
int mt_device_submit(mt_device *dev, enum mt_dev_op op, const void *args, struct mt_err *err);
/** Bytes of workspace for arguments of this shape or a smaller one; pointers in them may be NULL. */
size_t mt_device_workspace(mt_device *dev, enum mt_dev_op op, const void *args);

/* The same for each operation, typed: int mt_op_gemm(dev, const struct mt_gemm *, err). */
#define MT_OP_SUBMIT(ID, name, type)                                                               \
    static inline int mt_op_##name(mt_device *dev, const type *a, struct mt_err *err)              \
    {                                                                                              \
        return mt_device_submit(dev, MT_DEV_##ID, a, err);                                         \
    }
/* And size_t mt_op_bias_bwd_workspace(dev, const struct mt_bias_bwd *). */
#define MT_OP_WORKSPACE(ID, name, type)                                                            \
    MT_OP_SUBMIT(ID, name, type)                                                                   \
    static inline size_t mt_op_##name##_workspace(mt_device *dev, const type *a)                   \
    {                                                                                              \
        return mt_device_workspace(dev, MT_DEV_##ID, a);                                           \
    }
MT_DEVICE_OPS(MT_OP_SUBMIT, MT_OP_WORKSPACE)
#undef MT_OP_SUBMIT
#undef MT_OP_WORKSPACE

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <cuda_runtime_api.h>

#include "device/ops.h"
#include "fused.h"

/**
 * The operations of device/ops.h but products and attention, which have code of their own. Each has one launcher,
 * which enqueues on `stream` and returns the result of the launch. Arguments are those of device/ops.h, already
 * checked; all pointers are device memory. Launchers never allocate or wait. Deterministic: every sum has an order
 * fixed by the shape alone.
 */
#ifdef __cplusplus
extern "C" {
#endif

#define MT_CUDA_LAUNCHER(ID, name, type) cudaError_t mt_cuda_##name(const type *a, cudaStream_t stream);
MT_DEVICE_OPS_OTHERS(MT_CUDA_LAUNCHER, MT_CUDA_LAUNCHER)
#undef MT_CUDA_LAUNCHER

/** Copies whole words of 4 bytes between device memory and locked host memory, by the addresses that the device knows
 * them by. */
cudaError_t mt_cuda_small_copy(void *dst, const void *src, size_t bytes, cudaStream_t stream);
/** Whether this build has code that the current device can run: one of the kernels stands for all. */
cudaError_t mt_cuda_has_code(void);

/* --- a product's bias (gemm_bias.cu) ------------------------------------------------------------ */

/**
 * D[i, :] = bias (+ C[i, :]) for i < m, so that a product can then be added to D; for combinations that cuBLASLt's bias
 * epilogue refuses. C is in d_dtype and may be D; pointers are element-aligned.
 */
struct mt_cuda_bias_rows {
    size_t m, n, ldc, ldd;
    enum mt_dtype dtype, d_dtype; /* of the bias; of C and D */
    const void *bias, *c;         /* c: or NULL */
    void *d;
};
cudaError_t mt_cuda_fill_bias(const struct mt_cuda_bias_rows *a, cudaStream_t stream);

/* --- tiled attention, between its products (attention_softmax.cu) ------------------------------- */

/**
 * The scores of one tile of queries, between the matrix products. Query i of the tile is at position q0 + i of its
 * document and attends to keys (q0 + i - window, q0 + i] (window 0: all); column j is key k0 + j. Scores and
 * probabilities are [n_heads, rows, ld], 16-byte aligned, ld a multiple of 8; columns from n_keys on are undefined. In
 * forward, the tile has all keys of its queries; in backward, it may have some of them. The order of sums is fixed by
 * the number of keys.
 */
struct mt_cuda_scores {
    size_t rows, n_heads, n_keys, ld, q0, k0, window;
    enum mt_dtype dtype; /* of p, ds, o and d_o */
    float cap;           /* s are to be replaced by cap tanh(s / cap); 0: no */
    float *s;            /* scaled scores */
    void *p;             /* probabilities, 0 where masked; may be s if dtype is f32 */
    float *lse;          /* of (head, i) at head * lse_stride + i: written forward, read backward */
    size_t lse_stride;
    /* backward */
    float *dp;              /* d_o V' */
    void *ds;               /* p (dp - rowsum(d_o o)), times the cap's slope, 0 where masked; may be dp if dtype is f32 */
    struct mt_heads o, d_o; /* from the tile's first row on */
};

cudaError_t mt_cuda_softmax(const struct mt_cuda_scores *t, cudaStream_t stream);
cudaError_t mt_cuda_softmax_bwd(const struct mt_cuda_scores *t, cudaStream_t stream);

/** Row `row` of head `head` of dst = src[head, past + row], rounded to dtype: src is [heads, rows, width]. With add->p
 * all of src is added to that, in FP32, and dst is of these sums. */
cudaError_t mt_cuda_store_heads(const struct mt_heads *dst, enum mt_dtype dtype, const float *src, size_t rows,
                                const struct mt_heads *add, size_t past, cudaStream_t stream);

/* --- attention of our own (attention_flash.cu) -------------------------------------------------- */

/**
 * On tensor cores, for bf16 heads of 64, 96, 128 or 256 elements, or of 192 whose values have 128 (multi-head latent
 * attention). Deterministic; a document's bits depend on nothing else in its batch. Memory is linear in the rows
 * (mt_cuda_flash_buffers_of()).
 */
bool mt_cuda_flash_suits(const struct mt_attention *a);
/** Also of the gradients' layouts. */
bool mt_cuda_flash_suits_bwd(const struct mt_attention_bwd *b);
/** Arguments must suit. Enqueues and returns the result of the launches. */
cudaError_t mt_cuda_flash(const struct mt_attention *a, cudaStream_t stream);
cudaError_t mt_cuda_flash_bwd(const struct mt_attention_bwd *b, cudaStream_t stream);

/* --- documents of fused attention (attention_documents.cu) -------------------------------------- */

enum { MT_DOCS_MAX = 32 };
/** Up to MT_DOCS_MAX documents: document i has rows [first[i], first[i] + rows[i]). */
struct mt_docs {
    int32_t n;
    int32_t first[MT_DOCS_MAX], rows[MT_DOCS_MAX];
};

/**
 * Fills lens[i] and tables[t][i] = cu_seqlens[i] * multiplier[t] for i < batch + 1: the n_docs documents, then empty
 * ones. Tables follow one another, batch + 1 entries each.
 */
struct mt_docs_tables {
    const int32_t *cu_seqlens;
    size_t n_docs, batch;
    int64_t multiplier[MT_FUSED_N_TABLES];
    int32_t *lens;
    int64_t *tables;
};
cudaError_t mt_cuda_docs_tables(const struct mt_docs_tables *t, cudaStream_t stream);

/**
 * bf16 heads of packed rows; all distances and the width are multiples of 8, pointers are 16-byte aligned. Copies
 * document i's rows to `padded` (without gaps) from row i * len on, followed by zeros; or, with `back`, the other way.
 */
struct mt_docs_rows {
    struct mt_docs docs;
    size_t len;
    struct mt_heads packed;
    void *padded;
    bool back;
};
cudaError_t mt_cuda_docs_rows(const struct mt_docs_rows *p, cudaStream_t stream);

/**
 * Copies log-sum-exps between lse[head * stride + row] and stats, for heads [head0, head0 + n_heads).
 * EVEN: n rows, documents of `len` rows each, stats [n / len, n_heads, len]. RAGGED: stats [n, n_heads].
 * PADDED: documents `docs`, stats [docs.n, n_heads, len], 0 after a document's rows.
 */
enum mt_stats_kind { MT_STATS_EVEN, MT_STATS_RAGGED, MT_STATS_PADDED };
struct mt_docs_stats {
    enum mt_stats_kind kind;
    struct mt_docs docs;
    size_t n, first_row, len, head0, n_heads, stride;
    float *lse, *stats;
    bool to_lse;
};
cudaError_t mt_cuda_docs_stats(const struct mt_docs_stats *p, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

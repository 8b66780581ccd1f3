/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device/heads.h"
#include "fused.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Copies documents between packed rows and the sequences of fused attention. */

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

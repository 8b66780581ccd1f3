/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <cuda_runtime_api.h>

#include "device/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

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

#ifdef __cplusplus
}
#endif

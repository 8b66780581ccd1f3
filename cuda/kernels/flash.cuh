/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/**
 * What the kernels of attention of our own share (attention_flash.cu). Each pass is a file. A block takes a tile of
 * rows of a head from a list in the workspace (flash_tiles.cu), the longest documents' and the costliest of a document
 * first.
 *
 * Shapes of tiles are chosen so that neither a register is spilled nor more than 99 KB of shared memory taken
 * (tests/cuda), with eight warps where that is possible: four sub-cores have two each then, one of which can feed the
 * tensor cores while the other takes exponentials.
 */
#include "mma.cuh"
#include "reduce.cuh"
#include "scalar.cuh"
#include "workspace.h"

static constexpr float LOG2E = 1.44269504f;

/* Tokens [row0, ...) of a document of `len`, of which the first has row `start`. One that began before the call has its
 * earlier tokens with it: as these have no rows but those of keys, its start is -past. */
struct flash_tile {
    int start, len, row0, unused;
};

template <typename T> struct flash_rows {
    T *p;
    int ld, stride;
};
using flash_heads = flash_rows<uint16_t>;
using flash_added = flash_rows<float>; /* sums of gradients, to which is added; p NULL: none */

struct flash_args {
    flash_heads q, k, v, o, d_o, dq, dk, dv;
    float *lse, *delta;
    flash_added dk_sum, dv_sum; /* of a document's earlier tokens, too */
    const flash_tile *tiles;
    int n, past, n_q, n_kv, window; /* past: rows of keys before those of the queries */
    float scale, cap, scale_over_cap; /* cap: 0 for none */
    bool sinks;                       /* backward: lse counts them */
};

/* A pass over heads whose queries have `dim` elements: its kernel, with two threads a row of its tiles. */
struct flash_pass {
    void (*kernel)(flash_args);
    int dim, rows, shared_bytes;
    bool queries; /* tiles are of queries, else of keys */
};
/* In flash_tiles.cu: of a table of n passes runs those for heads of a's width, each on the tiles it lists before.
 * Without one for that width: cudaErrorInvalidValue. */
cudaError_t mt_cuda_flash_run(const flash_pass *table, size_t n, const struct mt_attention *a, const flash_args &f,
                              cudaStream_t stream);
/* The passes, one in each of the other files, for heads that mt_cuda_flash_takes() knows. */
cudaError_t mt_cuda_flash_forward(const struct mt_attention *a, const flash_args &f, cudaStream_t stream);
cudaError_t mt_cuda_flash_keys(const struct mt_attention *a, const flash_args &f, cudaStream_t stream);
cudaError_t mt_cuda_flash_queries(const struct mt_attention *a, const flash_args &f, cudaStream_t stream);

template <typename T> static __device__ __forceinline__ T *rows_from(const flash_rows<T> &h, int row, int head)
{
    return h.p + static_cast<size_t>(row) * static_cast<unsigned>(h.ld) +
           static_cast<size_t>(head) * static_cast<unsigned>(h.stride);
}

/* A document's tokens before the call, of which there are no queries. */
static __device__ __forceinline__ int past_of(const flash_tile &t)
{
    return t.start < 0 ? -t.start : 0;
}

/* The row of a document's first key. */
static __device__ __forceinline__ int row_of_keys(const flash_args &a, const flash_tile &t)
{
    return t.start + a.past;
}

/* A tile of products, from the first query and key of a thread on; at the edge: some are masked. */
struct flash_place {
    int query, key, len;
    bool edge;
};

static __device__ __forceinline__ bool sees(int query, int key, int len, int window)
{
    return key <= query && query < len && (!window || query - key < window);
}

/* The first tile of BN keys that queries from q0 on see. */
template <int BN> static __device__ __forceinline__ int first_keys(int q0, int window)
{
    return window && q0 + 1 > window ? (q0 + 1 - window) / BN : 0;
}

/* Whether some query of BM from q0 on does not see some key of BN from k0 on, which is then masked. */
template <int BM, int BN> static __device__ __forceinline__ bool at_edge(int q0, int k0, int len, int window)
{
    return k0 + BN > q0 + 1 || q0 + BM > len || (window && k0 <= q0 + BM - 1 - window);
}

/* Two rows of a warp's sums of D columns, times `by`, as bf16. */
template <int D>
static __device__ __forceinline__ void store_sums(const flash_heads &h, const flash_tile &t, int row, int head,
                                                  const float (&sum)[D / 8][4], float by0, float by1)
{
    int lane = static_cast<int>(threadIdx.x) % WARP;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int at = row + lane / 4 + 8 * half;
        if (at >= t.len || at < past_of(t))
            continue;
        uint32_t *to = reinterpret_cast<uint32_t *>(rows_from(h, t.start + at, head));
        float by = half ? by1 : by0;
#pragma unroll
        for (int j = 0; j < D / 8; j++)
            to[4 * j + lane % 4] = rounded_pair(sum[j][2 * half] * by, sum[j][2 * half + 1] * by);
    }
}

/* The same for keys of documents that began before the call, and of which later calls have had their part: what is
 * there is added first, and keys before the call have no other place. */
template <int D>
static __device__ __forceinline__ void add_sums(const flash_heads &h, const flash_added &to, const flash_tile &t,
                                                int row, int keys, int head, const float (&sum)[D / 8][4], float by)
{
    int lane = static_cast<int>(threadIdx.x) % WARP, past = past_of(t);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int at = row + lane / 4 + 8 * half;
        if (at >= t.len)
            continue;
        float *all = rows_from(to, keys + at, head);
        uint32_t *own = reinterpret_cast<uint32_t *>(rows_from(h, max(t.start + at, 0), head));
#pragma unroll
        for (int j = 0; j < D / 8; j++) {
            float *two = all + 8 * j + lane % 4 * 2;
            two[0] = fmaf(sum[j][2 * half], by, two[0]);
            two[1] = fmaf(sum[j][2 * half + 1], by, two[1]);
            if (at >= past)
                own[4 * j + lane % 4] = rounded_pair(two[0], two[1]);
        }
    }
}

/* What scores are multiplied by for their exponents: capped ones are scaled already. */
static __device__ __forceinline__ float scale_of(const flash_args &a)
{
    return a.cap > 0 ? 1.0f : a.scale;
}

/* cap tanh(x scale / cap) of a product x; *slope: what the gradient of that has as a factor. */
static __device__ __forceinline__ float capped(float x, const flash_args &a, float *slope)
{
    float t = tanhf(x * a.scale_over_cap);
    *slope = 1.0f - t * t;
    return t * a.cap;
}

/* The weight of a product x whose row has the log-sum-exp `lse`. */
static __device__ __forceinline__ float capped_weight(float x, float lse, const flash_args &a, float *slope)
{
    return exp2_approx((capped(x, a, slope) - lse) * LOG2E);
}

/* ds of a weight p. A query's lone key has the weight 1, however p was rounded, but for sinks: then ds is exactly zero,
 * being p (dp - dp). */
static __device__ __forceinline__ float score_gradient(float p, float dp, float delta, bool lone, bool sinks)
{
    float own = sinks ? p * dp : dp;
    return p * (dp - (lone ? own : delta));
}

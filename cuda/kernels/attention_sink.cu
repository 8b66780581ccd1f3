/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A head's sink, a logit s without a value: o *= sigmoid(lse - s), then lse' = log(e^lse + e^s). Its gradient is
 * -sum of p d_o o over rows, with p = e^(s - lse') and the new o: a block takes a few rows, each warp a head of them,
 * and the blocks' sums are folded (fold.cu). Bytes moved per element of s bytes: 2 s, forward and backward.
 */
#include "workspace.h"
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"

enum { UNROLL = 2, THREADS = 256, WARPS = THREADS / WARP };

template <typename T, int N>
static __global__ void __launch_bounds__(256)
    scale_heads(struct mt_attention_sink a, size_t vecs, unsigned columns)
{
    size_t row, at;
    row_of_tile(columns, UNROLL, &row, &at);
    if (row >= a.n)
        return;
    T *o = static_cast<T *>(a.o.p) + row * a.o.ld;
    unsigned dim = static_cast<unsigned>(a.o.dim);
    each_vector<UNROLL>(at, vecs, [&](int, size_t i) {
        unsigned column = static_cast<unsigned>(i * N), head = column / dim;
        T *of_head = o + head * a.o.stride + (column - head * dim);
        float by = sigmoid<float>(a.lse[head * a.n + row] - load(static_cast<const T *>(a.sinks) + head)), x[N];
        load_n<T, N>(of_head, x);
        for (int k = 0; k < N; k++)
            x[k] *= by;
        store_n<T, N>(of_head, x);
    });
}

template <typename T> static __global__ void __launch_bounds__(THREADS) add_to_lse(struct mt_attention_sink a)
{
    size_t i = blockIdx.x * static_cast<size_t>(THREADS) + threadIdx.x;
    if (i >= a.n * a.o.n)
        return;
    float over = load(static_cast<const T *>(a.sinks) + i / a.n) - a.lse[i];
    a.lse[i] += (over > 0.0f ? over : 0.0f) + logf(1.0f + exp_of(over > 0.0f ? -over : over));
}

template <typename T, int N>
static __global__ void __launch_bounds__(THREADS) sum_heads(struct mt_attention_sink_bwd a, size_t rows)
{
    size_t first = blockIdx.x * rows, end = first + rows < a.n ? first + rows : a.n;
    unsigned vecs = static_cast<unsigned>(a.o.dim / N), n = static_cast<unsigned>(end - first) * vecs;
    for (size_t head = threadIdx.y; head < a.o.n; head += WARPS) {
        float s = load(static_cast<const T *>(a.sinks) + head), sum = 0;
        MT_UNROLL(1)
        for (unsigned i = threadIdx.x; i < n; i += WARP) {
            size_t row = first + i / vecs, at = i % vecs * N;
            float o[N], d_o[N], dot = 0;
            load_n<T, N>(static_cast<const T *>(a.o.p) + row * a.o.ld + head * a.o.stride + at, o);
            load_n<T, N>(static_cast<const T *>(a.d_o.p) + row * a.d_o.ld + head * a.d_o.stride + at, d_o);
            for (int k = 0; k < N; k++)
                dot = fmaf(o[k], d_o[k], dot);
            sum = fmaf(exp_of(s - a.lse[head * a.n + row]), dot, sum);
        }
        sum = warp_sum(sum);
        if (threadIdx.x == 0)
            static_cast<float *>(a.workspace)[blockIdx.x * a.o.n + head] = -sum;
    }
}

cudaError_t mt_cuda_attention_sink(const struct mt_attention_sink *a, cudaStream_t stream)
{
    cudaError_t rc = for_dtype(a->dtype, [=](auto t) {
        using T = decltype(t);
        return for_widths<T>(heads_aligned<T>(a->o), [=](auto v) {
            size_t vecs = a->o.n * a->o.dim / v.n;
            row_tiles tiles = tile_rows(a->n, vecs, UNROLL);
            return MT_LAUNCH((scale_heads<T, v.n>), grid_of(tiles.blocks), dim3(tiles.x, tiles.y), 0, stream, *a, vecs,
                             tiles.columns);
        });
    });
    dim3 grid = grid_of(ceil_div(a->n * a->o.n, THREADS));
    return rc == cudaSuccess ? MT_LAUNCH_OF(a->dtype, add_to_lse, grid, THREADS, 0, stream, *a) : rc;
}

cudaError_t mt_cuda_attention_sink_bwd(const struct mt_attention_sink_bwd *a, cudaStream_t stream)
{
    size_t rows = mt_cuda_sum_rows(a->n), blocks = ceil_div(a->n, rows);
    cudaError_t rc = for_dtype(a->dtype, [=](auto t) {
        using T = decltype(t);
        return for_widths<T>(heads_aligned<T>(a->o) && heads_aligned<T>(a->d_o), [=](auto v) {
            return MT_LAUNCH((sum_heads<T, v.n>), grid_of(blocks), dim3(WARP, WARPS), 0, stream, *a, rows);
        });
    });
    return mt_cuda_fold_after(rc, a->dsinks, a->workspace, blocks, a->o.n, a->o.n, stream);
}

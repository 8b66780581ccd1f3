/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Muon's momentum, and the matrix that its iteration begins with: sums of squares of u by pieces, the factor 1 / |u| by one
 * block, then the elements. Bytes moved per element: 8 of g, three times the width of m, the width of x.
 */
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"

static constexpr unsigned THREADS = 256, WIDE = 1024;
static constexpr unsigned PIECE = MT_DIRECT_PIECE;

/* The new momentum into *m; returns u. */
static __device__ float step(float g, float *m, float mu)
{
    *m = *m + (1.0f - mu) * (g - *m);
    return g + mu * (*m - g);
}

template <typename M> static __global__ void __launch_bounds__(THREADS) sum_steps(struct mt_muon a)
{
    __shared__ float scratch[WARP];
    size_t first = static_cast<size_t>(blockIdx.x) * PIECE;
    const M *moment = static_cast<const M *>(a.m);
    float sum = 0;
    for (size_t i = first + threadIdx.x; i < first + PIECE && i < a.n; i += THREADS) {
        float m = load(moment + i), u = step(a.g[i], &m, a.mu);
        sum = fmaf(u, u, sum);
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0)
        a.workspace[1 + blockIdx.x] = sum;
}

/* 0: it is not finite. */
static __global__ void __launch_bounds__(WIDE) find_factor(float *workspace, size_t pieces)
{
    __shared__ float scratch[WARP];
    float norm = sqrtf(block_sum_of(workspace + 1, pieces, scratch));
    if (threadIdx.x == 0)
        workspace[0] = isfinite(norm) ? 1.0f / fmaxf(norm, 1e-7f) : 0.0f;
}

template <typename M, typename T> static __global__ void __launch_bounds__(THREADS) write_steps(struct mt_muon a)
{
    size_t i = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x;
    float factor = a.workspace[0], u = 0;
    M *moment = static_cast<M *>(a.m);
    if (i >= a.n)
        return;
    if (factor > 0.0f) {
        float m = load(moment + i);
        u = step(a.g[i], &m, a.mu) * factor;
        store(moment + i, m);
    }
    store(static_cast<T *>(a.x) + i, u);
}

template <typename M> static cudaError_t run(const struct mt_muon *a, cudaStream_t stream)
{
    size_t pieces = ceil_div(a->n, PIECE);
    dim3 grid = grid_of(ceil_div(a->n, THREADS));
    cudaError_t rc = MT_LAUNCH(sum_steps<M>, grid_of(pieces), THREADS, 0, stream, *a);
    rc = MT_LAUNCH_NEXT(rc, find_factor, 1, WIDE, 0, stream, a->workspace, pieces);
    if (rc != cudaSuccess)
        return rc;
    if (a->dtype == MT_BF16)
        return MT_LAUNCH((write_steps<M, bf16>), grid, THREADS, 0, stream, *a);
    return MT_LAUNCH((write_steps<M, float>), grid, THREADS, 0, stream, *a);
}

cudaError_t mt_cuda_muon(const struct mt_muon *a, cudaStream_t stream)
{
    return a->m_dtype == MT_BF16 ? run<bf16>(a, stream) : run<float>(a, stream);
}

template <typename T> static __global__ void __launch_bounds__(THREADS) widen(struct mt_widen a)
{
    size_t i = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (i < a.n)
        a.y[i] = a.scale * load(static_cast<const T *>(a.x) + i);
}

cudaError_t mt_cuda_widen(const struct mt_widen *a, cudaStream_t stream)
{
    return MT_LAUNCH_OF(a->dtype, widen, grid_of(ceil_div(a->n, THREADS)), THREADS, 0, stream, *a);
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Muon's momentum, and the matrix that its iteration begins with: sums of squares of u by pieces, the factor 1 / |u| by one
 * block, then the elements. Bytes moved per element: 8 of g, three times the width of m, the width of x.
 */
#include "launch.cuh"
#include "reduce.cuh"
#include "scalar.cuh"

static constexpr unsigned THREADS = 256, WIDE = 1024;

/* The new momentum into *m; returns u. */
static __device__ float step(float g, float *m, float mu)
{
    *m = *m + (1.0f - mu) * (g - *m);
    return g + mu * (*m - g);
}

template <typename M> static __global__ void __launch_bounds__(THREADS) sum_steps(struct mt_muon a)
{
    __shared__ float scratch[WARP];
    float sum = piece_squares(a.n, scratch, [=](size_t i) {
        float m = load(static_cast<const M *>(a.m) + i);
        return step(a.g[i], &m, a.mu);
    });
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

cudaError_t mt_cuda_muon(const struct mt_muon *a, cudaStream_t stream)
{
    size_t pieces = ceil_div(a->n, MT_DIRECT_PIECE);
    cudaError_t rc = MT_LAUNCH_OF(a->m_dtype, sum_steps, grid_of(pieces), THREADS, 0, stream, *a);
    rc = MT_LAUNCH_NEXT(rc, find_factor, 1, WIDE, 0, stream, a->workspace, pieces);
    return for_dtype(a->m_dtype, [=](auto m) {
        return for_dtype(a->dtype, [=](auto x) {
            return MT_LAUNCH_NEXT(rc, (write_steps<decltype(m), decltype(x)>), grid_of(ceil_div(a->n, THREADS)),
                                  THREADS, 0, stream, *a);
        });
    });
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

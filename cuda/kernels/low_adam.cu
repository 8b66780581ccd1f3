/* SPDX-License-Identifier: Apache-2.0 */
/*
 * AdamW's steps of a projected gradient: sums of squares by pieces, whether all are finite by one block, then the elements;
 * bytes moved an element: 28. Rows of norm 1 copied: a block a row, 16 bytes an element.
 */
#include "launch.cuh"
#include "reduce.cuh"

static constexpr unsigned THREADS = 256, WIDE = 1024;

static __global__ void __launch_bounds__(THREADS) sum_pieces(struct mt_low_adam a)
{
    __shared__ float scratch[WARP];
    float sum = piece_squares(a.n, scratch, [=](size_t i) { return a.low[i]; });
    if (threadIdx.x == 0)
        a.workspace[1 + blockIdx.x] = sum;
}

static __global__ void __launch_bounds__(WIDE) add_pieces(float *workspace, size_t pieces)
{
    __shared__ float scratch[WARP];
    float sum = block_sum_of(workspace + 1, pieces, scratch);
    if (threadIdx.x == 0)
        workspace[0] = sum;
}

static __global__ void __launch_bounds__(THREADS) write_steps(struct mt_low_adam a)
{
    size_t i = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= a.n)
        return;
    float low = a.low[i], u = 0;
    if (isfinite(a.workspace[0])) {
        float m = a.beta1 * a.m[i] + (1.0f - a.beta1) * low, v = a.beta2 * a.v[i] + (1.0f - a.beta2) * low * low;
        a.m[i] = m;
        a.v[i] = v;
        u = m / (sqrtf(v) + a.eps);
    }
    a.low[i] = u;
}

cudaError_t mt_cuda_low_adam(const struct mt_low_adam *a, cudaStream_t stream)
{
    size_t pieces = ceil_div(a->n, MT_DIRECT_PIECE);
    cudaError_t rc = MT_LAUNCH(sum_pieces, grid_of(pieces), THREADS, 0, stream, *a);
    rc = MT_LAUNCH_NEXT(rc, add_pieces, 1, WIDE, 0, stream, a->workspace, pieces);
    return MT_LAUNCH_NEXT(rc, write_steps, grid_of(ceil_div(a->n, THREADS)), THREADS, 0, stream, *a);
}

static __global__ void __launch_bounds__(THREADS) copy_rows(struct mt_unit_rows a)
{
    __shared__ float scratch[WARP];
    const float *from = a.from + blockIdx.x * a.cols;
    float *to = a.to + blockIdx.x * a.cols, sum = 0, along = 0;
    for (size_t i = threadIdx.x; i < a.cols; i += THREADS) {
        sum = fmaf(from[i], from[i], sum);
        along = fmaf(from[i], to[i], along);
    }
    sum = block_sum(sum, scratch);
    __syncthreads();
    along = block_sum(along, scratch);
    if (!(sum > 0.25f && sum < 4.0f))
        return;
    for (size_t i = threadIdx.x; i < a.cols; i += THREADS)
        to[i] = along < 0.0f ? -from[i] : from[i];
}

cudaError_t mt_cuda_unit_rows(const struct mt_unit_rows *a, cudaStream_t stream)
{
    return MT_LAUNCH(copy_rows, grid_of(a->rows), THREADS, 0, stream, *a);
}

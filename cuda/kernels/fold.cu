/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Second stage of the sums over rows (weight gradients of norms, bias gradients): a block adds up 32
 * columns of the partial rows, 32 rows at a time, then over its threads. Moves 4 bytes a partial.
 */
#include "reduce.cuh"

static __global__ void __launch_bounds__(WARP *WARP)
    fold_columns(float *dst, const float *__restrict__ partials, size_t n, size_t ld, size_t c)
{
    __shared__ float tile[WARP][WARP + 1]; /* one column more, so that columns are read without bank conflicts */
    size_t column = static_cast<size_t>(blockIdx.x) * WARP + threadIdx.x;
    float sum = 0;
    if (column < c) {
        MT_UNROLL(4)
        for (size_t p = threadIdx.y; p < n; p += WARP)
            sum += partials[p * ld + column];
    }
    tile[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = warp_sum(tile[threadIdx.x][threadIdx.y]);
    column = static_cast<size_t>(blockIdx.x) * WARP + threadIdx.y;
    if (threadIdx.x == 0 && column < c)
        dst[column] += sum;
}

cudaError_t mt_cuda_fold(float *dst, const float *partials, size_t n_partials, size_t ld, size_t c,
                         cudaStream_t stream)
{
    return MT_LAUNCH(fold_columns, grid_of(ceil_div(c, WARP)), dim3(WARP, WARP), 0, stream, dst,
                     partials, n_partials, ld, c);
}

cudaError_t mt_cuda_fold_after(cudaError_t rc, float *dst, const void *partials, size_t n_partials, size_t ld, size_t c,
                               cudaStream_t stream)
{
    if (rc != cudaSuccess || !dst)
        return rc;
    return mt_cuda_fold(dst, static_cast<const float *>(partials), n_partials, ld, c, stream);
}

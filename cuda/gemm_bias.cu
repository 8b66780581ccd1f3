/* SPDX-License-Identifier: Apache-2.0 */
/* A thread has one element: 2 bytes in, 4 out. */
#include "gemm_bias.h"
#include "launch.cuh"
#include "scalar.cuh"

static __global__ void __launch_bounds__(256) widen(float *dst, const bf16 *__restrict__ src, size_t n)
{
    size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n)
        dst[i] = load(src + i);
}

cudaError_t mt_cuda_widen_bias(float *dst, const void *src, size_t n, cudaStream_t stream)
{
    return MT_LAUNCH(widen, grid_of(ceil_div(n, 256)), 256, 0, stream, dst,
                     static_cast<const bf16 *>(src), n);
}

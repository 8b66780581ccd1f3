/* SPDX-License-Identifier: Apache-2.0 */
/* A copy of words between device memory and locked host memory, a thread a word: for what a copy engine would hold back
 * behind large copies. Bytes moved: those over the link. */
#include "launch.cuh"

static constexpr unsigned THREADS = 256;

static __global__ void __launch_bounds__(THREADS) copy_words(uint32_t *dst, const uint32_t *src, size_t n)
{
    size_t i = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (i < n)
        dst[i] = src[i];
}

cudaError_t mt_cuda_small_copy(void *dst, const void *src, size_t bytes, cudaStream_t stream)
{
    size_t n = bytes / sizeof(uint32_t);
    return MT_LAUNCH(copy_words, grid_of(ceil_div(n, THREADS)), THREADS, 0, stream, static_cast<uint32_t *>(dst),
                     static_cast<const uint32_t *>(src), n);
}

cudaError_t mt_cuda_has_code(void)
{
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, copy_words);
}

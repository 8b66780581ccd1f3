/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_CUDA_GEMM_BIAS_H
#define MT_CUDA_GEMM_BIAS_H

#include <cuda_runtime_api.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/** dst[i] = src[i], i < n: bf16 to f32, for products that cuBLASLt gives in f32 only with an f32 bias. */
cudaError_t mt_cuda_widen_bias(float *dst, const void *src, size_t n, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif

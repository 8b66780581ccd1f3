/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <cuda_runtime_api.h>
#include <stddef.h>

#include "device/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * D[i, :] = bias (+ C[i, :]) for i < m, so that a product can then be added to D; for combinations that cuBLASLt's bias
 * epilogue refuses. C is in d_dtype and may be D; pointers are element-aligned.
 */
struct mt_cuda_bias_rows {
    size_t m, n, ldc, ldd;
    enum mt_dtype dtype, d_dtype; /* of the bias; of C and D */
    const void *bias, *c;         /* c: or NULL */
    void *d;
};
cudaError_t mt_cuda_fill_bias(const struct mt_cuda_bias_rows *a, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

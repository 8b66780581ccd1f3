/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_CUDA_KERNELS_H
#define MT_CUDA_KERNELS_H

#include <cuda_runtime_api.h>

#include "device/backend.h"

/**
 * One launcher an operation: enqueues on `stream` and returns what the launch returned. Arguments are
 * those of device/ops.h, checked already; all pointers are device memory. Never allocates or waits.
 * Deterministic: every sum has an order fixed by the shape alone.
 */
#ifdef __cplusplus
extern "C" {
#endif

#define MT_CUDA_KERNEL_OPS(X)                                                                      \
    X(embedding, struct mt_embedding)                                                              \
    X(embedding_bwd, struct mt_embedding_bwd)                                                      \
    X(rmsnorm, struct mt_rmsnorm)                                                                  \
    X(rmsnorm_bwd, struct mt_rmsnorm_bwd)                                                          \
    X(bias_bwd, struct mt_bias_bwd)                                                                \
    X(qk_rope, struct mt_qk_rope)                                                                  \
    X(qk_rope_bwd, struct mt_qk_rope_bwd)                                                          \
    X(glu, struct mt_glu)                                                                          \
    X(glu_bwd, struct mt_glu_bwd)                                                                  \
    X(cross_entropy, struct mt_cross_entropy)                                                      \
    X(gather_rows, struct mt_rows)                                                                 \
    X(scatter_rows, struct mt_rows)                                                                \
    X(add, struct mt_add)                                                                          \
    X(grad_cast, struct mt_grad_cast)                                                              \
    X(join, struct mt_join)                                                                        \
    X(cast, struct mt_cast)

#define MT_CUDA_LAUNCHER(name, type) cudaError_t mt_cuda_##name(const type *a, cudaStream_t stream);
MT_CUDA_KERNEL_OPS(MT_CUDA_LAUNCHER)
#undef MT_CUDA_LAUNCHER

#ifdef __cplusplus
}
#endif
#endif

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <cuda_runtime_api.h>

#include "device/ops.h"

/**
 * The operations of device/ops.h that are kernels; the others (products, attention, zero) have code of their own. Each
 * has one launcher, which enqueues on `stream` and returns the result of the launch. Arguments are those of
 * device/ops.h, already checked; all pointers are device memory. Launchers never allocate or wait. Deterministic: every
 * sum has an order fixed by the shape alone.
 */
#ifdef __cplusplus
extern "C" {
#endif

#define MT_CUDA_KERNEL_OPS(X)                                                                      \
    X(ATTENTION_CACHED, attention_cached, struct mt_attention_cached)                              \
    X(ATTENTION_SINK, attention_sink, struct mt_attention_sink)                                    \
    X(ATTENTION_SINK_BWD, attention_sink_bwd, struct mt_attention_sink_bwd)                        \
    X(EMBEDDING, embedding, struct mt_embedding)                                                   \
    X(EMBEDDING_BWD, embedding_bwd, struct mt_embedding_bwd)                                       \
    X(RMSNORM, rmsnorm, struct mt_rmsnorm)                                                         \
    X(RMSNORM_BWD, rmsnorm_bwd, struct mt_rmsnorm_bwd)                                             \
    X(LAYERNORM, layernorm, struct mt_layernorm)                                                   \
    X(LAYERNORM_BWD, layernorm_bwd, struct mt_layernorm_bwd)                                       \
    X(BIAS_BWD, bias_bwd, struct mt_bias_bwd)                                                      \
    X(QK_ROPE, qk_rope, struct mt_qk_rope)                                                         \
    X(QK_ROPE_BWD, qk_rope_bwd, struct mt_qk_rope_bwd)                                             \
    X(GLU, glu, struct mt_glu)                                                                     \
    X(GLU_BWD, glu_bwd, struct mt_glu_bwd)                                                         \
    X(ACTIVATE, activate, struct mt_activate)                                                      \
    X(ACTIVATE_BWD, activate_bwd, struct mt_activate_bwd)                                          \
    X(CROSS_ENTROPY, cross_entropy, struct mt_cross_entropy)                                       \
    X(CAP, cap, struct mt_cap)                                                                     \
    X(GATHER_ROWS, gather_rows, struct mt_rows)                                                    \
    X(SCATTER_ROWS, scatter_rows, struct mt_rows)                                                  \
    X(ADD, add, struct mt_add)                                                                     \
    X(GRAD_CAST, grad_cast, struct mt_grad_cast)                                                   \
    X(JOIN, join, struct mt_join)                                                                  \
    X(CAST, cast, struct mt_cast)                                                                  \
    X(DECODE, decode, struct mt_decode)                                                            \
    X(PACKED_GEMM, packed_gemm, struct mt_packed_gemm)                                             \
    X(MERGE_ADAPTER, merge_adapter, struct mt_merge_adapter)                                       \
    X(DROPOUT, dropout, struct mt_dropout)                                                         \
    X(DORA_SCALE, dora_scale, struct mt_dora_scale)                                                \
    X(SCALE_COLUMNS, scale_columns, struct mt_scale_columns)                                       \
    X(XIELU, xielu, struct mt_xielu)                                                               \
    X(XIELU_BWD, xielu_bwd, struct mt_xielu_bwd)                                                   \
    MT_DEVICE_OPS_DIRECT(X)                                                                        \
    MT_DEVICE_OPS_E4M3(X)                                                                          \
    MT_DEVICE_OPS_MOE(X, X)                                                                        \
    MT_DEVICE_OPS_DELTA(X, X)

#define MT_CUDA_LAUNCHER(ID, name, type) cudaError_t mt_cuda_##name(const type *a, cudaStream_t stream);
MT_CUDA_KERNEL_OPS(MT_CUDA_LAUNCHER)
#undef MT_CUDA_LAUNCHER

/** Copies whole words of 4 bytes between device memory and locked host memory, by the addresses that the device knows
 * them by. */
cudaError_t mt_cuda_small_copy(void *dst, const void *src, size_t bytes, cudaStream_t stream);
/** Whether this build has code that the current device can run: one of the kernels stands for all. */
cudaError_t mt_cuda_has_code(void);

#ifdef __cplusplus
}
#endif

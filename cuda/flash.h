/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <cuda_runtime_api.h>
#include <stdbool.h>

#include "device/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Attention of our own on tensor cores (kernels/attention_flash.cu), for bf16 heads of 64, 96, 128 or 256 elements,
 * or of 192 whose values have 128 (multi-head latent attention). Deterministic; a document's bits depend on nothing else in its batch. Memory is linear in the rows
 * (mt_cuda_flash_buffers_of()).
 */
bool mt_cuda_flash_suits(const struct mt_attention *a);
/** Also of the gradients' layouts. */
bool mt_cuda_flash_suits_bwd(const struct mt_attention_bwd *b);
/** Arguments must suit. Enqueues and returns the result of the launches. */
cudaError_t mt_cuda_flash(const struct mt_attention *a, cudaStream_t stream);
cudaError_t mt_cuda_flash_bwd(const struct mt_attention_bwd *b, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

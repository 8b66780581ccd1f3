/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <cuda_runtime_api.h>

#include "device/ops.h"

/**
 * The operations of device/ops.h but products and attention, which have code of their own. Each has one launcher, which
 * enqueues on `stream` and returns the result of the launch. Arguments are those of device/ops.h, already checked; all
 * pointers are device memory. Launchers never allocate or wait. Deterministic: every sum has an order fixed by the shape
 * alone.
 */
#ifdef __cplusplus
extern "C" {
#endif

#define MT_CUDA_LAUNCHER(ID, name, type) cudaError_t mt_cuda_##name(const type *a, cudaStream_t stream);
MT_DEVICE_OPS_OTHERS(MT_CUDA_LAUNCHER, MT_CUDA_LAUNCHER)
#undef MT_CUDA_LAUNCHER

/** Copies whole words of 4 bytes between device memory and locked host memory, by the addresses that the device knows
 * them by. */
cudaError_t mt_cuda_small_copy(void *dst, const void *src, size_t bytes, cudaStream_t stream);
/** Whether this build has code that the current device can run: one of the kernels stands for all. */
cudaError_t mt_cuda_has_code(void);

#ifdef __cplusplus
}
#endif

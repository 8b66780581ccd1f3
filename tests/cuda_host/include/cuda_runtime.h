/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_EMU_CUDA_RUNTIME_H
#define MT_EMU_CUDA_RUNTIME_H

#include "cuda_runtime_api.h"
#ifdef __cplusplus
#include "cuda_emu_device.h"
#endif

#endif

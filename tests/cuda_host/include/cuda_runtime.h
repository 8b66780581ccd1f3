/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "cuda_runtime_api.h"
#ifdef __cplusplus
#include "cuda_emu_device.h"
#endif

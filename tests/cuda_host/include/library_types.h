/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/** The element types that the emulated cuBLASLt tells apart; values as in the CUDA toolkit. */
typedef enum cudaDataType_t {
    CUDA_R_32F = 0,
    CUDA_R_64F = 1,
    CUDA_R_16F = 2,
    CUDA_R_8I = 3,
    CUDA_R_32I = 10,
    CUDA_R_16BF = 14,
    CUDA_R_8F_E4M3 = 28,
} cudaDataType_t;
typedef cudaDataType_t cudaDataType;

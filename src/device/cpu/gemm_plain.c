/* SPDX-License-Identifier: Apache-2.0 */
/* For CPUs without AVX2: vector types of the compiler, on the vectors that the CPU has. */

#include "device/cpu/gemm_kernel.h"

enum { LANES = 4, ROWS = 4, VECS = 2 };

static inline void transpose(void *vectors)
{
    float(*r)[LANES] = vectors;
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            float x = r[i][j];
            r[i][j] = r[j][i];
            r[j][i] = x;
        }
}

#include "device/cpu/gemm_kernel_body.h"

const struct mt_cpu_gemm_isa mt_cpu_gemm_plain = {"plain C", "plain", ROWS, COLS, panel_a, panel_b,
                                                  multiply, multiply_rows, multiply_thin, LANES};

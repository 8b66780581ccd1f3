/* SPDX-License-Identifier: Apache-2.0 */
/* For builds without oneDNN: bf16 is multiplied as f32. */
#include "device/cpu/gemm.h"

int mt_cpu_bf16_gemm_create(struct mt_cpu_bf16_gemm **out, struct mt_err *)
{
    *out = NULL;
    return 0;
}

void mt_cpu_bf16_gemm_destroy(struct mt_cpu_bf16_gemm **)
{
}

float *mt_cpu_bf16_gemm_sums(struct mt_cpu_bf16_gemm *)
{
    return NULL;
}

int mt_cpu_bf16_gemm_tile(struct mt_cpu_bf16_gemm *, const struct mt_cpu_tile *)
{
    return 0;
}

void mt_cpu_bf16_gemm_thread_init(void)
{
}

void mt_cpu_bf16_gemm_describe(char *buf, size_t len)
{
    if (len)
        buf[0] = 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

/** Whether this CPU has the sets that our AVX-512 files are compiled for: F, BW, VL and DQ. */
static inline bool mt_has_avx512(void)
{
#ifdef __x86_64__
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
    return false;
#endif
}

static inline bool mt_has_avx2(void)
{
#ifdef __x86_64__
    return __builtin_cpu_supports("avx2");
#else
    return false;
#endif
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Not by MT_HOT, whose clones share their vectors: those wider than an instruction set's are kept in memory. */
#include "device/cpu/delta_products.h"

#include "device/cpu/gemm_kernel.h"

#if defined(__x86_64__) && !defined(__clang__)
#define HAS_VARIANTS 1
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
#define WIDTH 16
#define ROWS 8
#define VECS 1
#define NAME(x) x##_avx512
#include "device/cpu/delta_products_body.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2")
#define WIDTH 8
#define ROWS 4
#define VECS 2
#define NAME(x) x##_avx2
#include "device/cpu/delta_products_body.h"
#pragma GCC pop_options
#endif

#define WIDTH 4
#define ROWS 4
#define VECS 2
#define NAME(x) x##_plain
#include "device/cpu/delta_products_body.h"

const struct mt_cpu_products *mt_cpu_products(const struct mt_cpu_gemm *g)
{
#ifdef HAS_VARIANTS
    if (mt_cpu_gemm_isa(g) == &mt_cpu_gemm_avx512)
        return &products_avx512;
    if (mt_cpu_gemm_isa(g) == &mt_cpu_gemm_avx2)
        return &products_avx2;
#endif
    (void)g;
    return &products_plain;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* One-thread products by oneDNN's sgemm, which takes row-major matrices. */
#include <omp.h>
#include <oneapi/dnnl/dnnl.h>
#include <stdio.h>

#include "device/cpu/cpu.h"

void mt_cpu_gemm_tile(const struct mt_cpu_tile *t)
{
    dnnl_sgemm(t->trans_a ? 'T' : 'N', t->trans_b ? 'T' : 'N', (dnnl_dim_t)t->m, (dnnl_dim_t)t->n,
               (dnnl_dim_t)t->k, t->alpha, t->a, (dnnl_dim_t)t->lda, t->b, (dnnl_dim_t)t->ldb,
               t->beta, t->d, (dnnl_dim_t)t->ldd);
}

void mt_cpu_gemm_thread_init(void)
{
    omp_set_num_threads(1); /* of the calling thread: K must never be split over threads */
}

void mt_cpu_gemm_describe(char *buf, size_t len)
{
    const dnnl_version_t *v = dnnl_version();
    dnnl_cpu_isa_t isa = dnnl_get_effective_cpu_isa();
    const char *name = isa >= dnnl_cpu_isa_avx512_core_bf16 && isa != dnnl_cpu_isa_all
                           ? "avx512_core_bf16"
                       : isa >= dnnl_cpu_isa_avx512_core ? "avx512_core"
                       : isa >= dnnl_cpu_isa_avx2        ? "avx2"
                                                         : "sse4.1";
    snprintf(buf, len, "oneDNN %d.%d.%d, %s", v->major, v->minor, v->patch, name);
}

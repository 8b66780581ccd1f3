/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cpu/cpu.h"

enum { PIECE = 1024 };

static void chunk_main(void *ctx, size_t block, int thread)
{
    const struct mt_grad_cast *a = ctx;
    size_t first = block * MT_SUMSQ_BLOCK, end = MT_MIN(a->n, first + MT_SUMSQ_BLOCK);
    float x[PIECE], sum = 0;
    (void)thread;
    for (size_t i = first; i < end; i += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, end - i);
        mt_cpu_store_row(MT_F32, x, 0, n, a->src + i);
        mt_cpu_round_row(a->dst_dtype, x, n);
        sum += mt_cpu_dot(x, x, n);
        mt_cpu_store_row(a->dst_dtype, a->dst, i, n, x);
    }
    a->partials[block] = sum;
}

void mt_cpu_run_grad_cast(struct mt_cpu_device *d, const struct mt_grad_cast *a)
{
    mt_pool_run(d->pool, chunk_main, (void *)(uintptr_t)a, mt_div_up(a->n, MT_SUMSQ_BLOCK));
}

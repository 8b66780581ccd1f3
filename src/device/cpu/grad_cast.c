/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "device/cpu/cpu.h"

enum { PIECE = 1024 };

static void chunk_main(void *ctx, size_t block, int)
{
    const struct mt_grad_cast *a = ctx;
    size_t first = block * MT_SUMSQ_BLOCK, end = MT_MIN(a->n, first + MT_SUMSQ_BLOCK);
    float x[PIECE], sum = 0;
    for (size_t i = first; i < end; i += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, end - i);
        const float *g = a->src + i;
        if (a->dst_dtype != MT_F32) {
            memcpy(x, g, n * sizeof(float));
            mt_cpu_round_row(a->dst_dtype, x, n);
            g = x;
        }
        sum += mt_cpu_dot(g, g, n);
        if (a->dst)
            mt_cpu_store_row(a->dst_dtype, a->dst, i, n, g);
    }
    if (a->partials)
        a->partials[block] = sum;
}

void mt_cpu_run_grad_cast(struct mt_cpu_device *d, const struct mt_grad_cast *a)
{
    mt_pool_run(d->pool, chunk_main, (void *)(uintptr_t)a, mt_div_up(a->n, MT_SUMSQ_BLOCK));
}

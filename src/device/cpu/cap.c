/* SPDX-License-Identifier: Apache-2.0 */
/* x = cap tanh(x / cap) (Bello et al. 2016; Gemma 2): every result is within (-cap, cap). */
#include "device/cpu/cpu.h"
#include "device/cpu/vecmath.h"

MT_HOT static void cap_row(float *x, float cap, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] = cap * mt_tanh_close(x[i] / cap);
}

static void chunk_main(void *ctx, size_t chunk, int thread)
{
    const struct mt_cap *a = ctx;
    size_t per = mt_cpu_rows_per_chunk(a->c), end = MT_MIN(a->n, (chunk + 1) * per);
    (void)thread;
    for (size_t r = chunk * per; r < end; r++)
        cap_row(a->x + r * a->ld, a->cap, a->c);
}

void mt_cpu_run_cap(struct mt_cpu_device *d, const struct mt_cap *a)
{
    mt_pool_run(d->pool, chunk_main, (void *)(uintptr_t)a, mt_div_up(a->n, mt_cpu_rows_per_chunk(a->c)));
}

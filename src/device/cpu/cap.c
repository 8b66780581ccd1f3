/* SPDX-License-Identifier: Apache-2.0 */
/* x = cap tanh(x / cap) (Bello et al. 2016; Gemma 2): every result is within (-cap, cap). */
#include "device/cpu/cpu.h"
#include "device/cpu/vecmath.h"

MT_HOT static void cap_row(float *x, float cap, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] = cap * mt_tanh_close(x[i] / cap);
}

static void row(const void *args, size_t r)
{
    const struct mt_cap *a = args;
    cap_row(a->x + r * a->ld, a->cap, a->c);
}

void mt_cpu_run_cap(struct mt_cpu_device *d, const struct mt_cap *a)
{
    mt_cpu_by_rows(d, row, a, a->n, a->c);
}

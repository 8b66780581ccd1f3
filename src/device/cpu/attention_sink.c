/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A head's sink, a logit s without a value: o *= sigmoid(lse - s), lse' = log(e^lse + e^s). Its gradient is
 * -sum of p d_o o over rows, with p = e^(s - lse') and the new o.
 */
#include <math.h>

#include "device/cpu/cpu.h"
#include "device/cpu/vecmath.h"

enum { ROW_BLOCK = 32, PIECE = 1024 };

static void forward_head(const struct mt_attention_sink *a, size_t row, size_t head)
{
    float tmp[PIECE], *lse = a->lse + head * a->n + row, over = mt_cpu_element(a->dtype, a->sinks, head) - *lse;
    float by = mt_sigmoidf(-over);
    for (size_t c = 0; c < a->o.dim; c += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->o.dim - c), at = mt_heads_at(&a->o, row, head) + c;
        float *y = mt_cpu_row_place(a->dtype, a->o.p, at, tmp);
        mt_cpu_scale(y, mt_cpu_row_f32(a->dtype, a->o.p, at, n, tmp), by, n);
        mt_cpu_store_row(a->dtype, a->o.p, at, n, y);
    }
    *lse += (over > 0 ? over : 0) + logf(1.0f + mt_expf(over > 0 ? -over : over));
}

static void forward_row(const void *args, size_t row)
{
    const struct mt_attention_sink *a = args;
    for (size_t h = 0; h < a->o.n; h++)
        forward_head(a, row, h);
}

void mt_cpu_run_attention_sink(struct mt_cpu_device *d, const struct mt_attention_sink *a)
{
    mt_cpu_by_rows(d, forward_row, a, a->n, a->o.n * a->o.dim);
}

MT_CPU_SUMS(attention_sink_bwd, n, ROW_BLOCK, a->o.n)

static void backward_row(const void *args, size_t row, float *sums)
{
    const struct mt_attention_sink_bwd *a = args;
    for (size_t h = 0; h < a->o.n; h++) {
        float p = mt_expf(mt_cpu_element(a->dtype, a->sinks, h) - a->lse[h * a->n + row]);
        sums[h] -= p * mt_cpu_dot_rows(a->dtype, a->o.p, mt_heads_at(&a->o, row, h), a->d_o.p,
                                       mt_heads_at(&a->d_o, row, h), a->o.dim);
    }
}

void mt_cpu_run_attention_sink_bwd(struct mt_cpu_device *d, const struct mt_attention_sink_bwd *a)
{
    mt_cpu_sum_rows(d, backward_row, a, a->n, (struct mt_cpu_sums){ROW_BLOCK, a->o.n, a->dsinks, a->workspace});
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A head's sink, a logit s without a value: o *= sigmoid(lse - s), lse' = log(e^lse + e^s). Its gradient is
 * -sum of p d_o o over rows, with p = e^(s - lse') and the new o.
 */
#include <math.h>
#include <string.h>

#include "device/cpu/cpu.h"
#include "device/cpu/vecmath.h"

enum { ROW_BLOCK = 32, PIECE = 1024 };

MT_HOT static void scale(float *y, const float *x, float by, size_t n)
{
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++)
        y[i] = by * x[i];
}

static float sink_of(enum mt_dtype dtype, const void *sinks, size_t head)
{
    float s;
    return *mt_cpu_row_f32(dtype, sinks, head, 1, &s);
}

static void forward_head(const struct mt_attention_sink *a, size_t row, size_t head)
{
    float tmp[PIECE], *lse = a->lse + head * a->n + row, over = sink_of(a->dtype, a->sinks, head) - *lse;
    float by = mt_sigmoidf(-over);
    for (size_t c = 0; c < a->o.dim; c += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->o.dim - c), at = mt_heads_at(&a->o, row, head) + c;
        float *y = mt_cpu_row_place(a->dtype, a->o.p, at, tmp);
        scale(y, mt_cpu_row_f32(a->dtype, a->o.p, at, n, tmp), by, n);
        mt_cpu_store_row(a->dtype, a->o.p, at, n, y);
    }
    *lse += (over > 0 ? over : 0) + logf(1.0f + mt_expf(over > 0 ? -over : over));
}

static void forward_chunk(void *ctx, size_t chunk, int)
{
    const struct mt_attention_sink *a = ctx;
    size_t end = MT_MIN(a->n, (chunk + 1) * ROW_BLOCK);
    for (size_t r = chunk * ROW_BLOCK; r < end; r++)
        for (size_t h = 0; h < a->o.n; h++)
            forward_head(a, r, h);
}

void mt_cpu_run_attention_sink(struct mt_cpu_device *d, const struct mt_attention_sink *a)
{
    mt_pool_run(d->pool, forward_chunk, (void *)(uintptr_t)a, mt_div_up(a->n, ROW_BLOCK));
}

size_t mt_cpu_attention_sink_bwd_workspace(const struct mt_device_limits *, const struct mt_attention_sink_bwd *a)
{
    return mt_div_up(a->n, ROW_BLOCK) * a->o.n * sizeof(float);
}

static float row_dot(const struct mt_attention_sink_bwd *a, size_t row, size_t head)
{
    float x[PIECE], y[PIECE], sum = 0;
    size_t o = mt_heads_at(&a->o, row, head), d_o = mt_heads_at(&a->d_o, row, head);
    for (size_t c = 0; c < a->o.dim; c += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->o.dim - c);
        sum += mt_cpu_dot(mt_cpu_row_f32(a->dtype, a->o.p, o + c, n, x),
                          mt_cpu_row_f32(a->dtype, a->d_o.p, d_o + c, n, y), n);
    }
    return sum;
}

static void backward_chunk(void *ctx, size_t chunk, int)
{
    const struct mt_attention_sink_bwd *a = ctx;
    float *sum = (float *)a->workspace + chunk * a->o.n;
    size_t end = MT_MIN(a->n, (chunk + 1) * ROW_BLOCK);
    memset(sum, 0, a->o.n * sizeof(*sum));
    for (size_t r = chunk * ROW_BLOCK; r < end; r++)
        for (size_t h = 0; h < a->o.n; h++) {
            float p = mt_expf(sink_of(a->dtype, a->sinks, h) - a->lse[h * a->n + r]);
            sum[h] -= p * row_dot(a, r, h);
        }
}

void mt_cpu_run_attention_sink_bwd(struct mt_cpu_device *d, const struct mt_attention_sink_bwd *a)
{
    size_t blocks = mt_div_up(a->n, ROW_BLOCK);
    mt_pool_run(d->pool, backward_chunk, (void *)(uintptr_t)a, blocks);
    mt_cpu_fold(d, a->dsinks, a->workspace, blocks, a->o.n);
}

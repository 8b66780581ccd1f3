/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "device/cpu/cpu.h"

static void forward_chunk(void *ctx, size_t chunk, int thread)
{
    const struct mt_embedding *a = ctx;
    size_t per = mt_cpu_rows_per_chunk(a->c), end = MT_MIN(a->n, (chunk + 1) * per);
    size_t bytes = a->c * mt_dtype_size(a->dtype);
    float scale = a->scale, tmp[256];
    (void)thread;
    mt_cpu_round_row(a->dtype, &scale, 1);
    for (size_t i = chunk * per; i < end; i++) {
        size_t src = (size_t)a->ids[i] * a->c;
        if (scale == 1.0f) {
            memcpy((char *)a->out + i * bytes, (const char *)a->table + (size_t)a->ids[i] * bytes,
                   bytes);
            continue;
        }
        for (size_t c = 0; c < a->c; c += 256) {
            size_t n = MT_MIN((size_t)256, a->c - c);
            const float *x = mt_cpu_row_f32(a->dtype, a->table, src + c, n, tmp);
            for (size_t k = 0; k < n; k++)
                tmp[k] = x[k] * scale;
            mt_cpu_store_row(a->dtype, a->out, i * a->c + c, n, tmp);
        }
    }
}

void mt_cpu_run_embedding(struct mt_cpu_device *d, const struct mt_embedding *a)
{
    mt_pool_run(d->pool, forward_chunk, (void *)(uintptr_t)a,
                mt_div_up(a->n, mt_cpu_rows_per_chunk(a->c)));
}

MT_HOT static void add_scaled(float *restrict dst, const float *restrict src, float scale, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] += src[i] * scale;
}

enum { RUNS_PER_CHUNK = 32 };

static void backward_chunk(void *ctx, size_t chunk, int thread)
{
    const struct mt_embedding_bwd *a = ctx;
    size_t end = MT_MIN(a->n_runs, (chunk + 1) * RUNS_PER_CHUNK);
    float scale = a->scale, tmp[256];
    (void)thread;
    mt_cpu_round_row(a->dtype, &scale, 1);
    for (size_t u = chunk * RUNS_PER_CHUNK; u < end; u++) {
        float *row = a->dtable + (size_t)a->run_ids[u] * a->c;
        for (size_t c = 0; c < a->c; c += 256) {
            size_t n = MT_MIN((size_t)256, a->c - c);
            for (int32_t t = a->starts[u]; t < a->starts[u + 1]; t++)
                add_scaled(row + c,
                           mt_cpu_row_f32(a->dtype, a->dout, (size_t)a->order[t] * a->c + c, n, tmp),
                           scale, n);
        }
    }
}

void mt_cpu_run_embedding_bwd(struct mt_cpu_device *d, const struct mt_embedding_bwd *a)
{
    mt_pool_run(d->pool, backward_chunk, (void *)(uintptr_t)a,
                mt_div_up(a->n_runs, RUNS_PER_CHUNK));
}

/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "device/cpu/cpu.h"

static void forward_row(const void *args, size_t row)
{
    const struct mt_embedding *a = args;
    size_t bytes = a->c * mt_dtype_size(a->dtype), src = (size_t)a->ids[row];
    float scale = a->scale, tmp[256];
    mt_cpu_round_row(a->dtype, &scale, 1);
    if (scale == 1.0f) {
        memcpy((char *)a->out + row * bytes, (const char *)a->table + src * bytes, bytes);
        return;
    }
    for (size_t c = 0; c < a->c; c += 256) {
        size_t n = MT_MIN((size_t)256, a->c - c);
        mt_cpu_scale(tmp, mt_cpu_row_f32(a->dtype, a->table, src * a->c + c, n, tmp), scale, n);
        mt_cpu_store_row(a->dtype, a->out, row * a->c + c, n, tmp);
    }
}

void mt_cpu_run_embedding(struct mt_cpu_device *d, const struct mt_embedding *a)
{
    mt_cpu_by_rows(d, forward_row, a, a->n, a->c);
}

static void backward_run(const void *args, size_t u)
{
    const struct mt_embedding_bwd *a = args;
    float scale = a->scale, tmp[256], *row = a->dtable + (size_t)a->run_ids[u] * a->c;
    mt_cpu_round_row(a->dtype, &scale, 1);
    for (size_t c = 0; c < a->c; c += 256) {
        size_t n = MT_MIN((size_t)256, a->c - c);
        for (int32_t t = a->starts[u]; t < a->starts[u + 1]; t++)
            mt_cpu_add_scaled(row + c, mt_cpu_row_f32(a->dtype, a->dout, (size_t)a->order[t] * a->c + c, n, tmp), scale,
                              n);
    }
}

void mt_cpu_run_embedding_bwd(struct mt_cpu_device *d, const struct mt_embedding_bwd *a)
{
    mt_cpu_by_rows(d, backward_run, a, a->n_runs, a->c);
}

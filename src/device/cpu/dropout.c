/* SPDX-License-Identifier: Apache-2.0 */
#include "base/philox.h"
#include "device/cpu/cpu.h"

enum { PIECE = 1024 };

struct job {
    const struct mt_dropout *a;
    size_t per_chunk;
    uint64_t drop; /* words below it */
};

/* m[j] = 1 where column first + j of the row is kept, else 0; `first` and n are multiples of 4. */
static void mask_of(float *m, const struct job *j, uint64_t row, size_t first, size_t n)
{
    for (size_t i = 0; i < n; i += 4) {
        struct mt_philox r = mt_philox(j->a->seed, j->a->stream, row << 32 | (first + i) / 4);
        for (size_t k = 0; k < 4; k++)
            m[i + k] = r.v[k] >= j->drop ? 1.0f : 0.0f;
    }
}

MT_HOT static void drop(float *y, const float *x, const float *mask, float scale, size_t n)
{
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++)
        y[i] = mask[i] != 0.0f ? x[i] * scale : 0.0f;
}

MT_HOT static void add_row(float *y, const float *x, size_t n)
{
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++)
        y[i] = x[i] + y[i];
}

static void chunk_main(void *ctx, size_t chunk, int thread)
{
    const struct job *j = ctx;
    const struct mt_dropout *a = j->a;
    float mask[PIECE], x[PIECE], y[PIECE], scale = 1.0f / (1.0f - a->p);
    size_t end = MT_MIN(a->n, (chunk + 1) * j->per_chunk);
    (void)thread;
    for (size_t row = chunk * j->per_chunk; row < end; row++)
        for (size_t c = 0; c < a->c; c += PIECE) {
            size_t n = MT_MIN((size_t)PIECE, a->c - c), at = row * a->c + c;
            mask_of(mask, j, a->first_row + (a->rows ? (size_t)a->rows[row] : row), c, mt_align_up(n, 4));
            drop(y, mt_cpu_row_f32(a->dtype, a->x, at, n, x), mask, scale, n);
            if (a->add)
                add_row(y, mt_cpu_row_f32(a->out_dtype, a->add, at, n, x), n);
            mt_cpu_store_row(a->out_dtype, a->out, at, n, y);
        }
}

void mt_cpu_run_dropout(struct mt_cpu_device *d, const struct mt_dropout *a)
{
    struct job j = {a, mt_cpu_rows_per_chunk(a->c), (uint64_t)((double)a->p * 0x1p32)};
    mt_pool_run(d->pool, chunk_main, &j, mt_div_up(a->n, j.per_chunk));
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Adafactor's direction: means of squares by rows and columns, the scaled gradient, and its clipping. */
#include <math.h>

#include "device/cpu/cpu.h"

enum { PIECE = MT_DIRECT_PIECE };

struct job {
    const struct mt_adafactor *a;
    struct mt_adafactor_space s;
    size_t chunk;
};

static void sums_chunk(void *ctx, size_t chunk, int)
{
    const struct job *j = ctx;
    const struct mt_adafactor *a = j->a;
    size_t end = MT_MIN(a->rows, (chunk + 1) * j->chunk);
    float *col = a->col ? j->s.col + chunk * a->cols : NULL;
    if (col)
        memset(col, 0, a->cols * sizeof(*col));
    for (size_t i = chunk * j->chunk; i < end; i++) {
        const float *g = a->g + i * a->cols;
        j->s.row[i] = mt_cpu_dot(g, g, a->cols) / (float)a->cols + a->eps;
        if (col)
            mt_cpu_add_products(col, g, g, a->cols);
    }
}

static void weights_piece(void *ctx, size_t piece, int)
{
    const struct job *j = ctx;
    size_t first = piece * PIECE, n = MT_MIN(j->a->rows * j->a->cols - first, (size_t)PIECE);
    j->s.w[piece] = mt_cpu_dot_rows(j->a->dtype, j->a->w, first, j->a->w, first, n);
}

static float blend(float beta2, float old, float mean)
{
    return beta2 * old + (1 - beta2) * mean;
}

/* The moments, the mean of row, and the scale of the weights. */
static void settle(const struct job *j)
{
    const struct mt_adafactor *a = j->a;
    const struct mt_adafactor_space *s = &j->s;
    bool finite = isfinite(mt_cpu_sum(s->row, a->rows));
    for (size_t i = 0; finite && i < a->rows; i++)
        a->row[i] = blend(a->beta2, a->row[i], s->row[i]);
    for (size_t k = 0; finite && a->col && k < a->cols; k++) {
        float sum = 0;
        for (size_t c = 0; c < s->chunks; c++)
            sum += s->col[c * a->cols + k];
        if (isfinite(sum)) /* else it would be infinite for ever */
            a->col[k] = blend(a->beta2, a->col[k], sum / (float)a->rows + a->eps);
    }
    s->scalar[0] = finite;
    s->scalar[1] = a->col ? mt_cpu_sum(a->row, a->rows) / (float)a->rows : 1;
    float rms = sqrtf(mt_cpu_sum(s->w, s->pieces) / (float)(a->rows * a->cols));
    *a->scale = rms > a->least ? rms : a->least;
}

MT_HOT static void scale_row(float *restrict g, const float *restrict col, float row, size_t n)
{
    for (size_t i = 0; i < n; i++)
        g[i] *= row * (1 / __builtin_sqrtf(col[i]));
}

static void scale_chunk(void *ctx, size_t chunk, int)
{
    const struct job *j = ctx;
    const struct mt_adafactor *a = j->a;
    size_t end = MT_MIN(a->rows, (chunk + 1) * j->chunk);
    float sum = 0;
    for (size_t i = chunk * j->chunk; i < end; i++) {
        float *g = a->g + i * a->cols, row = 1 / sqrtf(a->row[i] / j->s.scalar[1]);
        if (a->col)
            scale_row(g, a->col, row, a->cols);
        else
            *g *= row;
        sum += mt_cpu_dot(g, g, a->cols);
    }
    j->s.u[chunk] = sum;
}

static void clip_chunk(void *ctx, size_t chunk, int)
{
    const struct job *j = ctx;
    size_t first = chunk * j->chunk, n = MT_MIN(j->a->rows - first, j->chunk) * j->a->cols;
    float *g = j->a->g + first * j->a->cols;
    if (j->s.scalar[0] != 0)
        mt_cpu_scale(g, g, j->s.scalar[2], n);
    else
        memset(g, 0, n * sizeof(*g));
}

void mt_cpu_run_adafactor(struct mt_cpu_device *d, const struct mt_adafactor *a)
{
    struct job j = {a, mt_adafactor_space(a), mt_adafactor_chunk(a->rows)};
    mt_pool_run(d->pool, sums_chunk, &j, j.s.chunks);
    mt_pool_run(d->pool, weights_piece, &j, j.s.pieces);
    settle(&j);
    mt_pool_run(d->pool, scale_chunk, &j, j.s.chunks);
    float rms = sqrtf(mt_cpu_sum(j.s.u, j.s.chunks) / (float)(a->rows * a->cols)) / a->clip;
    j.s.scalar[2] = rms > 1 ? 1 / rms : 1;
    if (!isfinite(rms))
        j.s.scalar[0] = 0;
    mt_pool_run(d->pool, clip_chunk, &j, j.s.chunks);
}

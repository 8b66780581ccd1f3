/* SPDX-License-Identifier: Apache-2.0 */
/* Random signs; APOLLO's direction: sums of channels, the norm by rows, then the elements and the moments. */
#include <math.h>

#include "base/philox.h"
#include "device/cpu/cpu.h"

enum { TMP = 2048, PIECE = MT_DIRECT_PIECE, CHANNELS = 16, BLOCK = 128 };

static void signs_piece(void *ctx, size_t piece, int)
{
    const struct mt_signs *a = ctx;
    size_t end = MT_MIN(a->n, (piece + 1) * PIECE);
    for (size_t at = piece * PIECE; at < end; at += BLOCK) {
        struct mt_philox r = mt_philox(a->seed, a->stream, at / BLOCK);
        for (size_t i = 0; i < MT_MIN((size_t)BLOCK, end - at); i++)
            a->x[at + i] = r.v[i / 32] >> i % 32 & 1 ? -a->scale : a->scale;
    }
}

void mt_cpu_run_signs(struct mt_cpu_device *d, const struct mt_signs *a)
{
    mt_pool_run(d->pool, signs_piece, (void *)(uintptr_t)a, mt_div_up(a->n, (size_t)PIECE));
}

struct job {
    const struct mt_apollo *a;
    float *low, *u, *row; /* of the workspace: sums of squares by channel, of which the first becomes s; by row */
    size_t channels;
    bool tall;
    float factor; /* 0: not finite */
};

MT_HOT static void moments(float *restrict m, float *restrict v, const float *restrict low, const struct mt_apollo *a,
                           size_t n)
{
    for (size_t i = 0; i < n; i++) {
        m[i] = a->beta1 * m[i] + (1 - a->beta1) * low[i];
        v[i] = a->beta2 * v[i] + (1 - a->beta2) * low[i] * low[i];
    }
}

MT_HOT static void steps(float *restrict u, const float *restrict m, const float *restrict v, float eps, size_t n)
{
    for (size_t i = 0; i < n; i++)
        u[i] = m[i] / (__builtin_sqrtf(v[i]) + eps);
}

static void sum_channels(void *ctx, size_t chunk, int)
{
    struct job *j = ctx;
    size_t rank = j->a->rank, end = MT_MIN(j->channels, (chunk + 1) * CHANNELS);
    float m[TMP], v[TMP], u[TMP];
    for (size_t c = chunk * CHANNELS; c < end; c++) {
        j->low[c] = j->u[c] = 0;
        for (size_t i = 0; i < rank; i += TMP) {
            size_t n = MT_MIN((size_t)TMP, rank - i), at = c * rank + i;
            memcpy(m, j->a->m + at, n * sizeof(*m));
            memcpy(v, j->a->v + at, n * sizeof(*v));
            moments(m, v, j->a->low + at, j->a, n);
            steps(u, m, v, j->a->eps, n);
            j->low[c] += mt_cpu_dot(j->a->low + at, j->a->low + at, n);
            j->u[c] += mt_cpu_dot(u, u, n);
        }
    }
}

/* Infinite if squares overflow: second moments would, too, and stay infinite. */
static void find_scales(const struct job *j)
{
    float low = mt_cpu_sum(j->low, j->channels), u = j->a->by_tensor ? mt_cpu_sum(j->u, j->channels) : 0;
    float of_all = isfinite(low) ? sqrtf(u) / (sqrtf(low) + 1e-8f) : INFINITY;
    bool by_channel = !j->a->by_tensor && isfinite(low);
    for (size_t c = 0; c < j->channels; c++)
        j->low[c] = by_channel ? sqrtf(j->u[c]) / (sqrtf(j->low[c]) + 1e-8f) : of_all;
}

/* d = factor g s of a row. */
MT_HOT static void scale_row(float *d, const float *g, const float *s, float factor, size_t n)
{
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++)
        d[i] = g[i] * s[i] * factor;
}

static void part_of_row(const struct job *j, size_t row, size_t at, size_t n, float *d, float factor)
{
    const float *g = j->a->g + row * j->a->cols + at;
    if (j->tall)
        mt_cpu_scale(d, g, j->low[row] * factor, n);
    else
        scale_row(d, g, j->low + at, factor, n);
}

static void sum_row(void *ctx, size_t row, int)
{
    struct job *j = ctx;
    float d[TMP], sum = 0;
    for (size_t at = 0; at < j->a->cols; at += TMP) {
        size_t n = MT_MIN((size_t)TMP, j->a->cols - at);
        part_of_row(j, row, at, n, d, 1);
        sum += mt_cpu_dot(d, d, n);
    }
    j->row[row] = sum;
}

static void write_row(void *ctx, size_t row, int)
{
    const struct job *j = ctx;
    float *g = j->a->g + row * j->a->cols;
    if (j->factor > 0)
        part_of_row(j, row, 0, j->a->cols, g, j->factor);
    for (size_t i = 0; i < j->a->cols && !(j->factor > 0); i++)
        g[i] = 0;
}

static void write_moments(void *ctx, size_t chunk, int)
{
    const struct job *j = ctx;
    size_t first = chunk * CHANNELS * j->a->rank;
    size_t n = MT_MIN(j->channels - chunk * CHANNELS, (size_t)CHANNELS) * j->a->rank;
    moments(j->a->m + first, j->a->v + first, j->a->low + first, j->a, n);
}

void mt_cpu_run_apollo(struct mt_cpu_device *d, const struct mt_apollo *a)
{
    size_t channels = mt_apollo_channels(a), chunks = mt_div_up(channels, (size_t)CHANNELS);
    struct job j = {.a = a, .low = a->workspace, .u = a->workspace + channels, .row = a->workspace + 2 * channels,
                    .channels = channels, .tall = a->rows >= a->cols};
    mt_pool_run(d->pool, sum_channels, &j, chunks);
    find_scales(&j);
    mt_pool_run(d->pool, sum_row, &j, a->rows);
    float norm = sqrtf(mt_cpu_sum(j.row, a->rows)), grown = norm / (*a->norm + 1e-8f), f = 1;
    if (a->growth > 0 && *a->norm > 0 && grown > a->growth)
        f = grown / a->growth;
    if (isfinite(norm)) {
        *a->norm = norm / f;
        j.factor = a->scale / f;
        mt_pool_run(d->pool, write_moments, &j, chunks);
    }
    mt_pool_run(d->pool, write_row, &j, a->rows);
}

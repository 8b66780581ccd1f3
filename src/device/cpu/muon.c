/* SPDX-License-Identifier: Apache-2.0 */
/* Muon's momentum, and what its iteration begins with; numbers widened and scaled. */
#include <math.h>

#include "device/cpu/pointwise.h"

enum { TMP = 2048, PIECE = MT_DIRECT_PIECE };

struct job {
    const struct mt_muon *a;
    float factor;
};

/* u into to, and the new momentum into m. */
MT_HOT static void step(float *restrict to, float *restrict m, const float *restrict g, float mu, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        m[i] = m[i] + (1 - mu) * (g[i] - m[i]);
        to[i] = g[i] + mu * (m[i] - g[i]);
    }
}

static void steps_of(const struct mt_muon *a, size_t at, size_t n, float *u, float *m)
{
    mt_cpu_load_row(m, a->m_dtype, a->m, at, n);
    step(u, m, a->g + at, a->mu, n);
}

static void sum_piece(void *ctx, size_t piece, int)
{
    const struct job *j = ctx;
    size_t end = MT_MIN(j->a->n, (piece + 1) * PIECE);
    float u[TMP], m[TMP], sum = 0;
    for (size_t at = piece * PIECE; at < end; at += TMP) {
        size_t n = MT_MIN((size_t)TMP, end - at);
        steps_of(j->a, at, n, u, m);
        sum += mt_cpu_dot(u, u, n);
    }
    j->a->workspace[piece] = sum;
}

static void write_piece(void *ctx, size_t piece, int)
{
    const struct job *j = ctx;
    size_t end = MT_MIN(j->a->n, (piece + 1) * PIECE);
    float u[TMP], m[TMP];
    for (size_t at = piece * PIECE; at < end; at += TMP) {
        size_t n = MT_MIN((size_t)TMP, end - at);
        if (j->factor > 0) {
            steps_of(j->a, at, n, u, m);
            mt_cpu_scale(u, u, j->factor, n);
            mt_cpu_store_row(j->a->m_dtype, j->a->m, at, n, m);
        }
        for (size_t i = 0; i < n && !(j->factor > 0); i++)
            u[i] = 0;
        mt_cpu_store_row(j->a->dtype, j->a->x, at, n, u);
    }
}

void mt_cpu_run_muon(struct mt_cpu_device *d, const struct mt_muon *a)
{
    struct job j = {a, 0};
    size_t pieces = mt_div_up(a->n, (size_t)PIECE);
    mt_pool_run(d->pool, sum_piece, &j, pieces);
    float norm = sqrtf(mt_cpu_sum(a->workspace, pieces));
    j.factor = isfinite(norm) ? 1 / (norm > 1e-7f ? norm : 1e-7f) : 0;
    mt_pool_run(d->pool, write_piece, &j, pieces);
}

static void widen(const void *args, const struct mt_cpu_piece *p)
{
    mt_cpu_scale(p->out[0], p->in[0], ((const struct mt_widen *)args)->scale, p->n);
}

void mt_cpu_run_widen(struct mt_cpu_device *d, const struct mt_widen *a)
{
    mt_cpu_run_pointwise(d, &(struct mt_cpu_pointwise){
        .f = widen, .args = a, .n = 1, .heads = 1, .dim = a->n, .in = {mt_cpu_flat(a->dtype, a->x, a->n)},
        .out = {mt_cpu_flat(MT_F32, a->y, a->n)}});
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For each head of q and k: u = x, or with QK-norm xhat w; then the pair (u_i, u_j), j = i + r/2, is rotated by the
 * position's angle i (Su et al. 2021): (u_i cos - u_j sin, u_j cos + u_i sin). Backward rotates back, then through
 * the norm; the weights' gradients are summed over fixed blocks of rows, then over blocks in order. Where an input is
 * shared by the heads, backward sums their gradients before it rotates the sum.
 */
#include <string.h>

#include "device/cpu/cpu.h"

enum { ROW_BLOCK = 32, MAX_HEAD = 1024 };

MT_HOT static void rotate(float *restrict x, const float *restrict cos_t, const float *restrict sin_t, size_t rot,
                          float sign)
{
    size_t h = rot / 2;
    for (size_t i = 0; i < h; i++) {
        float c = cos_t[i], s = sign * sin_t[i], a = x[i], b = x[i + h];
        x[i] = a * c - b * s;
        x[i + h] = b * c + a * s;
    }
}

MT_HOT static void rotate_pairs(float *restrict x, const float *restrict cos_t, const float *restrict sin_t, size_t rot,
                                float sign)
{
    for (size_t i = 0; i < rot / 2; i++) {
        float c = cos_t[i], s = sign * sin_t[i], a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * c - b * s;
        x[2 * i + 1] = b * c + a * s;
    }
}

/* The first element of a position's row of the tables. */
static size_t table_at(const int32_t *positions, size_t row, size_t rot)
{
    return rot ? (size_t)positions[row] * (rot / 2) : 0;
}

MT_HOT static void forward_head(const struct mt_qk_rope *a, size_t row, bool key, size_t head)
{
    const struct mt_heads *from = key ? &a->k : &a->q, *to = key ? &a->to_k : &a->to_q;
    size_t d = from->dim, at = table_at(a->positions, row, a->rot);
    float x[MAX_HEAD], w[MAX_HEAD];
    mt_cpu_load_row(x, a->dtype, from->p, mt_heads_at(from, row, head), d);
    if (a->q_norm) {
        float rstd = 1.0f / sqrtf(mt_cpu_dot(x, x, d) / (float)d + a->eps);
        const float *pw = mt_cpu_row_f32(a->dtype, key ? a->k_norm : a->q_norm, 0, d, w);
        a->rstd[row * (a->q.n + a->k.n) + (key ? a->q.n : 0) + head] = rstd;
        mt_cpu_scale(x, x, rstd, d);
        mt_cpu_round_row(a->dtype, x, d);
        mt_cpu_multiply(x, x, pw, d);
        mt_cpu_round_row(a->dtype, x, d);
    }
    if (a->rot)
        (a->pairs ? rotate_pairs : rotate)(x, a->cos_t + at, a->sin_t + at, a->rot, 1);
    mt_cpu_store_row(a->dtype, to->p, mt_heads_at(to, row, head), d, x);
}

static void forward_row(const void *args, size_t row)
{
    const struct mt_qk_rope *a = args;
    for (size_t h = 0; h < a->q.n; h++)
        forward_head(a, row, false, h);
    for (size_t h = 0; h < a->k.n; h++)
        forward_head(a, row, true, h);
}

void mt_cpu_run_qk_rope(struct mt_cpu_device *d, const struct mt_qk_rope *a)
{
    mt_cpu_by_rows(d, forward_row, a, a->n, a->q.n * a->q.dim + a->k.n * a->k.dim);
}

MT_CPU_SUMS(qk_rope_bwd, fwd.n, ROW_BLOCK, 2 * a->dq.dim)

/* g: gradient of the normalised, weighted head; replaced by that of the head's input. */
MT_HOT static void norm_backward(const struct mt_qk_rope_bwd *a, size_t row, bool key, size_t head, float *restrict g,
                                 float *restrict dw)
{
    const struct mt_heads *from = key ? &a->fwd.k : &a->fwd.q;
    size_t d = from->dim;
    float x[MAX_HEAD], w[MAX_HEAD], xhat[MAX_HEAD];
    const float *px = mt_cpu_row_f32(a->fwd.dtype, from->p, mt_heads_at(from, row, head), d, x);
    const float *pw = mt_cpu_row_f32(a->fwd.dtype, key ? a->fwd.k_norm : a->fwd.q_norm, 0, d, w);
    float rstd = a->fwd.rstd[row * (a->fwd.q.n + a->fwd.k.n) + (key ? a->fwd.q.n : 0) + head];
    mt_cpu_scale(xhat, px, rstd, d);
    if (dw) {
        float rounded[MAX_HEAD];
        memcpy(rounded, xhat, d * sizeof(float));
        mt_cpu_round_row(a->fwd.dtype, rounded, d); /* the normalised value, which is multiplied by w */
        mt_cpu_add_products(dw, g, rounded, d);
    }
    mt_cpu_multiply(g, g, pw, d);
    float mean = mt_cpu_dot(g, xhat, d) / (float)d;
    for (size_t i = 0; i < d; i++)
        g[i] = rstd * (g[i] - xhat[i] * mean);
}

/* Heads [head, head + n) have one input, or n is 1. */
MT_HOT static void backward_head(const struct mt_qk_rope_bwd *a, size_t row, bool key, size_t head, size_t n, float *dw)
{
    const struct mt_heads *from = key ? &a->dk : &a->dq, *to = key ? &a->to_dk : &a->to_dq;
    size_t d = from->dim, at = table_at(a->fwd.positions, row, a->fwd.rot);
    float g[MAX_HEAD], tmp[MAX_HEAD];
    mt_cpu_load_row(g, a->fwd.dtype, from->p, mt_heads_at(from, row, head), d);
    for (size_t h = head + 1; h < head + n; h++)
        mt_cpu_add_scaled(g, mt_cpu_row_f32(a->fwd.dtype, from->p, mt_heads_at(from, row, h), d, tmp), 1, d);
    if (a->fwd.rot)
        (a->fwd.pairs ? rotate_pairs : rotate)(g, a->fwd.cos_t + at, a->fwd.sin_t + at, a->fwd.rot, -1);
    if (a->fwd.q_norm)
        norm_backward(a, row, key, head, g, dw);
    mt_cpu_store_row(a->fwd.dtype, to->p, mt_heads_at(to, row, head), d, g);
}

static void backward_side(const struct mt_qk_rope_bwd *a, size_t row, bool key, float *dw)
{
    const struct mt_heads *to = key ? &a->to_dk : &a->to_dq;
    size_t step = to->n > 1 && !to->stride ? to->n : 1;
    for (size_t h = 0; h < to->n; h += step)
        backward_head(a, row, key, h, step, dw);
}

static void backward_chunk(void *ctx, size_t chunk, int)
{
    const struct mt_qk_rope_bwd *a = ctx;
    size_t end = MT_MIN(a->fwd.n, (chunk + 1) * ROW_BLOCK);
    float *dw = a->fwd.q_norm ? (float *)a->workspace + chunk * 2 * a->dq.dim : NULL;
    if (dw)
        memset(dw, 0, 2 * a->dq.dim * sizeof(float));
    for (size_t r = chunk * ROW_BLOCK; r < end; r++) {
        backward_side(a, r, false, dw);
        backward_side(a, r, true, dw ? dw + a->dq.dim : NULL);
    }
}

void mt_cpu_run_qk_rope_bwd(struct mt_cpu_device *d, const struct mt_qk_rope_bwd *a)
{
    size_t blocks = mt_div_up(a->fwd.n, ROW_BLOCK), dim = a->dq.dim;
    mt_pool_run(d->pool, backward_chunk, (void *)(uintptr_t)a, blocks);
    const float *part = a->workspace;
    for (size_t b = 0; a->fwd.q_norm && b < blocks; b++)
        for (size_t i = 0; i < dim; i++) {
            if (a->dq_norm)
                a->dq_norm[i] += part[b * 2 * dim + i];
            if (a->dk_norm)
                a->dk_norm[i] += part[b * 2 * dim + dim + i];
        }
}

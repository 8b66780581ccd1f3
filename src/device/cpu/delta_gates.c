/* SPDX-License-Identifier: Apache-2.0 */
/*
 * beta = sigmoid(b), g = -exp(a_log) softplus(a + dt_bias). Backward: db = dbeta beta (1 - beta), da = -exp(a_log) dg
 * sigmoid(a + dt_bias), which ddt_bias sums, and da_log = sum of dg g; sums over blocks of rows, then over blocks.
 * Plain: beta = softplus(a + dt_bias) within its limits, where da = (dbeta - exp(a_log) dg) sigmoid(a + dt_bias).
 */
#include <math.h>

#include "device/cpu/cpu.h"
#include "device/cpu/vecmath.h"

enum { ROW_BLOCK = 64 };

static size_t at(const struct mt_heads *h, size_t row, size_t head)
{
    return mt_heads_at(h, row, head / h->dim) + head % h->dim;
}

static size_t n_heads(const struct mt_delta_gates *a)
{
    return a->a.n * a->a.dim;
}

static float before(const struct mt_delta_gates *a, size_t row, size_t head)
{
    return mt_cpu_element(a->dtype, a->a.p, at(&a->a, row, head)) + mt_cpu_element(a->dtype, a->dt_bias, head);
}

static float beta_of(const struct mt_delta_gates *a, size_t row, size_t head)
{
    float beta = mt_sigmoidf(mt_cpu_element(a->dtype, a->b.p, at(&a->b, row, head)));
    mt_cpu_round_row(a->dtype, &beta, 1);
    return beta;
}

/* Above 20 it is x, as in torch. */
static float softplus(float x)
{
    return x > 20 ? x : log1pf(expf(x));
}

/* The step of a plain rule; a NaN stays. */
static float limited(const struct mt_delta_gates *a, float step)
{
    return step < a->least ? a->least : step > a->most ? a->most : step;
}

static void forward_chunk(void *ctx, size_t chunk, int)
{
    const struct mt_delta_gates *a = ctx;
    size_t end = MT_MIN(a->n, (chunk + 1) * ROW_BLOCK), heads = n_heads(a);
    for (size_t h = 0; h < heads; h++) {
        float speed = -expf(mt_cpu_element(a->dtype, a->a_log, h));
        for (size_t r = chunk * ROW_BLOCK; r < end; r++) {
            float step = softplus(before(a, r, h));
            step = a->plain ? limited(a, step) : step;
            a->beta[r * heads + h] = a->plain ? step : beta_of(a, r, h);
            a->g[r * heads + h] = speed * step;
        }
    }
}

void mt_cpu_run_delta_gates(struct mt_cpu_device *d, const struct mt_delta_gates *a)
{
    mt_pool_run(d->pool, forward_chunk, (void *)(uintptr_t)a, mt_div_up(a->n, ROW_BLOCK));
}

/* Partial sums of da_log, then of ddt_bias, then of dd. */
size_t mt_cpu_delta_gates_bwd_workspace(const struct mt_device_limits *, const struct mt_delta_gates_bwd *b)
{
    return mt_div_up(b->fwd.n, ROW_BLOCK) * n_heads(&b->fwd) * 3 * sizeof(float);
}

static void backward_chunk(void *ctx, size_t chunk, int)
{
    const struct mt_delta_gates_bwd *b = ctx;
    const struct mt_delta_gates *a = &b->fwd;
    size_t end = MT_MIN(a->n, (chunk + 1) * ROW_BLOCK), heads = n_heads(a), blocks = mt_div_up(a->n, ROW_BLOCK);
    for (size_t h = 0; h < heads; h++) {
        float speed = -expf(mt_cpu_element(a->dtype, a->a_log, h)), sum_log = 0, sum_bias = 0, sum_skip = 0;
        for (size_t r = chunk * ROW_BLOCK; r < end; r++) {
            size_t i = r * heads + h;
            float x = before(a, r, h), step = softplus(x), da = speed * b->dg[i] * mt_sigmoidf(x);
            if (a->plain) {
                bool cut = step < a->least || step > a->most;
                step = limited(a, step);
                da = cut ? 0 : (b->dbeta[i] + speed * b->dg[i]) * mt_sigmoidf(x);
            } else {
                float beta = beta_of(a, r, h);
                float db = b->dbeta[i] * beta * (1.0f - beta);
                mt_cpu_store_row(a->dtype, b->db.p, at(&b->db, r, h), 1, &db);
            }
            mt_cpu_store_row(a->dtype, b->da.p, at(&b->da, r, h), 1, &da);
            sum_bias += da;
            sum_log += b->dg[i] * speed * step;
            sum_skip += b->dskip ? b->dskip[i] : 0;
        }
        float *sums = (float *)b->workspace + chunk * heads + h;
        sums[0] = sum_log;
        sums[blocks * heads] = sum_bias;
        sums[2 * blocks * heads] = sum_skip;
    }
}

void mt_cpu_run_delta_gates_bwd(struct mt_cpu_device *d, const struct mt_delta_gates_bwd *b)
{
    size_t blocks = mt_div_up(b->fwd.n, ROW_BLOCK), heads = n_heads(&b->fwd);
    mt_pool_run(d->pool, backward_chunk, (void *)(uintptr_t)b, blocks);
    if (b->da_log)
        mt_cpu_fold(d, b->da_log, b->workspace, blocks, heads);
    if (b->ddt_bias)
        mt_cpu_fold(d, b->ddt_bias, (const float *)b->workspace + blocks * heads, blocks, heads);
    if (b->dd)
        mt_cpu_fold(d, b->dd, (const float *)b->workspace + 2 * blocks * heads, blocks, heads);
}

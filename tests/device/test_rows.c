/* SPDX-License-Identifier: Apache-2.0 */
/* Embedding, gather and scatter, add, cast, gradient cast, join, zero. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "harness.h"

static void embedding_copies_rows(struct harness *h)
{
    enum { N = 37, V = 11, C = 72 };
    double *table, *want = scratch(h, N * C);
    int32_t ids[N];
    struct dbuf *t = buf_random(h, h->dtype, V * C, 1, &table), *out = buf_nan(h, h->dtype, N * C);
    for (int i = 0; i < N; i++) {
        ids[i] = i * 7 % V;
        memcpy(want + i * C, table + ids[i] * C, C * sizeof(double));
    }
    RUN(h, mt_op_embedding, &(struct mt_embedding){N, V, C, h->dtype, 1, buf_ints(h, ids, N)->p, t->p, out->p});
    expect_close(h, "out", buf_get(h, out), want, N * C, 0);
    for (int i = 0; i < N * C; i++)
        want[i] *= 3;
    RUN(h, mt_op_embedding, &(struct mt_embedding){N, V, C, h->dtype, 3, buf_ints(h, ids, N)->p, t->p, out->p});
    expect_close(h, "scaled", buf_get(h, out), want, N * C, tolerance(h, 1e-7, 3e-3));
}

static void embedding_gradient_adds_rows_by_token(struct harness *h)
{
    enum { N = 40, V = 9, C = 264 };
    double *dy, *g0, *want = scratch(h, V * C);
    int32_t ids[N], order[N], starts[V + 1], run_ids[V], n_runs = 0, at = 0;
    struct dbuf *g = buf_random(h, h->dtype, N * C, 1, &dy), *dt = buf_random(h, MT_F32, V * C, 1, &g0);
    memcpy(want, g0, V * C * sizeof(double));
    for (int i = 0; i < N; i++) {
        ids[i] = i % 3 ? i % (V - 2) : 1; /* one token is frequent, two never come */
        for (int c = 0; c < C; c++)
            want[ids[i] * C + c] += dy[i * C + c];
    }
    for (int v = 0; v < V; v++) {
        int first = at;
        for (int i = 0; i < N; i++)
            if (ids[i] == v)
                order[at++] = i;
        if (at > first) {
            starts[n_runs] = first;
            run_ids[n_runs++] = v;
        }
    }
    starts[n_runs] = at;
    RUN(h, mt_op_embedding_bwd,
        &(struct mt_embedding_bwd){N, V, C, (size_t)n_runs, h->dtype, 1,
                                   buf_ints(h, run_ids, (size_t)n_runs)->p,
                                   buf_ints(h, starts, (size_t)n_runs + 1)->p, buf_ints(h, order, N)->p,
                                   g->p, dt->p});
    expect_close(h, "dtable", buf_get(h, dt), want, V * C, 1e-6);
}

static void gather_and_scatter_are_inverse(struct harness *h)
{
    enum { N = 50, K = 7, C = 24 };
    static const int32_t rows[K] = {0, 3, 4, 17, 30, 48, 49};
    double *x, *want = scratch(h, N * C);
    struct dbuf *src = buf_random(h, h->dtype, N * C, 1, &x), *idx = buf_ints(h, rows, K);
    struct dbuf *few = buf_nan(h, h->dtype, K * C), *back = buf_nan(h, h->dtype, N * C);
    RUN(h, mt_op_gather_rows, &(struct mt_rows){K, N, C, h->dtype, idx->p, src->p, few->p});
    RUN(h, mt_op_scatter_rows, &(struct mt_rows){K, N, C, h->dtype, idx->p, few->p, back->p});
    for (int i = 0; i < K; i++)
        memcpy(want + rows[i] * C, x + rows[i] * C, C * sizeof(double));
    expect_close(h, "scattered", buf_get(h, back), want, N * C, 0);
}

static void add_and_cast(struct harness *h)
{
    enum { N = 70001 };
    double *a, *b, *want = scratch(h, N);
    struct dbuf *x = buf_random(h, h->dtype, N, 1, &a), *y = buf_random(h, h->dtype, N, 1, &b);
    struct dbuf *wide = buf_nan(h, MT_F32, N), *narrow = buf_nan(h, MT_BF16, N);
    RUN(h, mt_op_cast, &(struct mt_cast){N, h->dtype, MT_F32, x->p, wide->p});
    expect_close(h, "to f32", buf_get(h, wide), a, N, 0);
    RUN(h, mt_op_cast, &(struct mt_cast){N, h->dtype, MT_BF16, x->p, narrow->p});
    for (int i = 0; i < N; i++)
        want[i] = (double)mt_bf16_to_f32(mt_f32_to_bf16((float)a[i]));
    expect_close(h, "to bf16", buf_get(h, narrow), want, N, 0);
    RUN(h, mt_op_add, &(struct mt_add){N, h->dtype, x->p, y->p, x->p});
    for (int i = 0; i < N; i++)
        want[i] = a[i] + b[i];
    expect_close(h, "sum in place", buf_get(h, x), want, N, tolerance(h, 1e-7, 3e-3));
}

static void gradient_cast_sums_what_it_cast(struct harness *h)
{
    size_t n = 2 * MT_SUMSQ_BLOCK + 1001, blocks = 3;
    double *g, *sums = scratch(h, blocks);
    struct dbuf *src = buf_random(h, MT_F32, n, 0.01, &g), *dst = buf_nan(h, h->dtype, n);
    struct dbuf *part = buf_nan(h, MT_F32, blocks);
    RUN(h, mt_op_grad_cast, &(struct mt_grad_cast){n, src->p, h->dtype, dst->p, part->p});
    double *got = buf_get(h, dst), *want = scratch(h, n);
    for (size_t i = 0; i < n; i++) {
        want[i] = h->dtype == MT_F32 ? g[i] : (double)mt_bf16_to_f32(mt_f32_to_bf16((float)g[i]));
        sums[i / MT_SUMSQ_BLOCK] += want[i] * want[i];
    }
    expect_close(h, "cast", got, want, n, 0);
    expect_close(h, "partial sums", buf_get(h, part), sums, blocks, 1e-6);
}

static void gradient_overflow_is_not_finite(struct harness *h)
{
    enum { N = 64 };
    struct dbuf *src = buf_random(h, MT_F32, N, 3e30, NULL), *dst = buf_nan(h, h->dtype, N);
    struct dbuf *part = buf_nan(h, MT_F32, 1);
    RUN(h, mt_op_grad_cast, &(struct mt_grad_cast){N, src->p, h->dtype, dst->p, part->p});
    if (isfinite(buf_get(h, part)[0]))
        expect_rejected(h, "an overflowing sum of squares", 0);
}

static void join_restores_masters(struct harness *h)
{
    enum { N = 2 * MT_JOIN_BLOCK };
    static float master[N];
    static uint16_t hi[N], lo[N];
    double *want = scratch(h, N);
    struct dbuf *buf = buf_nan(h, MT_F32, N);
    size_t half = 2 * (size_t)MT_JOIN_BLOCK;
    for (int i = 0; i < N; i++) {
        master[i] = sinf((float)i) * powf(2.0f, (float)(i % 61 - 30));
        mt_master_split(master[i], &hi[i], &lo[i]);
        want[i] = (double)master[i];
    }
    struct mt_copy c = {buf->p, 2 * half, hi, half, half, 2};
    RUN(h, mt_device_copy, MT_STREAM_H2D, &c);
    c.dst = (char *)buf->p + half;
    c.src = lo;
    RUN(h, mt_device_copy, MT_STREAM_H2D, &c);
    mt_device_sync(h->dev, NULL);
    RUN(h, mt_op_join, buf->p, N);
    expect_close(h, "masters", buf_get(h, buf), want, N, 0);
}

static void zero_clears_all_and_no_more(struct harness *h)
{
    enum { N = 300001 };
    struct dbuf *b = buf_nan(h, h->dtype, N);
    RUN(h, mt_op_zero, b->p, N * mt_dtype_size(h->dtype));
    expect_close(h, "zeros", buf_get(h, b), scratch(h, N), N, 0);
}

const struct device_test row_tests[] = {
    {"embedding_copies_rows", embedding_copies_rows},
    {"embedding_gradient_adds_rows_by_token", embedding_gradient_adds_rows_by_token},
    {"gather_and_scatter_are_inverse", gather_and_scatter_are_inverse},
    {"add_and_cast", add_and_cast},
    {"gradient_cast_sums_what_it_cast", gradient_cast_sums_what_it_cast},
    {"gradient_overflow_is_not_finite", gradient_overflow_is_not_finite},
    {"join_restores_masters", join_restores_masters},
    {"zero_clears_all_and_no_more", zero_clears_all_and_no_more},
    {NULL, NULL},
};

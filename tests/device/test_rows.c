/* SPDX-License-Identifier: Apache-2.0 */
/* Embedding, gather and scatter, add, cast, gradient cast, join, zero. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "harness.h"

static void embedding_case(struct harness *h, size_t c)
{
    enum { N = 37, V = 11 };
    double *table, *want = scratch(h, N * c);
    int32_t ids[N];
    struct dbuf *t = buf_random(h, h->dtype, V * c, 1, &table), *out = buf_nan(h, h->dtype, N * c);
    for (int i = 0; i < N; i++) {
        ids[i] = i * 7 % V;
        memcpy(want + (size_t)i * c, table + (size_t)ids[i] * c, c * sizeof(double));
    }
    struct mt_embedding a = {N, V, c, h->dtype, 1, buf_ints(h, ids, N)->p, t->p, out->p};
    RUN(h, mt_op_embedding, &a);
    expect_close(h, "out", buf_get(h, out), want, N * c, 0);
    for (size_t i = 0; i < N * c; i++)
        want[i] *= 3;
    a.scale = 3;
    RUN(h, mt_op_embedding, &a);
    expect_close(h, "scaled", buf_get(h, out), want, N * c, tolerance(h, 1e-7, 3e-3));
}

DEVICE_TEST(embedding_copies_rows)
{
    embedding_case(h, 72);
    embedding_case(h, 5);
    embedding_case(h, 1201);
    embedding_case(h, 4104);
}

static void embedding_gradient_case(struct harness *h, int C, float scale)
{
    enum { N = 140, V = 9 };
    double *dy, *g0, *want = scratch(h, (size_t)(V * C));
    int32_t ids[N], order[N], starts[V + 1], run_ids[V], n_runs = 0, at = 0;
    struct dbuf *g = buf_random(h, h->dtype, (size_t)(N * C), 1, &dy);
    struct dbuf *dt = buf_random(h, MT_F32, (size_t)(V * C), 1, &g0);
    memcpy(want, g0, (size_t)(V * C) * sizeof(double));
    for (int i = 0; i < N; i++) {
        ids[i] = i % 3 ? i % (V - 2) : 1; /* one token is frequent, two never come */
        for (int c = 0; c < C; c++)
            want[ids[i] * C + c] += dy[i * C + c] * (double)scale;
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
        &(struct mt_embedding_bwd){N, V, (size_t)C, (size_t)n_runs, h->dtype, scale,
                                   buf_ints(h, run_ids, (size_t)n_runs)->p,
                                   buf_ints(h, starts, (size_t)n_runs + 1)->p, buf_ints(h, order, N)->p,
                                   g->p, dt->p});
    expect_close(h, "dtable", buf_get(h, dt), want, (size_t)(V * C), 1e-6);
}

DEVICE_TEST(embedding_gradient_adds_rows_by_token)
{
    embedding_gradient_case(h, 264, 1);
    embedding_gradient_case(h, 33, 2.5f);
    embedding_gradient_case(h, 2312, 1);
}

static void rows_case(struct harness *h, const int32_t *rows, size_t k, size_t n, size_t c)
{
    double *x, *want = scratch(h, n * c);
    struct dbuf *src = buf_random(h, h->dtype, n * c, 1, &x), *idx = buf_ints(h, rows, k);
    struct dbuf *few = buf_nan(h, h->dtype, k * c), *back = buf_nan(h, h->dtype, n * c);
    RUN(h, mt_op_gather_rows, &(struct mt_rows){k, n, c, h->dtype, idx->p, src->p, few->p});
    RUN(h, mt_op_scatter_rows, &(struct mt_rows){k, n, c, h->dtype, idx->p, few->p, back->p});
    for (size_t i = 0; i < k; i++)
        memcpy(want + (size_t)rows[i] * c, x + (size_t)rows[i] * c, c * sizeof(double));
    expect_close(h, "scattered", buf_get(h, back), want, n * c, 0);
}

DEVICE_TEST(gather_and_scatter_are_inverse)
{
    static const int32_t some[] = {0, 3, 4, 17, 30, 48, 49}, last[] = {49};
    int32_t all[50], most[48];
    for (int i = 0; i < 50; i++)
        all[i] = i;
    for (int i = 0; i < 48; i++)
        most[i] = i < 20 ? i + 1 : i + 2;
    rows_case(h, some, MT_ARRAY_LEN(some), 50, 24);
    rows_case(h, some, MT_ARRAY_LEN(some), 50, 7);
    rows_case(h, some, MT_ARRAY_LEN(some), 50, 4120);
    rows_case(h, last, 1, 50, 22);
    rows_case(h, all, 50, 50, 40);
    rows_case(h, most, 48, 50, 40);
    rows_case(h, some, 0, 50, 24); /* clears all */
}

static void add_and_cast_case(struct harness *h, size_t n)
{
    double *a, *b, *want = scratch(h, n);
    struct dbuf *x = buf_random(h, h->dtype, n, 1, &a), *y = buf_random(h, h->dtype, n, 1, &b);
    struct dbuf *wide = buf_nan(h, MT_F32, n), *narrow = buf_nan(h, MT_BF16, n);
    RUN(h, mt_op_cast, &(struct mt_cast){n, h->dtype, MT_F32, x->p, wide->p});
    expect_close(h, "to f32", buf_get(h, wide), a, n, 0);
    RUN(h, mt_op_cast, &(struct mt_cast){n, h->dtype, MT_BF16, x->p, narrow->p});
    for (size_t i = 0; i < n; i++)
        want[i] = (double)mt_bf16_to_f32(mt_f32_to_bf16((float)a[i]));
    expect_close(h, "to bf16", buf_get(h, narrow), want, n, 0);
    RUN(h, mt_op_add, &(struct mt_add){n, h->dtype, x->p, y->p, x->p});
    for (size_t i = 0; i < n; i++)
        want[i] = a[i] + b[i];
    expect_close(h, "sum in place", buf_get(h, x), want, n, tolerance(h, 1e-7, 3e-3));
    struct dbuf *out = buf_nan(h, h->dtype, n);
    RUN(h, mt_op_add, &(struct mt_add){n, h->dtype, y->p, x->p, out->p, 0.25f});
    double *sum = buf_get(h, x);
    for (size_t i = 0; i < n; i++)
        want[i] = b[i] + 0.25 * sum[i];
    expect_close(h, "scaled sum", buf_get(h, out), want, n, tolerance(h, 1e-7, 3e-3));
    RUN(h, mt_op_add, &(struct mt_add){n, h->dtype, NULL, y->p, y->p, -3});
    for (size_t i = 0; i < n; i++)
        want[i] = -3 * b[i];
    expect_close(h, "scaled in place", buf_get(h, y), want, n, tolerance(h, 1e-7, 3e-3));
}

DEVICE_TEST(add_and_cast)
{
    add_and_cast_case(h, 70001);
    add_and_cast_case(h, 8192);
    add_and_cast_case(h, 3);
    for (size_t n = 1; n < 7; n++) /* that end in each part of a thread */
        add_and_cast_case(h, n * 1024 + 7);
}

static void gradient_cast_case(struct harness *h, size_t n)
{
    size_t blocks = mt_div_up(n, MT_SUMSQ_BLOCK);
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

DEVICE_TEST(gradient_cast_sums_what_it_cast)
{
    gradient_cast_case(h, 2 * MT_SUMSQ_BLOCK + 1001);
    for (size_t part = 0; part < 4; part++)
        gradient_cast_case(h, 2048 * part + 7);
}

/* Source and destination only aligned to elements: the same bits. */
DEVICE_TEST(gradient_cast_does_not_depend_on_place)
{
    enum { N = MT_SUMSQ_BLOCK + 77 };
    double *g, *first = NULL;
    buf_random(h, MT_F32, N, 0.01, &g);
    for (size_t shift = 0; shift < 4; shift++) {
        double *moved = scratch(h, N + shift);
        memcpy(moved + shift, g, N * sizeof(double));
        struct dbuf *src = buf_values(h, MT_F32, N + shift, moved);
        struct dbuf *dst = buf_values(h, h->dtype, N + 2 * shift, scratch(h, N + 2 * shift));
        struct dbuf *part = buf_nan(h, MT_F32, 2 + shift);
        RUN(h, mt_op_grad_cast,
            &(struct mt_grad_cast){N, (float *)src->p + shift, h->dtype,
                                   (char *)dst->p + shift * mt_dtype_size(h->dtype), (float *)part->p + shift});
        struct dbuf *alone = buf_nan(h, MT_F32, 2 + shift);
        RUN(h, mt_op_grad_cast, &(struct mt_grad_cast){N, (float *)src->p + shift, h->dtype, NULL, (float *)alone->p + shift});
        double *sums = buf_get(h, part) + shift, *got = buf_get(h, dst);
        first = first ? first : sums;
        expect_close(h, "partial sums alone", buf_get(h, alone) + shift, first, 2, 0);
        expect_close(h, "partial sums", sums, first, 2, 0);
        for (size_t i = 0; i < N; i++)
            moved[i] = h->dtype == MT_F32 ? g[i] : (double)mt_bf16_to_f32(mt_f32_to_bf16((float)g[i]));
        expect_close(h, "cast", got + shift, moved, N, 0);
        expect_close(h, "not beside it", got + shift + N, scratch(h, shift), shift, 0);
    }
}

DEVICE_TEST(gradient_overflow_is_not_finite)
{
    enum { N = 64 };
    struct dbuf *src = buf_random(h, MT_F32, N, 3e30, NULL), *dst = buf_nan(h, h->dtype, N);
    struct dbuf *part = buf_nan(h, MT_F32, 1);
    RUN(h, mt_op_grad_cast, &(struct mt_grad_cast){N, src->p, h->dtype, dst->p, part->p});
    if (isfinite(buf_get(h, part)[0]))
        expect_rejected(h, "an overflowing sum of squares", 0);
}

DEVICE_TEST(join_restores_masters)
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
    RUN(h, mt_op_join, &(struct mt_join){buf->p, N});
    expect_close(h, "masters", buf_get(h, buf), want, N, 0);

    c.dst = buf->p; /* the second block has no lo: what lies there is not read */
    c.src = hi;
    RUN(h, mt_device_copy, MT_STREAM_H2D, &c);
    c.dst = (char *)buf->p + half;
    c.src = lo;
    RUN(h, mt_device_copy, MT_STREAM_H2D, &c);
    mt_device_sync(h->dev, NULL);
    RUN(h, mt_op_join, &(struct mt_join){buf->p, MT_JOIN_BLOCK});
    RUN(h, mt_op_join, &(struct mt_join){(float *)buf->p + MT_JOIN_BLOCK, MT_JOIN_BLOCK, .no_lo = true});
    for (int i = MT_JOIN_BLOCK; i < N; i++)
        want[i] = (double)mt_bf16_to_f32(hi[i]);
    expect_close(h, "masters and what is bf16 alone", buf_get(h, buf), want, N, 0);
}

DEVICE_TEST(copies_within_the_device)
{
    enum { N = 3001, ROWS = 7, WIDTH = 11, FROM = 13, TO = 17 };
    size_t size = mt_dtype_size(h->dtype);
    double *x, *want = scratch(h, ROWS * TO);
    struct dbuf *src = buf_random(h, h->dtype, N, 1, &x), *dst = buf_nan(h, h->dtype, N);
    struct dbuf *rows = buf_values(h, h->dtype, ROWS * TO, want);
    RUN(h, mt_device_copy, MT_STREAM_COMPUTE,
        &(struct mt_copy){dst->p, N * size, src->p, N * size, N * size, 1});
    expect_close(h, "copy", buf_get(h, dst), x, N, 0);
    RUN(h, mt_device_copy, MT_STREAM_COMPUTE,
        &(struct mt_copy){rows->p, TO * size, src->p, FROM * size, WIDTH * size, ROWS});
    for (int i = 0; i < ROWS; i++)
        memcpy(want + i * TO, x + i * FROM, WIDTH * sizeof(double));
    expect_close(h, "rows", buf_get(h, rows), want, ROWS * TO, 0);
}

DEVICE_TEST(zero_clears_all_and_no_more)
{
    enum { N = 300001 };
    struct dbuf *b = buf_nan(h, h->dtype, N);
    RUN(h, mt_op_zero, &(struct mt_zero){b->p, N * mt_dtype_size(h->dtype)});
    expect_close(h, "zeros", buf_get(h, b), scratch(h, N), N, 0);
}

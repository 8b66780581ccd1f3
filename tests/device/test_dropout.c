/* SPDX-License-Identifier: Apache-2.0 */
/* Dropout: the mask is that of the generator, of its key and an element's place alone, and drops the share it should. */
#include <math.h>

#include "base/philox.h"
#include "harness.h"

static bool kept(const struct mt_dropout *a, size_t row, size_t column)
{
    struct mt_philox r = mt_philox(a->seed, a->stream, (uint64_t)row << 32 | column / 4);
    return (double)r.v[column % 4] >= floor((double)a->p * 0x1p32);
}

static void dropout_case(struct harness *h, size_t n, size_t c, float p, size_t first_row)
{
    double *x, *add, *want = scratch(h, n * c);
    int32_t *rows = (int32_t *)(void *)scratch(h, n);
    struct dbuf *bx = buf_random(h, h->dtype, n * c, 1, &x), *ba = buf_random(h, h->dtype, n * c, 1, &add);
    struct dbuf *out = buf_nan(h, h->dtype, n * c);
    struct mt_dropout a = {.n = n, .c = c, .dtype = h->dtype, .out_dtype = h->dtype, .p = p, .seed = h->seed << 33 | 5, .stream = UINT64_C(7) << 40 | 9,
                           .first_row = first_row, .x = bx->p, .out = out->p};
    RUN(h, mt_op_dropout, &a);
    for (size_t i = 0; i < n * c; i++)
        want[i] = kept(&a, first_row + i / c, i % c) ? x[i] / (1 - (double)p) : 0;
    expect_close(h, "dropped", buf_get(h, out), want, n * c, tolerance(h, 2e-7, 3e-3));
    a.add = a.out = ba->p;
    for (size_t i = 0; i < n; i++)
        rows[i] = (int32_t)(3 * i + 1);
    a.rows = buf_ints(h, rows, n)->p;
    RUN(h, mt_op_dropout, &a);
    for (size_t i = 0; i < n * c; i++)
        want[i] = add[i] + (kept(&a, first_row + 3 * (i / c) + 1, i % c) ? x[i] / (1 - (double)p) : 0);
    expect_close(h, "added, rows by index", buf_get(h, ba), want, n * c, tolerance(h, 2e-7, 3e-3));
    struct dbuf *sum = buf_random(h, MT_F32, n * c, 1, &add);
    a.out_dtype = MT_F32;
    a.add = a.out = sum->p;
    RUN(h, mt_op_dropout, &a);
    for (size_t i = 0; i < n * c; i++)
        want[i] = add[i] + (kept(&a, first_row + 3 * (i / c) + 1, i % c) ? x[i] / (1 - (double)p) : 0);
    expect_close(h, "added in f32", buf_get(h, sum), want, n * c, 2e-7);
}

DEVICE_TEST(dropout_is_of_row_and_column)
{
    dropout_case(h, 37, 24, 0.5f, 0);
    dropout_case(h, 5, 2051, 0.1f, 1000);
    dropout_case(h, 3, 7, 0.9f, 0xfffffe00u);
    dropout_case(h, 130, 8, 0, 1);
}

/* The bits of a row are the same wherever the row lies in a call, and in place. */
DEVICE_TEST(dropout_does_not_depend_on_the_call)
{
    enum { N = 24, C = 40 };
    double *x;
    struct dbuf *bx = buf_random(h, h->dtype, N * C, 1, &x), *whole = buf_nan(h, h->dtype, N * C);
    size_t row = C * mt_dtype_size(h->dtype);
    struct mt_dropout a = {.n = N, .c = C, .dtype = h->dtype, .out_dtype = h->dtype, .p = 0.3f, .seed = 3, .stream = 4, .x = bx->p, .out = whole->p};
    RUN(h, mt_op_dropout, &a);
    for (size_t at = 0; at < N; at += 8) {
        a.n = 8;
        a.first_row = at;
        a.x = a.out = (char *)bx->p + at * row;
        RUN(h, mt_op_dropout, &a);
    }
    expect_close(h, "by pieces, in place", buf_get(h, bx), buf_get(h, whole), N * C, 0);
}

/* Of n independent elements a share p is dropped, within six standard deviations; other streams drop others. */
DEVICE_TEST(dropout_drops_the_share)
{
    enum { N = 200, C = 500 };
    static const float share[] = {0.05f, 0.5f, 0.75f};
    double *ones = scratch(h, N * C), *got[2];
    for (size_t i = 0; i < N * C; i++)
        ones[i] = 1;
    struct dbuf *x = buf_values(h, h->dtype, N * C, ones), *out = buf_nan(h, h->dtype, N * C);
    for (size_t s = 0; s < sizeof(share) / sizeof(*share); s++) {
        double p = (double)share[s], same = 0, slack = 6 * sqrt(N * C);
        for (uint64_t stream = 0; stream < 2; stream++) {
            double dropped = 0;
            struct mt_dropout a = {.n = N, .c = C, .dtype = h->dtype, .out_dtype = h->dtype, .p = share[s], .seed = 11, .stream = stream << 32,
                                   .x = x->p, .out = out->p};
            RUN(h, mt_op_dropout, &a);
            got[stream] = buf_get(h, out);
            for (size_t i = 0; i < N * C; i++)
                dropped += got[stream][i] == 0;
            if (fabs(dropped - p * N * C) > slack * sqrt(p * (1 - p)))
                must(h, "dropout", -1, &(struct mt_err){.msg = "another share is dropped"});
        }
        for (size_t i = 0; i < N * C; i++)
            same += (got[0][i] == 0) == (got[1][i] == 0);
        double agree = p * p + (1 - p) * (1 - p);
        if (fabs(same - agree * N * C) > slack * sqrt(agree * (1 - agree)))
            must(h, "dropout", -1, &(struct mt_err){.msg = "two streams drop alike"});
    }
}

DEVICE_TEST(dropout_is_checked)
{
    struct dbuf *x = buf_new(h, h->dtype, 32);
    struct mt_dropout a = {.n = 4, .c = 8, .dtype = h->dtype, .out_dtype = h->dtype, .p = 1, .x = x->p, .out = x->p};
    expect_rejected(h, "nothing is kept", mt_op_dropout(h->dev, &a, NULL));
    a.p = 0.5f;
    a.first_row = UINT32_MAX;
    expect_rejected(h, "rows beyond 32 bits", mt_op_dropout(h->dev, &a, NULL));
}

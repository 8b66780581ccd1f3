/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "base/mem.h"
#include "harness.h"

struct shape {
    size_t m, n, k;
    bool ta, tb, bias, c, f32_out;
    float scale;
};

static void check(struct harness *h, const struct shape *s)
{
    enum mt_dtype dt = h->dtype, od = s->f32_out ? MT_F32 : dt;
    size_t lda = (s->ta ? s->m : s->k) + 3, ldb = (s->tb ? s->k : s->n) + 5, ldd = s->n + 2;
    size_t skip = s->m % 3 == 0; /* a bias may begin at any element */
    double *a, *b, *bias = NULL, *c = NULL, *want = scratch(h, s->m * ldd);
    struct dbuf *da = buf_random(h, dt, (s->ta ? s->k : s->m) * lda, 1, &a);
    struct dbuf *db = buf_random(h, dt, (s->tb ? s->n : s->k) * ldb, 1, &b);
    struct dbuf *dbias = s->bias ? buf_random(h, dt, skip + s->n, 1, &bias) : NULL;
    /* accumulating into f32 is in place, as weight gradients are; else C is another buffer */
    struct dbuf *dc = s->c ? buf_random(h, od, s->m * ldd, 1, &c) : NULL;
    struct dbuf *dd = s->c && s->f32_out ? dc : buf_nan(h, od, s->m * ldd);
    struct mt_gemm g = {.m = s->m, .n = s->n, .k = s->k, .dtype = dt, .d_dtype = od, .trans_a = s->ta,
                        .trans_b = s->tb, .scale = s->scale, .a = da->p, .b = db->p, .lda = lda, .ldb = ldb, .ldc = ldd,
                        .ldd = ldd, .bias = dbias ? (char *)dbias->p + skip * mt_dtype_size(dt) : NULL,
                        .c = dc ? dc->p : NULL, .d = dd->p};
    RUN(h, mt_op_gemm, &g);
    double *got = buf_get(h, dd);
    for (size_t i = 0; i < s->m; i++)
        for (size_t j = 0; j < ldd; j++) {
            double sum = 0;
            if (j >= s->n) { /* between rows nothing is written */
                want[i * ldd + j] = got[i * ldd + j] = 0;
                continue;
            }
            for (size_t p = 0; p < s->k; p++)
                sum += (s->ta ? a[p * lda + i] : a[i * lda + p]) *
                       (s->tb ? b[j * ldb + p] : b[p * ldb + j]);
            want[i * ldd + j] = (s->scale != 0 ? (double)s->scale : 1) * sum + (bias ? bias[skip + j] : 0) + (c ? c[i * ldd + j] : 0);
        }
    expect_close(h, "D", got, want, s->m * ldd, s->f32_out ? 2e-6 : tolerance(h, 2e-6, 3e-3));
}

DEVICE_TEST(gemm_products_of_odd_shapes)
{
    static const struct shape shapes[] = {
        {1, 1, 1, false, true, false, false, false},
        {7, 5, 3, false, true, true, false, false},
        {33, 17, 65, false, true, true, true, false},
        {64, 64, 64, false, false, false, false, false},
        {48, 40, 72, false, true, true, false, false},
        {40, 24, 64, false, true, true, true, false},
        {100, 130, 70, false, false, false, true, false},
        {65, 31, 1100, true, false, false, true, true},
        {400, 390, 33, true, false, false, true, true},
        {390, 20, 2100, false, true, false, false, true},
        {3, 500, 40, false, true, true, false, true},
        {3, 20, 40, false, true, true, true, true},
        {2047, 1024, 9, false, true, false, true, false}, /* several blocks, of a strip more than is even */
        {40, 33, 1100, false, false, true, true, false},  /* several panels that do not end in D */
        {60, 96, 1024, false, false, false, true, true},  /* rows that begin in the same place of a page */
        {25, 16500, 24, false, true, false, true, true},  /* more columns than a block takes */
        {40, 8, 72, false, true, false, false, false, 0.5f}, /* the products of an adapter */
        {40, 72, 8, false, true, false, true, false, 1.7f},
        {72, 12, 40, true, false, false, true, true, -3.3f},
        {70, 24, 600, false, false, true, true, false, 0.3f},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(shapes); i++)
        check(h, &shapes[i]);
}

DEVICE_TEST(gemm_long_sums_of_small_outputs)
{
    check(h, &(struct shape){64, 64, 8192, true, false, false, true, true});
}

/* Where a test alone has the cpu device take oneDNN, on a CPU without AVX512_BF16, the library has other kernels. */
static bool takes_what_no_run_does(struct harness *h)
{
    bool native = true;
#ifdef __x86_64__
    native = __builtin_cpu_supports("avx512bf16");
#endif
    return h->dtype == MT_BF16 && mt_device_limits(h->dev)->makes_products && !native;
}

/* Generation relies on it: a row has the bits that it has among others, on the cpu device. */
DEVICE_TEST(gemm_rows_do_not_depend_on_how_many_there_are)
{
    static const size_t shapes[][2] = {{64, 48}, {32, 1100}, {160, 576}, {48, 513}, {385, 100}, {576, 600}}; /* n, k */
    enum { ROWS = 20, BIAS = 1, ADDED = 2, F32_OUT = 4, WAYS = 8 };
    bool asked = !strcmp(h->device_name, "cpu") && !takes_what_no_run_does(h);
    for (size_t i = 0; i < MT_ARRAY_LEN(shapes) && asked; i++) {
        size_t n = shapes[i][0], k = shapes[i][1];
        double *unused, *all = NULL;
        struct dbuf *a = buf_random(h, h->dtype, ROWS * k, 1, &unused), *b = buf_random(h, h->dtype, n * k, 1, &unused),
                    *bias = buf_random(h, h->dtype, n, 1, &unused);
        for (int way = 0; way < WAYS; way++) {
            enum mt_dtype out = way & F32_OUT ? MT_F32 : h->dtype;
            struct dbuf *c = buf_random(h, out, ROWS * n, 1, &unused);
            for (size_t m = ROWS; m > 0; m = m > 5 ? 5 : m - 1) {
                struct dbuf *d = buf_nan(h, out, m * n);
                struct mt_gemm g = {.m = m, .n = n, .k = k, .dtype = h->dtype, .d_dtype = out, .trans_b = true, .a = a->p,
                                    .lda = k, .b = b->p, .ldb = k, .bias = way & BIAS ? bias->p : NULL,
                                    .c = way & ADDED ? c->p : NULL, .ldc = n, .d = d->p, .ldd = n};
                RUN(h, mt_op_gemm, &g);
                double *got = buf_get(h, d);
                all = m == ROWS ? got : all;
                expect_close(h, "the first rows", got, all, m * n, 0);
            }
        }
    }
}

DEVICE_TEST(gemm_bad_arguments_are_rejected)
{
    struct dbuf *x = buf_nan(h, h->dtype, 64);
    struct mt_gemm g = {.m = 4, .n = 4, .k = 4, .dtype = h->dtype, .d_dtype = h->dtype, .a = x->p,
                        .b = x->p, .d = x->p, .lda = 4, .ldb = 4, .ldd = 4};
    expect_rejected(h, "D over A", mt_op_gemm(h->dev, &g, NULL));
    g.d = (char *)x->p + 32;
    g.lda = 3;
    expect_rejected(h, "a short lda", mt_op_gemm(h->dev, &g, NULL));
    g.lda = 4;
    g.a = NULL;
    expect_rejected(h, "no A", mt_op_gemm(h->dev, &g, NULL));
}

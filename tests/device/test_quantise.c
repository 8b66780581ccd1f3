/* SPDX-License-Identifier: Apache-2.0 */
/* Products in FP8: largest magnitudes, codes against the definition of the format, products of decoded codes. */
#include <math.h>

#include "base/mem.h"
#include "harness.h"

/* The format's definition: 4 bits of exponent with bias 7, 3 of mantissa; 0x7f is a NaN. */
static double magnitude_of(int code)
{
    return code >> 3 ? ldexp(1 + (code & 7) / 8.0, (code >> 3) - 7) : ldexp(code & 7, -9);
}

static double value_of(int code)
{
    return (code & 0x7f) == 0x7f ? NAN : (code & 0x80 ? -1 : 1) * magnitude_of(code & 0x7f);
}

/* The nearest of all codes; of two as near the even one. */
static int code_of(double x)
{
    int best = 0x7f, sign = signbit(x) ? 0x80 : 0;
    double least = INFINITY;
    for (int c = 0; c < 0x7f && isfinite(x); c++) {
        double d = fabs(fabs(x) - magnitude_of(c));
        if (d < least || (d == least && c % 2 == 0)) {
            least = d;
            best = c;
        }
    }
    return best | sign;
}

/* The largest power of two that leaves amax within 448. */
static double factor_of(double amax)
{
    int k = -126;
    if (!(amax > 0) || !isfinite(amax))
        return 1;
    while (k < 126 && amax * ldexp(1, k + 1) <= 448)
        k++;
    return ldexp(1, k);
}

struct codes {
    struct dbuf *plain, *turned, *scale;
    double *of, *of_turned, factor;
};

/* Both kinds of codes of x [rows, cols], together and apart, checked. */
static struct codes quantise(struct harness *h, const struct dbuf *x, const double *v, size_t rows, size_t cols)
{
    size_t n = rows * cols, ld = mt_codes_ld(rows);
    struct codes c = {buf_nan(h, MT_E4M3, n), buf_nan(h, MT_E4M3, ld * cols), buf_nan(h, MT_F32, 1), NULL, NULL, 1};
    struct dbuf *parts = buf_nan(h, MT_F32, MT_AMAX_PARTS), *alone[2] = {buf_nan(h, MT_E4M3, n),
                                                                      buf_nan(h, MT_E4M3, ld * cols)};
    RUN(h, mt_op_amax, &(struct mt_amax){n, x->dtype, x->p, parts->p});
    struct mt_quantise q = {.rows = rows, .cols = cols, .dtype = x->dtype, .x = x->p, .parts = parts->p,
                            .codes = c.plain->p, .codes_t = c.turned->p, .scale = c.scale->p};
    RUN(h, mt_op_quantise, &q);
    q.codes = alone[0]->p;
    q.codes_t = NULL;
    RUN(h, mt_op_quantise, &q);
    q.codes = NULL;
    q.codes_t = alone[1]->p;
    RUN(h, mt_op_quantise, &q);
    double amax = 0, *part = buf_get(h, parts), *want = scratch(h, n), *want_t = scratch(h, ld * cols), most = 0;
    for (size_t i = 0; i < n; i++)
        amax = fabs(v[i]) <= amax ? amax : fabs(v[i]); /* a NaN stays */
    for (size_t i = 0; i < MT_AMAX_PARTS; i++)
        most = part[i] <= most ? most : part[i];
    c.factor = factor_of(amax);
    double inverse = 1 / c.factor;
    if (isfinite(amax))
        expect_close(h, "the largest magnitude", &most, &amax, 1, 0);
    expect_close(h, "scale", buf_get(h, c.scale), &inverse, 1, 0);
    for (size_t r = 0; r < rows; r++)
        for (size_t k = 0; k < cols; k++)
            want_t[k * ld + r] = want[r * cols + k] = code_of(v[r * cols + k] * c.factor);
    c.of = buf_get_bytes(h, c.plain);
    c.of_turned = buf_get_bytes(h, c.turned);
    expect_close(h, "codes", c.of, want, n, 0);
    expect_close(h, "turned codes", c.of_turned, want_t, ld * cols, 0);
    expect_close(h, "codes alone", buf_get_bytes(h, alone[0]), want, n, 0);
    expect_close(h, "turned codes alone", buf_get_bytes(h, alone[1]), want_t, ld * cols, 0);
    return c;
}

DEVICE_TEST(quantise_codes_are_the_nearest)
{
    static const size_t shapes[][2] = {{1, 16}, {3, 32}, {16, 48}, {17, 304}, {64, 64}, {65, 80}, {130, 272}, {80, 1040}};
    static const double spread[] = {1, 1e-8, 3e4, 1e-36};
    for (size_t i = 0; i < MT_ARRAY_LEN(shapes); i++) {
        double *v;
        struct dbuf *x = buf_random(h, h->dtype, shapes[i][0] * shapes[i][1], spread[i % 4], &v);
        quantise(h, x, v, shapes[i][0], shapes[i][1]);
    }
}

/* Halves between codes, all codes themselves, zeros of both signs, and what is less than the least code. */
DEVICE_TEST(quantise_codes_round_to_even)
{
    enum { N = 512 };
    double v[N];
    for (int i = 0; i < N / 2; i++) {
        double m = magnitude_of(i / 2 % 127), next = magnitude_of(i / 2 % 127 + 1);
        v[i] = i % 2 && i / 2 % 127 < 126 ? (m + next) / 2 : m;
        v[i + N / 2] = -v[i];
    }
    v[N - 1] = 0x1p-10;
    v[N - 2] = 0x1.02p-10;
    quantise(h, buf_values(h, h->dtype, N, v), v, 16, N / 16);
}

DEVICE_TEST(quantise_special_values)
{
    static const double last[] = {INFINITY, -INFINITY, NAN, 0, 449, 1e38, 0x1p-126, 448};
    for (size_t i = 0; i < MT_ARRAY_LEN(last); i++) {
        double v[64];
        for (int k = 0; k < 64; k++)
            v[k] = (double)mt_f32_from_bits((uint32_t)mt_f32_to_bf16((float)(last[i] > 1 ? k - 20 : 0)) << 16);
        v[37] = (double)mt_f32_from_bits((uint32_t)mt_f32_to_bf16((float)last[i]) << 16);
        struct codes c = {0};
        if (!isnan(last[i])) {
            c = quantise(h, buf_values(h, h->dtype, 64, v), v, 4, 16);
            if (isinf(last[i]) && ((int)c.of[37] & 0x7f) != 0x7f)
                expect_close(h, "infinity", c.of, v, 1, -1);
            continue;
        }
        struct dbuf *parts = buf_nan(h, MT_F32, MT_AMAX_PARTS), *codes = buf_nan(h, MT_E4M3, 64),
                    *x = buf_values(h, h->dtype, 64, v), *scale = buf_nan(h, MT_F32, 1);
        RUN(h, mt_op_amax, &(struct mt_amax){64, h->dtype, x->p, parts->p});
        RUN(h, mt_op_quantise, &(struct mt_quantise){.rows = 4, .cols = 16, .dtype = h->dtype, .x = x->p,
                                                     .parts = parts->p, .codes = codes->p, .scale = scale->p});
        double got[] = {buf_get_bytes(h, codes)[37], buf_get(h, scale)[0], isnan(buf_get(h, parts)[0])},
               want[] = {0x7f, 1, 1};
        expect_close(h, "a NaN", got, want, MT_ARRAY_LEN(want), 0);
    }
}

struct product {
    size_t m, n, k;
    bool bias, c, f32, tiny;
};

/* Of sums of codes' products the tensor cores of Ada and Hopper keep 13 bits (SageAttention2, arXiv:2411.10958). */
static double sum_tolerance(struct harness *h)
{
    int capability = mt_device_limits(h->dev)->capability;
    return capability == 89 || capability == 90 ? 1e-3 : 2e-6;
}

static void product(struct harness *h, const struct product *s)
{
    enum mt_dtype od = s->f32 ? MT_F32 : MT_BF16;
    double *a, *b, *bias = NULL, *c = NULL, *want = scratch(h, s->m * s->n);
    struct dbuf *xa = buf_random(h, h->dtype, s->m * s->k, s->tiny ? 1e-30 : 1e-3, &a),
                *xb = buf_random(h, h->dtype, s->n * s->k, s->tiny ? 1e-30 : 30, &b);
    struct codes ca = quantise(h, xa, a, s->m, s->k), cb = quantise(h, xb, b, s->n, s->k);
    struct dbuf *dbias = s->bias ? buf_random(h, od, s->n, 1, &bias) : NULL;
    struct dbuf *dc = s->c ? buf_random(h, od, s->m * s->n, 1, &c) : NULL;
    struct dbuf *d = s->c && s->f32 ? dc : buf_nan(h, od, s->m * s->n);
    RUN(h, mt_op_gemm,
        &(struct mt_gemm){.m = s->m, .n = s->n, .k = s->k, .dtype = MT_E4M3, .d_dtype = od, .trans_b = true,
                          .a = ca.plain->p, .b = cb.plain->p, .lda = s->k, .ldb = s->k, .ldc = s->n, .ldd = s->n,
                          .bias = dbias ? dbias->p : NULL, .c = dc ? dc->p : NULL, .d = d->p, .a_scale = ca.scale->p,
                          .b_scale = cb.scale->p});
    for (size_t i = 0; i < s->m; i++)
        for (size_t j = 0; j < s->n; j++) {
            double sum = 0;
            for (size_t k = 0; k < s->k; k++)
                sum += value_of((int)ca.of[i * s->k + k]) * value_of((int)cb.of[j * s->k + k]);
            want[i * s->n + j] = sum / ca.factor / cb.factor + (bias ? bias[j] : 0) + (c ? c[i * s->n + j] : 0);
        }
    expect_close(h, "D", buf_get(h, d), want, s->m * s->n, s->f32 ? sum_tolerance(h) : 3e-3);
}

DEVICE_TEST(gemm_products_of_codes)
{
    static const struct product shapes[] = {
        {1, 16, 16, false, false, false}, {7, 32, 48, true, false, false},   {33, 16, 1040, true, true, false},
        {64, 64, 64, false, true, false}, {130, 48, 32, false, false, true}, {48, 80, 528, false, true, true}, {7, 48, 32, true, false, true},
        {16, 16, 32, false, false, true, true}, /* scales whose product is below all numbers */
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(shapes); i++)
        product(h, &shapes[i]);
}

DEVICE_TEST(gemm_bad_codes_are_rejected)
{
    struct dbuf *x = buf_nan(h, MT_F32, 1024);
    uint8_t *codes = x->p;
    struct mt_gemm g = {.m = 16, .n = 16, .k = 16, .dtype = MT_E4M3, .d_dtype = MT_BF16, .trans_b = true, .a = codes,
                        .b = codes + 256, .d = codes + 512, .lda = 16, .ldb = 16, .ldd = 16, .a_scale = x->p,
                        .b_scale = x->p};
    RUN(h, mt_op_gemm, &g);
    g.k = 8;
    expect_rejected(h, "k of 8", mt_op_gemm(h->dev, &g, NULL));
    g.k = 16;
    g.trans_b = false;
    expect_rejected(h, "B not transposed", mt_op_gemm(h->dev, &g, NULL));
    g.trans_b = true;
    g.b_scale = NULL;
    expect_rejected(h, "no scale", mt_op_gemm(h->dev, &g, NULL));
    struct mt_quantise q = {.rows = 4, .cols = 24, .dtype = MT_F32, .x = x->p, .parts = x->p, .codes = codes,
                            .scale = x->p};
    expect_rejected(h, "24 columns", mt_op_quantise(h->dev, &q, NULL));
    q.cols = 16;
    q.codes = NULL;
    expect_rejected(h, "no codes", mt_op_quantise(h->dev, &q, NULL));
}

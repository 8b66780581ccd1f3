/* SPDX-License-Identifier: Apache-2.0 */
/* Packed formats against plain code in the words of base/packed.h: to the bit. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/packed.h"
#include "base/philox.h"
#include "harness.h"

static bool is_fp8(enum mt_packed f)
{
    return mt_packed_formats[f].bytes;
}

/* Elements of a row in a block of each kind of int4. */
static const size_t int4_group[MT_N_PACKED] = {
    [MT_PACKED_INT4] = 32, [MT_PACKED_INT4_64] = 64, [MT_PACKED_INT4_128] = 128, [MT_PACKED_INT4R] = SIZE_MAX};

/* Rows and columns of a block of each kind of FP8. */
static const size_t fp8_block[MT_N_PACKED][2] = {
    [MT_PACKED_FP8] = {128, 128},      [MT_PACKED_FP8T] = {SIZE_MAX, SIZE_MAX}, [MT_PACKED_FP8R] = {1, SIZE_MAX},
    [MT_PACKED_FP8_64] = {64, 64},     [MT_PACKED_FP8_32] = {32, 32},           [MT_PACKED_FP8_1X128] = {1, 128},
    [MT_PACKED_FP8_1X64] = {1, 64},    [MT_PACKED_FP8_1X32] = {1, 32},
};

static float e4m3_of(uint8_t c)
{
    float mag = (c & 0x7f) == 0x7f ? NAN
                : c >> 3 & 15      ? ldexpf((float)(8 + (c & 7)), (c >> 3 & 15) - 10)
                                   : ldexpf((float)(c & 7), -9);
    return c & 0x80 ? -mag : mag;
}

static float scale_of(const struct mt_decode *a, size_t row, size_t col)
{
    size_t i = row * a->cols + col;
    const float *f = a->scales;
    const uint8_t *b = a->scales;
    const uint16_t *h = a->scales;
    if (a->format == MT_PACKED_MXFP4)
        return ldexpf(1, b[i / 32] - 127);
    if (int4_group[a->format]) {
        size_t k = row * ((a->cols - 1) / int4_group[a->format] + 1) + col / int4_group[a->format];
        return a->scale == MT_SCALE_F16 || a->scale == MT_SCALE_F16_ZEROS ? mt_f16_to_f32(h[k]) : mt_bf16_to_f32(h[k]);
    }
    if (a->format == MT_PACKED_NVFP4) {
        float x = e4m3_of(b[i / 16]);
        return a->scale == MT_SCALE_E4M3 ? x * *a->factor : x / *a->factor;
    }
    if (is_fp8(a->format)) {
        const size_t *block = fp8_block[a->format];
        size_t k = row / block[0] * ((a->cols - 1) / block[1] + 1) + col / block[1];
        return a->scale == MT_SCALE_F32 ? f[k] : a->scale == MT_SCALE_BF16 ? mt_bf16_to_f32(h[k]) : ldexpf(1, b[k] - 127);
    }
    if (!a->nested_scales)
        return f[i / 64];
    volatile float product = a->nested_map[b[i / 64]] * a->nested_scales[i / 64 / 256];
    return product + *a->nested_offset;
}

static float code_of(const struct mt_decode *a, size_t i)
{
    uint8_t c = a->codes[is_fp8(a->format) ? i : i / 2];
    if (a->format == MT_PACKED_NF4)
        return mt_nf4_values[i % 2 ? c & 15 : c >> 4];
    if (a->format == MT_PACKED_MXFP4 || a->format == MT_PACKED_NVFP4)
        return mt_fp4_values[i % 2 ? c >> 4 : c & 15];
    if (int4_group[a->format]) {
        size_t row = i / a->cols, col = i % a->cols, across = (a->cols - 1) / int4_group[a->format] + 1;
        uint32_t word = a->zeros ? a->zeros[row / 8 * across + col / int4_group[a->format]] : 0x88888888u;
        return (float)((i % 2 ? c >> 4 : c & 15) - (int)(word >> row % 8 * 4 & 15));
    }
    return e4m3_of(c);
}

static void want_of(const struct mt_decode *a, double *want)
{
    for (size_t r = 0; r < a->rows; r++)
        for (size_t c = 0; c < a->cols; c++) {
            float x = code_of(a, r * a->cols + c) * scale_of(a, r, c);
            want[r * a->cols + c] = (double)(a->dtype == MT_BF16 ? mt_bf16_to_f32(mt_f32_to_bf16(x)) : x);
        }
}

static void *upload(struct harness *h, const void *src, size_t bytes)
{
    size_t n = mt_div_up(bytes, 4);
    MT_FREED int32_t *words = mt_calloc(n, 4);
    memcpy(words, src, bytes);
    void *p = buf_ints(h, words, n)->p;
    return p;
}

/* Equal to the bit, the sign of zeros included; NaN for NaN. */
static void expect_equal(struct harness *h, const char *what, const double *got, const double *want, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!(isnan(got[i]) && isnan(want[i])) && memcmp(&got[i], &want[i], sizeof(*got))) {
            double g = got[i], w = want[i];
            expect_close(h, what, &g, &w, 1, 0);
            expect_rejected(h, what, 0); /* zeros of two signs are close */
            return;
        }
}

/* What is on the host in `a`, on the device. */
static struct mt_decode upload_codes(struct harness *h, const struct mt_decode *a)
{
    struct mt_decode d = *a;
    size_t scales = mt_packed_n_scales(a->format, a->rows, a->cols);
    d.codes = upload(h, a->codes, mt_packed_code_bytes(a->format, a->rows, a->cols));
    d.scales = upload(h, a->scales, scales * mt_scale_size(a->scale));
    d.factor = a->factor ? upload(h, a->factor, sizeof(*a->factor)) : NULL;
    if (a->zeros)
        d.zeros = upload(h, a->zeros, mt_packed_n_zeros(a->format, a->rows, a->cols) * sizeof(*a->zeros));
    if (a->nested_scales) {
        d.nested_scales = upload(h, a->nested_scales, mt_div_up(scales, 256) * 4);
        d.nested_map = upload(h, a->nested_map, 256 * 4);
        d.nested_offset = upload(h, a->nested_offset, 4);
    }
    return d;
}

static void check(struct harness *h, const char *what, const struct mt_decode *a)
{
    size_t n = a->rows * a->cols;
    double *want = scratch(h, n);
    struct dbuf *out = buf_nan(h, a->dtype, n);
    struct mt_decode d = upload_codes(h, a);
    want_of(a, want);
    d.out = out->p;
    RUN(h, mt_op_decode, &d);
    expect_equal(h, what, buf_get(h, out), want, n);
}

/* Every byte there is, in some order. */
static uint8_t *some_bytes(size_t n)
{
    uint8_t *b = mt_calloc(n + 1, 1);
    for (size_t i = 0; i < n; i++)
        b[i] = (uint8_t)(i * 151 + i / 256 * 7);
    return b;
}

static float *some_scales(size_t n, float spread)
{
    float *s = mt_calloc(n + 1, sizeof(*s));
    mt_philox_normal(s, n, 0, 11, 1, spread);
    for (size_t i = 0; i < n; i++) /* half of them are ties as bf16, up and down */
        s[i] = mt_f32_from_bits((mt_f32_bits(s[i]) & (i % 2 ? 0x7fffffffu : 0x7fff0000u)) | (i % 2 ? 0 : 0x8000u));
    return s;
}

static void nf4_case(struct harness *h, size_t rows, size_t cols, bool nested)
{
    size_t blocks = mt_div_up(rows * cols, 64);
    uint8_t *codes = some_bytes(rows * cols / 2 + 1), *bytes = some_bytes(blocks);
    float *scales = some_scales(nested ? mt_div_up(blocks, 256) : blocks, 0.03f), *map = some_scales(256, 1);
    static const float offset = 0.0171f;
    struct mt_decode a = {.rows = rows, .cols = cols, .dtype = h->dtype, .format = MT_PACKED_NF4, .codes = codes};
    a.scales = nested ? (void *)bytes : (void *)scales;
    if (nested) {
        a.scale = MT_SCALE_NESTED;
        a.nested_scales = scales;
        a.nested_map = map;
        a.nested_offset = &offset;
    }
    check(h, nested ? "nested nf4" : "nf4", &a);
    free(codes);
    free(bytes);
    free(scales);
    free(map);
}

DEVICE_TEST(decode_nf4)
{
    static const size_t shape[][2] = {{64, 72}, {1, 64}, {3, 67}, {1, 1}, {130, 512}, {5, 4096}, {1, 16384 + 63}};
    for (size_t i = 0; i < MT_ARRAY_LEN(shape); i++) {
        nf4_case(h, shape[i][0], shape[i][1], false);
        nf4_case(h, shape[i][0], shape[i][1], true);
    }
    for (size_t part = 0; part < 4; part++) /* that end in each part of a thread */
        for (size_t pack = 4; pack <= 8; pack *= 2) {
            nf4_case(h, 1, part * pack * 256 + pack - 1, false);
            nf4_case(h, 1, part * pack * 256 + pack - 1, true);
        }
    nf4_case(h, 260, 1024, true); /* several groups of nested scales */
}

static void mxfp4_case(struct harness *h, size_t rows, size_t cols)
{
    uint8_t *codes = some_bytes(rows * cols / 2), *scales = some_bytes(rows * cols / 32);
    for (size_t i = 0; i < rows * cols / 32; i++) /* up to where 6 * 2^127 overflows; 2^128 of a zero is NaN */
        scales[i] = scales[i] == 255 ? 254 : scales[i];
    struct mt_decode a = {.rows = rows, .cols = cols, .dtype = h->dtype, .format = MT_PACKED_MXFP4,
                          .scale = MT_SCALE_E8M0, .codes = codes, .scales = scales};
    check(h, "mxfp4", &a);
    free(codes);
    free(scales);
}

DEVICE_TEST(decode_mxfp4)
{
    mxfp4_case(h, 1, 32);
    mxfp4_case(h, 7, 96);
    mxfp4_case(h, 256, 64);
    mxfp4_case(h, 33, 2880);
}

static void int4_case(struct harness *h, enum mt_packed format, enum mt_scale type, size_t rows, size_t cols)
{
    size_t blocks = mt_packed_n_scales(format, rows, cols);
    bool f16 = type == MT_SCALE_F16 || type == MT_SCALE_F16_ZEROS;
    MT_FREED uint8_t *zeros = some_bytes(mt_packed_n_zeros(format, rows, cols) * 4);
    uint8_t *codes = some_bytes(rows * cols / 2);
    float *wide = some_scales(blocks, 0.01f);
    MT_FREED uint16_t *scales = mt_calloc(blocks + 2, sizeof(*scales));
    for (size_t i = 0; i < blocks; i++) /* some far away, some of them below the normal numbers */
        scales[i] = f16 ? (uint16_t)(i * 1021 % 0x7c00 | i % 2 << 15)
                        : mt_f32_to_bf16(i % 7 == 3 ? wide[i] * 1e-37f : i % 7 == 5 ? wide[i] * 1e37f : wide[i]);
    struct mt_decode a = {.rows = rows, .cols = cols, .dtype = h->dtype, .format = format, .scale = type, .codes = codes,
                          .scales = scales, .zeros = mt_scale_has_zeros(type) ? (void *)zeros : NULL};
    check(h, mt_packed_names[format], &a);
    free(codes);
    free(wide);
}

DEVICE_TEST(decode_int4)
{
    static const enum mt_scale scales[] = {MT_SCALE_BF16, MT_SCALE_F16, MT_SCALE_BF16_ZEROS, MT_SCALE_F16_ZEROS};
    int4_case(h, MT_PACKED_INT4, MT_SCALE_BF16, 1, 32);
    int4_case(h, MT_PACKED_INT4, MT_SCALE_BF16, 7, 96);
    for (size_t i = 0; i < MT_ARRAY_LEN(scales); i++)
        for (int f = MT_PACKED_NONE; f < MT_N_PACKED; f++)
            if (int4_group[f]) {
                int4_case(h, (enum mt_packed)f, scales[i], 17, f == MT_PACKED_INT4R ? 96 : 384);
                int4_case(h, (enum mt_packed)f, scales[i], 33, 7168);
                int4_case(h, (enum mt_packed)f, scales[i], 260, 128);
            }
}

static void nvfp4_case(struct harness *h, enum mt_scale type, size_t rows, size_t cols)
{
    static const float factor = 3.7e-3f;
    size_t blocks = mt_packed_n_scales(MT_PACKED_NVFP4, rows, cols);
    uint8_t *codes = some_bytes(rows * cols / 2), *scales = some_bytes(blocks);
    struct mt_decode a = {.rows = rows, .cols = cols, .dtype = h->dtype, .format = MT_PACKED_NVFP4, .scale = type,
                          .codes = codes, .scales = scales, .factor = &factor};
    check(h, "nvfp4", &a);
    free(codes);
    free(scales);
}

DEVICE_TEST(decode_nvfp4)
{
    for (int type = MT_SCALE_E4M3; type <= MT_SCALE_E4M3_OVER; type++) {
        nvfp4_case(h, (enum mt_scale)type, 1, 16);
        nvfp4_case(h, (enum mt_scale)type, 7, 80);
        nvfp4_case(h, (enum mt_scale)type, 33, 7168);
    }
}

static void fp8_case(struct harness *h, size_t rows, size_t cols, float spread)
{
    size_t blocks = mt_packed_n_scales(MT_PACKED_FP8, rows, cols);
    uint8_t *codes = some_bytes(rows * cols);
    MT_FREED float *scales = some_scales(blocks, spread);
    for (size_t i = 0; i < rows * cols; i++) /* no NaN in three rows of four */
        codes[i] = i / cols % 4 && (codes[i] & 0x7f) == 0x7f ? codes[i] - 1 : codes[i];
    for (size_t i = 0; i < blocks; i += 3)
        scales[i] = -scales[i];
    struct mt_decode a = {.rows = rows, .cols = cols, .dtype = h->dtype, .format = MT_PACKED_FP8, .codes = codes,
                          .scales = scales};
    check(h, "fp8", &a);
    free(codes);
}

DEVICE_TEST(decode_fp8)
{
    fp8_case(h, 128, 128, 0.01f);
    fp8_case(h, 576, 200, 0.01f); /* partial blocks at both edges */
    fp8_case(h, 3, 5, 1);
    fp8_case(h, 2, 1031, 1);
    fp8_case(h, 1, 8200, 1);
    fp8_case(h, 129, 1032, 1e-36f); /* values below the smallest normal number */
    fp8_case(h, 40, 24, 1e37f);     /* and beyond the largest */
    fp8_case(h, 260, 1024, 2e-36f); /* some of them */
    fp8_case(h, 260, 1024, 4e35f);
}

/* Scales of other types, of rows, and one for the whole matrix. */
static void fp8_scales_case(struct harness *h, enum mt_packed format, enum mt_scale type, size_t rows, size_t cols)
{
    size_t blocks = mt_packed_n_scales(format, rows, cols);
    uint8_t *codes = some_bytes(rows * cols), *bytes = mt_calloc(blocks + 1, 1);
    float *scales = some_scales(blocks, 0.01f);
    MT_FREED uint16_t *half = mt_calloc(blocks + 2, sizeof(*half));
    for (size_t i = 0; i < blocks; i++) {
        half[i] = mt_f32_to_bf16(scales[i]);
        bytes[i] = (uint8_t)(i % 5 == 2 ? i % 11 : i % 5 == 3 ? 236 + i % 11 : 110 + i % 30);
    }
    struct mt_decode a = {.rows = rows, .cols = cols, .dtype = h->dtype, .format = format, .scale = type, .codes = codes};
    a.scales = type == MT_SCALE_F32 ? (void *)scales : type == MT_SCALE_BF16 ? (void *)half : (void *)bytes;
    check(h, format == MT_PACKED_FP8 ? "fp8 with other scales" : mt_packed_names[format], &a);
    free(codes);
    free(bytes);
    free(scales);
}

DEVICE_TEST(decode_fp8_scales)
{
    static const size_t shape[][2] = {{576, 200}, {130, 1024}, {3, 5}, {260, 1032}, {2, 4101}};
    for (size_t i = 0; i < MT_ARRAY_LEN(shape); i++)
        for (int type = MT_SCALE_F32; type <= MT_SCALE_E8M0; type++)
            for (int f = MT_PACKED_NONE; f < MT_N_PACKED; f++)
                if (is_fp8((enum mt_packed)f))
                    fp8_scales_case(h, (enum mt_packed)f, (enum mt_scale)type, shape[i][0], shape[i][1]);
}

/* A part of a matrix has the values that it has in the whole. */
DEVICE_TEST(decode_parts)
{
    enum { ROWS = 384, COLS = 200, CUT = 256 };
    uint8_t *codes = some_bytes(ROWS * COLS);
    MT_FREED float *scales = some_scales(6, 1);
    double *want = scratch(h, ROWS * COLS);
    struct dbuf *out = buf_nan(h, h->dtype, ROWS * COLS);
    struct mt_decode a = {.rows = ROWS, .cols = COLS, .dtype = h->dtype, .format = MT_PACKED_FP8, .codes = codes,
                          .scales = scales};
    want_of(&a, want);
    a.codes = upload(h, codes, ROWS * COLS);
    a.scales = upload(h, scales, 6 * 4);
    a.out = out->p;
    a.rows = CUT;
    RUN(h, mt_op_decode, &a);
    a.codes += CUT * COLS;
    a.scales = (const float *)a.scales + CUT / 128 * 2;
    a.out = (char *)a.out + CUT * COLS * mt_dtype_size(h->dtype);
    a.rows = ROWS - CUT;
    RUN(h, mt_op_decode, &a);
    expect_equal(h, "two parts", buf_get(h, out), want, ROWS * COLS);
    free(codes);
}

/* --- products by codes --------------------------------------------------------------------------- */

struct product {
    enum mt_packed format;
    enum mt_scale scale;
    size_t m, n, k;
    bool bias, c, f32;
};

/* Codes and scales of numbers of ordinary size, on the host. */
static struct mt_decode ordinary(const struct product *p)
{
    struct mt_decode a = {.rows = p->n, .cols = p->k, .dtype = MT_BF16, .format = p->format, .scale = p->scale};
    size_t bytes = mt_packed_code_bytes(p->format, p->n, p->k), blocks = mt_packed_n_scales(p->format, p->n, p->k);
    uint8_t *codes = some_bytes(bytes), *small = mt_calloc(blocks + 1, 4);
    float *scales = some_scales(blocks, 0.03f);
    for (size_t i = 0; i < bytes && is_fp8(p->format); i++)
        codes[i] &= 0xb7; /* none above 2 */
    for (size_t i = 0; i < blocks; i++) {
        uint16_t half = mt_f32_to_bf16(scales[i]);
        if (p->scale == MT_SCALE_F16_ZEROS)
            half = (uint16_t)(0x2000 + i * 37 % 0x1000); /* from 2^-7 to 2^-3 */
        if (mt_scale_size(p->scale) == sizeof(half))
            memcpy(small + 2 * i, &half, sizeof(half));
        else
            small[i] = (uint8_t)(p->scale == MT_SCALE_E8M0 ? 120 + i % 5 : p->scale == MT_SCALE_NESTED ? i * 7 : 32 + i % 16);
    }
    if (mt_scale_has_zeros(p->scale))
        a.zeros = (void *)some_bytes(mt_packed_n_zeros(p->format, p->n, p->k) * 4);
    bool f32 = p->scale == MT_SCALE_F32;
    a.codes = codes;
    a.scales = f32 ? (void *)scales : (void *)small;
    free(f32 ? (void *)small : (void *)scales);
    if (p->scale == MT_SCALE_NESTED) {
        static const float offset = 0.0171f;
        a.nested_scales = some_scales(mt_div_up(blocks, 256), 0.03f);
        a.nested_map = some_scales(256, 1);
        a.nested_offset = &offset;
    }
    static const float factor = 0.25f;
    a.factor = p->format == MT_PACKED_NVFP4 ? &factor : NULL;
    return a;
}

static void free_codes(const struct mt_decode *a)
{
    free((void *)(uintptr_t)a->codes);
    free((void *)(uintptr_t)a->scales);
    free((void *)(uintptr_t)a->zeros);
    free((void *)(uintptr_t)a->nested_scales);
    free((void *)(uintptr_t)a->nested_map);
}

/* Beside sums in double; and where the device decodes as it multiplies, a row alone has the bits that it has here. */
static void product_case(struct harness *h, const struct product *p)
{
    enum mt_dtype od = p->f32 ? MT_F32 : MT_BF16;
    struct mt_decode host = ordinary(p);
    size_t lda = p->k + 8, ldd = p->n + 2;
    double *x, *w = scratch(h, p->n * p->k), *bias = NULL, *c = NULL, *want = scratch(h, p->m * ldd);
    struct dbuf *dx = buf_random(h, MT_BF16, p->m * lda, 1, &x);
    struct dbuf *dbias = p->bias ? buf_random(h, MT_BF16, p->n, 1, &bias) : NULL;
    struct dbuf *dc = p->c ? buf_random(h, od, p->m * ldd, 1, &c) : NULL, *dd = buf_nan(h, od, p->m * ldd);
    struct mt_packed_gemm g = {.m = p->m, .d_dtype = od, .a = dx->p, .b = upload_codes(h, &host), .lda = lda, .ldc = ldd,
                               .ldd = ldd, .bias = dbias ? dbias->p : NULL, .c = dc ? dc->p : NULL, .d = dd->p};
    struct dbuf *space = buf_nan(h, MT_F32, mt_op_packed_gemm_workspace(h->dev, &g) / 4 + 1);
    g.workspace = space->p;
    RUN(h, mt_op_packed_gemm, &g);
    want_of(&host, w);
    double *got = buf_get(h, dd);
    for (size_t i = 0; i < p->m; i++)
        for (size_t j = 0; j < ldd; j++) {
            double sum = 0;
            for (size_t k = 0; k < p->k && j < p->n; k++)
                sum += x[i * lda + k] * w[j * p->k + k];
            if (j >= p->n) /* between rows nothing is written */
                got[i * ldd + j] = 0;
            want[i * ldd + j] = j < p->n ? sum + (bias ? bias[j] : 0) + (c ? c[i * ldd + j] : 0) : 0;
        }
    expect_close(h, mt_packed_names[p->format], got, want, p->m * ldd, p->f32 ? 2e-6 : 3e-3);
    if (mt_device_limits(h->dev)->coded_rows && !p->c) {
        struct dbuf *one = buf_nan(h, od, ldd);
        g.a = (const uint16_t *)g.a + (p->m - 1) * lda;
        g.d = one->p;
        g.m = 1;
        RUN(h, mt_op_packed_gemm, &g);
        expect_equal(h, "the last row alone", buf_get(h, one), got + (p->m - 1) * ldd, p->n);
    }
    free_codes(&host);
}

/* Few rows and more, each with every end of a sum, over more steps than there are warps, or fewer. */
DEVICE_TEST(products_by_codes)
{
    static const struct product of[] = {
        {.format = MT_PACKED_NF4, .scale = MT_SCALE_F32, .n = 33, .k = 576},
        {.format = MT_PACKED_NF4, .scale = MT_SCALE_NESTED, .n = 40, .k = 640},
        {.format = MT_PACKED_MXFP4, .scale = MT_SCALE_E8M0, .n = 29, .k = 576},
        {.format = MT_PACKED_INT4, .scale = MT_SCALE_BF16, .n = 35, .k = 576},
        {.format = MT_PACKED_INT4_64, .scale = MT_SCALE_F16_ZEROS, .n = 35, .k = 576},
        {.format = MT_PACKED_INT4_128, .scale = MT_SCALE_BF16_ZEROS, .n = 40, .k = 640},
        {.format = MT_PACKED_INT4R, .scale = MT_SCALE_F16, .n = 5, .k = 128},
        {.format = MT_PACKED_NVFP4, .scale = MT_SCALE_E4M3, .n = 40, .k = 576},
        {.format = MT_PACKED_NVFP4, .scale = MT_SCALE_E4M3_OVER, .n = 20, .k = 128},
        {.format = MT_PACKED_FP8, .scale = MT_SCALE_BF16, .n = 132, .k = 192},
        {.format = MT_PACKED_FP8, .scale = MT_SCALE_F32, .n = 33, .k = 576},
        {.format = MT_PACKED_FP8T, .scale = MT_SCALE_F32, .n = 30, .k = 64},
        {.format = MT_PACKED_FP8R, .scale = MT_SCALE_E8M0, .n = 34, .k = 320},
        {.format = MT_PACKED_FP8_32, .scale = MT_SCALE_F32, .n = 70, .k = 192},
        {.format = MT_PACKED_FP8_1X64, .scale = MT_SCALE_BF16, .n = 34, .k = 320},
        {.format = MT_PACKED_FP8_1X32, .scale = MT_SCALE_E8M0, .n = 5, .k = 576},
    };
    enum { ENDS = 16 };
    for (size_t i = 0; i < MT_ARRAY_LEN(of) * ENDS && h->dtype == MT_BF16; i++) {
        struct product p = of[i / ENDS];
        bool more = i & 8;
        p.bias = i & 1;
        p.c = i & 2;
        p.f32 = i & 4;
        p.m = more ? (p.bias ? 37 : 33) : (p.bias ? 8 : 7);
        product_case(h, &p);
    }
}

DEVICE_TEST(decode_refuses_what_it_cannot)
{
    struct dbuf *b = buf_nan(h, MT_F32, 256);
    struct mt_decode ok = {.rows = 2, .cols = 32, .dtype = h->dtype, .format = MT_PACKED_MXFP4,
                           .scale = MT_SCALE_E8M0, .codes = b->p, .scales = b->p, .out = (float *)b->p + 128};
    struct mt_decode bad = ok;
    bad.cols = 20;
    expect_rejected(h, "mxfp4 of part of a block", mt_op_decode(h->dev, &bad, NULL));
    bad = ok;
    bad.scale = MT_SCALE_BF16;
    expect_rejected(h, "mxfp4 with bf16 scales", mt_op_decode(h->dev, &bad, NULL));
    bad = ok;
    bad.format = MT_PACKED_NONE;
    expect_rejected(h, "no format", mt_op_decode(h->dev, &bad, NULL));
    bad = ok;
    bad.nested_scales = b->p;
    expect_rejected(h, "a nested scale without a map", mt_op_decode(h->dev, &bad, NULL));
    bad.nested_map = b->p;
    expect_rejected(h, "nested mxfp4", mt_op_decode(h->dev, &bad, NULL));
    bad = ok;
    bad.format = MT_PACKED_INT4;
    bad.scale = MT_SCALE_F16_ZEROS;
    expect_rejected(h, "zero points that are not there", mt_op_decode(h->dev, &bad, NULL));
    bad.zeros = b->p;
    bad.format = MT_PACKED_INT4_64;
    expect_rejected(h, "a row that is half a group", mt_op_decode(h->dev, &bad, NULL));
    bad = ok;
    bad.codes++;
    expect_rejected(h, "codes out of line", mt_op_decode(h->dev, &bad, NULL));
}

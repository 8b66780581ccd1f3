/* SPDX-License-Identifier: Apache-2.0 */
/* Adapters merged into weights: beside a search for the nearest value in double, and to the bit as on the host. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/packed.h"
#include "device/merge_job.h"
#include "harness.h"

enum { RANK = 5 };

/* A merge with everything on the host, and what is on the device. */
struct merge {
    struct mt_merge_adapter host, dev;
    size_t n, n_scales;
    double *w, *a, *b, *m;
};

static void *words_of(struct harness *h, enum mt_dtype t, size_t n, double spread, double **host, void **dev)
{
    struct dbuf *d = buf_random(h, t, n, spread, host);
    void *p = mt_calloc(n, mt_dtype_size(t));
    *dev = d->p;
    for (size_t i = 0; i < n; i++)
        if (t == MT_BF16)
            ((uint16_t *)p)[i] = mt_f32_to_bf16((float)(*host)[i]);
        else
            ((float *)p)[i] = (float)(*host)[i];
    return p;
}

/* Bytes of host memory on the device. */
static void *uploaded(struct harness *h, const void *bytes, size_t n)
{
    return buf_ints(h, bytes, mt_div_up(n, 4))->p;
}

/* Scales of blocks: between 2^-2 and 2^1, and with signs but where they are bytes. */
static void set_scales(struct harness *h, struct merge *c)
{
    static const float factor = 0.37f;
    struct mt_decode *d = &c->host.of, *to = &c->dev.of;
    if (mt_packed_factor_name(d->scale)) {
        d->factor = &factor;
        to->factor = uploaded(h, &factor, sizeof(factor));
    }
    if (c->host.rescale)
        return;
    double *values;
    void *p;
    if (d->scale == MT_SCALE_F32 || d->scale == MT_SCALE_BF16) {
        d->scales = words_of(h, d->scale == MT_SCALE_BF16 ? MT_BF16 : MT_F32, c->n_scales, 0.5, &values, &p);
        to->scales = p;
        return;
    }
    uint8_t *bytes = mt_calloc(mt_div_up(c->n_scales, 4), 4);
    bool e4m3 = mt_packed_factor_name(d->scale);
    for (size_t i = 0; i < c->n_scales; i++)
        bytes[i] = (uint8_t)(e4m3 ? 50 + i % 7 : 125 + i % 4);
    d->scales = bytes;
    to->scales = uploaded(h, bytes, c->n_scales);
    if (d->scale != MT_SCALE_NESTED)
        return;
    d->nested_map = words_of(h, MT_F32, 256, 0.5, &values, &p);
    to->nested_map = p;
    d->nested_scales = words_of(h, MT_F32, mt_div_up(c->n_scales, MT_NF4_NESTED), 0.5, &values, &p);
    to->nested_scales = p;
    d->nested_offset = words_of(h, MT_F32, 1, 0.5, &values, &p);
    to->nested_offset = p;
}

static void begin(struct harness *h, struct merge *c, enum mt_packed f, enum mt_scale scale, size_t rows, size_t cols,
                  bool rescale, bool dora)
{
    struct mt_merge_adapter a = {.of = {.rows = rows, .cols = cols, .dtype = h->dtype, .format = f, .scale = scale},
                                 .rescale = rescale, .r = RANK, .s = 0.75f};
    void *dev[4] = {NULL};
    c->n = rows * cols;
    c->n_scales = f ? mt_packed_n_scales(f, rows, cols) : 0;
    c->host = a;
    c->host.of.out = words_of(h, h->dtype, c->n, 1, &c->w, &dev[0]);
    c->host.a = words_of(h, h->dtype, RANK * cols, 0.5, &c->a, &dev[1]);
    c->host.b = words_of(h, h->dtype, rows * RANK, 0.5, &c->b, &dev[2]);
    c->host.magnitude = dora ? words_of(h, h->dtype, rows, 1, &c->m, &dev[3]) : NULL;
    c->host.scale = dora ? mt_calloc(rows, sizeof(float)) : NULL;
    c->host.inverse = dora ? mt_calloc(rows, sizeof(float)) : NULL;
    c->dev = c->host;
    c->dev.of.out = dev[0];
    c->dev.a = dev[1];
    c->dev.b = dev[2];
    c->dev.magnitude = dev[3];
    c->dev.scale = dora ? buf_nan(h, MT_F32, rows)->p : NULL;
    c->dev.inverse = dora ? buf_nan(h, MT_F32, rows)->p : NULL;
    if (f)
        set_scales(h, c);
}

static void end(struct merge *c)
{
    void *all[] = {c->host.of.out, (void *)(uintptr_t)c->host.a, (void *)(uintptr_t)c->host.b, c->host.scale,
                   (void *)(uintptr_t)c->host.magnitude, c->host.inverse, (void *)(uintptr_t)c->host.of.scales,
                   (void *)(uintptr_t)c->host.of.nested_map, (void *)(uintptr_t)c->host.of.nested_scales,
                   (void *)(uintptr_t)c->host.of.nested_offset};
    for (size_t i = 0; i < MT_ARRAY_LEN(all); i++)
        free(all[i]);
}

/* g (W + s B A) */
static double sum_at(const struct merge *c, size_t i)
{
    size_t cols = c->host.of.cols, row = i / cols, col = i % cols;
    double x = c->w[i], sum = 0;
    for (size_t k = 0; k < RANK; k++)
        sum += c->b[row * RANK + k] * c->a[k * cols + col];
    return x + (double)c->host.s * sum;
}

static double factor(const struct merge *c, size_t row)
{
    double sum = 0;
    for (size_t col = 0; c->m && col < c->host.of.cols; col++)
        sum += pow(sum_at(c, row * c->host.of.cols + col), 2);
    return c->host.magnitude ? c->m[row] / sqrt(sum) : 1;
}

/* The least distance of a value of the format from x. */
static double nearest(const struct merge *c, double x, float scale)
{
    const struct mt_packed_format *f = &mt_packed_formats[c->host.of.format];
    double least = INFINITY;
    for (int k = 0; k < (f->bytes ? 256 : 16); k++) {
        double v = (double)(f->bytes ? mt_e4m3_to_f32((uint8_t)k) : f->values[k]) * (double)scale;
        least = isnan(v) ? least : fmin(least, fabs(x - v));
    }
    return least;
}

static size_t block_of(const struct merge *c, size_t i)
{
    return mt_packed_scale_at(c->host.of.format, c->host.of.cols, i);
}

static void scaled_case(struct harness *h, enum mt_packed f, enum mt_scale scale, size_t rows, size_t cols, bool rescale,
                        bool dora)
{
    struct merge c = {.n = 0};
    begin(h, &c, f, scale, rows, cols, rescale, dora);
    uint8_t *codes = mt_calloc(c.n + 1, 1);
    float *scales = mt_calloc(c.n_scales + 1, sizeof(float)), *values = mt_calloc(c.n, sizeof(float));
    double *got, *want = scratch(h, c.n), off = 0;
    size_t differ = 0, moved = 0;
    for (size_t r = 0; dora && r < rows; r++)
        mt_merge_adapter_norm(&c.host, r);
    for (size_t j = 0; j < mt_merge_adapter_n_jobs(&c.host); j++)
        differ += mt_merge_adapter_job(&c.host, j, codes, scales);
    RUN(h, mt_op_merge_adapter, &c.dev);
    struct dbuf out = {.p = c.dev.of.out, .n = c.n, .dtype = h->dtype};
    got = buf_get(h, &out);
    if (f)
        mt_packed_values(&(struct mt_packed_view){f, cols, codes, scales, NULL}, 0, c.n, values); /* the codes are those weights */
    for (size_t i = 0; i < c.n; i++) {
        double x = sum_at(&c, i) * factor(&c, i / cols);
        float v = f ? values[i] : mt_bf16_to_f32(mt_f32_to_bf16((float)x));
        want[i] = (double)(h->dtype == MT_BF16 ? mt_bf16_to_f32(mt_f32_to_bf16(v)) : v);
        moved += got[i] != c.w[i];
        double least = f ? nearest(&c, x, scales[block_of(&c, i)]) : fabs(x) / 256;
        off = fmax(off, fabs(got[i] - x) - least - fmax(fabs(x), fabs(got[i])) / 200 - 1e-5);
        if (f && (float)got[i] != (float)want[i])
            off = INFINITY;
    }
    if (off > 0 || isnan(off) || moved != differ || !moved)
        expect_close(h, mt_packed_names[f], &off, &(double){0}, 1, 0);
    double *host = scratch(h, c.n);
    for (size_t i = 0; i < c.n; i++)
        host[i] = (double)(h->dtype == MT_BF16 ? mt_bf16_to_f32(((uint16_t *)c.host.of.out)[i]) : ((float *)c.host.of.out)[i]);
    for (size_t i = 0; i < c.n; i++)
        if (memcmp(&host[i], &got[i], sizeof(*got))) {
            expect_close(h, "as on the host", &got[i], &host[i], 1, 0);
            break;
        }
    free(codes);
    free(scales);
    free(values);
    end(&c);
    buffers_done(h);
}

static void merge_case(struct harness *h, enum mt_packed f, size_t rows, size_t cols, bool rescale, bool dora)
{
    scaled_case(h, f, mt_packed_formats[f].scale, rows, cols, rescale, dora);
}

DEVICE_TEST(merge_adapter)
{
    static const enum mt_scale fp8_scales[] = {MT_SCALE_F32, MT_SCALE_BF16, MT_SCALE_E8M0};
    static const size_t shape[][2] = {{8, 64}, {1, 32}, {7, 96}, {130, 160}, {260, 320}};
    for (int f = MT_PACKED_NONE; f < MT_N_PACKED; f++) /* int4 only in its usual groups */
        for (size_t i = 0; i < MT_ARRAY_LEN(shape) && (f == MT_PACKED_INT4 || mt_packed_kind(f) != MT_PACKED_INT4); i++) {
            merge_case(h, (enum mt_packed)f, shape[i][0], shape[i][1], false, i == 2);
            if (f && f < MT_N_PACKABLE)
                merge_case(h, (enum mt_packed)f, shape[i][0], shape[i][1], true, i == 3);
        }
    merge_case(h, MT_PACKED_NF4, 5, 67, false, false); /* blocks across rows, and a part of one */
    merge_case(h, MT_PACKED_NF4, 300, 67, true, true);
    merge_case(h, MT_PACKED_NONE, 3, 5, false, true);
    merge_case(h, MT_PACKED_MXFP4, 16, 6, true, false);
    merge_case(h, MT_PACKED_FP8, 3, 5, true, false);
    for (size_t i = 0; i < MT_ARRAY_LEN(fp8_scales); i++) {
        scaled_case(h, MT_PACKED_FP8, fp8_scales[i], 129, 128, false, true);
        scaled_case(h, MT_PACKED_FP8T, fp8_scales[i], 5, 7, false, false);
    }
    scaled_case(h, MT_PACKED_NF4, MT_SCALE_NESTED, 260, 128, false, false); /* several groups of nested scales */
    scaled_case(h, MT_PACKED_NF4, MT_SCALE_NESTED, 5, 67, false, false);
    for (int rescale = 0; rescale < 2; rescale++) {
        scaled_case(h, MT_PACKED_NVFP4, MT_SCALE_E4M3, 9, 80, rescale, false);
        scaled_case(h, MT_PACKED_NVFP4, MT_SCALE_E4M3_OVER, 300, 64, rescale, true);
    }
    scaled_case(h, MT_PACKED_FP8R, MT_SCALE_BF16, 130, 40, false, true);
}

DEVICE_TEST(merge_adapter_refuses_what_it_cannot)
{
    struct dbuf *b = buf_nan(h, MT_F32, 64);
    struct mt_merge_adapter bad = {.of = {.rows = 1, .cols = 32, .dtype = h->dtype, .format = MT_PACKED_INT4R,
                                          .scale = MT_SCALE_BF16, .scales = b->p, .out = b->p},
                                   .r = 1, .s = 1, .a = b->p, .b = b->p};
    expect_rejected(h, "int4 in other groups", mt_op_merge_adapter(h->dev, &bad, NULL));
    bad.of.format = MT_PACKED_INT4;
    bad.of.scale = MT_SCALE_F16_ZEROS;
    expect_rejected(h, "zero points", mt_op_merge_adapter(h->dev, &bad, NULL));
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "base/pack.h"

#include <math.h>

#include "base/mem.h"

enum { RUN = MT_NF4_BLOCK * MT_NF4_NESTED }; /* elements */

size_t mt_pack_n_jobs(enum mt_packed f, size_t rows, size_t cols)
{
    return f == MT_PACKED_FP8 ? mt_packed_n_scales(f, rows, cols) : mt_div_up(rows * cols, RUN);
}

static float largest(const float *w, size_t n)
{
    float most = 0;
    for (size_t i = 0; i < n; i++)
        most = fabsf(w[i]) > most ? fabsf(w[i]) : most;
    return most;
}

static void put_nibble(uint8_t *codes, size_t i, unsigned code, bool high_first)
{
    uint8_t *c = &codes[i / 2];
    bool high = high_first == (i % 2 == 0);
    *c = (uint8_t)(high ? (*c & 15) | code << 4 : (*c & 0xf0) | code);
}

/* How many of n ascending bounds are below x. */
static unsigned count_below(const float *bound, int n, float x)
{
    unsigned at = 0;
    for (int k = 0; k < n; k++)
        at += x > bound[k];
    return at;
}

static float clamp(float x, float most)
{
    return x < -most ? -most : x > most ? most : x;
}

static float clamp1(float x)
{
    return clamp(x, 1);
}

/* To the nearest, ties away from zero or to even codes; larger values become the largest. */
static unsigned e2m1(float x, bool to_even)
{
    static const float half_way[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5};
    unsigned at = 0;
    for (int k = 0; k < 7; k++)
        at += to_even && k % 2 == 0 ? fabsf(x) > half_way[k] : fabsf(x) >= half_way[k];
    return at | (signbit(x) ? 8u : 0);
}

static uint8_t e4m3(float x)
{
    return mt_f32_to_e4m3(clamp(x, 448));
}

float mt_pack_scale(enum mt_packed f, const float *w, size_t n)
{
    float most = largest(w, n);
    if (f == MT_PACKED_NF4)
        return most;
    if (f == MT_PACKED_MXFP4) {
        uint32_t bits = (mt_f32_bits(most / 6.0f) + 0x7fffffu) & 0x7f800000u;
        return bits ? mt_f32_from_bits(bits) : 0x1p-127f; /* the value of byte 0 */
    }
    if (f == MT_PACKED_INT4)
        return most > 0 ? mt_bf16_to_f32(mt_f32_to_bf16(most / 7.5f)) : 0x1p-7f;
    return 1.0f / (most > 0 ? 1.0f / most * 448.0f : 1); /* as torch divides a number by a tensor */
}

float mt_pack_e4m3_scale(enum mt_scale type, float factor, const float *w, size_t n)
{
    float most = largest(w, n) / 6.0f;
    return mt_e4m3_scale(type, mt_pack_e4m3_byte(type, factor, most), factor);
}

float mt_pack_nvfp4_factor(float largest)
{
    float factor = 448.0f * 6.0f / largest;
    return factor > 0 && isfinite(factor) ? factor : 1;
}

uint8_t mt_pack_e4m3_byte(enum mt_scale type, float factor, float scale)
{
    uint8_t byte = e4m3(type == MT_SCALE_E4M3 ? scale / factor : scale * factor);
    return byte ? byte : 1;
}

void mt_pack_scales(enum mt_scale type, float factor, const float *scales, size_t n, void *out)
{
    for (size_t i = 0; i < n; i++) /* never wider than what is read */
        if (type == MT_SCALE_E8M0)
            ((uint8_t *)out)[i] = mt_f32_to_e8m0(scales[i]);
        else if (type == MT_SCALE_BF16)
            ((uint16_t *)out)[i] = mt_f32_to_bf16(scales[i]);
        else if (mt_packed_factor_name(type))
            ((uint8_t *)out)[i] = mt_pack_e4m3_byte(type, factor, scales[i]);
        else
            ((float *)out)[i] = scales[i];
}

void mt_pack_codes(enum mt_packed f, const float *w, size_t n, float scale, uint8_t *code)
{
    float bound[15], least = f == MT_PACKED_NF4 ? 1e-38f : 0x1p-127f;
    float unit = fabsf(scale) < least ? copysignf(least, scale) : scale, inverse = 1.0f / unit;
    for (int k = 0; k < 15; k++)
        bound[k] = (mt_nf4_values[k] + mt_nf4_values[k + 1]) / 2;
    for (size_t i = 0; i < n; i++)
        if (f == MT_PACKED_NF4)
            code[i] = (uint8_t)count_below(bound, 15, clamp1(w[i] * inverse));
        else if (mt_packed_formats[f].values == mt_fp4_values)
            code[i] = (uint8_t)e2m1(w[i] * inverse, f == MT_PACKED_NVFP4);
        else if (f == MT_PACKED_INT4)
            code[i] = (uint8_t)(8 + MT_MAX(-8, MT_MIN(7, (int)rintf(clamp(w[i] / unit, 16)))));
        else
            code[i] = e4m3(w[i] * inverse);
}

void mt_pack_put(enum mt_packed f, uint8_t *codes, size_t first, const uint8_t *code, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (mt_packed_formats[f].bytes)
            codes[first + i] = code[i];
        else
            put_nibble(codes, first + i, code[i], f == MT_PACKED_NF4);
}

/* As bitsandbytes does, an incomplete last block is divided by its scale, others are multiplied by the reciprocal. */
static void nf4_block(const float *w, size_t n, uint8_t *codes, float *scale)
{
    uint8_t code[MT_NF4_BLOCK];
    float x[MT_NF4_BLOCK], most = mt_pack_scale(MT_PACKED_NF4, w, n);
    if (n < MT_NF4_BLOCK && most < 1e-38f)
        most = 1e-38f;
    for (size_t i = 0; i < n && n < MT_NF4_BLOCK; i++)
        x[i] = w[i] / most;
    mt_pack_codes(MT_PACKED_NF4, n < MT_NF4_BLOCK ? x : w, n, n < MT_NF4_BLOCK ? 1 : most, code);
    mt_pack_put(MT_PACKED_NF4, codes, 0, code, n);
    if (n % 2)
        put_nibble(codes, n, 7, true); /* bitsandbytes pads with a zero */
    *scale = most;
}

/* A part of a row, of MXFP4, INT4 or NVFP4. */
static void row_block(enum mt_packed f, float factor, const float *w, uint8_t *codes, float *scale)
{
    uint8_t code[MT_NF4_BLOCK];
    size_t n = mt_packed_formats[f].block;
    *scale = f == MT_PACKED_NVFP4 ? mt_pack_e4m3_scale(MT_SCALE_E4M3_OVER, factor, w, n) : mt_pack_scale(f, w, n);
    mt_pack_codes(f, w, n, *scale, code);
    mt_pack_put(f, codes, 0, code, n);
}

static void fp8_block(size_t rows, size_t cols, const float *w, size_t i, uint8_t *codes, float *scales)
{
    size_t per_row = mt_div_up(cols, MT_FP8_BLOCK), row = i / per_row * MT_FP8_BLOCK, col = i % per_row * MT_FP8_BLOCK;
    size_t end = MT_MIN(rows, row + MT_FP8_BLOCK), n = MT_MIN(cols - col, (size_t)MT_FP8_BLOCK);
    float most = 0, up;
    for (size_t r = row; r < end; r++) {
        float m = largest(w + r * cols + col, n);
        most = m > most ? m : most;
    }
    up = most > 0 ? 1.0f / most * 448.0f : 1;
    scales[i] = mt_pack_scale(MT_PACKED_FP8, &most, 1);
    for (size_t r = row; r < end; r++)
        for (size_t c = r * cols + col; c < r * cols + col + n; c++)
            codes[c] = e4m3(w[c] * up);
}

void mt_pack_job(const struct mt_pack *p, const float *w, size_t i, uint8_t *codes, float *scales)
{
    enum mt_packed f = p->format;
    size_t n = p->rows * p->cols, end = MT_MIN(n, (i + 1) * RUN);
    if (f == MT_PACKED_FP8) {
        fp8_block(p->rows, p->cols, w, i, codes, scales);
        return;
    }
    size_t block = mt_packed_formats[f].block;
    for (size_t at = i * RUN; at < end; at += block) {
        if (f == MT_PACKED_NF4)
            nf4_block(w + at, MT_MIN(block, n - at), codes + at / 2, &scales[at / block]);
        else
            row_block(f, p->factor, w + at, codes + at / 2, &scales[at / block]);
    }
}

/* torch.linspace(0.1, 1, items + 1)[k]: counted from the nearer end, rounded once. */
static float linspace(float step, int k, int items)
{
    return k < (items + 1) / 2 ? fmaf(step, (float)k, 0.1f) : fmaf(-step, (float)(items - k), 1);
}

/* Decades from 10^-6 to 1, each with twice as many fractions as the one before. */
void mt_pack_nested_map(float map[256])
{
    int n = 0;
    map[n++] = 0;
    map[n++] = 1;
    for (int e = 0; e < 7; e++) {
        int items = 1 << e;
        float step = 0.9f / (float)items;
        for (int k = 0; k < items; k++) {
            float mean = (linspace(step, k, items) + linspace(step, k + 1, items)) / 2;
            float v = (float)pow(10, e - 6) * mean;
            map[n++] = v;
            map[n++] = -v;
        }
    }
    for (int i = 1; i < n; i++)
        for (int k = i; k > 0 && map[k] < map[k - 1]; k--) {
            float t = map[k];
            map[k] = map[k - 1];
            map[k - 1] = t;
        }
}

void mt_pack_nest(const float *scales, size_t n, const float map[256], uint8_t *bytes, float *nested, float *offset)
{
    double sum = 0;
    float bound[255];
    for (size_t i = 0; i < n; i++)
        sum += (double)scales[i];
    *offset = n ? (float)(sum / (double)n) : 0;
    for (int k = 0; k < 255; k++)
        bound[k] = (map[k] + map[k + 1]) / 2;
    for (size_t at = 0; at < n; at += MT_NF4_NESTED) {
        size_t end = MT_MIN(n, at + MT_NF4_NESTED);
        bool whole = end - at == MT_NF4_NESTED;
        float most = 0;
        for (size_t i = at; i < end; i++) {
            float m = fabsf(scales[i] - *offset);
            most = m > most ? m : most;
        }
        if (!whole && most < 1e-38f)
            most = 1e-38f;
        float inverse = 1.0f / (most < 1e-38f ? 1e-38f : most);
        for (size_t i = at; i < end; i++) {
            float x = scales[i] - *offset;
            bytes[i] = (uint8_t)count_below(bound, 255, clamp1(whole ? x * inverse : x / most));
        }
        nested[at / MT_NF4_NESTED] = most;
    }
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of either dtype as f32 and back; sums in fixed lanes, and of columns; gather, scatter. */
#include <string.h>

#include "device/cpu/cpu.h"

MT_HOT static void bf16_to_f32(float *restrict dst, const uint16_t *restrict src, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = mt_bf16_to_f32(src[i]);
}

MT_HOT static void f32_to_bf16(uint16_t *restrict dst, const float *restrict src, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t u = mt_f32_bits(src[i]);
        uint32_t nan = (u >> 16) | 0x40, even = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
        dst[i] = (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? nan : even);
    }
}

const float *mt_cpu_row_f32(enum mt_dtype t, const void *base, size_t first, size_t n, float *tmp)
{
    if (t == MT_F32)
        return (const float *)base + first;
    bf16_to_f32(tmp, (const uint16_t *)base + first, n);
    return tmp;
}

float *mt_cpu_row_place(enum mt_dtype t, void *base, size_t first, float *tmp)
{
    return t == MT_F32 ? (float *)base + first : tmp;
}

void mt_cpu_store_row(enum mt_dtype t, void *base, size_t first, size_t n, const float *src)
{
    if (t == MT_BF16)
        f32_to_bf16((uint16_t *)base + first, src, n);
    else if ((float *)base + first != src)
        memcpy((float *)base + first, src, n * sizeof(float));
}

float mt_cpu_element(enum mt_dtype t, const void *base, size_t i)
{
    return t == MT_F32 ? ((const float *)base)[i] : mt_bf16_to_f32(((const uint16_t *)base)[i]);
}

void mt_cpu_load_row(float *dst, enum mt_dtype t, const void *base, size_t first, size_t n)
{
    const float *src = mt_cpu_row_f32(t, base, first, n, dst);
    if (src != dst)
        memcpy(dst, src, n * sizeof(*dst));
}

MT_HOT void mt_cpu_round_row(enum mt_dtype t, float *row, size_t n)
{
    if (t == MT_F32)
        return;
    for (size_t i = 0; i < n; i++) {
        uint32_t u = mt_f32_bits(row[i]);
        uint32_t even = (u + 0x7fffu + ((u >> 16) & 1)) & 0xffff0000u;
        row[i] = mt_f32_from_bits((u & 0x7fffffffu) > 0x7f800000u ? u : even);
    }
}

/* The lanes are added as a tree, so that the order is fixed and short. */
static inline float add_lanes(float lane[MT_LANES])
{
    for (int width = MT_LANES / 2; width; width /= 2)
        for (int k = 0; k < width; k++)
            lane[k] += lane[k + width];
    return lane[0];
}

MT_HOT float mt_cpu_dot(const float *restrict a, const float *restrict b, size_t n)
{
    float lane[MT_LANES] = {0};
    size_t i = 0;
    for (; i + MT_LANES <= n; i += MT_LANES)
        for (int k = 0; k < MT_LANES; k++)
            lane[k] += a[i + (size_t)k] * b[i + (size_t)k];
    for (int k = 0; i < n; i++, k++)
        lane[k] += a[i] * b[i];
    return add_lanes(lane);
}

MT_HOT float mt_cpu_sum(const float *a, size_t n)
{
    float lane[MT_LANES] = {0};
    size_t i = 0;
    for (; i + MT_LANES <= n; i += MT_LANES)
        for (int k = 0; k < MT_LANES; k++)
            lane[k] += a[i + (size_t)k];
    for (int k = 0; i < n; i++, k++)
        lane[k] += a[i];
    return add_lanes(lane);
}

float mt_cpu_dot_rows(enum mt_dtype t, const void *a, size_t i, const void *b, size_t j, size_t n)
{
    float x[MT_CPU_DOT], y[MT_CPU_DOT], sum = 0;
    for (size_t at = 0; at < n; at += MT_CPU_DOT) {
        size_t some = MT_MIN((size_t)MT_CPU_DOT, n - at);
        const float *p = mt_cpu_row_f32(t, a, i + at, some, x);
        sum += mt_cpu_dot(p, a == b && i == j ? p : mt_cpu_row_f32(t, b, j + at, some, y), some);
    }
    return sum;
}

MT_HOT void mt_cpu_scale(float *y, const float *x, float by, size_t n)
{
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++)
        y[i] = by * x[i];
}

MT_HOT void mt_cpu_multiply(float *y, const float *a, const float *b, size_t n)
{
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++)
        y[i] = a[i] * b[i];
}

MT_HOT void mt_cpu_add_scaled(float *y, const float *x, float by, size_t n)
{
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++)
        y[i] += by * x[i];
}

MT_HOT void mt_cpu_add_products(float *y, const float *a, const float *b, size_t n)
{
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++)
        y[i] += a[i] * b[i];
}

MT_HOT float mt_cpu_max(const float *x, size_t n)
{
    float lane[MT_LANES];
    for (int k = 0; k < MT_LANES; k++)
        lane[k] = x[0];
    size_t i = 0;
    for (; i + MT_LANES <= n; i += MT_LANES)
        for (int k = 0; k < MT_LANES; k++)
            lane[k] = x[i + (size_t)k] > lane[k] ? x[i + (size_t)k] : lane[k];
    for (int k = 0; i < n; i++, k++)
        lane[k] = x[i] > lane[k] ? x[i] : lane[k];
    for (int k = 1; k < MT_LANES; k++)
        lane[0] = lane[k] > lane[0] ? lane[k] : lane[0];
    return lane[0];
}

/* dst += the partial rows, in order; a chunk is a range of columns. */
struct fold_job {
    float *dst;
    const float *partials;
    size_t n_partials, c;
};

enum { FOLD_COLUMNS = 512 };

static void fold_chunk(void *ctx, size_t chunk, int)
{
    const struct fold_job *j = ctx;
    size_t c = chunk * FOLD_COLUMNS, n = MT_MIN((size_t)FOLD_COLUMNS, j->c - c);
    float sum[FOLD_COLUMNS] = {0};
    for (size_t p = 0; p < j->n_partials; p++)
        for (size_t k = 0; k < n; k++)
            sum[k] += j->partials[p * j->c + c + k];
    for (size_t k = 0; k < n; k++)
        j->dst[c + k] += sum[k];
}

void mt_cpu_fold(struct mt_cpu_device *d, float *dst, const void *partials, size_t n_partials, size_t c)
{
    struct fold_job j = {dst, partials, n_partials, c};
    mt_pool_run(d->pool, fold_chunk, &j, mt_div_up(c, FOLD_COLUMNS));
}

struct rows_job {
    void (*row)(const void *args, size_t r);
    void (*summed)(const void *args, size_t r, float *sums);
    const void *args;
    size_t n, block;
    struct mt_cpu_sums s;
};

static void rows_chunk(void *ctx, size_t chunk, int)
{
    const struct rows_job *j = ctx;
    for (size_t r = chunk * j->block, end = MT_MIN(j->n, r + j->block); r < end; r++)
        j->row(j->args, r);
}

void mt_cpu_by_rows(struct mt_cpu_device *d, void (*row)(const void *args, size_t r), const void *args, size_t n,
                    size_t c)
{
    struct rows_job j = {.row = row, .args = args, .n = n, .block = mt_cpu_rows_per_chunk(c)};
    mt_pool_run(d->pool, rows_chunk, &j, mt_div_up(n, j.block));
}

static void sums_block(void *ctx, size_t block, int)
{
    const struct rows_job *j = ctx;
    float *sums = j->s.dst ? (float *)j->s.workspace + block * j->s.width : NULL;
    if (sums)
        memset(sums, 0, j->s.width * sizeof(*sums));
    for (size_t r = block * j->block, end = MT_MIN(j->n, r + j->block); r < end; r++)
        j->summed(j->args, r, sums);
}

void mt_cpu_sum_rows(struct mt_cpu_device *d, void (*row)(const void *args, size_t r, float *sums), const void *args,
                     size_t n, struct mt_cpu_sums s)
{
    struct rows_job j = {.summed = row, .args = args, .n = n, .block = s.block, .s = s};
    size_t blocks = mt_div_up(n, s.block);
    mt_pool_run(d->pool, sums_block, &j, blocks);
    if (s.dst)
        mt_cpu_fold(d, s.dst, s.workspace, blocks, s.width);
}

enum { BIAS_ROWS = 64, BIAS_PIECE = 2048 };

MT_CPU_SUMS(bias_bwd, n, BIAS_ROWS, a->c)

static void bias_chunk(void *ctx, size_t chunk, int)
{
    const struct mt_bias_bwd *a = ctx;
    float *sum = (float *)a->workspace + chunk * a->c, tmp[BIAS_PIECE], own[BIAS_PIECE];
    size_t end = MT_MIN(a->n, (chunk + 1) * BIAS_ROWS);
    memset(sum, 0, a->c * sizeof(float));
    for (size_t r = chunk * BIAS_ROWS; r < end; r++)
        for (size_t c = 0; c < a->c; c += BIAS_PIECE) {
            size_t n = MT_MIN((size_t)BIAS_PIECE, a->c - c);
            const float *x = mt_cpu_row_f32(a->dtype, a->dy, r * a->ld + c, n, tmp);
            if (a->x)
                mt_cpu_add_products(sum + c, x, mt_cpu_row_f32(a->dtype, a->x, r * a->ld + c, n, own), n);
            else
                mt_cpu_add_scaled(sum + c, x, 1, n);
        }
    if (a->scale)
        mt_cpu_multiply(sum, sum, a->scale, a->c);
}

void mt_cpu_run_bias_bwd(struct mt_cpu_device *d, const struct mt_bias_bwd *a)
{
    size_t blocks = mt_div_up(a->n, BIAS_ROWS);
    mt_pool_run(d->pool, bias_chunk, (void *)(uintptr_t)a, blocks);
    mt_cpu_fold(d, a->db, a->workspace, blocks, a->c);
}

static void gather_row(const void *args, size_t r)
{
    const struct mt_rows *a = args;
    size_t bytes = a->c * mt_dtype_size(a->dtype);
    memcpy((char *)a->dst + r * bytes, (const char *)a->src + (size_t)a->rows[r] * bytes, bytes);
}

void mt_cpu_run_gather_rows(struct mt_cpu_device *d, const struct mt_rows *a)
{
    mt_cpu_by_rows(d, gather_row, a, a->n, a->c);
}

static void scatter_chunk(void *ctx, size_t chunk, int)
{
    const struct mt_rows *a = ctx;
    size_t per = mt_cpu_rows_per_chunk(a->c), bytes = a->c * mt_dtype_size(a->dtype);
    size_t first = chunk * per, end = MT_MIN(a->n_dst, first + per), lo = 0, hi = a->n;
    while (lo < hi) { /* first source row of this chunk */
        size_t mid = (lo + hi) / 2;
        if ((size_t)a->rows[mid] < first)
            lo = mid + 1;
        else
            hi = mid;
    }
    for (size_t i = first; i < end; i++) {
        char *dst = (char *)a->dst + i * bytes;
        if (lo < a->n && (size_t)a->rows[lo] == i)
            memcpy(dst, (const char *)a->src + lo++ * bytes, bytes);
        else
            memset(dst, 0, bytes);
    }
}

void mt_cpu_run_scatter_rows(struct mt_cpu_device *d, const struct mt_rows *a)
{
    mt_pool_run(d->pool, scatter_chunk, (void *)(uintptr_t)a, mt_div_up(a->n_dst, mt_cpu_rows_per_chunk(a->c)));
}

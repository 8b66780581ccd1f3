/* SPDX-License-Identifier: Apache-2.0 */
/* Adapters merged into weights, block by block. */
#include <math.h>
#include <string.h>

#include "base/pack.h"
#include "device/cpu/cpu.h"
#include "device/merge_job.h"

enum { JOB = MT_NF4_BLOCK * MT_NF4_NESTED, STRIP = 512, NORM_LANES = 32, NORM_PIECE = 2048 };
_Static_assert(JOB == MT_FP8_BLOCK * MT_FP8_BLOCK, "a job must be a block of FP8");

size_t mt_merge_adapter_n_jobs(const struct mt_merge_adapter *a)
{
    size_t rows = a->of.rows, cols = a->of.cols;
    return a->of.format ? mt_pack_n_jobs(a->of.format, rows, cols) : mt_div_up(rows * cols, JOB);
}

MT_HOT static void add_to(float *x, const float *w, const float *sum, float s, size_t n)
{
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++)
        x[i] = w[i] + s * sum[i];
}

/* W + s B A of columns [col, col + n) of a row. */
static void sum_of(const struct mt_merge_adapter *a, size_t row, size_t col, size_t n, float *x)
{
    enum mt_dtype t = a->of.dtype;
    float sum[STRIP], tmp[STRIP];
    for (size_t at = 0, k; at < n; at += k) {
        k = MT_MIN(n - at, (size_t)STRIP);
        memset(sum, 0, k * sizeof(*sum));
        for (size_t i = 0; i < a->r; i++)
            mt_cpu_add_scaled(sum, mt_cpu_row_f32(t, a->a, i * a->of.cols + col + at, k, tmp),
                              mt_cpu_element(t, a->b, row * a->r + i), k);
        add_to(x + at, mt_cpu_row_f32(t, a->of.out, row * a->of.cols + col + at, k, tmp), sum, a->s, k);
    }
}

MT_HOT static void add_squares(float *lanes, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i += NORM_LANES)
        for (size_t k = 0; k < MT_MIN(n - i, (size_t)NORM_LANES); k++)
            lanes[k] += x[i + k] * x[i + k];
}

static float norm_of(float *lanes)
{
    for (int half = NORM_LANES / 2; half; half /= 2)
        for (int k = 0; k < half; k++)
            lanes[k] += lanes[k + half];
    return sqrtf(lanes[0]);
}

float mt_merge_row_norm(const float *x, size_t n)
{
    float lanes[NORM_LANES] = {0};
    add_squares(lanes, x, n);
    return norm_of(lanes);
}

void mt_merge_adapter_norm(const struct mt_merge_adapter *a, size_t row)
{
    float lanes[NORM_LANES] = {0}, x[NORM_PIECE], m = mt_cpu_element(a->of.dtype, a->magnitude, row);
    for (size_t c = 0; c < a->of.cols; c += NORM_PIECE) {
        size_t n = MT_MIN(a->of.cols - c, (size_t)NORM_PIECE);
        sum_of(a, row, c, n, x);
        add_squares(lanes, x, n);
    }
    a->scale[row] = m * (1 / norm_of(lanes));
    a->inverse[row] = m ? 1 / m : 0;
}

static float scale_at(const struct mt_decode *d, size_t block)
{
    if (!d->nested_scales)
        return mt_scale_to_f32(d->scale, d->scales, d->factor, block);
    float s = d->nested_map[((const uint8_t *)d->scales)[block]] * d->nested_scales[block / MT_NF4_NESTED];
    return s + *d->nested_offset;
}

static float own_scale(const struct mt_decode *d, const float *x, size_t n)
{
    return d->format == MT_PACKED_NVFP4 ? mt_pack_e4m3_scale(d->scale, *d->factor, x, n)
                                        : mt_pack_scale(d->format, x, n);
}

/* Elements of a job: rows of n from (row, col) on, each in x at its place; flat ones are parts of neighbouring rows. */
struct region {
    size_t row, col, n, rows;
};

static struct region region_of(const struct mt_merge_adapter *a, size_t job)
{
    size_t cols = a->of.cols, at = job * JOB, per_row = mt_div_up(cols, MT_FP8_BLOCK);
    if (a->of.format != MT_PACKED_FP8)
        return (struct region){at / cols, at % cols, MT_MIN((size_t)JOB, a->of.rows * cols - at), 1};
    struct region r = {job / per_row * MT_FP8_BLOCK, job % per_row * MT_FP8_BLOCK, 0, 0};
    r.n = MT_MIN(cols - r.col, (size_t)MT_FP8_BLOCK);
    r.rows = MT_MIN(a->of.rows - r.row, (size_t)MT_FP8_BLOCK);
    return r;
}

/* Stores n new values of neighbouring elements from `first` on; returns how many differ. */
static size_t replace(const struct mt_merge_adapter *a, size_t first, size_t n, float *x)
{
    float tmp[JOB];
    const float *old = mt_cpu_row_f32(a->of.dtype, a->of.out, first, n, tmp);
    size_t differ = 0;
    mt_cpu_round_row(a->of.dtype, x, n);
    for (size_t i = 0; i < n; i++)
        differ += x[i] != old[i];
    mt_cpu_store_row(a->of.dtype, a->of.out, first, n, x);
    return differ;
}

/* Encodes and decodes n elements of a block, which begin at element `first`. */
static void quantise(const struct mt_merge_adapter *a, size_t first, size_t n, float *x, float scale, uint8_t *codes)
{
    const struct mt_packed_format *f = &mt_packed_formats[a->of.format];
    uint8_t code[MT_FP8_BLOCK];
    mt_pack_codes(a->of.format, x, n, scale, code);
    for (size_t i = 0; i < n; i++)
        x[i] = (f->bytes ? mt_e4m3_to_f32(code[i]) : f->values[code[i]]) * scale;
    if (codes)
        mt_pack_put(a->of.format, codes, first, code, n);
}

/* Elements from i on that share its scale and lie end to end; of blocks of several rows, those of its row. */
static size_t own_elems(const struct mt_packed_format *f, size_t cols, size_t i)
{
    if (!f->by_rows)
        return f->block;
    return !f->rows ? SIZE_MAX : MT_MIN(f->block ? f->block - i % cols % f->block : cols, cols - i % cols);
}

size_t mt_merge_adapter_job(const struct mt_merge_adapter *a, size_t job, uint8_t *codes, float *scales)
{
    const struct mt_packed_format *f = &mt_packed_formats[a->of.format];
    struct region r = region_of(a, job);
    float x[JOB];
    bool square = a->of.format == MT_PACKED_FP8;
    size_t cols = a->of.cols, first = r.row * cols + r.col, n = r.n * r.rows, differ = 0;
    for (size_t at = 0, k; at < n; at += k) {
        size_t row = square ? r.row + at / r.n : (first + at) / cols, col = square ? r.col : (first + at) % cols;
        k = MT_MIN(square ? r.n : cols - col, n - at);
        sum_of(a, row, col, k, x + at);
        for (size_t i = 0; a->magnitude && i < k; i++)
            x[at + i] *= a->scale[row];
    }
    if (!a->of.format) /* to bf16 */
        mt_cpu_round_row(MT_BF16, x, n);
    for (size_t at = 0, k; a->of.format && at < n; at += k) {
        size_t i = square ? first : first + at, number = mt_packed_scale_at(a->of.format, cols, i);
        k = MT_MIN(n - at, square ? n : own_elems(f, cols, i));
        float scale = a->rescale ? own_scale(&a->of, x + at, k) : scale_at(&a->of, number);
        for (size_t j = 0, len; j < k; j += len) {
            len = MT_MIN(square ? r.n : (size_t)MT_FP8_BLOCK, k - j);
            quantise(a, square ? i + j / r.n * cols : i + j, len, x + at + j, scale, codes);
        }
        if (scales)
            scales[number] = scale;
    }
    for (size_t i = 0; i < r.rows; i++)
        differ += replace(a, first + i * cols, r.n, x + i * r.n);
    return differ;
}

static void norm_main(void *ctx, size_t row, int)
{
    mt_merge_adapter_norm(ctx, row);
}

static void job_main(void *ctx, size_t job, int)
{
    mt_merge_adapter_job(ctx, job, NULL, NULL);
}

void mt_cpu_run_merge_adapter(struct mt_cpu_device *d, const struct mt_merge_adapter *a)
{
    void *ctx = (void *)(uintptr_t)a;
    if (a->magnitude)
        mt_pool_run(d->pool, norm_main, ctx, a->of.rows);
    mt_pool_run(d->pool, job_main, ctx, mt_merge_adapter_n_jobs(a));
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Loops over s[n][nr], compiled for each width that a strip can have. */
#include "device/cpu/columns.h"

#include "device/cpu/cpu.h"
#include "device/cpu/gemm_kernel.h"
#include "device/cpu/vecmath.h"

enum { PANEL = 512 }; /* rows that are summed before the sum is added to the total */

#define BY_WIDTH(nr, f, ...) \
    do { \
        if ((nr) == 32) \
            f(__VA_ARGS__, 32); \
        else if ((nr) == 16) \
            f(__VA_ARGS__, 16); \
        else \
            f(__VA_ARGS__, nr); \
    } while (0)

MT_HOT_PART void column_max_of(float *restrict max, const float *restrict s, size_t n, size_t nr)
{
    for (size_t j = 0; j < nr; j++)
        max[j] = -INFINITY;
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < nr; j++)
            max[j] = s[i * nr + j] > max[j] ? s[i * nr + j] : max[j];
}

MT_HOT void mt_cpu_column_max(float *restrict max, const float *restrict s, size_t n, size_t nr)
{
    BY_WIDTH(nr, column_max_of, max, s, n);
}

MT_HOT_PART void exp_of(float *restrict s, size_t ld, const float *restrict shift, size_t n, size_t nr)
{
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < nr; j++)
            s[i * ld + j] = mt_exp_negative(s[i * ld + j] - shift[j]);
}

MT_HOT void mt_cpu_exp_columns(float *restrict s, size_t ld, const float *restrict shift, size_t n, size_t nr)
{
    BY_WIDTH(nr, exp_of, s, ld, shift, n);
}

MT_HOT_PART void column_sum_of(float *restrict sum, const float *restrict s, size_t n, size_t nr)
{
    for (size_t j = 0; j < nr; j++)
        sum[j] = 0;
    for (size_t p = 0; p < n; p += PANEL) {
        float part[MT_CPU_GEMM_COLS] = {0};
        for (size_t i = p; i < MT_MIN(n, p + PANEL); i++)
            for (size_t j = 0; j < nr; j++)
                part[j] += s[i * nr + j];
        for (size_t j = 0; j < nr; j++)
            sum[j] += part[j];
    }
}

MT_HOT void mt_cpu_column_sum(float *restrict sum, const float *restrict s, size_t n, size_t nr)
{
    BY_WIDTH(nr, column_sum_of, sum, s, n);
}

MT_HOT_PART void score_gradient_of(float *restrict ds, float *restrict dp, const float *restrict p, size_t ld,
                                   const float *restrict delta, size_t n, size_t nr)
{
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < nr; j++)
            ds[i * ld + j] = dp[i * nr + j] = p[i * ld + j] * (dp[i * nr + j] - delta[j]);
}

MT_HOT void mt_cpu_score_gradient(float *restrict ds, float *restrict dp, const float *restrict p, size_t ld,
                                  const float *restrict delta, size_t n, size_t nr)
{
    BY_WIDTH(nr, score_gradient_of, ds, dp, p, ld, delta, n);
}

MT_HOT void mt_cpu_cap_columns(float *restrict s, size_t ld, float cap, size_t n, size_t nr)
{
    float inverse = 1.0f / cap;
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < nr; j++)
            s[i * ld + j] = cap * mt_tanh_close(s[i * ld + j] * inverse);
}

MT_HOT void mt_cpu_cap_columns_slope(float *restrict s, float *restrict slope, size_t ld, float cap, size_t n,
                                     size_t nr)
{
    float inverse = 1.0f / cap;
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < nr; j++) {
            float t = mt_tanh_close(s[i * ld + j] * inverse);
            s[i * ld + j] = cap * t;
            slope[i * ld + j] = 1.0f - t * t;
        }
}

MT_HOT void mt_cpu_multiply_columns(float *restrict ds, float *restrict dp, const float *restrict slope, size_t ld,
                                    size_t n, size_t nr)
{
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < nr; j++)
            ds[i * ld + j] = dp[i * nr + j] = ds[i * ld + j] * slope[i * ld + j];
}

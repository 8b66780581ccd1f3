/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

/**
 * Softmax down the columns of scores s[n][nr]: columns are queries, rows are keys. nr is the width of a product's
 * strip, at most MT_CPU_GEMM_COLS. The order of a column's sum depends on n alone.
 */
void mt_cpu_column_max(float *restrict max, const float *restrict s, size_t n, size_t nr);
/** s = exp(s - shift), a shift for each column that is not below its scores. Rows are `ld` floats apart. */
void mt_cpu_exp_columns(float *restrict s, size_t ld, const float *restrict shift, size_t n, size_t nr);
void mt_cpu_column_sum(float *restrict sum, const float *restrict s, size_t n, size_t nr);
/** ds = dp = p (dp - delta), a delta for each column. Rows of p and ds are `ld` floats apart, those of dp nr. */
void mt_cpu_score_gradient(float *restrict ds, float *restrict dp, const float *restrict p, size_t ld,
                           const float *restrict delta, size_t n, size_t nr);

/** s = cap tanh(s / cap); rows are `ld` floats apart. */
void mt_cpu_cap_columns(float *restrict s, size_t ld, float cap, size_t n, size_t nr);
/** The same, and slope = the derivative, laid out as s. */
void mt_cpu_cap_columns_slope(float *restrict s, float *restrict slope, size_t ld, float cap, size_t n, size_t nr);
/** ds *= slope and dp *= slope; laid out as in mt_cpu_score_gradient(). */
void mt_cpu_multiply_columns(float *restrict ds, float *restrict dp, const float *restrict slope, size_t ld, size_t n,
                             size_t nr);

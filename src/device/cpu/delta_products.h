/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "device/cpu/cpu.h"
#include "device/cpu/vecmath.h"

/** Small products in FP32 of what a chunk of a linear recurrence has in a thread's workspace: sums in order of k. */

enum { LANES = 16 };

/* A product: element (i, k) of A is at a[i * rs + k * cs]; rows of B and D begin every ldb and ldd elements. */
struct product {
    size_t m, n, k; /* n: a multiple of LANES */
    const float *a;
    size_t rs, cs;
    const float *b;
    size_t ldb;
    float *d;
    size_t ldd;
    float sign; /* D = sign * A B, or with adds D += that */
    bool adds;
    bool lower, upper; /* A is 0 above its diagonal; below it: these are left out */
    bool half;         /* D is not read above its diagonal, and need not be computed there */
};

/* Rows of X, in order: x_i -= sum over j < i of a_ij x_j. */
struct substitution {
    size_t rows, n; /* n: a multiple of LANES */
    const float *a;
    size_t lda;
    float *x;
    size_t ldx;
};

/* Their functions for an instruction set. All give the same bits: no multiply-add is fused. */
struct mt_cpu_products {
    void (*multiply)(const struct product *x);
    void (*substitute)(const struct substitution *s);
};
/** Those of the instruction set that matrix products have. */
const struct mt_cpu_products *mt_cpu_products(const struct mt_cpu_gemm *g);

MT_HOT static inline void scale_row(float *y, const float *x, float by, size_t n)
{
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++)
        y[i] = x[i] * by;
}

MT_HOT static inline void add_row(float *y, const float *x, float by, size_t n)
{
    MT_INDEPENDENT
    for (size_t i = 0; i < n; i++)
        y[i] += x[i] * by;
}

/* A sum in double, in LANES fixed lanes; n is a multiple of LANES. */
MT_HOT static inline double dot(const float *x, const float *y, size_t n)
{
    double lane[LANES] = {0}, sum = 0;
    for (size_t i = 0; i < n; i += LANES)
        for (size_t l = 0; l < LANES; l++)
            lane[l] += (double)x[i + l] * (double)y[i + l];
    for (size_t l = 0; l < LANES; l++)
        sum += lane[l];
    return sum;
}

/* d[c][r] = s[r][c] */
static inline void transpose_rows(float *d, size_t ldd, const float *s, size_t lds, size_t rows, size_t cols)
{
    for (size_t c = 0; c < cols; c++)
        for (size_t r = 0; r < rows; r++)
            d[c * ldd + r] = s[r * lds + c];
}

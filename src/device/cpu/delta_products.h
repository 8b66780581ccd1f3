/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_DEVICE_CPU_DELTA_PRODUCTS_H
#define MT_DEVICE_CPU_DELTA_PRODUCTS_H

#include "device/cpu/cpu.h"
#include "device/cpu/vecmath.h"

/** Small products in FP32 of what a chunk of a linear recurrence has in a thread's workspace: sums in order of k. */

enum { LANES = 16 };

typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

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
};

MT_HOT_PART void tile(const struct product *x, size_t i, size_t j, size_t rows)
{
    vec sum[4] = {{0}, {0}, {0}, {0}};
    const float *a = x->a + i * x->rs, *b = x->b + j;
    for (size_t k = 0; k < x->k; k++, b += x->ldb, a += x->cs) {
        vec row = *(const vec *)b;
        for (size_t r = 0; r < rows; r++)
            sum[r] += a[r * x->rs] * row;
    }
    for (size_t r = 0; r < rows; r++) {
        vec *d = (vec *)(x->d + (i + r) * x->ldd + j);
        *d = x->adds ? *d + x->sign * sum[r] : x->sign * sum[r];
    }
}

MT_HOT static inline void multiply(const struct product *x)
{
    size_t i = 0;
    for (; i + 4 <= x->m; i += 4)
        for (size_t j = 0; j < x->n; j += LANES)
            tile(x, i, j, 4);
    for (; i < x->m; i++)
        for (size_t j = 0; j < x->n; j += LANES)
            tile(x, i, j, 1);
}

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
static inline void transpose(float *d, size_t ldd, const float *s, size_t lds, size_t rows, size_t cols)
{
    for (size_t c = 0; c < cols; c++)
        for (size_t r = 0; r < rows; r++)
            d[c * ldd + r] = s[r * lds + c];
}

#endif

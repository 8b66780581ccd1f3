/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/dtype.h"

/* e^x = 2^k e^r with k = round(x / ln 2), for x whose result is a normal number; undefined for others and NaN.
 * Cody-Waite reduction to |r| <= ln2/2 and a degree-6 polynomial; k is added to the exponent. Error below 2 ulp. */
static inline float mt_exp_normal(float x)
{
    float shifted = x * 1.44269504f + 12582912.0f; /* the lowest bits are k */
    float k = shifted - 12582912.0f;
    float r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    float p = 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = (p * r) * r + r;
    p = p + 1.0f;
    return mt_f32_from_bits(mt_f32_bits(p) + (mt_f32_bits(shifted) << 23));
}

/**
 * e^x without branches, so that loops over it are vectorised. Error below 2 ulp where the result is a normal number; 0
 * below that range, infinite above. A NaN stays NaN.
 */
static inline float mt_expf(float x)
{
    float c = x < -87.3f ? -87.3f : x; /* a NaN fails both tests and passes */
    c = c > 88.7f ? 88.7f : c;
    float y = mt_exp_normal(c);
    y = x < -87.3f ? 0.0f : y;
    y = x > 88.72f ? INFINITY : y;
    return x != x ? x : y;
}

/** The same for x <= 0, or above 0 only by a rounding error. */
static inline float mt_exp_negative(float x)
{
    float y = mt_exp_normal(x < -87.3f ? -87.3f : x);
    y = x < -87.3f ? 0.0f : y;
    return x != x ? x : y;
}

static inline float mt_sigmoidf(float x)
{
    return 1.0f / (1.0f + mt_expf(-x));
}

static inline float mt_tanhf(float x)
{
    return 2.0f / (1.0f + mt_expf(-2.0f * x)) - 1.0f;
}

/** The same with a small relative error also near 0, where the difference above would lose digits (Cephes' tanhf). */
static inline float mt_tanh_close(float x)
{
    float z = x * x, p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    float near = (p * z) * x + x, far = mt_tanhf(x);
    return z < 0.390625f ? near : far;
}

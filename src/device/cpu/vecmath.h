/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_DEVICE_CPU_VECMATH_H
#define MT_DEVICE_CPU_VECMATH_H

#include "base/dtype.h"

/**
 * e^x without branches, so that loops over it become vector code. Cody-Waite reduction to |r| <= ln2/2
 * and a degree-6 polynomial; below 2 ulp in the range where the result is a normal number, 0 below it,
 * infinite above. A NaN stays a NaN.
 */
static inline float mt_expf(float x)
{
    float c = x < -87.3f ? -87.3f : x; /* a NaN fails both tests and passes */
    c = c > 88.7f ? 88.7f : c;
    float k = (c * 1.44269504f + 12582912.0f) - 12582912.0f;
    float r = (c - k * 0.693359375f) + k * 2.12194440e-4f;
    float p = 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = (p * r) * r + r;
    p = p + 1.0f;
    int32_t n = (int32_t)k;
    float s = mt_f32_from_bits((uint32_t)((n >> 1) + 127) << 23);
    float t = mt_f32_from_bits((uint32_t)((n - (n >> 1)) + 127) << 23);
    float y = p * s * t;
    y = x < -87.3f ? 0.0f : y;
    y = x > 88.72f ? INFINITY : y;
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

#endif

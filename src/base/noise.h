/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/**
 * Noise by which weights are perturbed: a number of mean 0 and variance 1 for each element of a tensor, of a step and a
 * sample, by Philox. It is stored nowhere: devices and the host's update make it again, with the same bits, since it
 * takes only operations that IEEE 754 rounds correctly.
 */
enum mt_noise_kind {
    MT_NOISE_NORMAL, /* the point of the normal distribution below which is the share of word i % 4 of block i / 4 */
    MT_NOISE_SIGN,   /* 1 or -1, by bit i % 32 of word i / 32 % 4 of block i / 128 */
};
#define MT_NOISE_NAMES "normal|sign"

#ifdef __CUDACC__
#define MT_NOISE_PART static inline __host__ __device__
#else
#define MT_NOISE_PART static inline
#endif

/** Elements of a block of Philox, whose index is the element's by this, after the sample's. */
MT_NOISE_PART uint64_t mt_noise_block(enum mt_noise_kind kind)
{
    return kind == MT_NOISE_SIGN ? 128 : 4;
}
MT_NOISE_PART uint64_t mt_noise_index(enum mt_noise_kind kind, uint64_t sample, uint64_t element)
{
    return sample << 48 | element / mt_noise_block(kind);
}
/** The stream of a tensor in a step: of fewer than 2^24 tensors, and 2^32 steps. */
MT_NOISE_PART uint64_t mt_noise_stream(uint64_t step, uint64_t tensor)
{
    return UINT64_C(0xA9) << 56 | step << 24 | tensor;
}

/** Of Sparse-MeZO (arXiv 2402.15751): whether noise is added to a weight: not to those whose bf16 is larger. `limit` is the
 * largest of these without its sign, MT_NOISE_ALL: there is none. */
#define MT_NOISE_ALL 0x7fffu
MT_NOISE_PART bool mt_noise_takes(float weight, uint32_t limit)
{
    uint32_t u;
    memcpy(&u, &weight, sizeof(u));
    return ((u & 0x7fffffffu) + 0x8000u) >> 16 <= limit;
}

/** Natural logarithm of a normal number, to an ulp (fdlibm's logf). */
MT_NOISE_PART float mt_noise_log(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof(u));
    u += 0x3f800000u - 0x3f3504f3u;
    float k = (float)((int32_t)(u >> 23) - 0x7f);
    u = (u & 0x007fffffu) + 0x3f3504f3u;
    memcpy(&x, &u, sizeof(x));
    float f = x - 1.0f, s = f / (2.0f + f), z = s * s, w = z * z, half = 0.5f * f * f;
    float r = z * (0.66666662693f + w * 0.28498786688f) + w * (0.40000972152f + w * 0.24279078841f);
    return s * (half + r) + k * 9.0580006145e-06f - half + f + k * 6.9313812256e-01f;
}

/** Giles 2010, "Approximating the erfinv function", in single precision: of a uniform word, beyond 6 at most. */
MT_NOISE_PART float mt_noise_normal(uint32_t word)
{
    float p = ((float)(word >> 9) + 0.5f) * 0x1p-23f; /* exact, in (0, 1) */
    float x = 2.0f * p - 1.0f, w = -mt_noise_log(4.0f * p * (1.0f - p));
    float a = w - 2.5f, b = sqrtf(w) - 3.0f;
    float near = 2.81022636e-08f, far = -0.000200214257f;
    near = 3.43273939e-07f + near * a;
    near = -3.5233877e-06f + near * a;
    near = -4.39150654e-06f + near * a;
    near = 0.00021858087f + near * a;
    near = -0.00125372503f + near * a;
    near = -0.00417768164f + near * a;
    near = 0.246640727f + near * a;
    near = 1.50140941f + near * a;
    far = 0.000100950558f + far * b;
    far = 0.00134934322f + far * b;
    far = -0.00367342844f + far * b;
    far = 0.00573950773f + far * b;
    far = -0.0076224613f + far * b;
    far = 0.00943887047f + far * b;
    far = 1.00167406f + far * b;
    far = 2.83297682f + far * b;
    return 1.41421356f * x * (w < 5.0f ? near : far);
}

/** Which of its block's words element i of a tensor has, and its noise by that word. */
MT_NOISE_PART unsigned mt_noise_word(enum mt_noise_kind kind, uint64_t i)
{
    return (unsigned)((kind == MT_NOISE_SIGN ? i / 32 : i) % 4);
}
MT_NOISE_PART float mt_noise_of(enum mt_noise_kind kind, uint32_t word, uint64_t i)
{
    return kind == MT_NOISE_SIGN ? (word >> (i % 32) & 1 ? -1.0f : 1.0f) : mt_noise_normal(word);
}

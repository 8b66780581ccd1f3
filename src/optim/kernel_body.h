/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The update of one element, as a sequence of IEEE operations: no contraction, division and square root
 * correctly rounded, denormals kept. Every instruction set compiles this same body, vectorised by the compiler,
 * so that all give the same bits.
 *
 * States in 8 bits (FlashOptim, arXiv 2602.23349): for m, with a = max |m| of a block, x = m / a, the code is 127 times
 * 2x / (1 + |x|), rounded; for v, with a = max sqrt(v), 255 sqrt(v) / a. The scale is a in bf16, whose range f16 does
 * not have.
 */
#ifndef MT_OPTIM_KERNEL_BODY_H
#define MT_OPTIM_KERNEL_BODY_H

#include <string.h>

#include "base/mem.h"
#include "optim/kernel.h"
#include "optim/kernel_random.h"

enum { MT_KERNEL_PIECE = 512, MT_KERNEL_BLOCKS = MT_KERNEL_PIECE / MT_BLOCK8 };

uint64_t mt_kernel_scalar(const struct mt_kernel *k);
uint64_t mt_kernel_avx2(const struct mt_kernel *k);
uint64_t mt_kernel_avx512(const struct mt_kernel *k);

/* bf16 in the upper half of what is returned: choices of 32 bits and one cut to 16 make the fastest vectors. */
static inline uint32_t mt_kernel_nearest(uint32_t u)
{
    uint32_t even = u + 0x7fffu + ((u >> 16) & 1);
    return (u & 0x7fffffffu) > 0x7f800000u ? u | 0x400000u : even;
}

static inline uint16_t mt_kernel_bf16(float x)
{
    return (uint16_t)(mt_kernel_nearest(mt_f32_bits(x)) >> 16);
}

/* A weight: joined, and split again. Returns 1 if it is not finite or has an infinite hi. */
static inline float mt_kernel_join(uint16_t hi, uint16_t lo)
{
    return mt_f32_from_bits(((uint32_t)hi << 16) + (uint32_t)(int32_t)(int16_t)lo);
}

static inline uint32_t mt_kernel_split(float w, uint16_t *hi, uint16_t *lo)
{
    uint32_t u = mt_f32_bits(w);
    *hi = (uint16_t)((u + 0x8000u) >> 16);
    *lo = (uint16_t)u;
    return (u & 0x7fffffffu) >= 0x7f7f8000u;
}

/* --- the rules, of n elements in FP32: grad is read; states and the weight (hi, lo) are updated --------------- */

static inline uint64_t mt_kernel_adamw(const struct mt_kernel_scalars *s, uint16_t *restrict hi, uint16_t *restrict lo,
                                       float *restrict m, float *restrict v, const float *restrict grad, size_t n)
{
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        float g = grad[i] * s->clip;
        float m1 = m[i] + s->one_minus_beta1 * (g - m[i]);
        float v1 = s->beta2 * v[i] + s->one_minus_beta2 * g * g;
        float w = mt_kernel_join(hi[i], lo[i]) * s->keep;
        float root = __builtin_sqrtf(v1);
        w = w - s->step * (m1 / (root / s->sqrt_bc2 + s->eps));
        m[i] = m1;
        v[i] = s->roots ? root : v1;
        bad += mt_kernel_split(w, &hi[i], &lo[i]);
    }
    return bad;
}

static inline uint64_t mt_kernel_lion(const struct mt_kernel_scalars *s, uint16_t *restrict hi, uint16_t *restrict lo,
                                      float *restrict m, const float *restrict grad, size_t n)
{
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        float g = grad[i] * s->clip;
        float u = s->beta1 * m[i] + s->one_minus_beta1 * g;
        float sign = (float)(u > 0) - (float)(u < 0);
        float w = mt_kernel_join(hi[i], lo[i]) * s->keep - s->step * sign;
        m[i] = s->beta2 * m[i] + s->one_minus_beta2 * g;
        bad += mt_kernel_split(w, &hi[i], &lo[i]);
    }
    return bad;
}

static inline uint64_t mt_kernel_sgd(const struct mt_kernel_scalars *s, uint16_t *restrict hi, uint16_t *restrict lo,
                                     float *restrict m, const float *restrict grad, size_t n)
{
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        float b = s->beta1 * m[i] + grad[i] * s->clip;
        float w = mt_kernel_join(hi[i], lo[i]) * s->keep - s->step * b;
        m[i] = b;
        bad += mt_kernel_split(w, &hi[i], &lo[i]);
    }
    return bad;
}

static inline uint64_t mt_kernel_plain_sgd(const struct mt_kernel_scalars *s, uint16_t *restrict hi,
                                           uint16_t *restrict lo, const float *restrict grad, size_t n)
{
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        float w = mt_kernel_join(hi[i], lo[i]) * s->keep - s->step * (grad[i] * s->clip);
        bad += mt_kernel_split(w, &hi[i], &lo[i]);
    }
    return bad;
}

/* --- states in bf16 ------------------------------------------------------------------------------------------- */

static inline void mt_kernel_load_bf16(float *restrict dst, const uint16_t *restrict src, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = mt_bf16_to_f32(src[i]);
}

static inline void mt_kernel_store_bf16(uint16_t *restrict dst, const float *restrict src, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = mt_kernel_bf16(src[i]);
}

/* Up by chance: by the 16 bits of random[i] from `shift` on. What is not finite is rounded to the nearest. */
static inline void mt_kernel_store_stochastic(uint16_t *restrict dst, const float *restrict src,
                                              const uint32_t *restrict random, int shift, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t u = mt_f32_bits(src[i]), up = u + (random[i] >> shift & 0xffffu), nearest = mt_kernel_nearest(u);
        up = (u & 0x7fffffffu) >= 0x7f7f0000u ? nearest : up;
        dst[i] = (uint16_t)(up >> 16);
    }
}

/* Element i has word (first + i) % 4 of block (first + i) / 4. */
static inline const uint32_t *mt_kernel_words(uint32_t *restrict random, const struct mt_kernel *k, uint64_t first,
                                              size_t n)
{
    mt_kernel_random(random, k->seed, k->stream, first / 4, mt_div_up(first % 4 + n, (size_t)4));
    return random + first % 4;
}

/* --- masters of 24 bits and of bf16 --------------------------------------------------------------------------- */

/* lo of the elements, as of a master of 32 bits. */
static inline void mt_kernel_load_lo(uint16_t *restrict lo, const uint8_t *restrict lo8, size_t n)
{
    for (size_t i = 0; i < n; i++)
        lo[i] = (uint16_t)(lo8[i] << 8);
}

/* Rounds masters of 32 bits. Returns how many are not finite then. */
static inline uint64_t mt_kernel_store_24bit(uint16_t *restrict hi, uint8_t *restrict lo8, const uint16_t *restrict lo,
                                             size_t n)
{
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t u = mt_f32_bits(mt_kernel_join(hi[i], lo[i]));
        mt_master_split24(u, &hi[i], &lo8[i]);
        bad += (u & 0x7fffffffu) >= 0x7f7f7f80u;
    }
    return bad;
}

/* Up by chance. What could become infinite is rounded to the nearest. */
static inline void mt_kernel_store_bf16_master(uint16_t *restrict hi, const uint16_t *restrict lo,
                                               const uint32_t *restrict random, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t u = mt_f32_bits(mt_kernel_join(hi[i], lo[i]));
        uint32_t up = (u & 0x7fffffffu) >= 0x7f7f0000u ? 0x8000u : random[i];
        hi[i] = (uint16_t)((u + up) >> 16);
    }
}

/* Element i has half (first + i) % 8 of block (first + i) / 8, of each word the lower one first. */
static inline void mt_kernel_round_masters(const struct mt_kernel *k, size_t i, const uint16_t *restrict lo, size_t n)
{
    uint32_t words[MT_KERNEL_PIECE / 2 + 4 * MT_KERNEL_LANES];
    uint32_t halves[2 * MT_ARRAY_LEN(words)];
    uint64_t first = k->first + i;
    size_t blocks = mt_div_up(first % 8 + n, (size_t)8);
    mt_kernel_random(words, k->seed, k->master_stream, first / 8, blocks);
    for (size_t w = 0; w < 4 * blocks; w++) {
        halves[2 * w] = words[w] & 0xffffu;
        halves[2 * w + 1] = words[w] >> 16;
    }
    mt_kernel_store_bf16_master(k->hi + i, lo, halves + first % 8, n);
}

/* --- states in 8 bits: blocks of MT_BLOCK8 codes and a scale -------------------------------------------------- */

/* Scales of `blocks` blocks, and of numbers the largest absolute value in each: numbers that are not negative have the
 * order of their bits. */
static inline void mt_kernel_scales(float *restrict a, const uint8_t *restrict block, size_t blocks)
{
    uint16_t scale[MT_KERNEL_BLOCKS];
    for (size_t b = 0; b < blocks; b++)
        memcpy(&scale[b], block + b * MT_BLOCK8_BYTES + MT_BLOCK8, sizeof(*scale));
    mt_kernel_load_bf16(a, scale, blocks);
}

static inline void mt_kernel_put_scales(uint8_t *restrict block, const float *restrict a, size_t blocks)
{
    uint16_t scale[MT_KERNEL_BLOCKS];
    mt_kernel_store_bf16(scale, a, blocks);
    for (size_t b = 0; b < blocks; b++)
        memcpy(block + b * MT_BLOCK8_BYTES + MT_BLOCK8, &scale[b], sizeof(*scale));
}

static inline void mt_kernel_largest(float *restrict a, const float *restrict x, size_t blocks)
{
    for (size_t b = 0; b < blocks; b++) {
        uint32_t most = 0;
        for (int i = 0; i < MT_BLOCK8; i++) {
            uint32_t u = mt_f32_bits(x[b * MT_BLOCK8 + (size_t)i]) & 0x7fffffffu;
            most = u > most ? u : most;
        }
        a[b] = mt_f32_from_bits(most);
    }
}

/* y / (2 - |y|) with y = code / 127. */
static inline void mt_kernel_load_signed(float *restrict dst, const uint8_t *restrict block, size_t blocks)
{
    float a[MT_KERNEL_BLOCKS];
    mt_kernel_scales(a, block, blocks);
    for (size_t b = 0; b < blocks; b++) {
        const int8_t *code = (const int8_t *)block + b * MT_BLOCK8_BYTES;
        for (int i = 0; i < MT_BLOCK8; i++) {
            float q = (float)code[i];
            dst[b * MT_BLOCK8 + (size_t)i] = a[b] * (q / (254.0f - __builtin_fabsf(q)));
        }
    }
}

/* q: the codes, whole numbers that a byte has, with or without a sign. */
static inline void mt_kernel_put_codes(uint8_t *restrict block, const float *restrict q, size_t blocks)
{
    for (size_t b = 0; b < blocks; b++)
        for (size_t i = 0; i < MT_BLOCK8; i++)
            block[b * MT_BLOCK8_BYTES + i] = (uint8_t)(int32_t)q[b * MT_BLOCK8 + i];
}

static inline void mt_kernel_store_signed(uint8_t *restrict block, float *restrict m, size_t blocks)
{
    float a[MT_KERNEL_BLOCKS];
    mt_kernel_largest(a, m, blocks);
    for (size_t b = 0; b < blocks; b++)
        a[b] = a[b] < 1e-12f ? 1e-12f : a[b];
    for (size_t b = 0; b < blocks; b++)
        for (size_t i = b * MT_BLOCK8; i < (b + 1) * MT_BLOCK8; i++) {
            float q = __builtin_floorf(254.0f * (m[i] / (a[b] + __builtin_fabsf(m[i]))) + 0.5f);
            m[i] = q > -127.0f ? q : -127.0f; /* what is no number; others are not less, and none is above 127 */
        }
    mt_kernel_put_codes(block, m, blocks);
    mt_kernel_put_scales(block, a, blocks);
}

static inline void mt_kernel_load_squares(float *restrict dst, const uint8_t *restrict block, size_t blocks)
{
    float a[MT_KERNEL_BLOCKS];
    mt_kernel_scales(a, block, blocks);
    for (size_t b = 0; b < blocks; b++)
        a[b] /= 255.0f;
    for (size_t b = 0; b < blocks; b++) {
        const uint8_t *code = block + b * MT_BLOCK8_BYTES;
        for (int i = 0; i < MT_BLOCK8; i++) {
            float r = a[b] * (float)code[i];
            dst[b * MT_BLOCK8 + (size_t)i] = r * r;
        }
    }
}

static inline void mt_kernel_store_squares(uint8_t *restrict block, float *restrict v, size_t blocks)
{
    float a[MT_KERNEL_BLOCKS], to[MT_KERNEL_BLOCKS];
    mt_kernel_largest(a, v, blocks);
    for (size_t b = 0; b < blocks; b++) {
        to[b] = 255.0f / a[b];
    }
    for (size_t b = 0; b < blocks; b++)
        for (size_t i = b * MT_BLOCK8; i < (b + 1) * MT_BLOCK8; i++) {
            float q = __builtin_floorf(v[i] * to[b] + 0.5f);
            v[i] = q > 0.0f ? q : 0.0f; /* where all are zero, or some no number; none is above 255 */
        }
    mt_kernel_put_codes(block, v, blocks);
    mt_kernel_put_scales(block, a, blocks);
}

/* --- pieces that fit the L1 cache ----------------------------------------------------------------------------- */

/* State j of elements [i, i + n), as FP32 in `buf` or in place. */
static inline float *mt_kernel_load(const struct mt_kernel *k, int j, size_t i, size_t n, float *buf)
{
    if (!k->state[j])
        return NULL;
    if (k->state_type == MT_STATE_F32)
        return (float *)k->state[j] + i;
    if (k->state_type == MT_STATE_BF16) {
        mt_kernel_load_bf16(buf, (const uint16_t *)k->state[j] + i, n);
        return buf;
    }
    const uint8_t *block = (const uint8_t *)k->state[j] + i / MT_BLOCK8 * MT_BLOCK8_BYTES;
    size_t blocks = mt_div_up(n, (size_t)MT_BLOCK8);
    if (j)
        mt_kernel_load_squares(buf, block, blocks);
    else
        mt_kernel_load_signed(buf, block, blocks);
    return buf;
}

/* `random`: of the elements, if bf16 is rounded by chance. Codes of the last block's rest are those of zeros. */
static inline void mt_kernel_store(const struct mt_kernel *k, int j, size_t i, size_t n, float *buf,
                                   const uint32_t *random)
{
    if (!k->state[j] || k->state_type == MT_STATE_F32)
        return;
    if (k->state_type == MT_STATE_BF16) {
        uint16_t *to = (uint16_t *)k->state[j] + i;
        if (k->stochastic)
            mt_kernel_store_stochastic(to, buf, random, 16 * j, n);
        else
            mt_kernel_store_bf16(to, buf, n);
        return;
    }
    uint8_t *block = (uint8_t *)k->state[j] + i / MT_BLOCK8 * MT_BLOCK8_BYTES;
    for (size_t at = n; at % MT_BLOCK8; at++)
        buf[at] = 0;
    size_t blocks = mt_div_up(n, (size_t)MT_BLOCK8);
    if (j)
        mt_kernel_store_squares(block, buf, blocks);
    else
        mt_kernel_store_signed(block, buf, blocks);
}

static inline uint64_t mt_kernel_rule(const struct mt_kernel *k, uint16_t *hi, uint16_t *lo, size_t n,
                                      float *const state[2], const float *grad)
{
    switch (k->rule) {
    case MT_RULE_ADAMW:
        return mt_kernel_adamw(&k->s, hi, lo, state[0], state[1], grad, n);
    case MT_RULE_LION:
        return mt_kernel_lion(&k->s, hi, lo, state[0], grad, n);
    case MT_RULE_SGD:
    default:
        return state[0] ? mt_kernel_sgd(&k->s, hi, lo, state[0], grad, n) : mt_kernel_plain_sgd(&k->s, hi, lo, grad, n);
    }
}

/* The rule, on masters that are widened to 32 bits and rounded again. */
static inline uint64_t mt_kernel_piece(const struct mt_kernel *k, size_t i, size_t n, float *const state[2],
                                       const float *grad)
{
    uint16_t lo[MT_KERNEL_PIECE];
    uint64_t bad;
    switch (k->master) {
    case MT_MASTER_24BIT:
        mt_kernel_load_lo(lo, k->lo8 + i, n);
        mt_kernel_rule(k, k->hi + i, lo, n, state, grad);
        return mt_kernel_store_24bit(k->hi + i, k->lo8 + i, lo, n);
    case MT_MASTER_BF16:
        memset(lo, 0, n * sizeof(*lo));
        bad = mt_kernel_rule(k, k->hi + i, lo, n, state, grad);
        mt_kernel_round_masters(k, i, lo, n);
        return bad;
    case MT_MASTER_F32:
    default:
        return mt_kernel_rule(k, k->hi + i, k->lo + i, n, state, grad);
    }
}

static inline uint64_t mt_kernel_body(const struct mt_kernel *k)
{
    float g[MT_KERNEL_PIECE], buf[2][MT_KERNEL_PIECE];
    uint32_t random[MT_KERNEL_PIECE + 4 * MT_KERNEL_LANES];
    uint64_t bad = 0;
    for (size_t i = 0; i < k->n; i += MT_KERNEL_PIECE) {
        size_t n = MT_MIN((size_t)MT_KERNEL_PIECE, k->n - i);
        const float *grad = (const float *)k->grad + i;
        if (k->grad_dtype == MT_BF16) {
            mt_kernel_load_bf16(g, (const uint16_t *)k->grad + i, n);
            grad = g;
        }
        float *state[2];
        for (int j = 0; j < 2; j++)
            state[j] = mt_kernel_load(k, j, i, n, buf[j]);
        bad += mt_kernel_piece(k, i, n, state, grad);
        const uint32_t *words = random;
        if (k->stochastic && k->state_type == MT_STATE_BF16)
            words = mt_kernel_words(random, k, k->first + i, n);
        for (int j = 0; j < 2; j++)
            mt_kernel_store(k, j, i, n, buf[j], words);
    }
    return bad;
}

#endif

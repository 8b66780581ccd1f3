/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The update of one element, as a sequence of IEEE operations: no contraction, division and square root
 * correctly rounded, denormals kept. Every instruction set compiles this same body, vectorised by the compiler,
 * so that all give the same bits.
 */
#ifndef MT_OPTIM_ADAM_KERNEL_H
#define MT_OPTIM_ADAM_KERNEL_H

#include "base/mem.h"
#include "optim/adam.h"

/** The scalars of an update, rounded to FP32 once. */
struct mt_adam_scalars {
    float clip, one_minus_beta1, beta2, one_minus_beta2, decay, step_size, sqrt_bc2, eps;
};

enum { MT_ADAM_PIECE = 512 };

typedef uint64_t (*mt_adam_fn)(const struct mt_adam *a, const struct mt_adam_scalars *s, size_t first,
                               size_t n);
uint64_t mt_adam_scalar(const struct mt_adam *a, const struct mt_adam_scalars *s, size_t first,
                        size_t n);
uint64_t mt_adam_avx2(const struct mt_adam *a, const struct mt_adam_scalars *s, size_t first,
                      size_t n);
uint64_t mt_adam_avx512(const struct mt_adam *a, const struct mt_adam_scalars *s, size_t first,
                        size_t n);

static inline float mt_adam_round_bf16(float x, uint16_t *out)
{
    uint32_t u = mt_f32_bits(x);
    uint32_t nan = (u >> 16) | 0x40, even = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
    *out = (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? nan : even);
    return x;
}

/* n elements in FP32: grad is read; m, v and the weight (hi, lo) are updated. */
static inline uint64_t mt_adam_piece(const struct mt_adam_scalars *s, uint16_t *restrict hi,
                                     uint16_t *restrict lo, float *restrict m, float *restrict v,
                                     const float *restrict grad, size_t n)
{
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        float g = grad[i] * s->clip;
        float m1 = m[i] + s->one_minus_beta1 * (g - m[i]);
        float v1 = s->beta2 * v[i] + s->one_minus_beta2 * g * g;
        uint32_t u = ((uint32_t)hi[i] << 16) + (uint32_t)(int32_t)(int16_t)lo[i];
        float w = mt_f32_from_bits(u) * s->decay;
        w = w - s->step_size * (m1 / (__builtin_sqrtf(v1) / s->sqrt_bc2 + s->eps));
        m[i] = m1;
        v[i] = v1;
        u = mt_f32_bits(w);
        hi[i] = (uint16_t)((u + 0x8000u) >> 16);
        lo[i] = (uint16_t)u;
        bad += (u & 0x7fffffffu) >= 0x7f7f8000u;
    }
    return bad;
}

static inline void mt_adam_load_bf16(float *restrict dst, const uint16_t *restrict src, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = mt_bf16_to_f32(src[i]);
}

static inline void mt_adam_store_bf16(uint16_t *restrict dst, const float *restrict src, size_t n)
{
    for (size_t i = 0; i < n; i++)
        mt_adam_round_bf16(src[i], &dst[i]);
}

/* Elements [first, first + n), in pieces that fit the L1 cache. */
static inline uint64_t mt_adam_range(const struct mt_adam *a, const struct mt_adam_scalars *s,
                                     size_t first, size_t n)
{
    float g[MT_ADAM_PIECE], tm[MT_ADAM_PIECE], tv[MT_ADAM_PIECE];
    uint64_t bad = 0;
    for (size_t i = first; i < first + n; i += MT_ADAM_PIECE) {
        size_t k = MT_MIN((size_t)MT_ADAM_PIECE, first + n - i);
        const float *grad = (const float *)a->grad + i;
        float *m = (float *)a->m + i, *v = (float *)a->v + i;
        if (a->grad_dtype == MT_BF16) {
            mt_adam_load_bf16(g, (const uint16_t *)a->grad + i, k);
            grad = g;
        }
        if (a->state_dtype == MT_BF16) {
            mt_adam_load_bf16(tm, (uint16_t *)a->m + i, k);
            mt_adam_load_bf16(tv, (uint16_t *)a->v + i, k);
            m = tm;
            v = tv;
        }
        bad += mt_adam_piece(s, a->hi + i, a->lo + i, m, v, grad, k);
        if (a->state_dtype == MT_BF16) {
            mt_adam_store_bf16((uint16_t *)a->m + i, tm, k);
            mt_adam_store_bf16((uint16_t *)a->v + i, tv, k);
        }
    }
    return bad;
}

#endif

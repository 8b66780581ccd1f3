/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The update of one element, as a sequence of IEEE operations: no contraction, division and square root
 * correctly rounded, denormals kept. Every instruction set compiles this same body in vectors of its own width,
 * so that all give the same bits. From its planes to its planes an element stays in registers, so that
 * conversions are made while divisions go on.
 *
 * States in 8 bits (FlashOptim, arXiv 2602.23349): for m, with a = max |m| of a block, x = m / a, the code is 127 times
 * 2x / (1 + |x|), rounded; for v, with a = max sqrt(v), 255 sqrt(v) / a. The scale is a in bf16, whose range f16 does
 * not have.
 */
#pragma once

#include <string.h>

#include "base/mem.h"
#include "optim/kernel.h"
#include "optim/kernel_lanes.h"
#include "optim/kernel_random.h"

enum { MT_KERNEL_PIECE = 512 };

uint64_t mt_kernel_scalar(const struct mt_kernel *k);
uint64_t mt_kernel_avx2(const struct mt_kernel *k);
uint64_t mt_kernel_avx512(const struct mt_kernel *k);

/* What a loop is compiled for: constants where it is expanded. */
struct mt_kernel_form {
    enum mt_rule rule;
    int n_states;
    bool bf16;  /* states */
    bool roots; /* the root of v is left in its place */
    enum mt_master master;
};

/* Whole blocks of MT_BLOCK8 elements, and the random numbers of the first and those behind. */
struct mt_kernel_part {
    size_t n;
    uint16_t *hi, *lo;
    uint8_t *lo8;
    void *state[2];
    const void *grad;
    enum mt_dtype grad_dtype;
    const uint32_t *words;  /* of states; NULL: they are rounded to the nearest */
    const uint16_t *halves; /* of masters */
    const uint32_t *counts; /* [MT_BLOCK8] 1 for elements whose weights count if they are not finite */
};

/* To bf16, in the upper half of what is returned. What is no number is a result, so that it is quiet already. */
static inline mt_lanes_u mt_kernel_nearest(mt_lanes x)
{
    mt_lanes_u u = MT_LANES_BITS(x), even = u + 0x7fffu + ((u >> 16) & 1);
    return mt_lanes_choose(MT_LANES_MASK(x != x), u, even);
}

/* Up by chance: by half j of the random words. If one of a group could become infinite, or is not finite, those are
 * rounded to the nearest. */
static inline void mt_kernel_by_chance(mt_lanes_u to[MT_VECTORS], const mt_lanes x[MT_VECTORS],
                                       const uint32_t *words, int j)
{
    mt_lanes_u large = {0};
    for (size_t v = 0; v < MT_VECTORS; v++) {
        mt_lanes_u u = MT_LANES_BITS(x[v]), random = mt_lanes_load_u32(words + v * MT_LANES);
        to[v] = u + (j ? random >> 16 : random & 0xffffu);
        large |= mt_lanes_at_least(mt_lanes_size(u), 0x7f7f0000u);
    }
    for (size_t v = 0; v < MT_VECTORS && mt_lanes_any(large); v++) {
        mt_lanes_u u = MT_LANES_BITS(x[v]);
        to[v] = mt_lanes_choose(mt_lanes_at_least(mt_lanes_size(u), 0x7f7f0000u), mt_kernel_nearest(x[v]), to[v]);
    }
}

/* --- weights and gradients ------------------------------------------------------------------------------------ */

/* Bits. */
static inline void mt_kernel_load_weight(const struct mt_kernel_form f, const struct mt_kernel_part *p, size_t i,
                                         mt_lanes_u w[MT_VECTORS])
{
    if (f.master == MT_MASTER_F32)
        mt_lanes_load_master(w, p->hi + i, p->lo + i);
    else if (f.master == MT_MASTER_24BIT)
        mt_lanes_load_master24(w, p->hi + i, p->lo8 + i);
    else
        mt_lanes_load_bf16(w, p->hi + i);
}

static inline void mt_kernel_load_numbers(bool bf16, const void *from, size_t i, mt_lanes x[MT_VECTORS])
{
    mt_lanes_u bits[MT_VECTORS];
    if (bf16)
        mt_lanes_load_bf16(bits, (const uint16_t *)from + i);
    for (size_t v = 0; v < MT_VECTORS; v++)
        x[v] = bf16 ? MT_LANES_OF(bits[v]) : mt_lanes_load((const float *)from + i + v * MT_LANES);
}

static inline void mt_kernel_load_grad(const struct mt_kernel_scalars *s, const struct mt_kernel_part *p, size_t i,
                                       mt_lanes g[MT_VECTORS])
{
    mt_kernel_load_numbers(p->grad_dtype == MT_BF16, p->grad, i, g);
    for (size_t v = 0; v < MT_VECTORS; v++)
        g[v] = g[v] * s->clip;
}

/* Adds 1 to `bad` for a weight that is not finite or has an infinite `hi`. */
static inline void mt_kernel_store_weight(const struct mt_kernel_form f, const struct mt_kernel_part *p, size_t i,
                                          const mt_lanes w[MT_VECTORS], mt_lanes_u *bad)
{
    mt_lanes_u hi[MT_VECTORS], low[MT_VECTORS];
    if (f.master == MT_MASTER_BF16)
        mt_lanes_load_u16(low, p->halves + i);
    for (size_t v = 0; v < MT_VECTORS; v++) {
        mt_lanes_u u = MT_LANES_BITS(w[v]), size = mt_lanes_size(u), half = u + 0x8000u;
        const uint32_t least = f.master == MT_MASTER_24BIT ? 0x7f7f7f80u : 0x7f7f8000u;
        if (f.master == MT_MASTER_F32) {
            low[v] = u & 0xffffu;
        } else if (f.master == MT_MASTER_24BIT) {
            low[v] = (u + 0x80u) >> 8;
            half = (low[v] + 0x80u) << 8;
            low[v] &= 0xffu;
        } else { /* up by chance; what could become infinite, to the nearest */
            half = mt_lanes_choose(mt_lanes_at_least(size, 0x7f7f0000u), half, u + low[v]);
        }
        hi[v] = half >> 16;
        *bad += mt_lanes_at_least(size, least) & mt_lanes_load_u32(p->counts + i % MT_BLOCK8 + v * MT_LANES);
    }
    mt_lanes_store_u16(p->hi + i, hi);
    if (f.master == MT_MASTER_F32)
        mt_lanes_store_u16(p->lo + i, low);
    else if (f.master == MT_MASTER_24BIT)
        mt_lanes_store_byte(p->lo8 + i, (const mt_lanes_i *)low, false);
}

/* --- states in f32 and bf16 ----------------------------------------------------------------------------------- */

/* `words`: random numbers to round by, of which state j has half j; NULL: to the nearest. */
static inline void mt_kernel_store_state(const struct mt_kernel_form f, void *state, size_t i, const uint32_t *words,
                                         int j, const mt_lanes x[MT_VECTORS])
{
    mt_lanes_u bits[MT_VECTORS];
    if (f.bf16 && words)
        mt_kernel_by_chance(bits, x, words + i, j);
    for (size_t v = 0; v < MT_VECTORS; v++) {
        if (!f.bf16)
            mt_lanes_store((float *)state + i + v * MT_LANES, x[v]);
        else
            bits[v] = (words ? bits[v] : mt_kernel_nearest(x[v])) >> 16;
    }
    if (f.bf16)
        mt_lanes_store_u16((uint16_t *)state + i, bits);
}

/* --- states in 8 bits: blocks of MT_BLOCK8 codes and a scale -------------------------------------------------- */

/* Whole vectors of scales: those of a piece. */
enum { MT_KERNEL_BLOCKS = MT_KERNEL_PIECE / MT_BLOCK8 };

/* m is a y / (2 - |y|) with y = code / 127, and v the square of a code / 255. */
static inline void mt_kernel_decode(int j, float *restrict x, const uint8_t *restrict block, size_t blocks)
{
    uint16_t scale[MT_KERNEL_BLOCKS] = {0};
    float a[MT_KERNEL_BLOCKS];
    for (size_t b = 0; b < blocks; b++)
        memcpy(&scale[b], block + b * MT_BLOCK8_BYTES + MT_BLOCK8, sizeof(*scale));
    for (size_t b = 0; b < MT_KERNEL_BLOCKS; b += MT_GROUP) {
        mt_lanes_u bits[MT_VECTORS];
        mt_lanes_load_bf16(bits, scale + b);
        for (size_t v = 0; v < MT_VECTORS; v++)
            mt_lanes_store(a + b + v * MT_LANES, j ? MT_LANES_OF(bits[v]) / 255.0f : MT_LANES_OF(bits[v]));
    }
    for (size_t b = 0; b < blocks; b++)
        for (size_t i = 0; i < MT_BLOCK8; i += MT_LANES) {
            mt_lanes_i code = mt_lanes_load_byte(block + b * MT_BLOCK8_BYTES + i, !j);
            mt_lanes q = MT_LANES_CONVERT(code, mt_lanes), r = a[b] * q;
            mt_lanes_store(x + b * MT_BLOCK8 + i, j ? r * r : a[b] * (q / (254.0f - mt_lanes_abs(q))));
        }
}

/* The bits of a block's largest number: numbers that are not negative have the order of their bits. */
static inline uint32_t mt_kernel_largest(const float *x)
{
    mt_lanes_u most = {0};
    for (size_t i = 0; i < MT_BLOCK8; i += MT_LANES)
        most = mt_lanes_max(most, mt_lanes_size(MT_LANES_BITS(mt_lanes_load(x + i))));
    return mt_lanes_most(most);
}

/* Codes of a block by its scale `a`: of m, or of v, of which x are the roots and `a` is 255 / the scale. */
static inline void mt_kernel_put_codes(int j, uint8_t *restrict block, const float *restrict x, float a)
{
    for (size_t i = 0; i < MT_BLOCK8; i += MT_GROUP) {
        mt_lanes_i code[MT_VECTORS];
        for (size_t v = 0; v < MT_VECTORS; v++) {
            mt_lanes q = mt_lanes_load(x + i + v * MT_LANES);
            if (j) /* 0 where all are zero, or some no number; none is above 255 */
                q = mt_lanes_above(q * a + 0.5f, 0);
            else /* -127 what is no number; others are not less, and none is above 127 */
                q = mt_lanes_above(mt_lanes_floor(254.0f * (q / (a + mt_lanes_abs(q))) + 0.5f), -127);
            code[v] = MT_LANES_CONVERT(q, mt_lanes_i);
        }
        mt_lanes_store_byte(block + i, code, !j);
    }
}

static inline void mt_kernel_encode(int j, uint8_t *restrict block, const float *restrict x, size_t blocks)
{
    uint32_t most[MT_KERNEL_BLOCKS] = {0};
    uint16_t scale[MT_KERNEL_BLOCKS];
    float a[MT_KERNEL_BLOCKS];
    for (size_t b = 0; b < blocks; b++)
        most[b] = mt_kernel_largest(x + b * MT_BLOCK8);
    for (size_t b = 0; b < MT_KERNEL_BLOCKS; b += MT_GROUP) {
        mt_lanes_u bits[MT_VECTORS];
        for (size_t v = 0; v < MT_VECTORS; v++) {
            mt_lanes largest = MT_LANES_OF(mt_lanes_load_u32(most + b + v * MT_LANES));
            if (!j)
                largest = mt_lanes_least(largest, 1e-12f);
            mt_lanes_store(a + b + v * MT_LANES, j ? 255.0f / largest : largest);
            bits[v] = mt_kernel_nearest(largest) >> 16;
        }
        mt_lanes_store_u16(scale + b, bits);
    }
    for (size_t b = 0; b < blocks; b++) {
        mt_kernel_put_codes(j, block + b * MT_BLOCK8_BYTES, x + b * MT_BLOCK8, a[b]);
        memcpy(block + b * MT_BLOCK8_BYTES + MT_BLOCK8, &scale[b], sizeof(*scale));
    }
}

/* --- the rules ------------------------------------------------------------------------------------------------ */

/* The steps of a group, without the rate; its states are updated. */
static inline void mt_kernel_steps(const struct mt_kernel_scalars *s, const struct mt_kernel_form f,
                                   mt_lanes state[2][MT_VECTORS], const mt_lanes g[MT_VECTORS],
                                   mt_lanes step[MT_VECTORS])
{
    for (size_t v = 0; v < MT_VECTORS; v++) {
        mt_lanes m = state[0][v];
        if (f.rule == MT_RULE_ADAMW) {
            mt_lanes v1 = s->beta2 * state[1][v] + s->one_minus_beta2 * g[v] * g[v], root = mt_lanes_sqrt(v1);
            state[0][v] = m + s->one_minus_beta1 * (g[v] - m);
            state[1][v] = f.roots ? root : v1;
            step[v] = state[0][v] / (root / s->sqrt_bc2 + s->eps);
        } else if (f.rule == MT_RULE_LION) {
            mt_lanes u = s->beta1 * m + s->one_minus_beta1 * g[v];
            mt_lanes_u moves = MT_LANES_MASK(u > 0) | MT_LANES_MASK(u < 0);
            state[0][v] = s->beta2 * m + s->one_minus_beta2 * g[v];
            step[v] = MT_LANES_OF(((MT_LANES_BITS(u) & 0x80000000u) | 0x3f800000u) & moves);
        } else {
            step[v] = state[0][v] = f.n_states ? s->beta1 * m + g[v] : g[v];
        }
    }
}

static inline uint64_t mt_kernel_apply(const struct mt_kernel_scalars s, const struct mt_kernel_form f,
                                       const struct mt_kernel_part p)
{
    mt_lanes_u bad = {0};
    for (size_t i = 0; i < p.n; i += MT_GROUP) {
        mt_lanes g[MT_VECTORS], state[2][MT_VECTORS], step[MT_VECTORS], w[MT_VECTORS];
        mt_lanes_u bits[MT_VECTORS];
        mt_kernel_load_weight(f, &p, i, bits);
        mt_kernel_load_grad(&s, &p, i, g);
        for (int j = 0; j < f.n_states; j++)
            mt_kernel_load_numbers(f.bf16, p.state[j], i, state[j]);
        mt_kernel_steps(&s, f, state, g, step);
        for (size_t v = 0; v < MT_VECTORS; v++)
            w[v] = MT_LANES_OF(bits[v]) * s.keep - s.step * step[v];
        for (int j = 0; j < f.n_states; j++)
            mt_kernel_store_state(f, p.state[j], i, p.words, j, state[j]);
        mt_kernel_store_weight(f, &p, i, w, &bad);
    }
    return mt_lanes_sum(bad);
}

#define MT_KERNEL_EXPAND(rule_, n_, bf16_, roots_, master_)                                              \
    if (k->rule == (rule_) && n == (n_) && bf16 == (bf16_) && roots == (roots_) && k->master == (master_)) \
        return mt_kernel_apply(k->s, (struct mt_kernel_form){rule_, n_, bf16_, roots_, master_}, *p);
#define MT_KERNEL_MASTERS(...)                          \
    MT_KERNEL_EXPAND(__VA_ARGS__, MT_MASTER_F32)        \
    MT_KERNEL_EXPAND(__VA_ARGS__, MT_MASTER_24BIT)      \
    MT_KERNEL_EXPAND(__VA_ARGS__, MT_MASTER_BF16)

/* States in f32 or bf16: a loop for each form. */
static __attribute__((flatten)) uint64_t mt_kernel_plain(const struct mt_kernel *k, const struct mt_kernel_part *p,
                                                         bool bf16, bool roots)
{
    const int n = !p->state[0] ? 0 : k->rule == MT_RULE_ADAMW ? 2 : 1;
    MT_KERNEL_MASTERS(MT_RULE_ADAMW, 2, false, false)
    MT_KERNEL_MASTERS(MT_RULE_ADAMW, 2, false, true)
    MT_KERNEL_MASTERS(MT_RULE_ADAMW, 2, true, false)
    MT_KERNEL_MASTERS(MT_RULE_LION, 1, false, false)
    MT_KERNEL_MASTERS(MT_RULE_LION, 1, true, false)
    MT_KERNEL_MASTERS(MT_RULE_SGD, 1, false, false)
    MT_KERNEL_MASTERS(MT_RULE_SGD, 1, true, false)
    MT_KERNEL_MASTERS(MT_RULE_SGD, 0, false, false)
    return 0;
}

/* Of whole blocks whose first `n` elements are there. Codes of the rest are those of zeros. */
static __attribute__((flatten)) uint64_t mt_kernel_run_part(const struct mt_kernel *k, const struct mt_kernel_part *p,
                                                            size_t n)
{
    float x[2][MT_KERNEL_PIECE];
    struct mt_kernel_part decoded = *p;
    if (k->state_type != MT_STATE_8BIT || !p->state[0])
        return mt_kernel_plain(k, p, k->state_type == MT_STATE_BF16, false);
    for (int j = 0; j < 2 && p->state[j]; j++) {
        mt_kernel_decode(j, x[j], p->state[j], p->n / MT_BLOCK8);
        decoded.state[j] = x[j];
    }
    uint64_t bad = mt_kernel_plain(k, &decoded, false, p->state[1]);
    for (int j = 0; j < 2 && p->state[j]; j++) {
        memset(x[j] + n, 0, (p->n - n) * sizeof(float));
        mt_kernel_encode(j, p->state[j], x[j], p->n / MT_BLOCK8);
    }
    return bad;
}

/* Elements [i, i + n); `words` and `halves` are those of i. */
static inline struct mt_kernel_part mt_kernel_part_at(const struct mt_kernel *k, size_t i, size_t n,
                                                      const uint32_t *words, const uint16_t *halves)
{
    static const uint32_t all[MT_BLOCK8] = {[0 ... MT_BLOCK8 - 1] = 1};
    static const size_t bytes[] = {[MT_STATE_F32] = sizeof(float), [MT_STATE_BF16] = sizeof(uint16_t)};
    struct mt_kernel_part p = {.n = n, .words = words, .halves = halves,
                               .hi = k->hi + i, .lo = k->lo ? k->lo + i : NULL, .lo8 = k->lo8 ? k->lo8 + i : NULL,
                               .grad = k->grad ? (const char *)k->grad + i * mt_dtype_size(k->grad_dtype) : NULL,
                               .grad_dtype = k->grad_dtype, .counts = all};
    for (int j = 0; j < 2 && k->state[j]; j++)
        p.state[j] = (char *)k->state[j] + (k->state_type == MT_STATE_8BIT ? i / MT_BLOCK8 * MT_BLOCK8_BYTES
                                                                            : i * bytes[k->state_type]);
    return p;
}

/* A plane's `bytes` to the copy of a block, if there is such a plane. */
static inline void *mt_kernel_copied(void *to, const void *from, size_t bytes)
{
    return from ? memcpy(to, from, bytes) : NULL;
}

static inline void mt_kernel_put_back(void *to, const void *from, size_t bytes)
{
    if (to)
        memcpy(to, from, bytes);
}

/* Less than a block, in a copy that is a whole one. */
static inline uint64_t mt_kernel_rest(const struct mt_kernel *k, const struct mt_kernel_part *p)
{
    const size_t n = p->n;
    struct {
        uint16_t hi[MT_BLOCK8], lo[MT_BLOCK8];
        uint8_t lo8[MT_BLOCK8];
        float state[2][MT_BLOCK8], grad[MT_BLOCK8];
        uint32_t counts[MT_BLOCK8];
    } c = {{0}};
    const size_t state = k->state_type == MT_STATE_F32    ? n * sizeof(float)
                         : k->state_type == MT_STATE_BF16 ? n * sizeof(uint16_t)
                                                          : MT_BLOCK8_BYTES;
    struct mt_kernel_part copy = *p;
    copy.n = MT_BLOCK8;
    copy.hi = mt_kernel_copied(c.hi, p->hi, n * sizeof(*c.hi));
    copy.lo = mt_kernel_copied(c.lo, p->lo, n * sizeof(*c.lo));
    copy.lo8 = mt_kernel_copied(c.lo8, p->lo8, n);
    copy.grad = mt_kernel_copied(c.grad, p->grad, n * mt_dtype_size(k->grad_dtype));
    for (int j = 0; j < 2; j++)
        copy.state[j] = mt_kernel_copied(c.state[j], p->state[j], state);
    copy.counts = c.counts;
    for (size_t i = 0; i < n; i++)
        c.counts[i] = 1;
    uint64_t bad = mt_kernel_run_part(k, &copy, n);
    mt_kernel_put_back(p->hi, c.hi, n * sizeof(*c.hi));
    mt_kernel_put_back(p->lo, c.lo, n * sizeof(*c.lo));
    mt_kernel_put_back(p->lo8, c.lo8, n);
    for (int j = 0; j < 2; j++)
        mt_kernel_put_back(p->state[j], c.state[j], state);
    return bad;
}

/* Random numbers of a piece: state i has word (first + i) % 4 of block (first + i) / 4, master i half (first + i) % 8
 * of block (first + i) / 8, of each word the lower one first. Its elements are those of whole blocks. */
struct mt_kernel_numbers {
    uint32_t words[MT_KERNEL_PIECE + 4 * MT_KERNEL_LANES], halves[MT_KERNEL_PIECE / 2 + 4 * MT_KERNEL_LANES];
};

static inline void mt_kernel_draw(struct mt_kernel_numbers *r, const struct mt_kernel *k, size_t i, size_t n)
{
    uint64_t first = k->first + i;
    if (k->stochastic && k->state_type == MT_STATE_BF16)
        mt_kernel_random(r->words, k->seed, k->stream, first / 4, mt_div_up(first % 4 + n, (size_t)4));
    if (k->master == MT_MASTER_BF16)
        mt_kernel_random(r->halves, k->seed, k->master_stream, first / 8, mt_div_up(first % 8 + n, (size_t)8));
}

/* The gradient of elements [i, i + n), at most a piece, along its noise, added in the order of the samples. */
static inline void mt_kernel_along(float *restrict grad, const struct mt_kernel *k, size_t i, size_t n)
{
    const struct mt_along a = *k->along;
    const size_t block = mt_noise_block(a.kind), at = (k->first + i) % block;
    uint32_t words[MT_KERNEL_PIECE + 4 * MT_KERNEL_LANES];
    float z[MT_KERNEL_PIECE + 128];
    memset(grad, 0, n * sizeof(*grad));
    for (size_t s = 0; s < a.n; s++) {
        uint64_t first = mt_noise_index(a.kind, s, k->first + i);
        mt_kernel_random(words, a.seed, a.stream, first, mt_div_up(at + n, block));
        for (size_t w = 0; w < mt_div_up(at + n, (size_t)32) && a.kind == MT_NOISE_SIGN; w++)
            for (size_t bit = 0; bit < 32; bit++)
                z[32 * w + bit] = words[w] >> bit & 1 ? -1.0f : 1.0f;
        for (size_t j = 0; j < n && a.kind == MT_NOISE_NORMAL; j++)
            z[at + j] = mt_noise_normal(words[at + j]);
        for (size_t j = 0; j < n; j++)
            grad[j] += a.g[s] * z[at + j];
    }
    for (size_t j = 0; j < n && a.limit != MT_NOISE_ALL; j++)
        grad[j] = (k->hi[i + j] & 0x7fffu) <= a.limit ? grad[j] : 0;
}

static inline uint64_t mt_kernel_body(const struct mt_kernel *k)
{
    struct mt_kernel_numbers numbers;
    float grad[MT_KERNEL_PIECE];
    uint64_t bad = 0;
    for (size_t i = 0; i < k->n; i += MT_KERNEL_PIECE) {
        size_t n = MT_MIN((size_t)MT_KERNEL_PIECE, k->n - i), whole = n / MT_BLOCK8 * MT_BLOCK8;
        mt_kernel_draw(&numbers, k, i, mt_align_up(n, (size_t)MT_BLOCK8));
        const uint32_t *words = k->stochastic ? numbers.words + (k->first + i) % 4 : NULL;
        const uint16_t *halves = (const uint16_t *)numbers.halves + (k->first + i) % 8;
        struct mt_kernel_part p = mt_kernel_part_at(k, i, whole, words, halves);
        if (k->along) {
            mt_kernel_along(grad, k, i, n);
            p.grad = grad;
        }
        bad += mt_kernel_run_part(k, &p, whole);
        if (whole < n) {
            p = mt_kernel_part_at(k, i + whole, n - whole, words ? words + whole : NULL, halves + whole);
            p.grad = k->along ? grad + whole : p.grad;
            bad += mt_kernel_rest(k, &p);
        }
    }
    return bad;
}

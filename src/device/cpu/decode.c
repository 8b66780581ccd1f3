/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packed formats. A block of 4-bit codes has no more than 16 values: they are computed and rounded once a block, and
 * its elements look them up, byte by byte, 16 at a time (one instruction from SSSE3 on). FP8 is converted as it comes.
 */
#include <string.h>

#include "base/packed.h"
#include "device/cpu/cpu.h"

typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef float f32x16 __attribute__((vector_size(64)));

enum { CHUNK = 65536 }; /* elements; whole groups of NF4's nested scales */
_Static_assert(CHUNK % (MT_NF4_BLOCK * MT_NF4_NESTED) == 0 && CHUNK % MT_MXFP4_BLOCK == 0, "chunks are whole blocks");

#ifdef __clang__ /* has no shuffle by a vector */
MT_HOT_PART u8x16 look_up(u8x16 table, u8x16 at)
{
    u8x16 r;
    for (int i = 0; i < 16; i++)
        r[i] = table[at[i]];
    return r;
}
#define SHUFFLE2(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
MT_HOT_PART u8x16 look_up(u8x16 table, u8x16 at)
{
    return __builtin_shuffle(table, at);
}
#define SHUFFLE2(a, b, ...) __builtin_shuffle(a, b, (__typeof__(a)){__VA_ARGS__})
#endif

/* Elements of a and b in turn; first the lower half of each. */
struct bytes2 {
    u8x16 lo, hi;
};
MT_HOT_PART struct bytes2 in_turn8(u8x16 a, u8x16 b)
{
    return (struct bytes2){SHUFFLE2(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
                           SHUFFLE2(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)};
}

MT_HOT_PART void store_in_turn16(uint8_t *dst, u8x16 a, u8x16 b)
{
    u16x8 x = (u16x8)a, y = (u16x8)b, lo = SHUFFLE2(x, y, 0, 8, 1, 9, 2, 10, 3, 11);
    u16x8 hi = SHUFFLE2(x, y, 4, 12, 5, 13, 6, 14, 7, 15);
    memcpy(dst, &lo, 16);
    memcpy(dst + 16, &hi, 16);
}

/* All ones where a > b, of numbers from 0 up: comparisons of vectors wider than the CPU's are done one by one. */
#define ABOVE(a, b) ((u32x16)((i32x16)((b) - (a)) >> 31))

/* To bf16, to nearest even, in the upper half. */
MT_HOT_PART void round_bits(u32x16 *bits)
{
    u32x16 u = *bits, nan = ABOVE(u & 0x7fffffffu, 0x7f800000u);
    *bits = (nan & (u | 0x400000u)) | (~nan & (u + 0x7fffu + ((u >> 16) & 1u)));
}

/* The 16 values of a block in `dtype`: byte b of value i of f32 is in byte[b][i]; bf16 has the upper two. */
struct values {
    u8x16 byte[4];
};

MT_HOT_PART void make_values(struct values *v, const float *code, float scale, bool bf16)
{
    f32x16 x;
    memcpy(&x, code, sizeof(x));
    x *= scale;
    u32x16 bits = (u32x16)x;
    if (bf16)
        round_bits(&bits);
    for (int b = bf16 ? 2 : 0; b < 4; b++)
        v->byte[b] = __builtin_convertvector(bits >> (8 * (unsigned)b), u8x16);
}

MT_HOT_PART u8x16 load(const uint8_t *p)
{
    u8x16 v;
    memcpy(&v, p, 16);
    return v;
}

MT_HOT_PART void look_up_16(uint8_t *dst, const struct values *v, u8x16 at, bool bf16)
{
    struct bytes2 up = in_turn8(look_up(v->byte[2], at), look_up(v->byte[3], at));
    if (bf16) {
        memcpy(dst, &up.lo, 16);
        memcpy(dst + 16, &up.hi, 16);
        return;
    }
    struct bytes2 low = in_turn8(look_up(v->byte[0], at), look_up(v->byte[1], at));
    store_in_turn16(dst, low.lo, up.lo);
    store_in_turn16(dst + 32, low.hi, up.hi);
}

/* 32 elements, from 16 bytes of codes. */
MT_HOT_PART void look_up_32(uint8_t *dst, const struct values *v, const uint8_t *codes, bool high_first, bool bf16)
{
    u8x16 c = load(codes), high = c >> 4, low = c & 15;
    struct bytes2 at = in_turn8(high_first ? high : low, high_first ? low : high);
    look_up_16(dst, v, at.lo, bf16);
    look_up_16(dst + (bf16 ? 32 : 64), v, at.hi, bf16);
}

/* A block that the matrix ends in. */
MT_HOT_PART void look_up_rest(uint8_t *dst, const struct values *v, const uint8_t *codes, size_t n, bool bf16)
{
    for (size_t i = 0; i < n; i++)
        for (int b = bf16 ? 2 : 0; b < 4; b++)
            *dst++ = v->byte[b][i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4];
}

MT_HOT_PART float nf4_scale(const struct mt_decode *a, size_t block)
{
    if (!a->nested_scales)
        return ((const float *)a->scales)[block];
    float s = a->nested_map[((const uint8_t *)a->scales)[block]] * a->nested_scales[block / MT_NF4_NESTED];
    return s + *a->nested_offset;
}

MT_HOT_PART void decode_nf4(const struct mt_decode *a, size_t first, size_t end, bool bf16)
{
    const size_t size = bf16 ? 2 : 4;
    struct values v;
    for (size_t i = first; i < end; i += MT_NF4_BLOCK) {
        const uint8_t *codes = a->codes + i / 2;
        uint8_t *dst = (uint8_t *)a->out + i * size;
        make_values(&v, mt_nf4_values, nf4_scale(a, i / MT_NF4_BLOCK), bf16);
        if (end - i < MT_NF4_BLOCK) {
            look_up_rest(dst, &v, codes, end - i, bf16);
            continue;
        }
        look_up_32(dst, &v, codes, true, bf16);
        look_up_32(dst + 32 * size, &v, codes + 16, true, bf16);
    }
}

MT_HOT_PART void decode_mxfp4(const struct mt_decode *a, size_t first, size_t end, bool bf16)
{
    const size_t size = bf16 ? 2 : 4;
    struct values v;
    for (size_t i = first; i < end; i += MT_MXFP4_BLOCK) {
        float scale = mt_e8m0_to_f32(((const uint8_t *)a->scales)[i / MT_MXFP4_BLOCK]);
        make_values(&v, mt_fp4_values, scale, bf16);
        look_up_32((uint8_t *)a->out + i * size, &v, a->codes + i / 2, false, bf16);
    }
}

/* mt_e4m3_to_f32() of 16 codes. */
MT_HOT_PART f32x16 *e4m3(u32x16 *codes)
{
    u32x16 c = *codes, mag = c & 0x7fu;
    f32x16 small = __builtin_convertvector((i32x16)mag, f32x16) * 0x1p-9f;
    u32x16 normal = ABOVE(mag, 7u), nan = ABOVE(mag, 0x7eu) & 0x7fc00000u;
    u32x16 bits = (~normal & (u32x16)small) | (normal & ((mag << 20) + (120u << 23)));
    *codes = bits | nan | (c & 0x80u) << 24;
    return (f32x16 *)codes;
}

/* Columns [0, n) of a row of one block. Widths change in loops of their own, which become vector code so. */
MT_HOT_PART void decode_fp8(uint8_t *restrict out, const uint8_t *restrict codes, float scale, size_t n, bool bf16)
{
    union {
        u32x16 vec[MT_FP8_BLOCK / 16];
        uint32_t bits[MT_FP8_BLOCK];
    } u;
    uint16_t *restrict half = (uint16_t *)out;
    for (size_t i = 0; i < n; i++)
        u.bits[i] = codes[i];
    for (size_t i = n; i % 16; i++)
        u.bits[i] = 0;
    for (size_t i = 0; i < mt_div_up(n, 16); i++) {
        *e4m3(&u.vec[i]) *= scale;
        if (bf16)
            round_bits(&u.vec[i]);
    }
    if (bf16)
        for (size_t i = 0; i < n; i++)
            half[i] = (uint16_t)(u.bits[i] >> 16);
    else
        memcpy(out, u.bits, n * sizeof(*u.bits));
}

MT_HOT_PART void decode_fp8_rows(const struct mt_decode *a, size_t first, size_t end, bool bf16)
{
    size_t per_row = mt_div_up(a->cols, MT_FP8_BLOCK);
    for (size_t r = first; r < end; r++)
        for (size_t c = 0; c < a->cols; c += MT_FP8_BLOCK) {
            float scale = ((const float *)a->scales)[r / MT_FP8_BLOCK * per_row + c / MT_FP8_BLOCK];
            size_t at = r * a->cols + c, n = MT_MIN((size_t)MT_FP8_BLOCK, a->cols - c);
            uint8_t *dst = (uint8_t *)a->out + at * (bf16 ? 2 : 4);
            if (n == MT_FP8_BLOCK)
                decode_fp8(dst, a->codes + at, scale, MT_FP8_BLOCK, bf16);
            else
                decode_fp8(dst, a->codes + at, scale, n, bf16);
        }
}

/* Elements, of FP8 rows. A function for each format and dtype: each is compiled for its constants. */
typedef void (*decoder)(const struct mt_decode *a, size_t first, size_t end);
#define DECODER(name, body, bf16)                                                                  \
    MT_HOT static void name(const struct mt_decode *a, size_t first, size_t end)                   \
    {                                                                                              \
        body(a, first, end, bf16);                                                                 \
    }
DECODER(nf4_f32, decode_nf4, false)
DECODER(nf4_bf16, decode_nf4, true)
DECODER(mxfp4_f32, decode_mxfp4, false)
DECODER(mxfp4_bf16, decode_mxfp4, true)
DECODER(fp8_f32, decode_fp8_rows, false)
DECODER(fp8_bf16, decode_fp8_rows, true)

struct job {
    const struct mt_decode *a;
    decoder run;
    size_t n, per_chunk;
};

static void chunk_main(void *ctx, size_t chunk, int thread)
{
    const struct job *j = ctx;
    (void)thread;
    j->run(j->a, chunk * j->per_chunk, MT_MIN(j->n, (chunk + 1) * j->per_chunk));
}

void mt_cpu_run_decode(struct mt_cpu_device *d, const struct mt_decode *a)
{
    static const decoder of[MT_N_PACKED][2] = {
        [MT_PACKED_NF4] = {nf4_f32, nf4_bf16},
        [MT_PACKED_MXFP4] = {mxfp4_f32, mxfp4_bf16},
        [MT_PACKED_FP8] = {fp8_f32, fp8_bf16},
    };
    bool rows = a->format == MT_PACKED_FP8;
    struct job j = {a, of[a->format][a->dtype == MT_BF16], rows ? a->rows : a->rows * a->cols,
                    rows ? mt_cpu_rows_per_chunk(a->cols) : CHUNK};
    mt_pool_run(d->pool, chunk_main, &j, mt_div_up(j.n, j.per_chunk));
}

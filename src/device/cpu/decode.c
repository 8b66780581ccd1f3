/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packed formats. A block of 4-bit codes has at most 16 values: they are computed and rounded once for the block, and
 * its elements look them up, byte by byte, 16 at a time (one instruction from SSSE3 on). FP8 has 8 fractions and 8
 * values below them that are looked up so, and exponents that are added.
 */
#include <string.h>

#include "base/packed.h"
#include "device/cpu/cpu.h"

typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef uint64_t u64x2 __attribute__((vector_size(16)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef float f32x16 __attribute__((vector_size(64)));

enum {
    CHUNK = 65536, /* elements; whole groups of NF4's nested scales */
    FP8_ROWS = 4,  /* of a block that are decoded together: enough for its values, few enough to read on in each */
};
_Static_assert(CHUNK % (MT_NF4_BLOCK * MT_NF4_NESTED) == 0 && CHUNK % MT_MXFP4_BLOCK == 0 && CHUNK % MT_INT4_BLOCK == 0, "a chunk must be whole blocks");

#ifdef __clang__ /* has no shuffle with a vector of indices */
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

/* Elements of a and b interleaved: those of the lower halves, then those of the upper. */
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

/* All ones where a > b, for numbers from 0 up. (Comparisons of vectors wider than the CPU's are not vectorised.) */
#define ABOVE(a, b) ((u32x16)((i32x16)((b) - (a)) >> 31))

/* Rounds to bf16, to nearest even; the result is in the upper half. */
MT_HOT_PART void round_bits(u32x16 *bits)
{
    u32x16 u = *bits, nan = ABOVE(u & 0x7fffffffu, 0x7f800000u);
    *bits = (nan & (u | 0x400000u)) | (~nan & (u + 0x7fffu + ((u >> 16) & 1u)));
}

/* The 16 values of a block: byte b of value i as f32 is byte[b][i]; bf16 uses the upper two bytes. */
struct values {
    u8x16 byte[4];
};

/* byte[b][i]: byte b of number i. */
MT_HOT_PART void sort_bytes(struct values *v, const u32x16 *numbers)
{
    const u8x16 by_byte = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    u8x16 of[4]; /* of four numbers each */
    u32x4 q[4];
    memcpy(of, numbers, sizeof(of));
    for (int i = 0; i < 4; i++)
        q[i] = (u32x4)look_up(of[i], by_byte);
    u64x2 a = (u64x2)SHUFFLE2(q[0], q[1], 0, 4, 1, 5), b = (u64x2)SHUFFLE2(q[2], q[3], 0, 4, 1, 5);
    u64x2 c = (u64x2)SHUFFLE2(q[0], q[1], 2, 6, 3, 7), d = (u64x2)SHUFFLE2(q[2], q[3], 2, 6, 3, 7);
    v->byte[0] = (u8x16)SHUFFLE2(a, b, 0, 2);
    v->byte[1] = (u8x16)SHUFFLE2(a, b, 1, 3);
    v->byte[2] = (u8x16)SHUFFLE2(c, d, 0, 2);
    v->byte[3] = (u8x16)SHUFFLE2(c, d, 1, 3);
}

MT_HOT_PART void make_values(struct values *v, const float *code, float scale, bool bf16)
{
    f32x16 x;
    memcpy(&x, code, sizeof(x));
    x *= scale;
    u32x16 bits = (u32x16)x;
    if (bf16)
        round_bits(&bits);
    sort_bytes(v, &bits);
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

/* Decodes 32 elements from 16 bytes of codes. */
MT_HOT_PART void look_up_32(uint8_t *dst, const struct values *v, const uint8_t *codes, bool high_first, bool bf16)
{
    u8x16 c = load(codes), high = c >> 4, low = c & 15;
    struct bytes2 at = in_turn8(high_first ? high : low, high_first ? low : high);
    look_up_16(dst, v, at.lo, bf16);
    look_up_16(dst + (bf16 ? 32 : 64), v, at.hi, bf16);
}

/* Decodes the incomplete last block of a matrix. */
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

/* The same of MXFP4, whose scale is 2^(e - 127): where no product leaves the normal numbers, exponents are added. */
MT_HOT_PART void make_fp4_values(struct values *v, uint8_t e, bool bf16)
{
    static const uint16_t fp4[16] = {0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                     0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
    u16x16 x, zero;
    if (e < 2 || e > 251) {
        make_values(v, mt_fp4_values, mt_e8m0_to_f32(e), bf16);
        return;
    }
    memcpy(&x, fp4, sizeof(x));
    zero = (u16x16)((x & 0x7fff) == 0);
    x += (uint16_t)((e - 127) * 128) & ~zero;
    v->byte[0] = v->byte[1] = (u8x16){0};
    v->byte[2] = __builtin_convertvector(x, u8x16);
    v->byte[3] = __builtin_convertvector(x >> 8, u8x16);
}

MT_HOT_PART void decode_mxfp4(const struct mt_decode *a, size_t first, size_t end, bool bf16)
{
    const size_t size = bf16 ? 2 : 4;
    struct values v;
    for (size_t i = first; i < end; i += MT_MXFP4_BLOCK) {
        make_fp4_values(&v, ((const uint8_t *)a->scales)[i / MT_MXFP4_BLOCK], bf16);
        look_up_32((uint8_t *)a->out + i * size, &v, a->codes + i / 2, false, bf16);
    }
}

/* The values of a block's codes before the scale: code - zero. */
MT_HOT_PART const float *int4_values(const struct mt_decode *a, size_t i, size_t block)
{
    if (!a->zeros)
        return mt_int4_values + 7;
    size_t across = mt_packed_across(a->format, a->cols), row = i / a->cols;
    return mt_int4_values + 15 - mt_packed_zero(a->zeros, across, row, block - row * across);
}

MT_HOT_PART void decode_int4(const struct mt_decode *a, size_t first, size_t end, bool bf16)
{
    const size_t size = bf16 ? 2 : 4;
    struct values v;
    const size_t block = mt_packed_formats[a->format].block ?: a->cols;
    for (size_t i = first; i < end; i += block) {
        make_values(&v, int4_values(a, i, i / block), mt_scale_to_f32(a->scale, a->scales, NULL, i / block), bf16);
        for (size_t k = i; k < i + block; k += 32)
            look_up_32((uint8_t *)a->out + k * size, &v, a->codes + k / 2, false, bf16);
    }
}

MT_HOT_PART void decode_nvfp4(const struct mt_decode *a, size_t first, size_t end, bool bf16)
{
    struct values v;
    for (size_t i = first; i < end; i += MT_NVFP4_BLOCK) {
        u8x16 c = {0};
        memcpy(&c, a->codes + i / 2, MT_NVFP4_BLOCK / 2);
        make_values(&v, mt_fp4_values, mt_scale_to_f32(a->scale, a->scales, a->factor, i / MT_NVFP4_BLOCK), bf16);
        look_up_16((uint8_t *)a->out + i * (bf16 ? 2 : 4), &v, in_turn8(c & 15, c >> 4).lo, bf16);
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

/* Columns [0, n) of a row of one block, whatever codes and scale are. Widths change in loops of their own, which
 * become vector code so. */
MT_HOT_PART void convert_fp8(uint8_t *restrict out, const uint8_t *restrict codes, float scale, size_t n, bool bf16)
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

/* Of codes whose exponent is not 0 the fraction, as if it were 0; of the others the value. */
static const float e4m3_fraction[16] = {0x8p-10f, 0x9p-10f, 0xap-10f, 0xbp-10f, 0xcp-10f, 0xdp-10f, 0xep-10f, 0xfp-10f,
                                        0x0p-9f,  0x1p-9f,  0x2p-9f,  0x3p-9f,  0x4p-9f,  0x5p-9f,  0x6p-9f,  0x7p-9f};

/* Sign and exponent of codes, each in the upper half of an element, where bf16 has them. */
MT_HOT_PART u16x8 rest_of_e4m3(u16x8 c)
{
    return (c & 0x8000) + (c >> 4 & 0x780);
}

/*
 * Decodes n codes, a multiple of 16: a fraction times the scale is rounded alike whatever the exponent is, so
 * that it is looked up, and exponent and sign are added to it. Only where no product is too small or too large for
 * that. False: there is a NaN among the codes, and nothing of `out` is valid.
 */
MT_HOT_PART bool look_up_fp8(uint8_t *restrict out, const uint8_t *restrict codes, const struct values *v, size_t n,
                             bool bf16)
{
    u8x16 nan = {0};
    for (size_t i = 0; i < n; i += 16) {
        u8x16 c = load(codes + i), at = (c & 7) | ((u8x16)((c & 0x78) == 0) & 8);
        struct bytes2 wide = in_turn8((u8x16){0}, c), x = in_turn8(look_up(v->byte[2], at), look_up(v->byte[3], at));
        u16x8 lo = (u16x8)x.lo + rest_of_e4m3((u16x8)wide.lo), hi = (u16x8)x.hi + rest_of_e4m3((u16x8)wide.hi);
        nan |= (u8x16)((c & 0x7f) == 0x7f);
        if (bf16) {
            memcpy(out + 2 * i, &lo, sizeof(lo));
            memcpy(out + 2 * i + sizeof(lo), &hi, sizeof(hi));
            continue;
        }
        x = in_turn8(look_up(v->byte[0], at), look_up(v->byte[1], at));
        store_in_turn16(out + 4 * i, x.lo, (u8x16)lo);
        store_in_turn16(out + 4 * i + 32, x.hi, (u8x16)hi);
    }
    uint64_t any[2];
    memcpy(any, &nan, sizeof(any));
    return !(any[0] | any[1]);
}

/* Rows [first, end), columns [c, c + n), all of one scale. */
MT_HOT_PART void decode_fp8(const struct mt_decode *a, size_t first, size_t end, size_t c, size_t n, bool bf16)
{
    const size_t size = bf16 ? 2 : 4;
    size_t block = mt_packed_scale_at(a->format, a->cols, first * a->cols + c);
    float scale = mt_scale_to_f32(a->scale, a->scales, NULL, block);
    uint32_t magnitude = mt_f32_bits(scale) & 0x7fffffffu;
    bool fits = n % 16 == 0 && magnitude >= (127u - 119) << 23 && magnitude <= (127u + 118) << 23;
    struct values v = {.byte = {{0}}};
    if (fits)
        make_values(&v, e4m3_fraction, scale, bf16);
    for (size_t at = first * a->cols + c; first < end; first++, at += a->cols) {
        uint8_t *dst = (uint8_t *)a->out + at * size;
        if (!fits || !look_up_fp8(dst, a->codes + at, &v, n, bf16))
            convert_fp8(dst, a->codes + at, scale, n, bf16);
    }
}

MT_HOT_PART void decode_fp8_rows(const struct mt_decode *a, size_t first, size_t end, bool bf16)
{
    const struct mt_packed_format *f = &mt_packed_formats[a->format];
    const size_t rows = f->rows == 1 ? 1 : FP8_ROWS, wide = f->block ? f->block : MT_FP8_BLOCK;
    for (size_t r = first, next; r < end; r = next) {
        next = MT_MIN(end, (r / rows + 1) * rows);
        for (size_t c = 0; c < a->cols; c += wide) {
            size_t n = MT_MIN(wide, a->cols - c);
            if (n == MT_FP8_BLOCK)
                decode_fp8(a, r, next, c, MT_FP8_BLOCK, bf16);
            else
                decode_fp8(a, r, next, c, n, bf16);
        }
    }
}

/* [first, end) are elements; for FP8, rows. There is a function for each format and dtype, compiled for its
 * constants. */
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
DECODER(int4_f32, decode_int4, false)
DECODER(int4_bf16, decode_int4, true)
DECODER(nvfp4_f32, decode_nvfp4, false)
DECODER(nvfp4_bf16, decode_nvfp4, true)
DECODER(fp8_f32, decode_fp8_rows, false)
DECODER(fp8_bf16, decode_fp8_rows, true)

struct job {
    const struct mt_decode *a;
    decoder run;
    size_t n, per_chunk;
};

static void chunk_main(void *ctx, size_t chunk, int)
{
    const struct job *j = ctx;
    j->run(j->a, chunk * j->per_chunk, MT_MIN(j->n, (chunk + 1) * j->per_chunk));
}

void mt_cpu_run_decode(struct mt_cpu_device *d, const struct mt_decode *a)
{
    static const decoder of[][2] = {
        [MT_PACKED_NF4] = {nf4_f32, nf4_bf16},
        [MT_PACKED_MXFP4] = {mxfp4_f32, mxfp4_bf16},
        [MT_PACKED_FP8] = {fp8_f32, fp8_bf16},
        [MT_PACKED_INT4] = {int4_f32, int4_bf16},
        [MT_PACKED_NVFP4] = {nvfp4_f32, nvfp4_bf16},
    };
    enum mt_packed f = mt_packed_kind(a->format);
    bool rows = f == MT_PACKED_FP8;
    size_t whole = a->format == MT_PACKED_INT4R ? a->cols : 1;
    struct job j = {a, of[f][a->dtype == MT_BF16], rows ? a->rows : a->rows * a->cols,
                    rows ? mt_align_up(mt_cpu_rows_per_chunk(a->cols), FP8_ROWS) : mt_div_up(CHUNK, whole) * whole};
    mt_pool_run(d->pool, chunk_main, &j, mt_div_up(j.n, j.per_chunk));
}

size_t mt_cpu_packed_gemm_workspace(const struct mt_device_limits *, const struct mt_packed_gemm *a)
{
    return a->b.rows * a->b.cols * mt_dtype_size(MT_BF16);
}

void mt_cpu_run_packed_gemm(struct mt_cpu_device *d, const struct mt_packed_gemm *a)
{
    struct mt_decode b = a->b;
    b.out = a->workspace;
    mt_cpu_run_decode(d, &b);
    mt_cpu_run_gemm(d, &(struct mt_gemm){.m = a->m, .n = b.rows, .k = b.cols, .dtype = MT_BF16, .d_dtype = a->d_dtype,
                                         .trans_b = true, .a = a->a, .lda = a->lda, .b = b.out, .ldb = b.cols,
                                         .bias = a->bias, .c = a->c, .ldc = a->ldc, .d = a->d, .ldd = a->ldd});
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The functions of a struct mt_cpu_gemm_isa. The file that includes this defines before
 *     LANES             floats of a vector
 *     ROWS, VECS        a register tile: ROWS rows of A by VECS vectors of B
 *     transpose(vec *)  LANES vectors, in place
 */
#define VECTOR(type, n) __attribute__((vector_size((n) * sizeof(type)), aligned(sizeof(type)), may_alias))
typedef float vec VECTOR(float, LANES);
typedef float vec4 VECTOR(float, 4);
typedef uint16_t halves VECTOR(uint16_t, LANES);
typedef uint16_t halves4 VECTOR(uint16_t, 4);
typedef uint32_t words VECTOR(uint32_t, LANES);
typedef uint8_t bytes VECTOR(uint8_t, LANES);
typedef int32_t ints VECTOR(int32_t, LANES);
typedef uint32_t words4 VECTOR(uint32_t, 4);

#define INLINE static inline __attribute__((always_inline))

enum { COLS = VECS * LANES, AHEAD = 8 };
_Static_assert((int)ROWS <= (int)MT_CPU_GEMM_ROWS, "MT_CPU_GEMM_ROWS is the most rows that a kernel may have");
_Static_assert((int)MT_CPU_GEMM_COLS % (int)COLS == 0, "COLS must divide MT_CPU_GEMM_COLS");

INLINE void fetch_tile(const float *tile, size_t ld, bool to_write)
{
#pragma GCC unroll 1
    for (int i = 0; i < ROWS; i++, tile += ld)
#pragma GCC unroll 4
        for (int j = 0; j < VECS; j++)
            if (to_write)
                __builtin_prefetch(tile + j * LANES, 1);
            else
                __builtin_prefetch(tile + j * LANES, 0);
}

/* Hides a value from the compiler, which would otherwise keep a pointer for each row. */
#define OPAQUE(x) __asm__("" : "+r"(x))

/* Rows 0 to 3, 4 to 7 and 8 to 11 of A have one pointer each, and share the distances from it. */
INLINE void multiply_any(bool packed, size_t k, const float *restrict a, size_t lda, const float *restrict b,
                         const float *c, size_t ldc, float *d, size_t ldd)
{
    const float *a4 = ROWS > 4 ? a + 4 * lda : a, *a8 = ROWS > 8 ? a + 8 * lda : a;
    size_t lda3 = 3 * lda;
    fetch_tile(d, ldd, true);
    if (c && c != d)
        fetch_tile(c, ldc, false);
    vec sum[ROWS][VECS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < VECS; j++)
            sum[i][j] = (vec){0};
    for (; k; k--, b += COLS) {
        if (!packed) {
            OPAQUE(a);
            OPAQUE(a4);
            OPAQUE(a8);
            OPAQUE(lda3);
        }
        vec row[VECS];
#pragma GCC unroll 4
        for (int j = 0; j < VECS; j++) {
            row[j] = *(const vec *)(b + j * LANES);
            __builtin_prefetch(b + AHEAD * COLS + j * LANES);
        }
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            const float *four = i < 4 ? a : i < 8 ? a4 : a8;
            float x = packed ? a[i] : four[i % 4 == 3 ? lda3 : (size_t)(i % 4) * lda];
#pragma GCC unroll 4
            for (int j = 0; j < VECS; j++)
                sum[i][j] += x * row[j];
        }
        a += packed ? (int)ROWS : 1;
        a4++;
        a8++;
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++, c = c ? c + ldc : c, d += ldd)
#pragma GCC unroll 4
        for (int j = 0; j < VECS; j++) {
            if (c)
                sum[i][j] += *(const vec *)(c + j * LANES);
            *(vec *)(d + j * LANES) = sum[i][j];
        }
}

static void multiply(size_t k, const float *a, const float *b, const float *c, size_t ldc, float *d, size_t ldd)
{
    multiply_any(true, k, a, ROWS, b, c, ldc, d, ldd);
}

static void multiply_rows(size_t k, const float *a, size_t lda, const float *b, const float *c, size_t ldc, float *d,
                          size_t ldd)
{
    multiply_any(false, k, a, lda, b, c, ldc, d, ldd);
}

/* mt_e4m3_to_f32() of LANES codes. */
INLINE vec of_codes(words w)
{
    words mag = w & 0x7f, normal = (mag << 20) + (120u << 23);
    words small = (words)(__builtin_convertvector((ints)mag, vec) * 0x1p-9f);
    words is_small = (words)((ints)mag < 8), is_nan = (words)((ints)mag == 0x7f);
    words bits = (small & is_small) | (normal & ~is_small);
    return (vec)(bits | (is_nan & 0x7fc00000u) | (w & 0x80) << 24);
}

INLINE float one(enum mt_dtype t, const void *src, size_t i)
{
    if (t == MT_E4M3)
        return mt_e4m3_to_f32(((const uint8_t *)src)[i]);
    return t == MT_F32 ? ((const float *)src)[i] : mt_bf16_to_f32(((const uint16_t *)src)[i]);
}

INLINE vec several(enum mt_dtype t, const void *src, size_t i)
{
    if (t == MT_F32)
        return *(const vec *)((const float *)src + i);
    if (t == MT_E4M3)
        return of_codes(__builtin_convertvector(*(const bytes *)((const uint8_t *)src + i), words));
    return (vec)(__builtin_convertvector(*(const halves *)((const uint16_t *)src + i), words) << 16);
}

INLINE vec4 four(enum mt_dtype t, const void *src, size_t i)
{
    if (t == MT_F32)
        return *(const vec4 *)((const float *)src + i);
    return (vec4)(__builtin_convertvector(*(const halves4 *)((const uint16_t *)src + i), words4) << 16);
}

INLINE void fetch(enum mt_dtype t, const void *src, size_t i)
{
    __builtin_prefetch((const char *)src + i * mt_dtype_size(t), 0, 2);
}

/* Index of a lane's step k in the source. */
INLINE size_t source_at(const struct mt_cpu_panel *p, bool trans, size_t lane, size_t k)
{
    return p->first + (trans ? lane * p->ld + k : k * p->ld + lane);
}

/* Lanes [lane, lane + width) of steps [k, k + n), one by one. */
INLINE void panel_any(const struct mt_cpu_panel *p, enum mt_dtype t, bool trans, size_t width, size_t lane, size_t k,
                     size_t n)
{
    float *strip = p->dst + lane / width * p->pitch;
    for (size_t q = k; q < k + n; q++)
        for (size_t l = 0; l < width; l++)
            strip[q * width + l] =
                lane + l < p->lanes ? p->factor * one(t, p->src, source_at(p, trans, lane + l, q)) : 0;
}

/* LANES steps of a strip whose lanes are rows of the source. */
INLINE void panel_square(const struct mt_cpu_panel *p, enum mt_dtype t, size_t width, size_t lane, size_t k)
{
    float *strip = p->dst + lane / width * p->pitch + k * width;
    for (size_t l = 0; l < width; l += LANES) {
        vec v[LANES] __attribute__((aligned(LANES * sizeof(float)))); /* as transpose() wants them */
        size_t n = MT_MIN(width - l, (size_t)LANES);
        for (size_t i = 0; i < n; i++) /* prefetches the next strip */
            fetch(t, p->src, source_at(p, true, lane + width + l + i, k));
        for (size_t i = 0; i < LANES; i++)
            v[i] = i < n ? several(t, p->src, source_at(p, true, lane + l + i, k)) * p->factor : (vec){0} * p->factor;
        transpose(v);
        for (size_t i = 0; i < LANES; i++) {
            if (l + LANES <= width)
                *(vec *)(strip + i * width + l) = v[i];
            else
                memcpy(strip + i * width + l, &v[i], n * sizeof(float));
        }
    }
}

INLINE void panel_columns(const struct mt_cpu_panel *p, enum mt_dtype t, size_t width)
{
    for (size_t lane = 0; lane < p->lanes; lane += width) {
        size_t k = 0;
        if (lane + width <= p->lanes)
            for (; k + LANES <= p->k; k += LANES)
                panel_square(p, t, width, lane, k);
        panel_any(p, t, true, width, lane, k, p->k - k);
    }
}

/* A step of a strip whose lanes are columns of the source. */
INLINE void panel_step(const struct mt_cpu_panel *p, enum mt_dtype t, size_t width, size_t lane, size_t k)
{
    float *dst = p->dst + lane / width * p->pitch + k * width;
    size_t i = source_at(p, false, lane, k), l = 0;
    for (; l + LANES <= width; l += LANES)
        *(vec *)(dst + l) = p->factor * several(t, p->src, i + l);
    for (; l + 4 <= width; l += 4)
        *(vec4 *)(dst + l) = p->factor * four(t, p->src, i + l);
    for (; l < width; l++)
        dst[l] = p->factor * one(t, p->src, i + l);
}

/* A few steps of all strips at a time: long contiguous runs in the source's rows and in the strips. */
INLINE void panel_rows(const struct mt_cpu_panel *p, enum mt_dtype t, size_t width)
{
    enum { STEPS = 8 };
    size_t whole = p->lanes / width * width;
    for (size_t k = 0; k < p->k; k += STEPS)
        for (size_t lane = 0; lane < whole; lane += width)
            for (size_t q = k; q < MT_MIN(k + STEPS, p->k); q++) {
                for (size_t l = 0; l < width; l += LANES)
                    fetch(t, p->src, source_at(p, false, lane + l, q + 2 * STEPS));
                panel_step(p, t, width, lane, q);
            }
    if (whole < p->lanes)
        panel_any(p, t, false, width, whole, 0, p->k);
}

/* B is turned around in registers, LANES steps of LANES columns at a time. */
INLINE void thin_of(int m, size_t k, const float *a, size_t lda, const float *b, size_t ldb, float *d)
{
    vec sum[MT_CPU_GEMM_THIN] = {{0}};
    size_t q = 0;
    for (; q + LANES <= k; q += LANES) {
        vec v[LANES] __attribute__((aligned(LANES * sizeof(float))));
#pragma GCC unroll 16
        for (int l = 0; l < LANES; l++) {
            __builtin_prefetch(b + (size_t)(LANES + l) * ldb + q, 0, 2); /* of the next columns */
            v[l] = *(const vec *)(b + (size_t)l * ldb + q);
        }
        transpose(v);
#pragma GCC unroll 16
        for (int s = 0; s < LANES; s++)
#pragma GCC unroll 4
            for (int i = 0; i < m; i++)
                sum[i] += a[(size_t)i * lda + q + (size_t)s] * v[s];
    }
    for (; q < k; q++) {
        vec v = {0};
        for (int l = 0; l < LANES; l++)
            v[l] = b[(size_t)l * ldb + q];
        for (int i = 0; i < m; i++)
            sum[i] += a[(size_t)i * lda + q] * v;
    }
    for (int i = 0; i < m; i++)
        *(vec *)(d + i * LANES) = sum[i];
}

static void multiply_thin(size_t m, size_t k, const float *a, size_t lda, const float *b, size_t ldb, float *d)
{
    if (m == 1)
        thin_of(1, k, a, lda, b, ldb, d);
    else if (m == 2)
        thin_of(2, k, a, lda, b, ldb, d);
    else if (m == 3)
        thin_of(3, k, a, lda, b, ldb, d);
    else
        thin_of(4, k, a, lda, b, ldb, d);
}

/* Each case is compiled separately. */
INLINE void panel(const struct mt_cpu_panel *p, size_t width)
{
    if (p->trans && p->dtype == MT_F32)
        panel_columns(p, MT_F32, width);
    else if (p->dtype == MT_E4M3)
        panel_columns(p, MT_E4M3, width);
    else if (p->trans)
        panel_columns(p, MT_BF16, width);
    else if (p->dtype == MT_F32)
        panel_rows(p, MT_F32, width);
    else
        panel_rows(p, MT_BF16, width);
}

static void panel_a(const struct mt_cpu_panel *p)
{
    panel(p, ROWS);
}

static void panel_b(const struct mt_cpu_panel *p)
{
    panel(p, COLS);
}

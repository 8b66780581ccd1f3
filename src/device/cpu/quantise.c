/* SPDX-License-Identifier: Apache-2.0 */
/* Largest magnitudes, and codes in tiles, of which a transposed one is written by columns. */
#include <string.h>

#include "base/packed.h"
#include "device/cpu/cpu.h"

enum { TILE = 64, WIDE = 8 /* tiles of a chunk */ };

/* The largest magnitude as bits: order-free, and a NaN is larger than any number. */
MT_HOT static uint32_t largest_of_bf16(const uint16_t *x, size_t n)
{
    uint16_t most = 0;
    for (size_t i = 0; i < n; i++) {
        uint16_t mag = x[i] & 0x7fff;
        most = mag > most ? mag : most;
    }
    return (uint32_t)most << 16;
}

MT_HOT static uint32_t largest_of_f32(const uint32_t *x, size_t n)
{
    uint32_t most = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t mag = x[i] & 0x7fffffffu;
        most = mag > most ? mag : most;
    }
    return most;
}

static void amax_chunk(void *ctx, size_t part, int)
{
    const struct mt_amax *a = ctx;
    size_t piece = mt_amax_piece(a->n), first = MT_MIN(part * piece, a->n), n = MT_MIN(piece, a->n - first);
    a->parts[part] = mt_f32_from_bits(a->dtype == MT_F32 ? largest_of_f32((const uint32_t *)a->x + first, n)
                                                         : largest_of_bf16((const uint16_t *)a->x + first, n));
}

void mt_cpu_run_amax(struct mt_cpu_device *d, const struct mt_amax *a)
{
    mt_pool_run(d->pool, amax_chunk, (void *)(uintptr_t)a, MT_AMAX_PARTS);
}

MT_HOT static void encode(uint8_t *restrict codes, const float *restrict x, float factor, size_t n)
{
    for (size_t i = 0; i < n; i++)
        codes[i] = mt_f32_to_e4m3(x[i] * factor);
}

struct job {
    const struct mt_quantise *a;
    float factor;
    size_t wide; /* chunks side by side */
};

static void store_transposed(const struct mt_quantise *a, uint8_t (*tile)[TILE], size_t row, size_t col, size_t n)
{
    size_t ld = mt_codes_ld(a->rows), len = MT_MIN((size_t)TILE, ld - row);
    for (size_t c = 0; c < n; c++)
        for (size_t r = 0; r < len; r++)
            a->codes_t[(col + c) * ld + row + r] = tile[r][c];
}

static void quantise_tile(const struct job *j, size_t row, size_t col)
{
    const struct mt_quantise *a = j->a;
    uint8_t tile[TILE][TILE];
    float tmp[TILE];
    size_t rows = MT_MIN((size_t)TILE, a->rows - row), n = MT_MIN((size_t)TILE, a->cols - col);
    for (size_t r = 0; r < rows; r++) {
        size_t at = (row + r) * a->cols + col;
        encode(tile[r], mt_cpu_row_f32(a->dtype, a->x, at, n, tmp), j->factor, n);
        if (a->codes)
            memcpy(a->codes + at, tile[r], n);
    }
    for (size_t r = rows; r < TILE; r++)
        memset(tile[r], 0, TILE);
    if (a->codes_t)
        store_transposed(a, tile, row, col, n);
}

static void quantise_chunk(void *ctx, size_t chunk, int)
{
    const struct job *j = ctx;
    size_t row = chunk / j->wide * TILE, col = chunk % j->wide * TILE * WIDE;
    for (size_t end = MT_MIN(col + (size_t)TILE * WIDE, j->a->cols); col < end; col += TILE)
        quantise_tile(j, row, col);
}

void mt_cpu_run_quantise(struct mt_cpu_device *d, const struct mt_quantise *a)
{
    uint32_t most = largest_of_f32((const uint32_t *)(const void *)a->parts, MT_AMAX_PARTS);
    struct job j = {a, mt_e4m3_factor(mt_f32_from_bits(most)), mt_div_up(a->cols, (size_t)TILE * WIDE)};
    *a->scale = 1 / j.factor;
    mt_pool_run(d->pool, quantise_chunk, &j, mt_div_up(a->rows, (size_t)TILE) * j.wide);
}

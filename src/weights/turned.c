/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/turned.h"

#include "base/mem.h"

enum { TILE = 32, IN_WORD = 8 };

/* Which of a word's codes is that of the nth row. */
static const uint8_t place[][IN_WORD] = {
    [MT_TURNED_GPTQ] = {0, 1, 2, 3, 4, 5, 6, 7},
    [MT_TURNED_AWQ] = {0, 4, 1, 5, 2, 6, 3, 7},
};

/* out[c][r] = in[r][c], in tiles that stay in the cache. */
#define TURN(in, n_rows, n_cols, out)                                                              \
    for (size_t r0 = 0; r0 < (n_rows); r0 += TILE)                                                 \
        for (size_t c0 = 0; c0 < (n_cols); c0 += TILE)                                             \
            for (size_t r = r0; r < MT_MIN((n_rows), r0 + TILE); r++)                              \
                for (size_t c = c0; c < MT_MIN((n_cols), c0 + TILE); c++)                          \
                    (out)[c * (n_rows) + r] = (in)[r * (n_cols) + c];

/* From eight words, a column's codes of eight rows each, to a row's codes of eight columns each, `step` words apart: by
 * exchanging the two quarters off the diagonal of the square of codes, then of each quarter. */
static void exchange(const uint32_t *in, size_t in_step, uint32_t *out, size_t step)
{
    uint32_t x[IN_WORD], mask = 0xffff;
    for (size_t c = 0; c < IN_WORD; c++)
        x[c] = in[c * in_step];
    for (size_t half = IN_WORD / 2; half; half /= 2, mask ^= mask << 4 * half)
        for (size_t i = 0; i < IN_WORD; i++)
            if (!(i & half)) {
                uint32_t differ = (x[i] >> 4 * half ^ x[i + half]) & mask;
                x[i + half] ^= differ;
                x[i] ^= differ << 4 * half;
            }
    for (size_t r = 0; r < IN_WORD; r++)
        out[r * step] = x[place[MT_TURNED_AWQ][r]];
}

void mt_turn_codes(enum mt_turned form, const uint32_t *in, size_t rows, size_t cols, uint32_t *out)
{
    size_t words = cols / IN_WORD, bands = rows / IN_WORD;
    if (form == MT_TURNED_GPTQ) {
        TURN(in, words, rows, out)
        return;
    }
    for (size_t b0 = 0; b0 < bands; b0 += TILE)
        for (size_t w = 0; w < words; w++)
            for (size_t b = b0; b < MT_MIN(bands, b0 + TILE); b++)
                exchange(in + w * IN_WORD * bands + b, bands, out + b * IN_WORD * words + w, words);
}

void mt_turn_zeros(enum mt_turned form, const uint32_t *in, size_t rows, size_t across, uint32_t add, uint32_t *out)
{
    size_t bands = rows / IN_WORD;
    TURN(in, across, bands, out)
    for (size_t i = 0; i < bands * across; i++) {
        uint32_t of = out[i] + add, word = 0;
        for (size_t r = 0; r < IN_WORD; r++)
            word |= (of >> 4 * place[form][r] & 15) << 4 * r;
        out[i] = word;
    }
}

void mt_turn_scales(const uint16_t *in, size_t rows, size_t across, uint16_t *out)
{
    TURN(in, across, rows, out)
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "base/packed.h"

#include "base/mem.h"

const char *const mt_packed_names[MT_N_PACKED] = {"none", "nf4", "mxfp4", "fp8"};

/* Digit for digit those of bitsandbytes. */
const float mt_nf4_values[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
};

const float mt_fp4_values[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

size_t mt_packed_code_bytes(enum mt_packed f, size_t rows, size_t cols)
{
    return f == MT_PACKED_FP8 ? rows * cols : mt_div_up(rows * cols, 2);
}

size_t mt_packed_n_scales(enum mt_packed f, size_t rows, size_t cols)
{
    if (f == MT_PACKED_FP8)
        return mt_div_up(rows, MT_FP8_BLOCK) * mt_div_up(cols, MT_FP8_BLOCK);
    return mt_div_up(rows * cols, f == MT_PACKED_NF4 ? MT_NF4_BLOCK : MT_MXFP4_BLOCK);
}

static float value_at(enum mt_packed f, size_t cols, const uint8_t *codes, const float *scales, size_t i)
{
    uint8_t c = codes[f == MT_PACKED_FP8 ? i : i / 2];
    switch (f) {
    case MT_PACKED_NF4:
        return mt_nf4_values[i % 2 ? c & 15 : c >> 4] * scales[i / MT_NF4_BLOCK];
    case MT_PACKED_MXFP4:
        return mt_fp4_values[i % 2 ? c >> 4 : c & 15] * scales[i / MT_MXFP4_BLOCK];
    default: {
        size_t row = i / cols, col = i % cols;
        return mt_e4m3_to_f32(c) * scales[row / MT_FP8_BLOCK * mt_div_up(cols, MT_FP8_BLOCK) + col / MT_FP8_BLOCK];
    }
    }
}

void mt_packed_values(enum mt_packed f, size_t cols, const uint8_t *codes, const float *scales, size_t first, size_t n,
                      float *out)
{
    for (size_t i = 0; i < n; i++)
        out[i] = value_at(f, cols, codes, scales, first + i);
}

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

/**
 * Int4 layers as GPTQ and AWQ store them: [inputs, outputs], eight codes of 4 bits to a word. These put them to the
 * order of planes (compressed-tensors' pack-quantized): [rows, cols], which are outputs and inputs, a word having codes
 * of neighbouring columns. `out` is another array of the same size.
 */
enum mt_turned {
    MT_TURNED_NOT,
    MT_TURNED_GPTQ, /* a word has codes of neighbouring inputs, the first in the lowest bits: [cols / 8, rows] */
    MT_TURNED_AWQ,  /* of neighbouring outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7: [cols, rows / 8] */
};
/** rows and cols: of the matrix, multiples of 8. */
void mt_turn_codes(enum mt_turned form, const uint32_t *in, size_t rows, size_t cols, uint32_t *out);
/** From [across, rows / 8] to [rows / 8, across]; `add` is added to each word first. */
void mt_turn_zeros(enum mt_turned form, const uint32_t *in, size_t rows, size_t across, uint32_t add, uint32_t *out);
/** From [across, rows] to [rows, across], 2 bytes each. */
void mt_turn_scales(const uint16_t *in, size_t rows, size_t across, uint16_t *out);

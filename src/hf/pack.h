/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_HF_PACK_H
#define MT_HF_PACK_H

#include "base/packed.h"

/**
 * Encodes packed formats (base/packed.h) as the programs do whose files have them: NF4 as bitsandbytes, to the bit but
 * for the mean that nested scales are taken off; FP8 as transformers, to the bit; MXFP4 with the scale rounded up and
 * halves away from zero, as Triton's kernels for gpt-oss.
 *
 * Thread-safety: pure functions.
 */

/** What is encoded alone: 16384 elements of NF4 and MXFP4; of FP8 a scale's block. */
size_t mt_pack_n_jobs(enum mt_packed f, size_t rows, size_t cols);
/**
 * Job i of a matrix of finite weights [rows, cols]: its codes, and its scales in f32 (of NF4 the largest magnitudes).
 * A part of a matrix is a matrix if it begins at a multiple of 128 rows.
 */
void mt_pack_job(enum mt_packed f, size_t rows, size_t cols, const float *w, size_t i, uint8_t *codes, float *scales);

/** The byte of an MXFP4 scale that mt_pack_job() made. */
static inline uint8_t mt_f32_to_e8m0(float scale)
{
    return (uint8_t)(mt_f32_bits(scale) >> 23);
}

/** The values of nested NF4 scales' bytes, ascending: bitsandbytes' dynamic map of 8 bits. */
void mt_pack_nested_map(float map[256]);
/** Scales of n NF4 blocks to bytes, a nested scale for 256 of them, and what is added to all. */
void mt_pack_nest(const float *scales, size_t n, const float map[256], uint8_t *bytes, float *nested, float *offset);

#endif

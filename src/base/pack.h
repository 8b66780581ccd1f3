/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/packed.h"

/**
 * Encodes packed formats (base/packed.h) as the programs that define them do: NF4 as bitsandbytes, to the bit, except
 * for the mean that is subtracted from nested scales; FP8 as transformers, to the bit; MXFP4 as Triton's kernels for
 * gpt-oss, with scales rounded up and ties away from zero; INT4 and NVFP4 as compressed-tensors, with quotients in f32.
 *
 * Thread-safety: pure functions.
 */

/** Number of independent jobs: one block each for FP8, else 16384 elements each. */
size_t mt_pack_n_jobs(enum mt_packed f, size_t rows, size_t cols);
/**
 * Job i of a matrix [rows, cols] of finite weights: writes its codes, and its scales in f32 (for NF4 the largest
 * magnitudes). A part of a matrix that begins at a multiple of 128 rows may be encoded as a matrix by itself.
 */
struct mt_pack {
    enum mt_packed format;
    float factor; /* NVFP4's, that scales are divided by */
    size_t rows, cols;
};
void mt_pack_job(const struct mt_pack *p, const float *w, size_t i, uint8_t *codes, float *scales);

/** The scale that a block of n weights has by itself, as mt_pack_job() rounds it; INT4's is compressed-tensors', as bf16. */
float mt_pack_scale(enum mt_packed f, const float *w, size_t n);
/** The same of NVFP4: an E4M3 and a matrix's factor, as base/packed.h has them. */
float mt_pack_e4m3_scale(enum mt_scale type, float factor, const float *w, size_t n);
/** The factor that NVFP4's scales are divided by, of weights up to that magnitude: the largest scale is the largest E4M3. */
float mt_pack_nvfp4_factor(float largest);
/** The byte of a scale of that type which mt_pack_e4m3_scale() made. */
uint8_t mt_pack_e4m3_byte(enum mt_scale type, float factor, float scale);
/** n scales, which mt_pack_job() or these made, as their type has them; NF4's nested ones: mt_pack_nest(). In place, or to
 * an array of its own. */
void mt_pack_scales(enum mt_scale type, float factor, const float *scales, size_t n, void *out);
/** Codes of n weights of a block with that scale, a byte each: the nearest value there is. */
void mt_pack_codes(enum mt_packed f, const float *w, size_t n, float scale, uint8_t *code);

/** Puts n codes to their places in a matrix's, from element `first` on. */
void mt_pack_put(enum mt_packed f, uint8_t *codes, size_t first, const uint8_t *code, size_t n);

/** The byte of an MXFP4 scale that mt_pack_job() made. */
static inline uint8_t mt_f32_to_e8m0(float scale)
{
    return (uint8_t)(mt_f32_bits(scale) >> 23);
}

/** The values of nested NF4 scales' bytes, ascending: bitsandbytes' dynamic map of 8 bits. */
void mt_pack_nested_map(float map[256]);
/** Encodes the scales of n NF4 blocks as bytes, a nested scale for each 256 of them, and an offset for all. */
void mt_pack_nest(const float *scales, size_t n, const float map[256], uint8_t *bytes, float *nested, float *offset);

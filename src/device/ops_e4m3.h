/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"

/**
 * Operations that make the operands of products in FP8 (mt_gemm with MT_E4M3). The rules are those of ops.h. A matrix
 * has one factor, a power of two (mt_e4m3_factor()), of its own largest magnitude: a maximum has no order, so it does
 * not depend on how the matrix is divided.
 */

/** How many largest magnitudes a matrix has at most, each of a piece of it. */
enum { MT_AMAX_PARTS = 512 };
/** Elements of a piece. */
static inline size_t mt_amax_piece(size_t n)
{
    enum { LEAST = 4096, ALIGN = 1024 };
    size_t piece = (n + MT_AMAX_PARTS - 1) / MT_AMAX_PARTS;
    return piece < (size_t)LEAST ? (size_t)LEAST : (piece + ALIGN - 1) / ALIGN * ALIGN;
}

/** parts[i] = the largest |x| of piece i, 0 where there is none; a NaN is the largest of all. */
struct mt_amax {
    size_t n;
    enum mt_dtype dtype;
    const void *x; /* [n] */
    float *parts;  /* [MT_AMAX_PARTS], all written */
};

/** Elements from a row of transposed codes to the next: rows of a product's operands are of 16 bytes. */
static inline size_t mt_codes_ld(size_t rows)
{
    return (rows + 15) / 16 * 16;
}

/**
 * codes = e4m3(x f) with f = mt_e4m3_factor(the largest of `parts`), and *scale = 1 / f. To nearest even; what is
 * larger than that magnitude saturates, infinity and NaN become NaN.
 */
struct mt_quantise {
    size_t rows, cols;   /* cols: a multiple of 16 */
    enum mt_dtype dtype;
    const void *x;       /* [rows, cols] */
    const float *parts;  /* [MT_AMAX_PARTS] of mt_op_amax() */
    uint8_t *codes;      /* [rows, cols]; NULL: not wanted */
    uint8_t *codes_t;    /* [cols, mt_codes_ld(rows)], the transpose, with zeros behind each row; NULL: not wanted */
    float *scale;        /* this and parts only element-aligned */
};

/** Their rows of the table. */
#define MT_DEVICE_OPS_E4M3(X)                                                                      \
    X(AMAX, amax, struct mt_amax)                                                                  \
    X(QUANTISE, quantise, struct mt_quantise)

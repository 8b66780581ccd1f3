/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/mem.h"
#include "base/packed.h"

/**
 * The inner parts of a matrix product for one instruction set (Goto and van de Geijn 2008; van Zee and
 * van de Geijn 2015). A and B are packed, as f32, into strips that are read sequentially:
 *     A  strips of `mr` rows:     strip[k][mr]
 *     B  strips of `nr` columns:  strip[k][nr]
 * with zeros for missing rows and columns. Every element of D is one chain of
 * multiply-adds over k, in order, whatever strip it is in.
 */
struct mt_cpu_panel {
    enum mt_dtype dtype; /* E4M3: with trans */
    const void *src;
    size_t first, ld; /* elements */
    bool trans;       /* lanes (rows of A, columns of B) are `ld` apart and k is contiguous; false: the reverse */
    size_t lanes, k;
    float factor;
    float *dst;       /* the first strip's first step to write */
    size_t pitch;     /* floats from one strip to the next */
};

/** Largest register tile; the columns of every tile divide MT_CPU_GEMM_COLS. */
enum { MT_CPU_GEMM_ROWS = 12, MT_CPU_GEMM_COLS = 32, MT_CPU_GEMM_THIN = 4 };

struct mt_cpu_gemm_isa {
    const char *name, *key; /* "AVX-512", "avx512" */
    size_t mr, nr;
    void (*panel_a)(const struct mt_cpu_panel *p);
    void (*panel_b)(const struct mt_cpu_panel *p);
    /** d[mr][nr] = sum over k of a b, plus c if that is not NULL (it may be d). */
    void (*multiply)(size_t k, const float *a, const float *b, const float *c, size_t ldc, float *d, size_t ldd);
    /** The same with an unpacked A: its rows are `lda` apart and k is contiguous. */
    void (*multiply_rows)(size_t k, const float *a, size_t lda, const float *b, const float *c, size_t ldc, float *d,
                          size_t ldd);
    /** d[m][lanes] = sum over k of m rows of A, at most MT_CPU_GEMM_THIN, and `lanes` columns of B, neither of them
     * packed: k is contiguous in both. For products that read B once. */
    void (*multiply_thin)(size_t m, size_t k, const float *a, size_t lda, const float *b, size_t ldb, float *d);
    size_t lanes;
};

struct mt_cpu_gemm;
const struct mt_cpu_gemm_isa *mt_cpu_gemm_isa(const struct mt_cpu_gemm *g);

extern const struct mt_cpu_gemm_isa mt_cpu_gemm_avx512, mt_cpu_gemm_avx2, mt_cpu_gemm_plain;

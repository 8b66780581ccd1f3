/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/pool.h"
#include "device/ops.h"

/**
 * Matrix products in f32, of f32 or bf16 operands: operands are packed into strips as f32 and multiplied by kernels for
 * AVX-512, AVX2 or in plain C. An element of D is one chain of multiply-adds over k, in panels of fixed length, so its
 * bits do not depend on threads, on how the work is divided, or on other elements.
 */
struct mt_cpu_gemm;
int mt_cpu_gemm_create(struct mt_cpu_gemm **out, int n_threads, struct mt_err *err);
/** Accepts NULL; sets *g to NULL. */
void mt_cpu_gemm_destroy(struct mt_cpu_gemm **g);
/** Touches the memory that products need, so that it is resident from now on. */
void mt_cpu_gemm_warm(struct mt_cpu_gemm *g);
/** A product by the threads of `pool`, at most as many as `g` was created for. */
void mt_cpu_gemm_run(struct mt_cpu_gemm *g, mt_pool *pool, const struct mt_gemm *a);

/** A product by one thread, inside a chunk: D = op(A) op(B), or with `accumulate` D += op(A) op(B). D is f32. */
struct mt_cpu_tile {
    size_t m, n, k;
    bool trans_a, trans_b, accumulate;
    enum mt_dtype dtype;
    const void *a, *b;
    size_t lda, ldb, ldd;
    float *d;
};
void mt_cpu_gemm_tile(struct mt_cpu_gemm *g, int thread, const struct mt_cpu_tile *t);

/** Adds bias and C to the sums of D's row i, columns [j, j + n), and stores the row in D. Overwrites `sum`. */
void mt_cpu_gemm_finish_row(const struct mt_gemm *a, size_t i, size_t j, size_t n, float *sum);

/** "AVX-512", or "AVX-512, bf16 by oneDNN 2.6.3". */
void mt_cpu_gemm_describe(char *buf, size_t len);
/** What bits depend on: kernels of AVX2 and of AVX-512 have the same. */
void mt_cpu_gemm_arithmetic(char *buf, size_t len, bool bf16);

/**
 * bf16 products by oneDNN, without conversion to f32: the state of one compute thread, with a product prepared for each
 * shape met. NULL without oneDNN, or if the CPU has no bf16 instructions: operands are then converted to f32.
 * MEGATRAIN_CPU_GEMM in the environment (bf16, avx512, avx2 or plain; for tests) overrides the choice.
 */
struct mt_cpu_bf16_gemm;
int mt_cpu_bf16_gemm_create(struct mt_cpu_bf16_gemm **out, struct mt_err *err);
void mt_cpu_bf16_gemm_destroy(struct mt_cpu_bf16_gemm **g);
/** A buffer for the sums of a tile of up to MT_CPU_BF16_TILE squared elements. */
enum { MT_CPU_BF16_TILE = 512 };
float *mt_cpu_bf16_gemm_sums(struct mt_cpu_bf16_gemm *g);
/** 1: done; 0: the library has no product for this shape; -ENOMEM: it got no memory, now or before. */
int mt_cpu_bf16_gemm_tile(struct mt_cpu_bf16_gemm *g, const struct mt_cpu_tile *t);
/** Called once in each compute thread: the library must not start threads of its own. */
void mt_cpu_bf16_gemm_thread_init(void);
/** The library's name and version, or "". */
void mt_cpu_bf16_gemm_describe(char *buf, size_t len);

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One-thread products in C, for builds without oneDNN: B goes in panels of LANES columns, a block of rows
 * of A at a time, so that the inner loop is a multiply-add over one vector register's worth of columns.
 */
#include <stdio.h>
#include <string.h>

#include "device/cpu/cpu.h"

enum { COLS = 32, ROWS = 4, DEPTH = 256 };

static inline float a_at(const struct mt_cpu_tile *t, size_t i, size_t p)
{
    return t->trans_a ? t->a[p * t->lda + i] : t->a[i * t->lda + p];
}

/* A panel of op(B): depth x COLS, missing columns zero. */
static void pack_b(float *restrict panel, const struct mt_cpu_tile *t, size_t p0, size_t depth,
                   size_t j0, size_t cols)
{
    for (size_t p = 0; p < depth; p++)
        for (size_t j = 0; j < COLS; j++)
            panel[p * COLS + j] = j >= cols      ? 0
                                  : t->trans_b ? t->b[(j0 + j) * t->ldb + p0 + p]
                                               : t->b[(p0 + p) * t->ldb + j0 + j];
}

/* All of it is on this thread's stack: ThreadSanitizer has nothing to see, and takes ten times as long. */
MT_HOT __attribute__((no_sanitize_thread)) static void kernel(float acc[ROWS][COLS], const float *restrict a,
                                                          const float *restrict panel, size_t depth)
{
    for (size_t p = 0; p < depth; p++)
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < COLS; j++)
                acc[i][j] += a[p * ROWS + (size_t)i] * panel[p * COLS + (size_t)j];
}

static void add_block(const struct mt_cpu_tile *t, const float *panel, size_t i0, size_t p0,
                      size_t depth, size_t j0, size_t cols)
{
    float acc[ROWS][COLS] = {{0}}, a[DEPTH * ROWS];
    size_t rows = MT_MIN((size_t)ROWS, t->m - i0);
    for (size_t p = 0; p < depth; p++)
        for (size_t i = 0; i < ROWS; i++)
            a[p * ROWS + i] = i < rows ? a_at(t, i0 + i, p0 + p) : 0;
    kernel(acc, a, panel, depth);
    for (size_t i = 0; i < rows; i++) {
        float *d = t->d + (i0 + i) * t->ldd + j0;
        float beta = p0 ? 1.0f : t->beta;
        for (size_t j = 0; j < cols; j++)
            d[j] = t->alpha * acc[i][j] + (beta != 0 ? beta * d[j] : 0);
    }
}

void mt_cpu_gemm_tile(const struct mt_cpu_tile *t)
{
    float panel[DEPTH * COLS];
    for (size_t p0 = 0; p0 < t->k; p0 += DEPTH)
        for (size_t j0 = 0; j0 < t->n; j0 += COLS) {
            size_t depth = MT_MIN((size_t)DEPTH, t->k - p0), cols = MT_MIN((size_t)COLS, t->n - j0);
            pack_b(panel, t, p0, depth, j0, cols);
            for (size_t i0 = 0; i0 < t->m; i0 += ROWS)
                add_block(t, panel, i0, p0, depth, j0, cols);
        }
}

void mt_cpu_gemm_thread_init(void)
{
}

int mt_cpu_bf16_gemm_create(struct mt_cpu_bf16_gemm **out, struct mt_err *err)
{
    (void)err;
    *out = NULL;
    return 0;
}

void mt_cpu_bf16_gemm_destroy(struct mt_cpu_bf16_gemm **g)
{
    (void)g;
}

bool mt_cpu_bf16_gemm_tile(struct mt_cpu_bf16_gemm *g, const struct mt_cpu_bf16_tile *t)
{
    (void)g;
    (void)t;
    return false;
}

void mt_cpu_gemm_describe(char *buf, size_t len)
{
    snprintf(buf, len, "plain C, slow: build with oneDNN");
}

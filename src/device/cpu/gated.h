/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <string.h>

#include "device/cpu/cpu.h"

/** What the two forms of gated_norm share. */

/** Where the gate of head `head` begins, whose elements may lie in wider heads. */
static inline size_t mt_cpu_gate_at(const struct mt_heads *z, size_t dim, size_t row, size_t head)
{
    size_t i = head * dim;
    return mt_heads_at(z, row, i / z->dim) + i % z->dim;
}

/** Elements [at, at + n) of p as FP32 in dst. */
static inline void mt_cpu_copy_row(float *dst, enum mt_dtype t, const void *p, size_t at, size_t n)
{
    const float *src = mt_cpu_row_f32(t, p, at, n, dst);
    if (src != dst)
        memcpy(dst, src, n * sizeof(*dst));
}

/** A row with the gate first (norm_of_gated.c): of struct mt_gated_norm, and of struct mt_gated_norm_bwd. */
void mt_cpu_norm_of_gated_row(const void *args, size_t row);
void mt_cpu_norm_of_gated_row_bwd(const void *args, size_t row, float *dw);

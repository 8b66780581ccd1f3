/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "device/cpu/cpu.h"

/** What the two forms of gated_norm share. */

/** Where the gate of head `head` begins, whose elements may lie in wider heads. */
static inline size_t mt_cpu_gate_at(const struct mt_heads *z, size_t dim, size_t row, size_t head)
{
    size_t i = head * dim;
    return mt_heads_at(z, row, i / z->dim) + i % z->dim;
}

/** A row with the gate first (norm_of_gated.c): of struct mt_gated_norm, and of struct mt_gated_norm_bwd. */
void mt_cpu_norm_of_gated_row(const void *args, size_t row);
void mt_cpu_norm_of_gated_row_bwd(const void *args, size_t row, float *dw);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "device/cpu/cpu.h"
#include "device/heads.h"

/**
 * Pointwise operations: f() of pieces of rows, whatever the dtypes of the arrays and wherever their rows lie.
 */
enum { MT_CPU_PIECE = 1024, MT_CPU_VIEWS = 3 };

/** Elements of an array; at.p NULL: an input that is not there, or an output that is not wanted. */
struct mt_cpu_view {
    enum mt_dtype dtype;
    struct mt_heads at;
};

/** Rows of `ld` elements, of which the view begins at element `first`. */
static inline struct mt_cpu_view mt_cpu_rows(enum mt_dtype t, const void *p, size_t first, size_t ld)
{
    return (struct mt_cpu_view){t, mt_heads(p ? (const char *)p + first * mt_dtype_size(t) : NULL, ld, 1, ld)};
}

/** n elements in a row. */
static inline struct mt_cpu_view mt_cpu_flat(enum mt_dtype t, const void *p, size_t n)
{
    return mt_cpu_rows(t, p, 0, n);
}

/** n elements of a row in f32, from element `first` of all its heads on. Inputs and outputs are the arrays themselves
 * where these are f32, so that an output may be an input; what is not wanted is scratch. */
struct mt_cpu_piece {
    size_t n, row, first;
    const float *in[MT_CPU_VIEWS];
    float *out[MT_CPU_VIEWS];
};

struct mt_cpu_pointwise {
    void (*f)(const void *args, const struct mt_cpu_piece *p);
    const void *args;
    size_t n, heads, dim; /* rows, heads of a row, elements of a head */
    struct mt_cpu_view in[MT_CPU_VIEWS], out[MT_CPU_VIEWS];
};
void mt_cpu_run_pointwise(struct mt_cpu_device *d, const struct mt_cpu_pointwise *w);

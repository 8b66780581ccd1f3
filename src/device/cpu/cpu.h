/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdatomic.h>

#include "base/mem.h"
#include "base/pool.h"
#include "device/arena.h"
#include "device/backend.h"
#include "device/cpu/gemm.h"
#include "device/cpu/stream.h"

/**
 * Internals of the cpu device. An operation is enqueued on the COMPUTE stream with a copy of its arguments; the
 * stream's thread then calls mt_cpu_run_<op>(), which spreads the work over `pool` in chunks that depend on the shape
 * alone. These are fast implementations, blocked and vectorised; device/ops.h specifies the operations, and
 * tests/device has plain references in double.
 */
struct mt_cpu_device {
    struct mt_device base;
    mt_pool *pool; /* compute threads; the COMPUTE stream's thread runs it */
    struct mt_arena *arena;
    void *memory; /* mt_arena_span() of the budget, a mapping; or NULL */
    struct mt_cpu_gemm *gemm;
    struct mt_cpu_bf16_gemm **bf16_gemm; /* [compute threads], all NULL or none */
    struct mt_cpu_stream *streams[MT_N_STREAMS];
    atomic_bool no_memory; /* a product was left out: sticky */
};

#define MT_CPU_RUN(ID, name, type) void mt_cpu_run_##name(struct mt_cpu_device *d, const type *a);
/* The same with a function for the bytes of its workspace on a device with these limits. */
#define MT_CPU_RUN_IN_WORKSPACE(ID, name, type)                                                    \
    MT_CPU_RUN(ID, name, type)                                                                     \
    size_t mt_cpu_##name##_workspace(const struct mt_device_limits *l, const type *a);
MT_DEVICE_OPS(MT_CPU_RUN, MT_CPU_RUN_IN_WORKSPACE)
#undef MT_CPU_RUN
#undef MT_CPU_RUN_IN_WORKSPACE

/**
 * Hot loops are compiled for several instruction sets, of which one is chosen at load time. Contraction is off and
 * sums have fixed lanes (MT_LANES), so that all give the same bits. Sanitizers do not work with the resolver
 * functions that this needs, and Clang 14 gives them names that other files do not find.
 */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(__clang__) || !defined(__x86_64__)
#define MT_HOT
#else
#define MT_HOT __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
/** A part shared by several hot loops: inlined, and so compiled for the constants and instruction set of each. */
#define MT_HOT_PART static inline __attribute__((always_inline))
/** Before a loop: no iteration reads what another writes. Clang warns where a sanitizer keeps it from using that. */
#if defined(__clang__) && defined(__SANITIZE_ADDRESS__)
#define MT_INDEPENDENT
#elif defined(__clang__)
#define MT_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define MT_INDEPENDENT _Pragma("GCC ivdep")
#endif
enum { MT_LANES = 16 };

/** Rows in a chunk of about 32k elements; depends on the shape alone. */
static inline size_t mt_cpu_rows_per_chunk(size_t c)
{
    return MT_MAX((size_t)1, (size_t)32768 / MT_MAX(c, (size_t)1));
}

/** row(args, r) for each r < n, in chunks of rows of about c elements. */
void mt_cpu_by_rows(struct mt_cpu_device *d, void (*row)(const void *args, size_t r), const void *args, size_t n,
                    size_t c);
/** The same in blocks of `block` rows. Each adds to `width` sums of its own, which are 0 before; those of all blocks
 * are then added to dst in order. dst NULL: nothing is summed, and `sums` is NULL. */
struct mt_cpu_sums {
    size_t block, width;
    float *dst;
    void *workspace; /* mt_cpu_sums_bytes() */
};
void mt_cpu_sum_rows(struct mt_cpu_device *d, void (*row)(const void *args, size_t r, float *sums), const void *args,
                     size_t n, struct mt_cpu_sums s);
static inline size_t mt_cpu_sums_bytes(size_t n, size_t block, size_t width)
{
    return mt_div_up(n, block) * width * sizeof(float);
}
/** Defines the workspace of an operation with arguments `a`: `width` sums of each block of its n rows. */
#define MT_CPU_SUMS(op, n, block, width)                                                           \
    size_t mt_cpu_##op##_workspace(const struct mt_device_limits *, const struct mt_##op *a)       \
    {                                                                                              \
        return mt_cpu_sums_bytes(a->n, block, width);                                              \
    }

/** A row as f32: the row itself, or its conversion in `tmp`. */
const float *mt_cpu_row_f32(enum mt_dtype t, const void *base, size_t first, size_t n, float *tmp);
/** A place to compute a row as f32 before it is stored: the row itself, or `tmp`. */
float *mt_cpu_row_place(enum mt_dtype t, void *base, size_t first, float *tmp);
/** Stores f32 values in dtype, rounding to nearest even; does nothing if they are in place already. */
void mt_cpu_store_row(enum mt_dtype t, void *base, size_t first, size_t n, const float *src);
/** Element i as f32. */
float mt_cpu_element(enum mt_dtype t, const void *base, size_t i);
/** Copies a row as f32 to dst. */
void mt_cpu_load_row(float *dst, enum mt_dtype t, const void *base, size_t first, size_t n);
/** Rounds values as a store and a load would. */
void mt_cpu_round_row(enum mt_dtype t, float *row, size_t n);
/** Dot product and sum in MT_LANES fixed lanes. */
float mt_cpu_dot(const float *a, const float *b, size_t n);
float mt_cpu_sum(const float *a, size_t n);
/** Dot product of rows of a dtype that begin at elements i of a and j of b, in pieces of MT_CPU_DOT elements. */
enum { MT_CPU_DOT = 2048 };
float mt_cpu_dot_rows(enum mt_dtype t, const void *a, size_t i, const void *b, size_t j, size_t n);
/** y = by x; y = a b; y += by x; y += a b. An input may be y. */
void mt_cpu_scale(float *y, const float *x, float by, size_t n);
void mt_cpu_multiply(float *y, const float *a, const float *b, size_t n);
void mt_cpu_add_scaled(float *y, const float *x, float by, size_t n);
void mt_cpu_add_products(float *y, const float *a, const float *b, size_t n);
/** dst[k] += sum over p of partials[p * c + k], in order; k < c. Second stage of sums over rows. */
void mt_cpu_fold(struct mt_cpu_device *d, float *dst, const void *partials, size_t n_partials, size_t c);
/** Largest of n >= 1 values; ignores NaNs unless x[0] is one. */
float mt_cpu_max(const float *x, size_t n);

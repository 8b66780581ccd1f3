/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "device/metered.h"

/**
 * An operation of a given shape with arguments and buffers, ready to run: for measuring a machine, the kernel
 * benchmark and the conformance suite. Every operation's row (device/op.h) fills in its own arguments.
 */
typedef struct mt_example mt_example;

/** What the operation does with a buffer; 0: workspace. */
enum {
    MT_TAKE_READ = 1,
    MT_TAKE_WRITE = 2, /* without MT_TAKE_READ: overwrites all of it */
    MT_TAKE_FRESH = 4, /* in a step, the operations just before have used it */
};

/** A device buffer shared by several examples: their fresh operands are parts of it, one after the other. */
struct mt_example_flow {
    void *data;
    size_t bytes;
};

struct mt_example_params {
    mt_device *dev;
    struct mt_metered shape;
    struct mt_example_flow flow; /* borrowed; all 0: every buffer is the example's own */
    bool dry;            /* only to count: buffers are not filled */
    bool zero;           /* buffers from the arena hold zeros */
    /* Optional; replaces the device's arena: returns a buffer of n elements that the callee owns; NULL: none left. */
    void *(*take)(void *ctx, unsigned use, enum mt_dtype dtype, size_t n);
    void *ctx;
};
/** Buffers come from the device's arena and hold random values near 1, both as f32 and as pairs of bf16. */
int mt_example_create(mt_example **out, const struct mt_example_params *p, struct mt_err *err);
/** Waits for the device; accepts NULL; sets *x to NULL. */
void mt_example_destroy(mt_example **x);
int mt_example_submit(mt_example *x, struct mt_err *err);
/** The arguments, a struct that the table of operations names; the caller may change fields that do not affect cost. */
void *mt_example_args(mt_example *x);
int mt_example_n_buffers(const mt_example *x);
/** A buffer of `bytes` with the same random values, to be freed with mt_device_free(). */
int mt_example_flow_create(struct mt_example_flow *out, mt_device *dev, size_t bytes, struct mt_err *err);

/* --- for rows ------------------------------------------------------------------------------------
 * After a failure buffers are NULL; the failure is kept, and mt_example_create() returns it. */

mt_device *mt_example_device(const mt_example *x);
/** A device buffer of n elements, for a `use` of MT_USE_*. */
void *mt_example_take(mt_example *x, unsigned use, enum mt_dtype dtype, size_t n);
static inline void *mt_example_read(mt_example *x, enum mt_dtype dtype, size_t n)
{
    return mt_example_take(x, MT_TAKE_READ, dtype, n);
}
static inline void *mt_example_write(mt_example *x, enum mt_dtype dtype, size_t n)
{
    return mt_example_take(x, MT_TAKE_WRITE, dtype, n);
}
static inline void *mt_example_update(mt_example *x, enum mt_dtype dtype, size_t n)
{
    return mt_example_take(x, MT_TAKE_READ | MT_TAKE_WRITE, dtype, n);
}
static inline void *mt_example_fresh(mt_example *x, enum mt_dtype dtype, size_t n)
{
    return mt_example_take(x, MT_TAKE_READ | MT_TAKE_FRESH, dtype, n);
}
void *mt_example_workspace(mt_example *x, size_t bytes);
/** n integers in host memory that lives as long as the example: v[i] = i * mul % mod, or i * mul if mod is 0. NULL: out
 * of memory. */
int32_t *mt_example_host_ints(mt_example *x, size_t n, uint64_t mul, uint64_t mod);
/** The same on the device. */
int32_t *mt_example_ints(mt_example *x, size_t n, uint64_t mul, uint64_t mod);
/** ids of k different experts out of e for each of n tokens, on the device. */
const uint16_t *mt_example_choices(mt_example *x, size_t n, size_t e, size_t k);
/** A device copy of n host integers; NULL for NULL. */
int32_t *mt_example_upload(mt_example *x, const int32_t *host, size_t n);

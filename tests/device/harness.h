/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device/ops.h"

/**
 * The conformance suite of the device operations. A test runs on every device of the list (conformance.c),
 * touches device memory only by copies, and checks against a reference in double. Each buffer stands
 * between guard bands that are checked after the test; outputs are also hashed, and the hashes must be the
 * same when a test is run again and with another number of threads.
 */
struct harness {
    mt_device *dev;
    const char *device_name, *test_name;
    enum mt_dtype dtype; /* every test runs in both */
    uint64_t seed, hash;
    int failures;
    struct dbuf *bufs;
};

/** A device buffer of n elements (f32, bf16 or bytes as E4M3; i32 are kept as 4-byte words). */
struct dbuf {
    void *p; /* device memory */
    size_t n;
    enum mt_dtype dtype;
    char *base;
    struct dbuf *next;
};

struct dbuf *buf_new(struct harness *h, enum mt_dtype t, size_t n);
/** n random values of about the given spread, representable in t; uploaded, and as doubles in *host. */
struct dbuf *buf_random(struct harness *h, enum mt_dtype t, size_t n, double spread, double **host);
struct dbuf *buf_values(struct harness *h, enum mt_dtype t, size_t n, const double *v);
struct dbuf *buf_ints(struct harness *h, const int32_t *v, size_t n);
/** 16-bit integers, kept as the 2-byte words of a bf16 buffer. */
struct dbuf *buf_shorts(struct harness *h, const uint16_t *v, size_t n);
/** All NaN: what an operation must overwrite. */
struct dbuf *buf_nan(struct harness *h, enum mt_dtype t, size_t n);
/** Values as doubles (freed with the harness); enters the hash. */
double *buf_get(struct harness *h, const struct dbuf *b);
/** The same of 4-byte integers. */
double *buf_get_ints(struct harness *h, const struct dbuf *b);
double *buf_get_shorts(struct harness *h, const struct dbuf *b);
double *buf_get_bytes(struct harness *h, const struct dbuf *b);
/** Zeroed scratch, freed with the harness. */
double *scratch(struct harness *h, size_t n);
void *workspace(struct harness *h, size_t bytes);

/** Relative L2 error and largest error (relative to the largest value) within `tol`; NaN fails. */
void expect_close(struct harness *h, const char *what, const double *got, const double *want, size_t n,
                  double tol);
void expect_rejected(struct harness *h, const char *what, int rc);
/** Checks the guard bands of all buffers and frees them, for a test of many shapes; the hash stays. */
void buffers_done(struct harness *h);
void must(struct harness *h, const char *what, int rc, const struct mt_err *err);
#define RUN(h, op, ...)                                                                            \
    do {                                                                                           \
        struct mt_err err_ = {0};                                                                  \
        must(h, #op, op((h)->dev, __VA_ARGS__, &err_), &err_);                                     \
    } while (0)

/** 1 for f32, 2^-8 for bf16: tolerances are stated for f32 and for bf16 by rounding steps. */
double tolerance(const struct harness *h, double f32, double bf16);

double sigmoid(double x);

/** A test of the suite, listed where it is written: DEVICE_TEST(a_sentence_that_holds) { ... }, with `h`, the harness. */
#define DEVICE_TEST(name)                                      \
    static void name(struct harness *h);                       \
    __attribute__((constructor)) static void list_##name(void) \
    {                                                          \
        device_test_list(#name, name);                         \
    }                                                          \
    static void name(struct harness *h)
void device_test_list(const char *name, void (*test)(struct harness *h));

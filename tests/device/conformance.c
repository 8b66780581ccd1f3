/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/mem.h"
#include "base/philox.h"
#include "kinds/kinds.h"
#include "harness.h"

enum { GUARD = 512, PATTERN = 0xA5, MOST_TESTS = 512 };

static struct device_test {
    const char *name;
    void (*fn)(struct harness *h);
} tests[MOST_TESTS];
static size_t n_tests;

void device_test_list(const char *name, void (*test)(struct harness *h))
{
    if (n_tests == MOST_TESTS)
        abort();
    tests[n_tests++] = (struct device_test){name, test};
}

/* Host memory that lives as long as a test. */
struct block {
    struct block *next;
};
static struct block *blocks;

static void *keep(size_t bytes)
{
    struct block *b = calloc(1, sizeof(*b) + 16 + bytes);
    if (!b)
        abort();
    b->next = blocks;
    blocks = b;
    return (char *)b + 16;
}

static void must_copy(struct harness *h, void *dst, const void *src, size_t bytes)
{
    struct mt_err err = {0};
    struct mt_copy c = {dst, bytes, src, bytes, bytes, 1};
    must(h, "copy", mt_device_copy(h->dev, MT_STREAM_COMPUTE, &c, &err), &err);
    must(h, "sync", mt_device_sync(h->dev, &err), &err);
}

void must(struct harness *h, const char *what, int rc, const struct mt_err *err)
{
    if (rc) {
        printf("FAIL %s %s %s: %s: %s\n", h->device_name, h->test_name, mt_dtype_name(h->dtype), what,
               err->msg);
        h->failures++;
    }
}

struct dbuf *buf_new(struct harness *h, enum mt_dtype t, size_t n)
{
    struct dbuf *b = keep(sizeof(*b));
    struct mt_err err = {0};
    size_t bytes = mt_align_up(n * mt_dtype_size(t), 16) + 2 * GUARD;
    char *pattern = keep(bytes);
    void *base = NULL;
    must(h, "alloc", mt_device_alloc(h->dev, bytes, "test", &base, &err), &err);
    memset(pattern, PATTERN, bytes);
    *b = (struct dbuf){.p = (char *)base + GUARD, .n = n, .dtype = t, .base = base, .next = h->bufs};
    h->bufs = b;
    must_copy(h, base, pattern, bytes);
    return b;
}

static void put(struct harness *h, const struct dbuf *b, const double *v)
{
    size_t size = mt_dtype_size(b->dtype);
    char *raw = keep(b->n * size + 1);
    for (size_t i = 0; i < b->n; i++) {
        float f = (float)v[i];
        uint16_t half = mt_f32_to_bf16(f);
        if (b->dtype == MT_F32)
            memcpy(raw + i * 4, &f, 4);
        else if (b->dtype == MT_E4M3)
            raw[i] = (char)mt_f32_to_e4m3(f);
        else
            memcpy(raw + i * 2, &half, 2);
    }
    must_copy(h, b->p, raw, b->n * size);
}

struct dbuf *buf_random(struct harness *h, enum mt_dtype t, size_t n, double spread, double **host)
{
    struct dbuf *b = buf_new(h, t, n);
    float *z = keep(n * sizeof(float) + 4);
    double *v = keep(n * sizeof(double) + 8);
    mt_philox_normal(z, n, 0, 77, ++h->seed, (float)spread);
    for (size_t i = 0; i < n; i++)
        v[i] = (double)(t == MT_F32 ? z[i] : mt_bf16_to_f32(mt_f32_to_bf16(z[i])));
    put(h, b, v);
    if (host)
        *host = v;
    return b;
}

struct dbuf *buf_values(struct harness *h, enum mt_dtype t, size_t n, const double *v)
{
    struct dbuf *b = buf_new(h, t, n);
    put(h, b, v);
    return b;
}

struct dbuf *buf_ints(struct harness *h, const int32_t *v, size_t n)
{
    struct dbuf *b = buf_new(h, MT_F32, n);
    must_copy(h, b->p, v, n * sizeof(int32_t));
    return b;
}

struct dbuf *buf_shorts(struct harness *h, const uint16_t *v, size_t n)
{
    struct dbuf *b = buf_new(h, MT_BF16, n);
    must_copy(h, b->p, v, n * sizeof(*v));
    return b;
}

struct dbuf *buf_nan(struct harness *h, enum mt_dtype t, size_t n)
{
    double *v = keep(n * sizeof(double) + 8);
    for (size_t i = 0; i < n; i++)
        v[i] = NAN;
    return buf_values(h, t, n, v);
}

/* The buffer's bytes; they enter the hash. */
static char *get_raw(struct harness *h, const struct dbuf *b)
{
    size_t bytes = b->n * mt_dtype_size(b->dtype);
    char *raw = keep(bytes + 1);
    must_copy(h, raw, b->p, bytes);
    h->hash ^= XXH3_64bits_withSeed(raw, bytes, h->hash);
    return raw;
}

double *buf_get_ints(struct harness *h, const struct dbuf *b)
{
    const int32_t *raw = (const int32_t *)(void *)get_raw(h, b);
    double *v = keep(b->n * sizeof(double) + 8);
    for (size_t i = 0; i < b->n; i++)
        v[i] = raw[i];
    return v;
}

double *buf_get_shorts(struct harness *h, const struct dbuf *b)
{
    const uint16_t *raw = (const uint16_t *)(void *)get_raw(h, b);
    double *v = keep(b->n * sizeof(double) + 8);
    for (size_t i = 0; i < b->n; i++)
        v[i] = raw[i];
    return v;
}

double *buf_get_bytes(struct harness *h, const struct dbuf *b)
{
    const char *raw = get_raw(h, b);
    double *v = keep(b->n * sizeof(double) + 8);
    for (size_t i = 0; i < b->n; i++)
        v[i] = (unsigned char)raw[i];
    return v;
}

double *buf_get(struct harness *h, const struct dbuf *b)
{
    const char *raw = get_raw(h, b);
    double *v = keep(b->n * sizeof(double) + 8);
    for (size_t i = 0; i < b->n; i++) {
        float f = 0;
        uint16_t half = 0;
        memcpy(&f, raw + i * (b->dtype == MT_F32 ? 4 : 0), b->dtype == MT_F32 ? 4 : 2);
        memcpy(&half, raw + i * 2, b->dtype == MT_BF16 ? 2 : 0);
        v[i] = (double)(b->dtype == MT_F32 ? f : mt_bf16_to_f32(half));
    }
    return v;
}

double *scratch(struct harness *h, size_t n)
{
    (void)h;
    return keep(n * sizeof(double) + 8);
}

void *workspace(struct harness *h, size_t bytes)
{
    return buf_nan(h, MT_F32, mt_div_up(bytes, 4) + 1)->p;
}

double tolerance(const struct harness *h, double f32, double bf16)
{
    return h->dtype == MT_F32 ? f32 : bf16;
}

double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

void expect_close(struct harness *h, const char *what, const double *got, const double *want, size_t n,
                  double tol)
{
    double diff = 0, norm = 0, max = 0, top = 1e-30;
    for (size_t i = 0; i < n; i++) {
        double d = got[i] - want[i];
        diff += d * d;
        norm += want[i] * want[i];
        max = fabs(d) <= max ? max : fabs(d); /* a NaN stays */
        top = fmax(top, fabs(want[i]));
    }
    double l2 = sqrt(diff / fmax(norm, 1e-60));
    if (!(l2 <= tol) || !(max <= 8 * tol * top)) {
        printf("FAIL %s %s %s: %s: relative L2 %.3g, largest %.3g of %.3g; tolerance %.3g\n",
               h->device_name, h->test_name, mt_dtype_name(h->dtype), what, l2, max, top, tol);
        h->failures++;
    }
}

void expect_rejected(struct harness *h, const char *what, int rc)
{
    if (rc != -EINVAL) {
        printf("FAIL %s %s: %s was accepted\n", h->device_name, h->test_name, what);
        h->failures++;
    }
}

void buffers_done(struct harness *h)
{
    for (struct dbuf *b = h->bufs; b; b = b->next) {
        size_t size = b->n * mt_dtype_size(b->dtype); /* one element too many shows */
        unsigned char guard[2 * GUARD];
        must_copy(h, guard, b->base, GUARD);
        must_copy(h, guard + GUARD, b->base + GUARD + size, GUARD);
        for (int i = 0; i < 2 * GUARD; i++)
            if (guard[i] != PATTERN) {
                printf("FAIL %s %s: wrote %s a buffer of %zu\n", h->device_name, h->test_name,
                       i < GUARD ? "before" : "behind", b->n);
                h->failures++;
                break;
            }
        mt_device_free(h->dev, b->base);
    }
    h->bufs = NULL;
    while (blocks) {
        struct block *next = blocks->next;
        free(blocks);
        blocks = next;
    }
}

static uint64_t run_once(struct harness *h, const struct device_test *t, enum mt_dtype dtype)
{
    h->test_name = t->name;
    h->dtype = dtype;
    h->seed = 0;
    h->hash = 1;
    t->fn(h);
    buffers_done(h);
    return h->hash;
}

static mt_device *open_device(const char *kind, int threads)
{
    mt_device *dev = NULL;
    struct mt_err err = {0};
    struct mt_device_params p = {.kind = kind, .budget_bytes = (size_t)256 << 20, .n_threads = threads};
    if (mt_device_create(&dev, &p, &err)) {
        printf("device %s: %s\n", kind, err.msg);
        exit(77);
    }
    return dev;
}

/* Sanitizers look at one run; that three give the same bits is for the other builds, which are faster. What threads share
 * does not depend on the dtype. */
#if defined(__SANITIZE_THREAD__)
static const bool sanitized = true;
enum { FIRST_DTYPE = 1 };
#elif defined(__SANITIZE_ADDRESS__)
static const bool sanitized = true;
enum { FIRST_DTYPE = 0 };
#else
static const bool sanitized = false;
enum { FIRST_DTYPE = 0 };
#endif

/* With one thread, with three, and again: 0 where the bits are the same. Once with MEGATRAIN_TEST_ONCE, for nvcc's PTX,
 * which takes long and has the order of its threads from MT_EMU_SEED alone. */
static int compare(struct harness *one, struct harness *three, const struct device_test *t, enum mt_dtype dtype)
{
    const char *full = getenv("MEGATRAIN_TEST_FULL");
    uint64_t b = run_once(three, t, dtype);
    if (getenv("MEGATRAIN_TEST_ONCE") || (sanitized && !(full && *full)))
        return 0;
    /* threads are the cpu device's; another just runs twice */
    uint64_t a = run_once(one, t, dtype), c = strcmp(one->device_name, "cpu") ? b : run_once(three, t, dtype);
    if (a == b && b == c)
        return 0;
    printf("FAIL %s %s: bits differ %s\n", t->name, mt_dtype_name(dtype), b != c ? "when run again" : "with threads");
    return 1;
}

/* Tests whose name has one of the words in it, or is "=" and the word, or all where there are none; but not those with a
 * "-" before them. */
static bool is_wanted(const struct device_test *t, char *const *words)
{
    bool any = false, named = false;
    for (; *words; words++) {
        if (**words == '-' && strstr(t->name, *words + 1))
            return false;
        any |= **words != '-';
        named |= **words == '=' ? !strcmp(t->name, *words + 1) : **words != '-' && strstr(t->name, *words);
    }
    return named || !any;
}

static int list(void)
{
    for (size_t i = 0; i < n_tests; i++)
        puts(tests[i].name);
    return 0;
}

/* conformance [DEVICE [WORD...]], or conformance --list: the names of all tests. */
int main(int argc, char **argv)
{
    const char *kind = argc > 1 ? argv[1] : "cpu";
    if (!strcmp(kind, "--list"))
        return list();
    struct harness one = {.dev = open_device(kind, 1), .device_name = kind};
    struct harness three = {.dev = open_device(kind, 3), .device_name = kind};
    int n = 0, differ = 0;
    for (const struct device_test *t = tests; t < tests + n_tests; t++)
        for (int d = FIRST_DTYPE; is_wanted(t, argv + MT_MIN(argc, 2)) && d < 2; d++, n++)
            differ += compare(&one, &three, t, d ? MT_BF16 : MT_F32);
    int failures = one.failures + three.failures + differ;
    mt_device_destroy(&one.dev);
    mt_device_destroy(&three.dev);
    printf("%d cases, %d failures\n", n, failures);
    return failures || !n;
}

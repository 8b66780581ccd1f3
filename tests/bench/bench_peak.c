/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a device gives at most, to hold other figures against: matrix products of random bf16 values, and
 * copies each way, alone and together.
 *
 *   bench_peak [KIND]      device kind (cpu); prints one JSON object
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

#include "base/clock.h"
#include "base/mem.h"
#include "base/philox.h"
#include "device/ops.h"
#include "kinds/kinds.h"
#include "store/planes.h"

enum { SAMPLES = 5, PATTERN = 1 << 20 };

struct bench {
    mt_device *dev;
    size_t n, copy_bytes;
    char *buf[3], *host[2];
};

static void fill_random(struct bench *b)
{
    float *z = malloc(PATTERN * sizeof(*z));
    uint16_t *host = (uint16_t *)(void *)b->host[0];
    if (!z)
        exit(1);
    mt_philox_normal(z, PATTERN, 0, 1, 2, 1.0f);
    for (size_t i = 0; i < b->copy_bytes / 2; i++)
        host[i] = mt_f32_to_bf16(z[i % PATTERN]);
    memcpy(b->host[1], b->host[0], b->copy_bytes);
    free(z);
    size_t bytes = b->n * b->n * 2;
    for (int i = 0; i < 2; i++)
        for (size_t at = 0; at < bytes; at += b->copy_bytes) {
            size_t len = MT_MIN(b->copy_bytes, bytes - at);
            RUN(mt_device_copy, b->dev, MT_STREAM_H2D,
                &(struct mt_copy){b->buf[i] + at, len, b->host[0], len, len, 1});
        }
    RUN(mt_device_sync, b->dev);
}

/* Best of some samples, after one to warm up; flop/s. */
static double time_gemm(struct bench *b)
{
    struct mt_gemm g = {.m = b->n, .n = b->n, .k = b->n, .dtype = MT_BF16, .d_dtype = MT_BF16,
                        .trans_b = true, .a = b->buf[0], .b = b->buf[1], .d = b->buf[2],
                        .lda = b->n, .ldb = b->n, .ldd = b->n};
    int64_t best = INT64_MAX;
    for (int s = 0; s <= SAMPLES; s++) {
        int64_t t0 = mt_now_ns();
        for (int i = 0; i < 4; i++)
            RUN(mt_op_gemm, b->dev, &g);
        RUN(mt_device_sync, b->dev);
        if (s)
            best = MT_MIN(best, mt_now_ns() - t0);
    }
    return 4 * 2.0 * (double)b->n * (double)b->n * (double)b->n / ((double)best / 1e9);
}

/* Bytes/s of each direction asked for. */
static double time_copies(struct bench *b, bool in, bool out)
{
    int64_t best = INT64_MAX;
    for (int s = 0; s <= SAMPLES; s++) {
        int64_t t0 = mt_now_ns();
        if (in)
            RUN(mt_device_copy, b->dev, MT_STREAM_H2D,
                &(struct mt_copy){b->buf[0], b->copy_bytes, b->host[0], b->copy_bytes, b->copy_bytes, 1});
        if (out)
            RUN(mt_device_copy, b->dev, MT_STREAM_D2H,
                &(struct mt_copy){b->host[1], b->copy_bytes, b->buf[1], b->copy_bytes, b->copy_bytes, 1});
        RUN(mt_device_sync, b->dev);
        if (s)
            best = MT_MIN(best, mt_now_ns() - t0);
    }
    return (double)b->copy_bytes / ((double)best / 1e9);
}

int main(int argc, char **argv)
{
    const char *kind = argc > 1 ? argv[1] : "cpu";
    bool cpu = !strcmp(kind, "cpu");
    struct bench b = {.n = cpu ? 1024 : 8192};
    size_t bytes = b.n * b.n * 2;
    b.copy_bytes = bytes;
    struct mt_device_params p = {.kind = kind, .n_threads = 2,
                                 .budget_bytes = 3 * bytes + ((size_t)64 << 20)};
    RUN(mt_device_create, &b.dev, &p);
    for (int i = 0; i < 3; i++) {
        void *v = NULL;
        RUN(mt_device_alloc, b.dev, bytes, "bench", &v);
        b.buf[i] = v;
    }
    for (int i = 0; i < 2; i++) {
        void *v = NULL;
        struct mt_err err = {0};
        bench_must(mt_host_alloc(&v, b.copy_bytes, "bench", &err), &err);
        b.host[i] = v;
        RUN(mt_device_register_host, b.dev, v, b.copy_bytes);
    }
    fill_random(&b);
    double gemm = time_gemm(&b), in = time_copies(&b, true, false), out = time_copies(&b, false, true);
    double both = time_copies(&b, true, true);
    printf("{\"device\": \"%s\", \"gemm_bf16_tflops\": %.3f, \"h2d_gbps\": %.2f, \"d2h_gbps\": %.2f, "
           "\"both_each_gbps\": %.2f}\n",
           mt_device_limits(b.dev)->name, gemm / 1e12, in / 1e9, out / 1e9, both / 1e9);
    for (int i = 0; i < 2; i++) {
        mt_device_unregister_host(b.dev, b.host[i]);
        mt_host_free(b.host[i], b.copy_bytes);
    }
    mt_device_destroy(&b.dev);
    return 0;
}

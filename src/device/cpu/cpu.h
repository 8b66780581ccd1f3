/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_DEVICE_CPU_CPU_H
#define MT_DEVICE_CPU_CPU_H

#include "base/pool.h"
#include "device/backend.h"

/**
 * The cpu device's insides. An operation is enqueued on the COMPUTE stream with a copy of its
 * arguments; the stream's thread then calls run_<op>(), which spreads the work over `pool` in chunks cut
 * by shape alone. run_<op>() functions are the specification of the operations: written to be read.
 */
struct mt_cpu_device {
    struct mt_device base;
    mt_pool *pool;       /* compute team; its caller is the COMPUTE stream's thread */
    /* arena, streams: see arena.h and stream.h */
    struct mt_cpu_arena *arena;
    struct mt_cpu_stream *streams[MT_N_STREAMS];
};

#define MT_CPU_RUN(name, type) void mt_cpu_run_##name(struct mt_cpu_device *d, const type *a);
MT_DEVICE_OPS(MT_CPU_RUN)
#undef MT_CPU_RUN

/**
 * A matrix product of one thread, called inside a chunk: D = alpha op(A) op(B) + beta D, row-major, f32
 * out. A and B are f32. Fixed order of sums for a shape, whatever the threads (oneDNN's sgemm with one
 * thread, or plain C).
 */
struct mt_cpu_tile {
    size_t m, n, k;
    bool trans_a, trans_b;
    float alpha, beta;
    const float *a, *b;
    size_t lda, ldb, ldd;
    float *d;
};
void mt_cpu_gemm_tile(const struct mt_cpu_tile *t);
/** Called once in each compute thread: oneDNN must not start threads of its own. */
void mt_cpu_gemm_thread_init(void);
/** "oneDNN 2.6.3, avx512_core" or "plain C"; *native_bf16 as in mt_device_limits. */
const char *mt_cpu_gemm_describe(bool *native_bf16);

#endif

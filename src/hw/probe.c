/* SPDX-License-Identifier: Apache-2.0 */
#include "hw/probe.h"

#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "base/clock.h"
#include "base/mem.h"
#include "base/pool.h"

enum { BYTES = 256 << 20, PIECE = 1 << 20, ROUNDS = 7 };

struct job {
    char *dst, *src;
};

static void copy_chunk(void *ctx, size_t chunk, int thread)
{
    const struct job *j = ctx;
    char *dst = j->dst + chunk * PIECE;
    const char *src = j->src + chunk * PIECE;
    (void)thread;
#ifdef __SSE2__
    for (size_t i = 0; i < PIECE; i += 16)
        _mm_stream_si128((__m128i *)(void *)(dst + i),
                         _mm_load_si128((const __m128i *)(const void *)(src + i)));
    _mm_sfence();
#else
    memcpy(dst, src, PIECE);
#endif
}

int mt_probe_copy(int n_threads, const int *cpus, double *gbs, struct mt_err *err)
{
    struct job j = {mt_alloc_aligned(BYTES), mt_alloc_aligned(BYTES)};
    struct mt_pool_params p = {"probe", n_threads, cpus, NULL};
    mt_pool *pool = NULL;
    int64_t best = INT64_MAX;
    int rc = j.dst && j.src ? mt_pool_create(&pool, &p, err)
                            : mt_fail_nomem(err, "the copy probe", 2 * (unsigned long long)BYTES);
    if (!rc) {
        memset(j.src, 1, BYTES);
        memset(j.dst, 2, BYTES);
    }
    for (int r = 0; r < ROUNDS && !rc; r++) {
        int64_t t0 = mt_now_ns();
        mt_pool_run(pool, copy_chunk, &j, BYTES / PIECE);
        best = MT_MIN(best, mt_now_ns() - t0);
    }
    if (!rc)
        *gbs = 2.0 * BYTES / (double)best;
    mt_pool_destroy(&pool);
    free(j.dst);
    free(j.src);
    return rc;
}

bool mt_hw_io_uring_allowed(void)
{
    /* an invalid call: its error tells whether io_uring is missing, forbidden, or available (another error) */
    return syscall(SYS_io_uring_setup, 0, NULL) < 0 && errno != ENOSYS && errno != EPERM;
}

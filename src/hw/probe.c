/* SPDX-License-Identifier: Apache-2.0 */
#include "hw/probe.h"

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "base/clock.h"
#include "base/mem.h"
#include "base/pool.h"
#include "hw/host.h"

enum { BYTES = 256 << 20, PIECE = 1 << 20, ROUNDS = 7, WORK_NS = 20000000 };

struct job {
    char *dst, *src;
};

static void copy_chunk(void *ctx, size_t chunk, int)
{
    const struct job *j = ctx;
    char *dst = j->dst + chunk * PIECE;
    const char *src = j->src + chunk * PIECE;
#ifdef __SSE2__
    for (size_t i = 0; i < PIECE; i += 16)
        _mm_stream_si128((__m128i *)(void *)(dst + i),
                         _mm_load_si128((const __m128i *)(const void *)(src + i)));
    _mm_sfence();
#else
    memcpy(dst, src, PIECE);
#endif
}

static int home_of(const void *numa, size_t at, size_t)
{
    return (int)(at / MT_HUGE_PAGE % (size_t)((const struct mt_numa *)numa)->n);
}

static int alloc(char **out, const struct mt_numa *numa, int value, struct mt_err *err)
{
    void *p = NULL;
    int rc = mt_host_alloc_at(&p, BYTES, &(struct mt_host_homes){numa, home_of, numa}, "the copy probe", err);
    if (!rc)
        memset(p, value, BYTES);
    *out = p;
    return rc;
}

int mt_probe_copy(int n_threads, const int *cpus, const struct mt_numa *numa, double *gbs, struct mt_err *err)
{
    struct job j = {NULL, NULL};
    struct mt_numa none;
    struct mt_pool_params p = {"probe", n_threads, cpus, NULL};
    mt_pool *pool = NULL;
    int64_t best = INT64_MAX;
    mt_numa_none(&none);
    numa = numa ? numa : &none;
    int rc = mt_pool_create(&pool, &p, err)
          ?: alloc(&j.src, numa, 1, err)
          ?: alloc(&j.dst, numa, 2, err);
    if (!rc)
        mt_numa_lanes(numa, pool, cpus);
    for (int r = 0; r < ROUNDS && !rc; r++) {
        int64_t t0 = mt_now_ns();
        mt_pool_run_in_lanes(pool, copy_chunk, &j, BYTES / PIECE, (struct mt_pool_stripes){0, MT_HUGE_PAGE / PIECE});
        best = MT_MIN(best, mt_now_ns() - t0);
    }
    if (!rc)
        *gbs = 2.0 * BYTES / (double)best;
    mt_pool_destroy(&pool);
    mt_host_free(j.dst, BYTES);
    mt_host_free(j.src, BYTES);
    return rc;
}

static int64_t thread_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Works for as long as the thread has had its core for WORK_NS. */
static void work(void *, size_t, int)
{
    int64_t until = thread_ns() + WORK_NS;
    while (thread_ns() < until)
        ;
}

int mt_probe_cores(int n_threads, const int *cpus, double *share, struct mt_err *err)
{
    struct mt_pool_params p = {"cores", n_threads, cpus, NULL};
    MT_CLOSED_BY(mt_pool_destroy) mt_pool *pool = NULL;
    int rc = mt_pool_create(&pool, &p, err);
    int64_t began = mt_now_ns();
    if (!rc)
        mt_pool_run(pool, work, NULL, (size_t)n_threads);
    if (!rc)
        *share = WORK_NS * 1e-9 / mt_seconds_since(began);
    return rc;
}

bool mt_hw_io_uring_allowed(void)
{
    /* an invalid call: its error tells whether io_uring is missing, forbidden, or available (another error) */
    return syscall(SYS_io_uring_setup, 0, NULL) < 0 && errno != ENOSYS && errno != EPERM;
}

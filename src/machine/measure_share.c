/* SPDX-License-Identifier: Apache-2.0 */
/* Measures the link, and how copies, updates and compute slow each other down where they share the cores. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "optim/adam.h"
#include "machine/measure_priv.h"
#include "store/planes.h"

enum { COPY_BYTES = 64 << 20, ADAM_N = 8 << 20, SMALL_COPY_BYTES = 256 << 10 };

static size_t copy_bytes(const struct mt_measure_params *p)
{
    return p->small ? SMALL_COPY_BYTES : COPY_BYTES;
}

/* --- copies -------------------------------------------------------------------------------------- */

struct link {
    mt_device *dev;
    size_t bytes; /* of a copy */
    void *host[2], *device[2];
    mt_event *ev[4];
};

/* One copy and an event after it; way: 0 host to device, 1 device to host. */
static int link_copy(struct link *l, int way, size_t bytes, struct mt_err *err)
{
    enum mt_stream s = way ? MT_STREAM_D2H : MT_STREAM_H2D;
    struct mt_copy c = {way ? l->host[1] : l->device[0], bytes, way ? l->device[1] : l->host[0], bytes, bytes, 1};
    int rc = mt_device_copy(l->dev, s, &c, err);
    return rc ? rc : mt_event_record(l->dev, l->ev[2 * way + 1], s, err);
}

static int link_copies(struct link *l, int way, int n, struct mt_err *err)
{
    int rc = mt_event_record(l->dev, l->ev[2 * way], way ? MT_STREAM_D2H : MT_STREAM_H2D, err);
    for (int i = 0; i < n && !rc; i++)
        rc = link_copy(l, way, l->bytes, err);
    return rc;
}

static int64_t span_ns(const struct link *l, int way)
{
    return mt_event_time_ns(l->ev[2 * way + 1]) - mt_event_time_ns(l->ev[2 * way]);
}

/* GB/s of n_in copies to the device and n_out copies to the host at once; 0: none in that direction. */
static int time_copies(struct link *l, int n_in, int n_out, double gbs[2], struct mt_err *err)
{
    int n[2] = {n_in, n_out}, rc = 0;
    for (int way = 0; way < 2 && !rc; way++)
        if (n[way])
            rc = link_copies(l, way, n[way], err);
    if (!rc)
        rc = mt_device_sync(l->dev, err);
    for (int way = 0; way < 2 && !rc; way++)
        if (n[way])
            gbs[way] = (double)n[way] * (double)l->bytes / (double)span_ns(l, way);
    return rc;
}

/* Fixed cost of a copy: seconds of a very small one directly after a copy on the other queue, as in a step. */
static int time_small_copies(struct link *l, double *seconds, struct mt_err *err)
{
    enum { HOPS = 256, SMALL_BYTES = 4096 };
    int rc = mt_event_record(l->dev, l->ev[0], MT_STREAM_H2D, err);
    for (int i = 0; i < HOPS && !rc; i++) {
        int way = i % 2;
        if (i)
            rc = mt_event_wait(l->dev, l->ev[way ? 1 : 3], way ? MT_STREAM_D2H : MT_STREAM_H2D, err);
        if (!rc)
            rc = link_copy(l, way, SMALL_BYTES, err);
    }
    if (!rc)
        rc = mt_device_sync(l->dev, err);
    if (!rc)
        *seconds = (double)(mt_event_time_ns(l->ev[3]) - mt_event_time_ns(l->ev[0])) * 1e-9 / HOPS;
    return rc;
}

static int open_link(struct link *l, const struct mt_measure_params *p, struct mt_err *err)
{
    l->bytes = copy_bytes(p);
    int rc = mt_measure_device(&l->dev, p, l->bytes * 3, err);
    for (int i = 0; i < 2 && !rc; i++) {
        rc = mt_host_alloc(&l->host[i], l->bytes, "copy probe", err);
        if (!rc)
            memset(l->host[i], 0x3f, l->bytes);
        if (!rc)
            rc = mt_device_register_host(l->dev, l->host[i], l->bytes, err);
        if (!rc)
            rc = mt_device_alloc(l->dev, l->bytes, "copy probe", &l->device[i], err);
    }
    for (int i = 0; i < 4 && !rc; i++)
        rc = mt_event_create(l->dev, &l->ev[i], err);
    return rc;
}

static void close_link(struct link *l)
{
    for (int i = 0; i < 4; i++)
        mt_event_destroy(&l->ev[i]);
    for (int i = 0; i < 2; i++) {
        if (l->dev && l->host[i])
            mt_device_unregister_host(l->dev, l->host[i]);
        mt_host_free(l->host[i], l->bytes);
    }
    mt_device_destroy(&l->dev);
}

/* GB/s: to the device alone, to the host alone; both at once: to the device, to the host. */
static int link_round(struct link *l, double gbs[4], struct mt_err *err)
{
    enum { COPIES = 3 };
    double in[2] = {0}, out[2] = {0}, both[2] = {0};
    int rc = time_copies(l, COPIES, 0, in, err);
    if (!rc)
        rc = time_copies(l, 0, COPIES, out, err);
    if (!rc)
        rc = time_copies(l, COPIES, COPIES, both, err);
    gbs[0] = in[0];
    gbs[1] = out[1];
    gbs[2] = both[0];
    gbs[3] = both[1];
    return rc;
}

int mt_measure_link(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err)
{
    enum { ROUNDS = 5 };
    static const enum mt_rate_id id[4] = {MT_RATE_H2D, MT_RATE_D2H, MT_RATE_H2D_BOTH, MT_RATE_D2H_BOTH};
    struct link l = {0};
    double gbs[4] = {0}, seen[4][ROUNDS], small = 0;
    int rc = open_link(&l, p, err);
    if (!rc)
        rc = link_round(&l, gbs, err); /* warms up */
    for (int r = 0; r < ROUNDS && !rc; r++) {
        rc = link_round(&l, gbs, err);
        for (int i = 0; i < 4; i++)
            seen[i][r] = gbs[i];
    }
    if (!rc)
        rc = time_small_copies(&l, &small, err);
    close_link(&l);
    if (rc)
        return rc;
    m->rate[MT_RATE_COPY_US] = (struct mt_rate){small * 1e6, MT_RATE_MEASURED};
    for (int i = 0; i < 4; i++)
        m->rate[id[i]] = (struct mt_rate){mt_measure_median(seen[i], ROUNDS), MT_RATE_MEASURED};
    if (m->cpu)
        m->rate[MT_RATE_COPY] =
            (struct mt_rate){MT_MAX(m->rate[MT_RATE_H2D].value, m->rate[MT_RATE_D2H].value), MT_RATE_MEASURED};
    return 0;
}

/* --- work that shares the cores ------------------------------------------------------------------- */

/* Runs updates on threads of their own until stopped, and counts them. */
struct adam_load {
    const struct mt_measure_params *p;
    char *mem;
    mt_pool *pool;
    pthread_t thread;
    bool started;
    atomic_bool quit;
    atomic_long done;
};

static void *adam_main(void *arg)
{
    struct adam_load *l = arg;
    struct mt_adam a = {.n = ADAM_N, .hi = (void *)l->mem, .lo = (void *)(l->mem + (size_t)ADAM_N * 2),
                        .m = l->mem + (size_t)ADAM_N * 4, .v = l->mem + (size_t)ADAM_N * 8,
                        .grad = l->mem + (size_t)ADAM_N * 12, .state_dtype = MT_F32,
                        .grad_dtype = MT_BF16, .lr = 1e-6, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8,
                        .clip = 1, .t = 1};
    while (!atomic_load(&l->quit)) {
        mt_adam_run_pool(&a, MT_ADAM_AUTO, l->pool);
        atomic_fetch_add(&l->done, 1);
    }
    return NULL;
}

static int start_adam(struct adam_load *l, const struct mt_measure_params *p, struct mt_err *err)
{
    struct mt_pool_params pp = {"probe", p->n_threads, p->cpus, NULL};
    l->p = p;
    l->mem = mt_alloc_aligned((size_t)ADAM_N * 14);
    if (!l->mem)
        return mt_fail_nomem(err, "the Adam probe", (unsigned long long)ADAM_N * 14);
    memset(l->mem, 0x3c, (size_t)ADAM_N * 14);
    int rc = mt_pool_create(&l->pool, &pp, err);
    if (!rc)
        rc = pthread_create(&l->thread, NULL, adam_main, l)
                 ? mt_fail(err, MT_ERR_RUNTIME, -EAGAIN, "cannot start a thread")
                 : 0;
    l->started = !rc;
    return rc;
}

static void stop_adam(struct adam_load *l)
{
    atomic_store(&l->quit, true);
    if (l->started)
        pthread_join(l->thread, NULL);
    mt_pool_destroy(&l->pool);
    free(l->mem);
}

static double adam_rate(struct adam_load *l, int64_t ns)
{
    long from = atomic_load(&l->done);
    int64_t t0 = mt_now_ns();
    while (mt_now_ns() - t0 < ns)
        usleep(2000);
    return (double)(atomic_load(&l->done) - from) / (double)(mt_now_ns() - t0);
}

/* Compute at full speed: submits large products until stopped. */
struct gemm_load {
    mt_device *dev;
    struct mt_metered op;
    int64_t round_ns;
    pthread_t thread;
    bool started;
    atomic_bool quit;
    struct mt_err err;
};

static int time_gemm(double *seconds, const struct gemm_load *l, struct mt_err *err)
{
    return mt_measure_operation(seconds, l->dev, &l->op, l->round_ns, err);
}

static void *gemm_main(void *arg)
{
    struct gemm_load *l = arg;
    double s;
    while (!atomic_load(&l->quit) && !time_gemm(&s, l, &l->err))
        ;
    return NULL;
}

static int start_gemm(struct gemm_load *l, struct mt_err *err)
{
    atomic_store(&l->quit, false);
    l->started = !pthread_create(&l->thread, NULL, gemm_main, l);
    return l->started ? 0 : mt_fail(err, MT_ERR_RUNTIME, -EAGAIN, "cannot start a thread");
}

static void stop_gemm(struct gemm_load *l)
{
    atomic_store(&l->quit, true);
    if (l->started)
        pthread_join(l->thread, NULL);
    l->started = false;
}

enum { SHARE_COPY, COPY_SHARE, ADAM_SHARE, SHARE_ADAM, N_SHARES, SHARE_ROUNDS = 5 };

/* Compute and copies: speed of each beside the other, relative to its speed alone. */
static int copy_round(struct link *l, struct gemm_load *gemm, double share[N_SHARES], struct mt_err *err)
{
    double alone = 0, beside = 0, free_gbs[2] = {0}, gbs[2] = {0};
    int rc = time_gemm(&alone, gemm, err);
    if (!rc)
        rc = time_copies(l, 8, 0, free_gbs, err);
    if (!rc) /* copies of 64 MiB in the background that take longer than the measurement */
        rc = link_copies(l, 0, 24, err);
    if (!rc)
        rc = time_gemm(&beside, gemm, err);
    if (!rc)
        rc = mt_device_sync(l->dev, err);
    if (!rc)
        rc = start_gemm(gemm, err);
    if (!rc)
        rc = time_copies(l, 8, 0, gbs, err);
    stop_gemm(gemm);
    share[SHARE_COPY] = alone / beside;
    share[COPY_SHARE] = gbs[0] / free_gbs[0];
    return rc;
}

/* Compute and the optimizer. */
static int adam_round(const struct mt_measure_params *p, struct gemm_load *gemm, double share[N_SHARES],
                      struct mt_err *err)
{
    struct adam_load adam = {0};
    double alone = 0, beside = 0, free_rate = 0, rate = 0;
    const int64_t look_ns = p->small ? 10000000 : 250000000;
    int rc = time_gemm(&alone, gemm, err);
    if (!rc)
        rc = start_adam(&adam, p, err);
    if (!rc) {
        free_rate = adam_rate(&adam, look_ns);
        rc = time_gemm(&beside, gemm, err);
    }
    if (!rc)
        rc = start_gemm(gemm, err);
    if (!rc)
        rate = adam_rate(&adam, look_ns);
    stop_gemm(gemm);
    stop_adam(&adam);
    share[SHARE_ADAM] = alone / beside;
    share[ADAM_SHARE] = rate / free_rate;
    return rc;
}

/* Both figures of a ratio are taken within a second: a minute later the machine may be faster or slower. */
int mt_measure_shares(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err)
{
    static const enum mt_rate_id id[N_SHARES] = {MT_RATE_SHARE_COPY, MT_RATE_COPY_SHARE, MT_RATE_ADAM_SHARE,
                                                 MT_RATE_SHARE_ADAM};
    struct link l = {0};
    struct gemm_load gemm = {.op = mt_measure_gemm(MT_GEMM_NT, MT_F32, 512, 512, 512),
                             .round_ns = mt_measure_round_ns(p)};
    double share[N_SHARES] = {0}, seen[N_SHARES][SHARE_ROUNDS];
    int rc = mt_measure_device(&gemm.dev, p, mt_measure_operation_bytes(p, &gemm.op), err);
    if (!rc)
        rc = open_link(&l, p, err);
    for (int r = 0; r < SHARE_ROUNDS && !rc; r++) {
        rc = copy_round(&l, &gemm, share, err);
        if (!rc)
            rc = adam_round(p, &gemm, share, err);
        for (int i = 0; i < N_SHARES; i++)
            seen[i][r] = share[i];
    }
    for (int i = 0; i < N_SHARES && !rc; i++) {
        double share_of = MT_MIN(mt_measure_median(seen[i], SHARE_ROUNDS), 1.0);
        m->rate[id[i]] = (struct mt_rate){share_of, MT_RATE_MEASURED};
    }
    mt_device_destroy(&gemm.dev);
    close_link(&l);
    return rc;
}

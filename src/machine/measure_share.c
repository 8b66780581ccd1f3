/* SPDX-License-Identifier: Apache-2.0 */
/* Measures the link, and how copies, updates and compute slow each other down where they share the cores. */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/thread.h"
#include "device/example.h"
#include "hw/host.h"
#include "machine/measure_priv.h"
#include "optim/adam_probe.h"

enum { ADAM_N = 8 << 20, SMALL_PART = 64 }; /* of all bytes, in tests */

static size_t short_bytes(const struct mt_measure_params *p)
{
    return MT_SHORT_COPY_BYTES / (p->small ? SMALL_PART : 1);
}

/* --- copies -------------------------------------------------------------------------------------- */

struct link {
    mt_device *dev;
    size_t bytes; /* of a copy */
    void *host[2], *device[2];
    mt_event *ev[4];
};

/* One copy and an event after it; way: 0 host to device, 1 device to host. */
static int link_copy(struct link *l, int way, enum mt_stream s, size_t bytes, struct mt_err *err)
{
    struct mt_copy c = {way ? l->host[1] : l->device[0], bytes, way ? l->device[1] : l->host[0], bytes, bytes, 1};
    int rc = mt_device_copy(l->dev, s, &c, err);
    return rc ?: mt_event_record(l->dev, l->ev[2 * way + 1], s, err);
}

static int link_copies(struct link *l, int way, int n, struct mt_err *err)
{
    enum mt_stream s = way ? MT_STREAM_D2H : MT_STREAM_H2D;
    int rc = mt_event_record(l->dev, l->ev[2 * way], s, err);
    for (int i = 0; i < n && !rc; i++)
        rc = link_copy(l, way, s, l->bytes, err);
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
    rc = rc ?: mt_device_sync(l->dev, err);
    for (int way = 0; way < 2 && !rc; way++)
        if (n[way])
            gbs[way] = (double)n[way] * (double)l->bytes / (double)span_ns(l, way);
    return rc;
}

/* A copy of a part of the host's buffer from or to one of few buffers of the device, which stay in the caches. */
static int short_copy(struct link *l, int way, int i, size_t bytes, struct mt_err *err)
{
    enum { SLOTS = 2 };
    char *host = (char *)l->host[way] + (size_t)i * bytes % l->bytes, *device = l->device[way];
    device += (size_t)(i % SLOTS) * bytes;
    struct mt_copy c = {way ? host : device, bytes, way ? device : host, bytes, bytes, 1};
    return mt_device_copy(l->dev, way ? MT_STREAM_D2H : MT_STREAM_H2D, &c, err);
}

/* GB/s of short copies, one after the other. */
static int time_short_copies(struct link *l, int way, size_t bytes, double *gbs, struct mt_err *err)
{
    enum mt_stream s = way ? MT_STREAM_D2H : MT_STREAM_H2D;
    int n = (int)(l->bytes / bytes), rc = mt_event_record(l->dev, l->ev[2 * way], s, err);
    for (int i = 0; i < n && !rc; i++)
        rc = short_copy(l, way, i, bytes, err);
    rc = rc ?: mt_event_record(l->dev, l->ev[2 * way + 1], s, err) ?: mt_device_sync(l->dev, err);
    if (!rc)
        *gbs = (double)n * (double)bytes / (double)MT_MAX(span_ns(l, way), (int64_t)1);
    return rc;
}

/*
 * Fixed cost of a copy: seconds of a very small one directly after a copy on the other queue, as in a step. `other`:
 * the queue that goes on in turn with host to device. On the cpu device this is the compute queue, whose thread is on a
 * core of its own: what is left is the time until a thread that waits goes on.
 */
static int time_small_copies(struct link *l, enum mt_stream other, double *seconds, struct mt_err *err)
{
    enum { HOPS = 64, SMALL_BYTES = 4096 };
    int rc = mt_event_record(l->dev, l->ev[0], MT_STREAM_H2D, err);
    for (int i = 0; i < HOPS && !rc; i++) {
        int way = i % 2;
        if (i)
            rc = mt_event_wait(l->dev, l->ev[way ? 1 : 3], way ? other : MT_STREAM_H2D, err);
        rc = rc ?: link_copy(l, way, way ? other : MT_STREAM_H2D, SMALL_BYTES, err);
    }
    rc = rc ?: mt_device_sync(l->dev, err);
    if (!rc)
        *seconds = (double)(mt_event_time_ns(l->ev[3]) - mt_event_time_ns(l->ev[0])) * 1e-9 / HOPS;
    return rc;
}

/* With `more` device memory for others. */
static int open_link(struct link *l, const struct mt_measure_params *p, size_t more, struct mt_err *err)
{
    l->bytes = MT_LONG_COPY_BYTES / (p->small ? SMALL_PART : 1);
    int rc = mt_measure_device(&l->dev, p, l->bytes * 3 + more, err);
    for (int i = 0; i < 2 && !rc; i++) {
        rc = mt_host_alloc(&l->host[i], l->bytes, "copy probe", err);
        if (!rc)
            memset(l->host[i], 0x3f, l->bytes);
        rc = rc ?: mt_device_register_host(l->dev, l->host[i], l->bytes, err)
                ?: mt_device_alloc(l->dev, l->bytes, "copy probe", &l->device[i], err);
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

/* GB/s: to the device alone, to the host alone; both at once: to the device, to the host; short ones of `bytes`, unless
 * that is 0: to the device, to the host. */
enum { N_LINK = 6 };
static int link_round(struct link *l, size_t bytes, double gbs[N_LINK], struct mt_err *err)
{
    enum { COPIES = 3 };
    int rc = time_copies(l, COPIES, 0, gbs, err)
          ?: time_copies(l, 0, COPIES, gbs, err)
          ?: time_copies(l, COPIES, COPIES, gbs + 2, err);
    for (int way = 0; way < 2 && bytes && !rc; way++)
        rc = time_short_copies(l, way, bytes, &gbs[4 + way], err);
    return rc;
}

int mt_measure_link(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err)
{
    enum { ROUNDS = 5 };
    static const enum mt_rate_id id[N_LINK] = {MT_RATE_H2D, MT_RATE_D2H, MT_RATE_H2D_BOTH, MT_RATE_D2H_BOTH,
                                               MT_RATE_H2D_SHORT, MT_RATE_D2H_SHORT};
    MT_CLOSED_BY(close_link) struct link l = {0};
    double gbs[N_LINK] = {0}, seen[N_LINK][ROUNDS], small[ROUNDS];
    int rc = open_link(&l, p, 0, err), n = m->cpu ? N_LINK : 4;
    size_t bytes = m->cpu ? short_bytes(p) : 0;
    rc = rc ?: link_round(&l, bytes, gbs, err); /* warms up */
    for (int r = 0; r < ROUNDS && !rc; r++) {
        rc = link_round(&l, bytes, gbs, err)
          ?: time_small_copies(&l, m->cpu ? MT_STREAM_COMPUTE : MT_STREAM_D2H, &small[r], err);
        for (int i = 0; i < n; i++)
            seen[i][r] = gbs[i];
    }
    if (rc)
        return rc;
    mt_machine_measured(m, MT_RATE_COPY_US, mt_measure_median(small, ROUNDS) * 1e6);
    for (int i = 0; i < n; i++)
        mt_machine_measured(m, id[i], mt_measure_median(seen[i], ROUNDS));
    if (m->cpu)
        mt_machine_measured(m, MT_RATE_COPY, MT_MAX(m->rate[MT_RATE_H2D].value, m->rate[MT_RATE_D2H].value));
    return 0;
}

/* --- work that shares the cores ------------------------------------------------------------------- */

/* Runs updates on threads of their own until stopped, and counts them. */
struct update_load {
    struct mt_adam_probe adam;
    pthread_t thread;
    bool started;
    atomic_bool quit;
    atomic_long done;
};

static void *update_main(void *arg)
{
    struct update_load *l = arg;
    while (!atomic_load(&l->quit)) {
        mt_adam_probe_run(&l->adam);
        atomic_fetch_add(&l->done, 1);
    }
    return NULL;
}

static int start_update(struct update_load *l, const struct mt_measure_params *p, struct mt_err *err)
{
    int rc = mt_adam_probe_init(&l->adam,
                                &(struct mt_adam_probe_params){
                                    .n = ADAM_N, .n_threads = p->n_threads, .cpus = p->cpus, .numa = p->numa},
                                err);
    rc = rc ?: mt_thread_start(&l->thread, "mt-update", update_main, l, err);
    l->started = !rc;
    return rc;
}

static void stop_update(struct update_load *l)
{
    atomic_store(&l->quit, true);
    if (l->started)
        pthread_join(l->thread, NULL);
    mt_adam_probe_finish(&l->adam);
}

static double update_rate(struct update_load *l, int64_t ns)
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

enum { SHARE_COPY, COPY_SHARE, UPDATE_SHARE, SHARE_UPDATE, N_SHARES, SHARE_ROUNDS = 5, PAIRS = 32 };
static const double LEAST_SHARE = 0.1;

/* Products, each of which wakes up a short copy when it has ended, as in a step. */
struct pairs {
    struct link link; /* on the device that computes, too */
    mt_example *x;
    size_t bytes;          /* of a copy */
    mt_event *done[PAIRS]; /* the end of a product */
    mt_event *copy[PAIRS][2];
};

static int open_pairs(struct pairs *s, const struct mt_measure_params *p, struct mt_err *err)
{
    struct mt_metered op = mt_measure_gemm(MT_GEMM_NT, MT_F32, 512, 512, 256);
    s->bytes = short_bytes(p);
    int rc = open_link(&s->link, p, mt_measure_operation_bytes(p, &op), err)
          ?: mt_example_create(&s->x, &(struct mt_example_params){.dev = s->link.dev, .shape = op}, err);
    for (int i = 0; i < PAIRS && !rc; i++) {
        rc = mt_event_create(s->link.dev, &s->done[i], err);
        for (int k = 0; k < 2 && !rc; k++)
            rc = mt_event_create(s->link.dev, &s->copy[i][k], err);
    }
    return rc;
}

static void close_pairs(struct pairs *s)
{
    mt_example_destroy(&s->x);
    for (int i = 0; i < PAIRS; i++) {
        mt_event_destroy(&s->done[i]);
        mt_event_destroy(&s->copy[i][0]);
        mt_event_destroy(&s->copy[i][1]);
    }
    close_link(&s->link);
}

static int submit_pair(struct pairs *s, int i, bool product, bool copy, struct mt_err *err)
{
    mt_device *dev = s->link.dev;
    int rc = product ? mt_example_submit(s->x, err) ?: mt_event_record(dev, s->done[i], MT_STREAM_COMPUTE, err) : 0;
    if (!rc && product && copy)
        rc = mt_event_wait(dev, s->done[i], MT_STREAM_H2D, err);
    for (int k = 0; k < 2 && copy && !rc; k++) {
        rc = k ? short_copy(&s->link, 0, i, s->bytes, err) : 0;
        rc = rc ?: mt_event_record(dev, s->copy[i][k], MT_STREAM_H2D, err);
    }
    return rc;
}

/* Nanoseconds from the end of one product to that of the next, and of a copy; medians. */
static int time_pairs(struct pairs *s, bool product, bool copy, double *product_ns, double *copy_ns, struct mt_err *err)
{
    double of_product[PAIRS], of_copy[PAIRS];
    int rc = 0;
    for (int i = 0; i < PAIRS && !rc; i++)
        rc = submit_pair(s, i, product, copy, err);
    rc = rc ?: mt_device_sync(s->link.dev, err);
    for (int i = 0; i < PAIRS && !rc; i++) {
        if (product && i)
            of_product[i - 1] = (double)(mt_event_time_ns(s->done[i]) - mt_event_time_ns(s->done[i - 1]));
        if (copy)
            of_copy[i] = (double)(mt_event_time_ns(s->copy[i][1]) - mt_event_time_ns(s->copy[i][0]));
    }
    if (!rc && product)
        *product_ns = mt_measure_median(of_product, PAIRS - 1);
    if (!rc && copy)
        *copy_ns = MT_MAX(mt_measure_median(of_copy, PAIRS), 1.0);
    return rc;
}

/* Compute and copies: speed of each while the other runs, relative to its speed alone. */
static int copy_round(struct pairs *s, double share[N_SHARES], struct mt_err *err)
{
    double alone = 0, beside = 0, copy_alone = 0, copy = 0;
    int rc = time_pairs(s, true, false, &alone, NULL, err)
          ?: time_pairs(s, false, true, NULL, &copy_alone, err)
          ?: time_pairs(s, true, true, &beside, &copy, err);
    if (rc)
        return rc;
    share[SHARE_COPY] = MT_MAX(1 - (beside - alone) / copy, LEAST_SHARE);
    share[COPY_SHARE] = copy_alone / copy;
    return 0;
}

/* Compute and the optimizer. */
static int update_round(const struct mt_measure_params *p, struct gemm_load *gemm, double share[N_SHARES],
                      struct mt_err *err)
{
    struct update_load adam = {0};
    double alone = 0, beside = 0, free_rate = 0, rate = 0;
    const int64_t look_ns = p->small ? 10000000 : 250000000;
    int rc = time_gemm(&alone, gemm, err) ?: start_update(&adam, p, err);
    if (!rc) {
        free_rate = update_rate(&adam, look_ns);
        rc = time_gemm(&beside, gemm, err);
    }
    rc = rc ?: start_gemm(gemm, err);
    if (!rc)
        rate = update_rate(&adam, look_ns);
    stop_gemm(gemm);
    stop_update(&adam);
    share[SHARE_UPDATE] = alone / beside;
    share[UPDATE_SHARE] = rate / free_rate;
    return rc;
}

/* Both figures of a ratio are taken within a second: a minute later the machine may be faster or slower. */
int mt_measure_shares(struct mt_machine *m, const struct mt_measure_params *p, struct mt_err *err)
{
    static const enum mt_rate_id id[N_SHARES] = {MT_RATE_SHARE_COPY, MT_RATE_COPY_SHARE, MT_RATE_UPDATE_SHARE,
                                                 MT_RATE_SHARE_UPDATE};
    MT_CLOSED_BY(close_pairs) struct pairs pairs = {.x = NULL};
    struct gemm_load gemm = {.op = mt_measure_gemm(MT_GEMM_NT, MT_F32, 512, 512, 512),
                             .round_ns = mt_measure_round_ns(p)};
    double share[N_SHARES] = {0}, seen[N_SHARES][SHARE_ROUNDS];
    int rc = mt_measure_device(&gemm.dev, p, mt_measure_operation_bytes(p, &gemm.op), err)
          ?: open_pairs(&pairs, p, err);
    for (int r = 0; r < SHARE_ROUNDS && !rc; r++) {
        rc = copy_round(&pairs, share, err) ?: update_round(p, &gemm, share, err);
        for (int i = 0; i < N_SHARES; i++)
            seen[i][r] = share[i];
    }
    for (int i = 0; i < N_SHARES && !rc; i++)
        mt_machine_measured(m, id[i], MT_MIN(mt_measure_median(seen[i], SHARE_ROUNDS), 1.0));
    mt_device_destroy(&gemm.dev);
    return rc;
}

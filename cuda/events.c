/* SPDX-License-Identifier: Apache-2.0 */
/*
 * CUDA gives times of events as float milliseconds since another event: exact to a microsecond for
 * a few seconds only. So a new base event is recorded now and then, when all streams are idle; its
 * time is measured from the base before it, and the time of the first base is that of the host's
 * clock. With several devices every base has the host's time: their clocks drift apart by
 * milliseconds a minute.
 */
#include <stdlib.h>

#include "base/clock.h"
#include "cuda_priv.h"

enum { N_BASES = 8, BASE_TRIES = 8 };
static const int64_t base_age_ns = 2000000000, base_error_ns = 50000;

struct mt_cuda_clock {
    cudaEvent_t base[N_BASES];
    int64_t base_ns[N_BASES];
    int64_t newest_host_ns;
    atomic_ulong epoch; /* the newest base is base[epoch % N_BASES] */
    cudaEvent_t rest[MT_N_STREAMS];
};

struct event {
    struct mt_event base;
    cudaEvent_t cu;
    atomic_ulong epoch; /* epoch of the clock when it was recorded, from 1; 0: never recorded */
};

/*
 * Records a base and gives the host's time of it: it lies between the call and its return, so a thread that was
 * kept waiting in between tries again. All streams must be idle.
 */
static cudaError_t record_base(struct mt_cuda_device *d, cudaEvent_t base, int64_t *host_ns)
{
    cudaError_t rc = cudaSuccess;
    int64_t before = 0, after = INT64_MAX;
    for (int i = 0; i < BASE_TRIES && rc == cudaSuccess && after - before > 2 * base_error_ns; i++) {
        before = mt_now_ns();
        rc = cudaEventRecord(base, d->streams[MT_STREAM_COMPUTE]);
        if (rc == cudaSuccess)
            do /* a sleep's end would be late */
                rc = cudaEventQuery(base);
            while (rc == cudaErrorNotReady);
        after = mt_now_ns();
    }
    (void)cudaGetLastError(); /* cudaErrorNotReady is not an error */
    *host_ns = before + (after - before) / 2;
    return rc;
}

static cudaError_t start_clock(struct mt_cuda_device *d, struct mt_cuda_clock *c)
{
    cudaError_t rc = cudaSuccess;
    for (int i = 0; i < N_BASES && rc == cudaSuccess; i++)
        rc = cudaEventCreateWithFlags(&c->base[i], cudaEventBlockingSync);
    for (int i = 0; i < MT_N_STREAMS && rc == cudaSuccess; i++)
        rc = cudaEventCreateWithFlags(&c->rest[i], cudaEventBlockingSync | cudaEventDisableTiming);
    for (int i = 0; i < 2 && rc == cudaSuccess; i++) /* twice: the first time includes the start-up */
        rc = record_base(d, c->base[1], &c->newest_host_ns);
    c->base_ns[1] = c->newest_host_ns;
    atomic_store(&c->epoch, 1);
    return rc;
}

int mt_cuda_clock_create(struct mt_cuda_device *d, struct mt_err *err)
{
    struct mt_cuda_clock *c = mt_calloc(1, sizeof(*c));
    if (!c)
        return mt_fail_nomem(err, "the device's clock", sizeof(*c));
    d->clock = c;
    return mt_cuda_check(d, start_clock(d, c), err, "cannot create events");
}

void mt_cuda_clock_destroy(struct mt_cuda_clock **clock)
{
    struct mt_cuda_clock *c = *clock;
    if (!c)
        return;
    for (int i = 0; i < N_BASES; i++)
        if (c->base[i])
            cudaEventDestroy(c->base[i]);
    for (int i = 0; i < MT_N_STREAMS; i++)
        if (c->rest[i])
            cudaEventDestroy(c->rest[i]);
    free(c);
    *clock = NULL;
}

/* Records a new base if the newest is old. All streams must be idle. */
static cudaError_t move_base(struct mt_cuda_device *d)
{
    struct mt_cuda_clock *c = d->clock;
    if (mt_now_ns() - c->newest_host_ns < base_age_ns)
        return cudaSuccess;
    unsigned long old = atomic_load(&c->epoch), new = old + 1;
    float ms = 0;
    cudaError_t rc = record_base(d, c->base[new % N_BASES], &c->newest_host_ns)
        ?: cudaEventElapsedTime(&ms, c->base[old % N_BASES], c->base[new % N_BASES]);
    if (rc != cudaSuccess)
        return rc;
    c->base_ns[new % N_BASES] = mt_cuda_pins_shared()
                                    ? c->newest_host_ns
                                    : c->base_ns[old % N_BASES] + (int64_t)((double)ms * 1e6);
    atomic_store(&c->epoch, new);
    return rc;
}

int mt_cuda_event_create(mt_device *dev, mt_event **out, struct mt_err *err)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    int rc = mt_cuda_enter(d, err);
    if (rc)
        return rc;
    struct event *ev = mt_calloc(1, sizeof(*ev));
    if (!ev)
        return mt_fail_nomem(err, "an event", sizeof(*ev));
    ev->base.dev = dev;
    /* a waiting thread sleeps, to leave the cores to the optimizer */
    rc = mt_cuda_check(d, cudaEventCreateWithFlags(&ev->cu, cudaEventBlockingSync), err,
                       "cannot create an event");
    if (rc)
        free(ev);
    else
        *out = &ev->base;
    return rc;
}

void mt_cuda_event_destroy(mt_event *event)
{
    struct event *ev = (struct event *)event;
    cudaSetDevice(mt_cuda(event->dev)->index);
    cudaEventDestroy(ev->cu);
    free(ev);
}

int mt_cuda_event_record(mt_device *dev, mt_event *event, enum mt_stream s, struct mt_err *err)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    struct event *ev = (struct event *)event;
    int rc = mt_cuda_enter(d, err);
    if (rc)
        return rc;
    atomic_store_explicit(&ev->epoch, atomic_load(&d->clock->epoch), memory_order_release);
    return mt_cuda_check(d, cudaEventRecord(ev->cu, mt_cuda_stream(d, s)), err, "event record");
}

int mt_cuda_event_wait(mt_device *dev, mt_event *event, enum mt_stream s, struct mt_err *err)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    return mt_cuda_enter(d, err)
        ?: mt_cuda_check(d, cudaStreamWaitEvent(mt_cuda_stream(d, s), ((struct event *)event)->cu, 0), err, "event wait");
}

int mt_cuda_event_sync(mt_device *dev, mt_event *event, struct mt_err *err)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    return mt_cuda_enter(d, err)
        ?: mt_cuda_check(d, cudaEventSynchronize(((struct event *)event)->cu), err, "work before an event");
}

int64_t mt_cuda_event_time_ns(mt_event *event)
{
    struct mt_cuda_device *d = mt_cuda(event->dev);
    struct event *ev = (struct event *)event;
    unsigned long epoch = atomic_load_explicit(&ev->epoch, memory_order_acquire);
    float ms = 0;
    if (!epoch || atomic_load(&d->clock->epoch) - epoch >= N_BASES)
        return 0;
    cudaSetDevice(d->index);
    if (cudaEventQuery(ev->cu) != cudaSuccess ||
        cudaEventElapsedTime(&ms, d->clock->base[epoch % N_BASES], ev->cu) != cudaSuccess) {
        (void)cudaGetLastError(); /* cudaErrorNotReady is not an error */
        return 0;
    }
    return d->clock->base_ns[epoch % N_BASES] + (int64_t)((double)ms * 1e6);
}

/* A device that has failed may still do what was submitted before, such as copies: the memory may be freed next. */
static int sync_failed(const struct mt_cuda_device *d, int rc)
{
    cudaSetDevice(d->index);
    for (int s = 0; s < MT_N_STREAMS; s++)
        cudaStreamSynchronize(d->streams[s]);
    return rc;
}

int mt_cuda_sync(mt_device *dev, struct mt_err *err)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    cudaError_t e = cudaSuccess;
    int rc = mt_cuda_enter(d, err);
    if (rc)
        return sync_failed(d, rc);
    for (int s = 0; s < MT_N_STREAMS && e == cudaSuccess; s++)
        e = cudaEventRecord(d->clock->rest[s], d->streams[s]);
    for (int s = 0; s < MT_N_STREAMS && e == cudaSuccess; s++)
        e = cudaEventSynchronize(d->clock->rest[s]);
    return mt_cuda_check(d, e ?: move_base(d), err, "work on the GPU");
}

/* Also asks the runtime, where a fault of a kernel shows first. */
int mt_cuda_status(mt_device *dev, struct mt_err *err)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    int rc = mt_cuda_enter(d, err);
    if (rc)
        return rc;
    cudaError_t e = cudaStreamQuery(d->streams[MT_STREAM_COMPUTE]);
    if (e == cudaErrorNotReady) {
        (void)cudaGetLastError(); /* or the next launch on this thread would be reported as failed */
        e = cudaSuccess;
    }
    return mt_cuda_check(d, e, err, "work on the GPU");
}

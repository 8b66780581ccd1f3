/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams: ordered queues, each of a device and with a thread of its own. Events: an event counts
 * how often it was recorded; who waits remembers the count at that time. The null stream and
 * blocking streams wait for each other as CUDA's legacy default stream does.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "emu.h"

enum { MAX_PENDING = 1024 };

struct command {
    struct command *next;
    uint64_t number;
    mt_emu_command run, done;
    max_align_t args[];
};

struct CUstream_st {
    struct CUstream_st *next; /* of all streams */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t more, less;
    struct command *first, **last;
    uint64_t submitted, ended;
    uint64_t first_number; /* of the oldest command that has not ended; 0: idle */
    uint64_t random;
    int device;
    bool blocking, stop;
};

struct CUevent_st {
    pthread_mutex_t lock;
    pthread_cond_t fired;
    uint64_t recorded, done;
    int64_t time_ns;
    unsigned flags, references;
    int device;
};

static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUstream_st *streams, *null_stream[MT_EMU_MAX_DEVICES];
static uint64_t n_made, n_sharing;
static _Atomic uint64_t n_submitted;

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* --- the queue ------------------------------------------------------------------------------ */

static void jitter(struct CUstream_st *s)
{
    unsigned longest = mt_emu_settings()->jitter_us;
    if (!longest)
        return;
    uint64_t us = mt_emu_random(&s->random) % (longest + 1);
    struct timespec t = {.tv_sec = (time_t)(us / 1000000), .tv_nsec = (long)(us % 1000000) * 1000};
    nanosleep(&t, NULL);
}

static void *stream_main(void *arg)
{
    struct CUstream_st *s = arg;
    mt_emu_device_access(s->device);
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->first && !s->stop)
            pthread_cond_wait(&s->more, &s->lock);
        struct command *c = s->first;
        if (!c)
            break;
        s->first = c->next;
        if (!s->first)
            s->last = &s->first;
        pthread_mutex_unlock(&s->lock);
        jitter(s);
        c->run(c->args);
        if (c->done)
            c->done(c->args);
        free(c);
        pthread_mutex_lock(&s->lock);
        s->ended++;
        s->first_number = s->first ? s->first->number : 0;
        pthread_cond_broadcast(&s->less);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* The lock is held. */
static bool queues_are_taken(int device)
{
    unsigned n = 0;
    for (const struct CUstream_st *s = streams; s; s = s->next)
        n += s->device == device;
    return n >= mt_emu_settings()->connections;
}

size_t mt_emu_streams_that_share(void)
{
    pthread_mutex_lock(&streams_lock);
    size_t n = n_sharing;
    pthread_mutex_unlock(&streams_lock);
    return n;
}

static struct CUstream_st *make_stream(bool blocking)
{
    struct CUstream_st *s = calloc(1, sizeof(*s));
    if (!s)
        return NULL;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->more, NULL);
    pthread_cond_init(&s->less, NULL);
    s->last = &s->first;
    s->device = mt_emu_device();
    s->blocking = blocking;
    s->random = mt_emu_settings()->seed + ++n_made * 0x632be59bd9b4e019u;
    if (pthread_create(&s->thread, NULL, stream_main, s)) {
        free(s);
        return NULL;
    }
    char name[16];
    snprintf(name, sizeof(name), "emu-stream-%u", (unsigned)(n_made % 1000));
    pthread_setname_np(s->thread, name);
    n_sharing += queues_are_taken(s->device);
    s->next = streams;
    streams = s;
    return s;
}

static void wait_for(struct CUstream_st *s, uint64_t count)
{
    pthread_mutex_lock(&s->lock);
    while (s->ended < count)
        pthread_cond_wait(&s->less, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

static uint64_t tail(struct CUstream_st *s)
{
    pthread_mutex_lock(&s->lock);
    uint64_t n = s->submitted;
    pthread_mutex_unlock(&s->lock);
    return n;
}

/* MT_EMU_HOLD_UP_US: every eighth submission, drawn at random, keeps its thread for so long, and another's may come next. */
static void hold_up(uint64_t number)
{
    uint64_t state = mt_emu_settings()->seed + number;
    if (mt_emu_settings()->hold_up_us && mt_emu_random(&state) % 8 == 0)
        usleep(mt_emu_settings()->hold_up_us);
}

static cudaError_t push(struct CUstream_st *s, mt_emu_command run, mt_emu_command done, const void *args,
                        size_t bytes)
{
    struct command *c = malloc(sizeof(*c) + bytes);
    if (!c)
        return cudaErrorMemoryAllocation;
    *c = (struct command){.run = run, .done = done};
    memcpy(c->args, args, bytes);
    pthread_mutex_lock(&s->lock);
    while (s->submitted - s->ended >= MAX_PENDING)
        pthread_cond_wait(&s->less, &s->lock);
    uint64_t number = c->number = atomic_fetch_add_explicit(&n_submitted, 1, memory_order_relaxed) + 1;
    *s->last = c;
    s->last = &c->next;
    if (s->submitted++ == s->ended)
        s->first_number = c->number;
    pthread_cond_signal(&s->more);
    pthread_mutex_unlock(&s->lock);
    hold_up(number);
    return cudaSuccess;
}

struct follow {
    struct CUstream_st *stream;
    uint64_t count;
};

static void run_follow(void *args)
{
    const struct follow *f = args;
    wait_for(f->stream, f->count);
}

/* What `s` gets next runs after what `other` holds now. */
static void follow(struct CUstream_st *s, struct CUstream_st *other)
{
    struct follow f = {other, tail(other)};
    push(s, run_follow, NULL, &f, sizeof(f));
}

static struct CUstream_st *resolve(cudaStream_t s)
{
    if (s && !s->blocking) /* no lock, which would order threads that CUDA does not order */
        return s;
    int device = s ? s->device : mt_emu_device();
    pthread_mutex_lock(&streams_lock);
    if (!s && !null_stream[device])
        null_stream[device] = make_stream(true);
    s = s ? s : null_stream[device];
    if (s && s == null_stream[device]) {
        for (struct CUstream_st *other = streams; other; other = other->next)
            if (other->blocking && other->device == device && other != s)
                follow(s, other);
    } else if (s && s->blocking && null_stream[device]) {
        follow(s, null_stream[device]);
    }
    pthread_mutex_unlock(&streams_lock);
    return s;
}

int mt_emu_device_of_stream(cudaStream_t s)
{
    return s ? s->device : mt_emu_device();
}

cudaError_t mt_emu_submit(cudaStream_t stream, mt_emu_command run, mt_emu_command done,
                          const void *args, size_t bytes)
{
    cudaError_t e = mt_emu_result(cudaSuccess);
    struct CUstream_st *s = e ? NULL : resolve(stream);
    return e ? e : s ? mt_emu_result(push(s, run, done, args, bytes)) : cudaErrorMemoryAllocation;
}

void mt_emu_drain(cudaStream_t s)
{
    s = resolve(s);
    wait_for(s, tail(s));
}

/* Whether a stream has work from before `number`, which orders all submissions. */
static bool busy_since(uint64_t number)
{
    bool busy = false;
    pthread_mutex_lock(&streams_lock);
    for (struct CUstream_st *s = streams; s && !busy; s = s->next) {
        pthread_mutex_lock(&s->lock);
        busy = s->first_number && s->first_number <= number;
        pthread_mutex_unlock(&s->lock);
    }
    pthread_mutex_unlock(&streams_lock);
    return busy;
}

/* Looks again and again, so that other threads may submit what a stream waits for. */
void mt_emu_drain_all(void)
{
    uint64_t number = atomic_load_explicit(&n_submitted, memory_order_relaxed);
    struct timespec pause = {.tv_nsec = 20000};
    while (busy_since(number))
        nanosleep(&pause, NULL);
}

/* --- streams -------------------------------------------------------------------------------- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    (void)priority;
    if (!stream || flags & ~(unsigned)cudaStreamNonBlocking)
        return mt_emu_result(cudaErrorInvalidValue);
    if (mt_emu_settings()->no_device)
        return mt_emu_result(cudaErrorNoDevice);
    pthread_mutex_lock(&streams_lock);
    *stream = make_stream(!(flags & cudaStreamNonBlocking));
    pthread_mutex_unlock(&streams_lock);
    return mt_emu_result(*stream ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    if (!stream)
        return mt_emu_result(cudaErrorInvalidResourceHandle);
    pthread_mutex_lock(&streams_lock);
    for (struct CUstream_st **p = &streams; *p; p = &(*p)->next)
        if (*p == stream) {
            *p = stream->next;
            break;
        }
    pthread_mutex_unlock(&streams_lock);
    pthread_mutex_lock(&stream->lock);
    stream->stop = true;
    pthread_cond_signal(&stream->more);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    pthread_cond_destroy(&stream->more);
    pthread_cond_destroy(&stream->less);
    pthread_mutex_destroy(&stream->lock);
    free(stream);
    return mt_emu_result(cudaSuccess);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    cudaError_t e = mt_emu_result(cudaSuccess);
    if (e == cudaErrorNotPermitted)
        return e;
    mt_emu_drain(stream);
    return mt_emu_result(cudaSuccess);
}

cudaError_t cudaDeviceSynchronize(void)
{
    cudaError_t e = mt_emu_result(mt_emu_settings()->no_device ? cudaErrorNoDevice : cudaSuccess);
    if (e == cudaErrorNotPermitted)
        return e;
    mt_emu_drain_all();
    return mt_emu_result(e);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    struct CUstream_st *s = resolve(stream);
    pthread_mutex_lock(&s->lock);
    bool busy = s->ended < s->submitted;
    pthread_mutex_unlock(&s->lock);
    return mt_emu_result(busy ? cudaErrorNotReady : cudaSuccess);
}

struct host_call {
    cudaHostFn_t fn;
    void *user;
    int device;
};

static void run_host_call(void *args)
{
    const struct host_call *h = args;
    mt_emu_device_access(MT_EMU_NO_ACCESS);
    mt_emu_enter_host_function();
    h->fn(h->user);
    mt_emu_leave_host_function();
    mt_emu_device_access(h->device);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *user)
{
    struct host_call h = {fn, user, mt_emu_device_of_stream(stream)};
    if (!fn)
        return mt_emu_result(cudaErrorInvalidValue);
    return mt_emu_submit(stream, run_host_call, NULL, &h, sizeof(h));
}

/* --- events --------------------------------------------------------------------------------- */

struct event_use {
    struct CUevent_st *event;
    uint64_t count;
};

static void drop_reference(struct CUevent_st *ev)
{
    pthread_mutex_lock(&ev->lock);
    bool last = !--ev->references;
    pthread_mutex_unlock(&ev->lock);
    if (!last)
        return;
    pthread_cond_destroy(&ev->fired);
    pthread_mutex_destroy(&ev->lock);
    free(ev);
}

static void wait_event(struct CUevent_st *ev, uint64_t count)
{
    pthread_mutex_lock(&ev->lock);
    while (ev->done < count)
        pthread_cond_wait(&ev->fired, &ev->lock);
    pthread_mutex_unlock(&ev->lock);
}

static void run_record(void *args)
{
    const struct event_use *u = args;
    pthread_mutex_lock(&u->event->lock);
    if (u->event->done < u->count) { /* a later record may have fired on another stream */
        u->event->done = u->count;
        u->event->time_ns = now_ns();
    }
    pthread_cond_broadcast(&u->event->fired);
    pthread_mutex_unlock(&u->event->lock);
}

static void run_wait(void *args)
{
    const struct event_use *u = args;
    wait_event(u->event, u->count);
}

static void done_with_event(void *args)
{
    drop_reference(((struct event_use *)args)->event);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    if (!event || flags & ~(unsigned)(cudaEventBlockingSync | cudaEventDisableTiming))
        return mt_emu_result(cudaErrorInvalidValue);
    if (mt_emu_settings()->no_device)
        return mt_emu_result(cudaErrorNoDevice);
    struct CUevent_st *ev = calloc(1, sizeof(*ev));
    if (!ev)
        return mt_emu_result(cudaErrorMemoryAllocation);
    pthread_mutex_init(&ev->lock, NULL);
    pthread_cond_init(&ev->fired, NULL);
    ev->flags = flags;
    ev->device = mt_emu_device();
    ev->references = 1;
    *event = ev;
    return mt_emu_result(cudaSuccess);
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    if (!event)
        return mt_emu_result(cudaErrorInvalidResourceHandle);
    drop_reference(event);
    return mt_emu_result(cudaSuccess);
}

static cudaError_t submit_use(cudaStream_t stream, cudaEvent_t event, bool record)
{
    bool ours = event && (!record || event->device == mt_emu_device_of_stream(stream));
    cudaError_t e = mt_emu_result(ours ? cudaSuccess : cudaErrorInvalidResourceHandle);
    if (e)
        return e;
    pthread_mutex_lock(&event->lock);
    struct event_use u = {event, record ? ++event->recorded : event->recorded};
    event->references++;
    pthread_mutex_unlock(&event->lock);
    e = mt_emu_submit(stream, record ? run_record : run_wait, done_with_event, &u, sizeof(u));
    if (e)
        drop_reference(event);
    return e;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    return submit_use(stream, event, true);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    (void)flags;
    return submit_use(stream, event, false);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    cudaError_t e = mt_emu_result(event ? cudaSuccess : cudaErrorInvalidResourceHandle);
    if (e == cudaErrorNotPermitted || !event)
        return e;
    pthread_mutex_lock(&event->lock);
    uint64_t count = event->recorded;
    pthread_mutex_unlock(&event->lock);
    wait_event(event, count);
    return mt_emu_result(cudaSuccess);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    if (!event)
        return mt_emu_result(cudaErrorInvalidResourceHandle);
    pthread_mutex_lock(&event->lock);
    bool fired = event->done >= event->recorded;
    pthread_mutex_unlock(&event->lock);
    return mt_emu_result(fired ? cudaSuccess : cudaErrorNotReady);
}

static cudaError_t event_time(struct CUevent_st *ev, int64_t *ns)
{
    if (!ev)
        return cudaErrorInvalidResourceHandle;
    pthread_mutex_lock(&ev->lock);
    cudaError_t e = ev->flags & cudaEventDisableTiming || !ev->recorded ? cudaErrorInvalidResourceHandle
                    : ev->done < ev->recorded                           ? cudaErrorNotReady
                                                                        : cudaSuccess;
    *ns = ev->time_ns;
    pthread_mutex_unlock(&ev->lock);
    return e;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    int64_t from = 0, to = 0;
    cudaError_t e = ms ? event_time(start, &from) : cudaErrorInvalidValue;
    if (!e && end && end->device != start->device)
        e = cudaErrorInvalidResourceHandle;
    e = e ? e : event_time(end, &to);
    if (!e)
        *ms = (float)((double)(to - from) * 1e-6);
    return mt_emu_result(e);
}

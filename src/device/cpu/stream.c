/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cpu/stream.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/thread.h"
#include "device/cpu/cpu.h"

enum { RING = 256, COPY_PIECE = 1 << 20 };

struct command {
    mt_cpu_command run;
    _Alignas(16) char args[MT_CPU_MAX_ARGS];
};

struct mt_cpu_stream {
    struct mt_cpu_device *d;
    pthread_t thread;
    bool started;
    struct mt_cpu_stream_params p;
    int64_t link_free_ns;
    pthread_mutex_t lock;
    pthread_cond_t not_empty, not_full;
    size_t head, tail; /* under lock: commands [head, tail) are queued */
    bool quit;
    struct command ring[RING];
};

struct event {
    struct mt_event base;
    pthread_mutex_t lock;
    pthread_cond_t fired_cond;
    uint64_t recorded, fired; /* numbers of the newest record and of the newest that fired; under lock */
    int64_t time_ns;
};

struct ticket {
    struct event *ev;
    uint64_t number;
};

static void *stream_main(void *arg)
{
    struct mt_cpu_stream *s = arg;
    if (s->p.cpu >= 0)
        mt_bind_thread(s->p.cpu);
    if (s->p.not_cpu >= 0)
        mt_keep_thread_off(s->p.not_cpu);
    if (s->p.thread_init)
        s->p.thread_init();
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (s->head == s->tail && !s->quit)
            pthread_cond_wait(&s->not_empty, &s->lock);
        if (s->head == s->tail)
            break;
        struct command *c = &s->ring[s->head % RING];
        pthread_mutex_unlock(&s->lock);
        c->run(s->d, s, c->args); /* its slot is reused only after head moves */
        pthread_mutex_lock(&s->lock);
        s->head++;
        pthread_cond_signal(&s->not_full);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

int mt_cpu_stream_create(struct mt_cpu_stream **out, struct mt_cpu_device *d,
                         const struct mt_cpu_stream_params *p, struct mt_err *err)
{
    struct mt_cpu_stream *s = mt_calloc(1, sizeof(*s));
    if (!s)
        return mt_fail_nomem(err, "a stream", sizeof(*s));
    s->d = d;
    s->p = *p;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->not_empty, NULL);
    pthread_cond_init(&s->not_full, NULL);
    int rc = mt_thread_start(&s->thread, p->name, stream_main, s, err);
    s->started = !rc;
    if (rc)
        mt_cpu_stream_destroy(&s);
    else
        *out = s;
    return rc;
}

void mt_cpu_stream_destroy(struct mt_cpu_stream **stream)
{
    struct mt_cpu_stream *s = *stream;
    if (!s)
        return;
    pthread_mutex_lock(&s->lock);
    s->quit = true;
    pthread_cond_signal(&s->not_empty);
    pthread_mutex_unlock(&s->lock);
    if (s->started)
        pthread_join(s->thread, NULL);
    pthread_cond_destroy(&s->not_empty);
    pthread_cond_destroy(&s->not_full);
    pthread_mutex_destroy(&s->lock);
    free(s);
    *stream = NULL;
}

void mt_cpu_stream_submit(struct mt_cpu_stream *s, mt_cpu_command run, const void *args,
                          size_t bytes)
{
    pthread_mutex_lock(&s->lock);
    while (s->tail - s->head == RING)
        pthread_cond_wait(&s->not_full, &s->lock);
    struct command *c = &s->ring[s->tail % RING];
    c->run = run;
    memcpy(c->args, args, bytes);
    s->tail++;
    pthread_cond_signal(&s->not_empty);
    pthread_mutex_unlock(&s->lock);
}

/* Sleeps until a link of the stream's rate would have moved `bytes` more. */
static void pace(struct mt_cpu_stream *s, size_t bytes)
{
    if (s->p.gbps <= 0)
        return;
    s->link_free_ns += (int64_t)((double)bytes / s->p.gbps);
    struct timespec ts = {s->link_free_ns / 1000000000, s->link_free_ns % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL) == EINTR)
        ;
}

static void run_copy(struct mt_cpu_device *, struct mt_cpu_stream *s, const void *args)
{
    const struct mt_copy *c = args;
    /* after a late wake-up there is no gap to the copy before, as on a real link */
    const int64_t late_ns = 200000;
    if (mt_now_ns() - s->link_free_ns > late_ns)
        s->link_free_ns = mt_now_ns();
    size_t owed = 0;
    for (size_t r = 0; r < c->rows; r++)
        for (size_t at = 0; at < c->width; at += COPY_PIECE) {
            size_t n = MT_MIN((size_t)COPY_PIECE, c->width - at);
            memcpy((char *)c->dst + r * c->dst_pitch + at,
                   (const char *)c->src + r * c->src_pitch + at, n);
            owed += n;
            if (owed >= COPY_PIECE) {
                pace(s, owed);
                owed = 0;
            }
        }
    pace(s, owed);
}

static struct mt_cpu_stream *stream_of(mt_device *dev, enum mt_stream s)
{
    return ((struct mt_cpu_device *)dev)->streams[s];
}

int mt_cpu_copy(mt_device *dev, enum mt_stream s, const struct mt_copy *c, struct mt_err *)
{
    mt_cpu_stream_submit(stream_of(dev, s), run_copy, c, sizeof(*c));
    return 0;
}

int mt_cpu_event_create(mt_device *dev, mt_event **out, struct mt_err *err)
{
    struct event *ev = mt_calloc(1, sizeof(*ev));
    if (!ev)
        return mt_fail_nomem(err, "an event", sizeof(*ev));
    ev->base.dev = dev;
    pthread_mutex_init(&ev->lock, NULL);
    pthread_cond_init(&ev->fired_cond, NULL);
    *out = &ev->base;
    return 0;
}

void mt_cpu_event_destroy(mt_event *event)
{
    struct event *ev = (struct event *)event;
    pthread_cond_destroy(&ev->fired_cond);
    pthread_mutex_destroy(&ev->lock);
    free(ev);
}

static void run_record(struct mt_cpu_device *, struct mt_cpu_stream *, const void *args)
{
    const struct ticket *t = args;
    pthread_mutex_lock(&t->ev->lock);
    t->ev->fired = MT_MAX(t->ev->fired, t->number);
    t->ev->time_ns = mt_now_ns();
    pthread_cond_broadcast(&t->ev->fired_cond);
    pthread_mutex_unlock(&t->ev->lock);
}

static void await_ticket(const struct ticket *t)
{
    pthread_mutex_lock(&t->ev->lock);
    while (t->ev->fired < t->number)
        pthread_cond_wait(&t->ev->fired_cond, &t->ev->lock);
    pthread_mutex_unlock(&t->ev->lock);
}

static void run_wait(struct mt_cpu_device *, struct mt_cpu_stream *, const void *args)
{
    await_ticket(args);
}

static struct ticket newest_ticket(mt_event *event, uint64_t add)
{
    struct event *ev = (struct event *)event;
    pthread_mutex_lock(&ev->lock);
    ev->recorded += add;
    struct ticket t = {ev, ev->recorded};
    pthread_mutex_unlock(&ev->lock);
    return t;
}

static void record(struct mt_cpu_stream *s, mt_event *event)
{
    struct ticket t = newest_ticket(event, 1);
    mt_cpu_stream_submit(s, run_record, &t, sizeof(t));
}

int mt_cpu_event_record(mt_device *dev, mt_event *event, enum mt_stream s, struct mt_err *)
{
    record(stream_of(dev, s), event);
    return 0;
}

int mt_cpu_event_wait(mt_device *dev, mt_event *event, enum mt_stream s, struct mt_err *)
{
    struct ticket t = newest_ticket(event, 0);
    mt_cpu_stream_submit(stream_of(dev, s), run_wait, &t, sizeof(t));
    return 0;
}

void mt_cpu_event_sync(mt_event *event)
{
    struct ticket t = newest_ticket(event, 0);
    await_ticket(&t);
}

void mt_cpu_stream_drain(struct mt_cpu_stream *s)
{
    struct event ev = {.lock = PTHREAD_MUTEX_INITIALIZER, .fired_cond = PTHREAD_COND_INITIALIZER};
    record(s, &ev.base);
    mt_cpu_event_sync(&ev.base);
    pthread_cond_destroy(&ev.fired_cond);
    pthread_mutex_destroy(&ev.lock);
}

int64_t mt_cpu_event_time_ns(mt_event *event)
{
    struct event *ev = (struct event *)event;
    pthread_mutex_lock(&ev->lock);
    int64_t t = ev->fired == ev->recorded ? ev->time_ns : 0;
    pthread_mutex_unlock(&ev->lock);
    return t;
}

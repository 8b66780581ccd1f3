/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "device/device.h"

struct mt_cpu_device;

/** An in-order queue of commands with a thread of its own. Submitting blocks while the ring is full. */
struct mt_cpu_stream;
typedef void (*mt_cpu_command)(struct mt_cpu_device *d, struct mt_cpu_stream *s, const void *args);

enum { MT_CPU_MAX_ARGS = 512 };

struct mt_cpu_stream_params {
    const char *name;          /* name of the thread, at most 15 characters */
    int cpu;                   /* CPU to bind the thread to, or -1 */
    int not_cpu;               /* CPU to keep the thread off, or -1 */
    void (*thread_init)(void); /* called once in the thread; may be NULL */
    double gbps;               /* throttle of copies, 0: none */
};
int mt_cpu_stream_create(struct mt_cpu_stream **out, struct mt_cpu_device *d,
                         const struct mt_cpu_stream_params *p, struct mt_err *err);
/** Completes all submitted work, then ends the thread. Accepts NULL. */
void mt_cpu_stream_destroy(struct mt_cpu_stream **s);
/** Copies `bytes` of arguments, at most MT_CPU_MAX_ARGS. */
void mt_cpu_stream_submit(struct mt_cpu_stream *s, mt_cpu_command run, const void *args,
                          size_t bytes);

/* Of the backend's table. */
int mt_cpu_copy(mt_device *dev, enum mt_stream s, const struct mt_copy *c, struct mt_err *err);
int mt_cpu_event_create(mt_device *dev, mt_event **out, struct mt_err *err);
void mt_cpu_event_destroy(mt_event *ev);
int mt_cpu_event_record(mt_device *dev, mt_event *ev, enum mt_stream s, struct mt_err *err);
int mt_cpu_event_wait(mt_device *dev, mt_event *ev, enum mt_stream s, struct mt_err *err);
int64_t mt_cpu_event_time_ns(mt_event *ev);

void mt_cpu_event_sync(mt_event *ev);
/** Waits for all that the stream was given; needs no memory, so that what it uses can be freed behind it. */
void mt_cpu_stream_drain(struct mt_cpu_stream *s);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/err.h"
#include "base/strbuf.h"

/**
 * A compute device: an arena of memory with a fixed budget, three in-order streams, events between
 * them, copies to and from the host, and the operations in device/ops.h.
 *
 * Streams   COMPUTE runs operations; H2D and D2H run copies, independent of each other and of COMPUTE. Some devices
 *           have side streams, which take what is submitted to COMPUTE (mt_device_turn_to()).
 * Async     Submitting returns at once; buffers (host and device) must stay valid and unchanged until an
 *           event recorded after the work has fired. Work never allocates.
 * Errors    A failure of asynchronous work is sticky: later work is dropped, events still fire, and
 *           mt_device_status() and mt_event_sync() return it.
 * Threads   Each stream is fed by one thread at a time, D2H at once by that of COMPUTE, too; different streams may be
 *           fed by different threads. Everything else from one thread.
 */
typedef struct mt_device mt_device;
typedef struct mt_event mt_event;

enum mt_stream { MT_STREAM_COMPUTE, MT_STREAM_H2D, MT_STREAM_D2H, MT_N_STREAMS };

struct mt_device_params {
    const char *kind;      /* "cpu" or "cuda" (kinds/kinds.h) */
    int index;
    size_t budget_bytes;   /* of the arena; cuda: includes the workspace of libraries */
    int n_threads;         /* cpu: compute threads, at least 1 */
    const int *cpus;       /* cpu: [n_threads] CPU to bind each compute thread to, or NULL */
    double link_gbps;      /* cpu: throttle of each copy direction in GB/s, 0 = none */
    bool warm;             /* cpu: allocate now the memory that products need beside the arena */
};

struct mt_device_limits {
    char name[128];        /* "cpu (AVX-512)" */
    char product[64];      /* cuda: "NVIDIA H200", the driver's name of the GPU; cpu: "" */
    char arithmetic[2][48]; /* cpu: what the bits of products depend on, in f32 and in bf16; elsewhere "" */
    char address[72];      /* cuda: "0000:01:00.0, GPU-5a…", PCI address and UUID as nvidia-smi has them; cpu: "" */
    const char *kind;
    bool shares_host_memory; /* the arena is host memory, and the host's cores compute and copy */
    size_t budget_bytes;   /* most bytes of all allocations */
    size_t own_bytes;      /* that the device took of its budget before them (struct mt_device_kind) */
    int n_threads;
    bool native_bf16;      /* matrix products in bf16 are faster than in f32 */
    bool makes_products;   /* cpu: those are by code that is made for each shape met, and kept */
    int capability;        /* cuda: compute capability, 89 for 8.9; 0: not known */
    int multiprocessors;   /* cuda; 0: not known */
    bool e4m3;             /* there are matrix products in FP8 */
    size_t alignment;      /* of arena allocations, in bytes */
    size_t row_bucket;     /* row counts that routing of experts decides are padded to a multiple of it in products */
    size_t coded_rows;     /* most rows of products for which packed_gemm is faster than decode and gemm; 0: never */
    int sides;             /* most side streams, at most MT_MAX_SIDES; 0: there are none */
    size_t side_bytes;     /* memory that each needs, of a multiple of `alignment` */
};

/** What is known of a device before it is opened. */
struct mt_device_info {
    bool present;
    bool shown;                      /* not present, though this machine has such a device: text says what to do */
    char text[512];                  /* its name, or why it is not present */
    size_t total_bytes, free_bytes;  /* of its own memory; cpu: 0 */
    bool has_display;                /* it drives a desktop, which may take more of its memory at any time */
    bool is_integrated;              /* its memory is the host's: both together have no more than that */
    bool is_paged;                   /* Windows moves its memory to the host's where programs take nearly all (WSL) */
};
/** Waits for the streams, then frees all; accepts NULL; sets *dev to NULL. */
void mt_device_destroy(mt_device **dev);
const struct mt_device_limits *mt_device_limits(const mt_device *dev);

/* --- memory --------------------------------------------------------------------------------- */

/**
 * Takes `bytes` from the arena, aligned to limits.alignment. `tag` (a string literal) names the use in
 * the memory table. -ENOMEM (MT_ERR_NO_FIT) beyond the budget; the message lists the memory in use by
 * tag. In sanitizer builds there are poisoned gaps between allocations.
 */
int mt_device_alloc(mt_device *dev, size_t bytes, const char *tag, void **out, struct mt_err *err);
/** Accepts NULL. No work in flight may use it. */
void mt_device_free(mt_device *dev, void *ptr);
size_t mt_device_bytes_used(const mt_device *dev);

/** Overwrites dead arena memory with NaNs, in order on the COMPUTE stream, so that stale reads show. */
void mt_device_poison(mt_device *dev, void *ptr, size_t bytes);

/** Pins host memory for asynchronous copies; does nothing on the cpu device. */
int mt_device_register_host(mt_device *dev, void *ptr, size_t bytes, struct mt_err *err);
void mt_device_unregister_host(mt_device *dev, void *ptr);

/* --- events and copies ---------------------------------------------------------------------- */

int mt_event_create(mt_device *dev, mt_event **out, struct mt_err *err);
/** Accepts NULL. */
void mt_event_destroy(mt_event **ev);
/** The event fires when all work submitted to `stream` so far has ended. May be recorded again. */
int mt_event_record(mt_device *dev, mt_event *ev, enum mt_stream stream, struct mt_err *err);
/** Work submitted to `stream` from now on waits for the newest record of `ev` (none: no wait). */
int mt_event_wait(mt_device *dev, mt_event *ev, enum mt_stream stream, struct mt_err *err);
/** The calling thread waits for the newest record; returns the device's status. Any thread. */
int mt_event_sync(mt_device *dev, mt_event *ev, struct mt_err *err);
/** Nanoseconds (device clock) at which the newest record fired; 0: it has not. For tracing. */
int64_t mt_event_time_ns(mt_event *ev);

/** `rows` rows of `width` bytes; a pitch is the distance between the starts of two rows. */
struct mt_copy {
    void *dst;
    size_t dst_pitch;
    const void *src;
    size_t src_pitch;
    size_t width, rows;
};
/** Copies from host to device on stream H2D, from device to host on D2H; on COMPUTE in either direction (small inputs)
 * or within the device (without overlap). */
int mt_device_copy(mt_device *dev, enum mt_stream stream, const struct mt_copy *c,
                   struct mt_err *err);

/**
 * Runs fn(ctx) on a thread of the host when COMPUTE has come to it; later work of that stream waits for its end. fn may
 * read what copies to the host on COMPUTE have brought, and write what later copies take; it must not call the device.
 * It does not run if earlier work has failed.
 */
int mt_device_call(mt_device *dev, void (*fn)(void *ctx), void *ctx, struct mt_err *err);

/**
 * Names what the calling thread submits until mt_device_range_end(), for profilers (cuda: NVTX). Other devices
 * ignore it.
 */
void mt_device_range_begin(mt_device *dev, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void mt_device_range_end(mt_device *dev);

/**
 * Side streams: further streams of operations, in no order with COMPUTE and each other but by events. They let small
 * operations share the device, as those of several experts. Operations have the same bits on all.
 *
 * mt_device_open_sides() makes n of them, at most limits.sides; memory [n * limits.side_bytes], of the arena, is theirs
 * until the device is destroyed or opens others. Then what is submitted to COMPUTE, events included, goes to side
 * stream `side` (from 1) after mt_device_turn_to(), until it is called with another, or with 0: COMPUTE itself. Both
 * only from the thread that feeds COMPUTE. Calls of the host stay on COMPUTE. What waits for COMPUTE does not wait for
 * sides.
 */
enum { MT_MAX_SIDES = 4 };
int mt_device_open_sides(mt_device *dev, int n, void *memory, struct mt_err *err);
void mt_device_turn_to(mt_device *dev, int side);

/** Waits for all streams, for side streams only as far as COMPUTE waits for them; returns the first error of
 * asynchronous work, or 0. */
int mt_device_sync(mt_device *dev, struct mt_err *err);
int mt_device_status(mt_device *dev, struct mt_err *err);

/**
 * What the device has found out about its libraries and acts on, such as that one gives wrong results for a kind of
 * call: a line of text to keep with a checkpoint, or "". Call from the thread that feeds COMPUTE.
 */
void mt_device_findings(mt_device *dev, struct mt_str *out);
/** Takes over the findings of an earlier run, so that results have the same bits; call before the first operation.
 * False: the text is of another device or library, and nothing changes. */
bool mt_device_adopt_findings(mt_device *dev, const char *text);
/**
 * From now on `dev` and `first`, of one kind, have the same findings: what one finds holds for the other at once, so
 * that devices which share a step have the bits of one. False: their libraries differ. Call before the first operation;
 * what is said to `first` below is said for both.
 */
bool mt_device_share_findings(mt_device *dev, mt_device *first);
/** What libraries have computed right is compared once more, at the next call of each kind. Call between steps. */
void mt_device_doubt(mt_device *dev);
/** Calls of the shapes that libraries or fused kernels have done are done in the plain way from now on, to which these
 * were compared, and in no other; returns how many kinds that changes. mt_device_trust() takes that back. Both change
 * findings. Call between steps. */
size_t mt_device_distrust(mt_device *dev);
void mt_device_trust(mt_device *dev);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>

#include "base/mem.h"
#include "device/arena.h"
#include "device/backend.h"

/**
 * Internals of the CUDA device: one cudaMalloc of the budget with an arena in it, one CUDA stream each for
 * COMPUTE, H2D and D2H, and a sticky first error. Every thread that submits selects the GPU first.
 */
struct mt_cuda_device {
    struct mt_device base;
    int index;
    int sm; /* compute capability, 90 for 9.0 */
    int n_threads; /* of the host, for work on its memory */
    bool apart; /* each allocation is a cudaMalloc of its own, for compute-sanitizer */
    char *memory; /* mt_arena_span(budget) bytes; NULL if `apart` */
    size_t span;
    struct mt_arena *arena;
    struct mt_cuda_apart *apart_blocks;
    cudaStream_t streams[MT_N_STREAMS];
    cudaStream_t side[MT_MAX_SIDES];
    void *side_memory[MT_MAX_SIDES]; /* cuBLASLt's workspace there, MT_CUDA_BLAS_BYTES; the model's */
    int turned;                      /* the side stream (from 1) that stands for COMPUTE; 0: itself */
    struct mt_cuda_clock *clock;
    struct mt_cuda_ring *rings[MT_N_STREAMS]; /* made when first needed */
    pthread_mutex_t staging[MT_N_STREAMS];    /* of each: held while a copy is submitted */
    struct mt_cuda_blas *blas;
    struct mt_cuda_fused *fused; /* cuDNN attention, or NULL */
    bool flash; /* attention of our own where it suits */
    struct mt_trials *trials;    /* what was found about attention */
    bool follows;                /* they are another device's, too, which is asked instead of this one */
    enum mt_trial_verdict *verdict; /* on the kind of the current call; NULL: the kind is not tried */
    pthread_mutex_t lock;
    atomic_bool failed;
    struct mt_err error; /* the first one, under lock */
};

static inline struct mt_cuda_device *mt_cuda(mt_device *dev)
{
    return (struct mt_cuda_device *)dev;
}

/** The stream that work for `s` is submitted to. COMPUTE only by the thread that feeds it. */
static inline cudaStream_t mt_cuda_stream(const struct mt_cuda_device *d, enum mt_stream s)
{
    return s == MT_STREAM_COMPUTE && d->turned ? d->side[d->turned - 1] : d->streams[s];
}

/* --- status.c: errors --------------------------------------------------------------------------- */

/** Selects the GPU for this thread; returns the device's sticky error, if any. */
int mt_cuda_enter(struct mt_cuda_device *d, struct mt_err *err);
/** 0 for cudaSuccess; else makes the error sticky, with the text of fmt and CUDA's name of the error. */
int mt_cuda_check(struct mt_cuda_device *d, cudaError_t rc, struct mt_err *err, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/** Makes an error sticky; returns its code. */
int mt_cuda_stick(struct mt_cuda_device *d, const struct mt_err *error);
/** "cudaErrorNoDevice: no CUDA-capable device is detected" into buf, for some errors with what to do; returns buf. */
const char *mt_cuda_error_text(char *buf, size_t len, cudaError_t rc);
/**
 * What to say of a failure if little memory is left on the GPU (or, as `sure`, in any case): kernels and libraries need
 * some that is not of the budget, at their first use. Else "". Prints into buf, of at least 128 bytes; returns it.
 */
const char *mt_cuda_short_of_memory(char *buf, size_t len, bool sure);

/* --- memory.c: device memory ------------------------------------------------------------------- */

int mt_cuda_memory_create(struct mt_cuda_device *d, size_t budget, struct mt_err *err);
void mt_cuda_memory_destroy(struct mt_cuda_device *d);
int mt_cuda_alloc(mt_device *dev, size_t bytes, const char *tag, void **out, struct mt_err *err);
void mt_cuda_free(mt_device *dev, void *ptr);
size_t mt_cuda_bytes_used(const mt_device *dev);
bool mt_cuda_is_device_memory(const struct mt_cuda_device *d, const void *ptr);

/* --- pins.c: page-locked host memory ----------------------------------------------------------- */

/** Joins the process's table of locked memory: memory is locked once for all devices. */
int mt_cuda_pins_join(struct mt_cuda_device *d, struct mt_err *err);
/** Accepts a device that did not join. The last one that leaves unlocks all memory that is still
 * locked. */
void mt_cuda_pins_leave(struct mt_cuda_device *d);
/** Whether there are other devices. */
bool mt_cuda_pins_shared(void);
int mt_cuda_register_host(mt_device *dev, void *ptr, size_t bytes, struct mt_err *err);
void mt_cuda_unregister_host(mt_device *dev, void *ptr);
/** Whether host address `ptr` is page-locked; the answer holds for *run bytes from there. Any
 * thread. */
bool mt_cuda_pinned(const void *ptr, size_t *run);

/* --- copy.c, staging.c ------------------------------------------------------------------------- */

int mt_cuda_copy(mt_device *dev, enum mt_stream s, const struct mt_copy *c, struct mt_err *err);
/** Enqueues one copy by an engine; of host memory, which is locked or a ring's. One row's pitches are not looked at. */
cudaError_t mt_cuda_copy_rows(const struct mt_copy *c, enum cudaMemcpyKind kind, cudaStream_t stream);

/**
 * Two page-locked buffers for a stream, through which pageable memory is copied without blocking the submitting
 * thread: host functions on a stream of their own fill or empty one buffer while the other is transferred, with a
 * quarter of n_threads and at most 4 threads, since one core copies slower than a link. One thread at a time.
 */
int mt_cuda_ring_create(struct mt_cuda_ring **out, int n_threads, struct mt_err *err);
/** The stream must be idle. Accepts NULL. */
void mt_cuda_ring_destroy(struct mt_cuda_ring **r);
/** to_device: c->src is pageable host memory; else c->dst is. */
cudaError_t mt_cuda_ring_copy(struct mt_cuda_ring *r, cudaStream_t stream, const struct mt_copy *c,
                              bool to_device);

/* --- events.c ---------------------------------------------------------------------------------- */

int mt_cuda_clock_create(struct mt_cuda_device *d, struct mt_err *err);
void mt_cuda_clock_destroy(struct mt_cuda_clock **c);
int mt_cuda_event_create(mt_device *dev, mt_event **out, struct mt_err *err);
void mt_cuda_event_destroy(mt_event *ev);
int mt_cuda_event_record(mt_device *dev, mt_event *ev, enum mt_stream s, struct mt_err *err);
int mt_cuda_event_wait(mt_device *dev, mt_event *ev, enum mt_stream s, struct mt_err *err);
int mt_cuda_event_sync(mt_device *dev, mt_event *ev, struct mt_err *err);
int64_t mt_cuda_event_time_ns(mt_event *ev);
int mt_cuda_sync(mt_device *dev, struct mt_err *err);
int mt_cuda_status(mt_device *dev, struct mt_err *err);

/* --- ops.c ------------------------------------------------------------------------------------- */

int mt_cuda_submit(mt_device *dev, enum mt_dev_op op, const void *args, struct mt_err *err);
#define MT_CUDA_OP(ID, name, type)                                                                 \
    int mt_cuda_op_##name(mt_device *dev, const type *a, struct mt_err *err);
MT_DEVICE_OPS(MT_CUDA_OP, MT_CUDA_OP)
#undef MT_CUDA_OP

/* --- names.c or names_none.c (NVTX) ------------------------------------------------------------ */

/** Names the streams for profilers. */
void mt_cuda_name_streams(struct mt_cuda_device *d);
void mt_cuda_range(mt_device *dev, const char *name);

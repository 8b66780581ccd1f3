/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "base/mem.h"
#include "device/device.h"
#include "engine/lane.h"
#include "net/net.h"
#include "schedule/program.h"
#include "store/disk.h"

/**
 * The executor of an engine: runs programs with a thread per queue. It handles order, streams and drives; binding.h
 * implements the instructions of devices, and the engine (state.h) updates, and what messages hold.
 *
 * Thread-safety: one thread, except `interrupted`.
 */

/** A program and the events that its device instructions signal. */
struct mt_runnable {
    struct mt_program prog;
    enum mt_program_mode mode;
    struct mt_arrays arrays; /* what follows */
    mt_event **done;   /* [n_instrs] of device instructions that signal, else NULL */
    mt_event **before; /* [n_instrs] of compute instructions that wait for a copy: when the wait began */
    mt_event **after;  /* and when it ended */
    mt_event *start[MT_MAX_LANES], *end[MT_MAX_LANES]; /* of the step, on each lane; NULL: it has no operations */
    mt_event *turn;               /* after the last forward instruction */
    size_t turn_at;
    struct mt_queue_list {
        int32_t *at; /* positions of the queue's instructions in the program */
        size_t n;
    } queue[MT_MAX_QUEUES]; /* by number */
    struct mt_disk_sums *spilled; /* [n_objects] sums of objects spilled to the disk; NULL: no sums */
    bool *ended; /* [n_instrs] in this run, of queues that end in any order */
    struct mt_exec_trace *trace; /* NULL: not traced */
    struct mt_runnable *next;
};

/** An instruction under way that ends when all of its requests have. */
struct mt_exec_op {
    struct mt_exec *x; /* NULL: free */
    struct mt_runnable *run;
    int32_t at; /* instruction */
    int left;   /* requests that have not ended; under the executor's lock */
    int rc;     /* of the first request that failed; err says why */
    struct mt_err err;
};

/** A transfer of a disk queue; one per buffer of host staging. */
struct mt_disk_op {
    struct mt_exec_op op;
    struct mt_disk_request r;
    struct mt_file_request f; /* the part that comes from files */
};

/** A message of a program: to several hosts, or from one. */
enum { MT_NET_UNDER_WAY = 16, MT_NET_PARTS = MT_MAX_STATES };
struct mt_net_part {
    void *data;
    size_t bytes;
};
struct mt_net_op {
    struct mt_exec_op op;
    struct mt_net_message *m; /* [other hosts][MT_NET_PARTS] */
};

struct mt_exec {
    struct mt_engine *e; /* whose it is */
    struct mt_disk_op *disk_ops[MT_N_POOLS]; /* by buffer of a host pool */
    /* set by the engine before each run */
    bool pending; /* there is a pending update */
    bool tracing;
    atomic_bool interrupted; /* any thread */

    /* The run under way. Workers, one a queue but the first lane's COMPUTE, sleep until `run` changes. What is by queue
     * is by its number. */
    int n_queues;
    struct mt_worker {
        struct mt_exec *x;
        int queue;
        pthread_t thread;
        bool started;
    } worker[MT_MAX_QUEUES];
    pthread_mutex_t lock;
    pthread_cond_t workers; /* `generation`, `quit`, `n_busy` */
    pthread_cond_t moved[MT_MAX_QUEUES]; /* progress of a queue; all of them when the run is abandoned */
    struct mt_runnable *run;
    unsigned generation;
    bool quit;
    int n_busy;
    /* newest instruction that was issued (device queues), or that has ended with all before it (others); under lock */
    int32_t progress[MT_MAX_QUEUES];
    bool closed[MT_MAX_QUEUES]; /* the queue issues nothing more in this run; under lock */
    size_t head[MT_N_QUEUES]; /* queues with many under way: entries that have ended, in order; under lock */
    int in_flight[MT_N_QUEUES];
    bool stop;   /* the run is abandoned except for the pending update; under lock */
    bool broken; /* the update, too; or planes could not be written before the run; under lock */
    bool committed; /* planes change by this step's gradients: the run is no longer abandoned on request; under lock */
    pthread_mutex_t drain_lock;
    bool drained; /* the device is idle and stays so; under drain_lock */
    int error_code;
    struct mt_err error; /* the first error; it replaces an interruption */

    /* results of the last run */
    struct mt_disk_traffic traffic; /* read and written: each by its queue's thread */
    _Atomic size_t loaded; /* bytes of loads to the devices */
    const struct mt_runnable *traced; /* of the last traced step */
    int64_t update_ns;
    bool updated; /* the whole pending update was made, even if something else failed */
};

/** Starts the threads of an engine whose parameters are set. Call mt_exec_stop() after a failure, too. */
int mt_exec_start(struct mt_engine *e, struct mt_err *err);
void mt_exec_stop(struct mt_exec *x);
int mt_exec_run(struct mt_exec *x, struct mt_runnable *r, struct mt_err *err);

/** False for a program of only an update: an interruption or a failed device does not stop it. */
static inline bool mt_runnable_uses_device(const struct mt_runnable *r)
{
    return r->mode != MT_MODE_UPDATE;
}

/* trace.c: called around an instruction; no effect if the run is not traced. */
void mt_exec_trace_prepare(struct mt_exec *x, struct mt_runnable *r);
int mt_exec_trace_begin(struct mt_exec *x, struct mt_runnable *r, size_t i, struct mt_err *err);
int mt_exec_trace_end(struct mt_exec *x, struct mt_runnable *r, size_t i, struct mt_err *err);
void mt_exec_trace_destroy(struct mt_runnable *r);

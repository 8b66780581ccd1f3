/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_ENGINE_EXEC_H
#define MT_ENGINE_EXEC_H

#include <pthread.h>
#include <stdatomic.h>

#include "device/device.h"
#include "engine/binding.h"
#include "schedule/program.h"
#include "store/disk.h"

/**
 * The executor: runs programs, a thread a queue. It knows devices, drives and order; what an instruction does is the
 * binding's, what an update does its owner's.
 *
 * Thread-safety: one thread, but for `interrupted`.
 */

/** A program and the events its device instructions signal by. */
struct mt_runnable {
    struct mt_program prog;
    enum mt_program_mode mode;
    mt_event **done;   /* [n_instrs] of those that signal, else NULL */
    mt_event **before; /* [n_instrs] compute instructions that wait for a copy: when they began to */
    mt_event **after;  /* and when the wait was over */
    mt_event *start, *turn, *end; /* of the step; turn: the last forward instruction */
    size_t turn_at;
    int32_t *positions; /* of all queues' lists */
    struct mt_queue_list {
        int32_t *at; /* positions of the queue's instructions in the program */
        size_t n;
    } queue[MT_N_QUEUES];
    struct mt_disk_sums *spilled; /* [n_objects] sums of those that are spilled to the disk; NULL: none are kept */
    uint64_t *sum;                /* all of them */
    bool *ended; /* [n_instrs] of queues that end in any order, in this run */
    struct mt_exec_trace *trace; /* NULL: not traced */
    struct mt_runnable *next;
};

/** A transfer of the disk queues under way; one a buffer of host staging. */
struct mt_disk_op {
    struct mt_disk_request r;
    struct mt_file_request f; /* what of it comes from files */
    int left;                 /* requests that have not ended; under the executor's lock */
    int rc;                   /* of the first that failed, and why */
    struct mt_err err;
    struct mt_exec *x;
    struct mt_runnable *run;
    int32_t at; /* instruction */
};

struct mt_exec {
    /* set by the owner before the first run */
    struct mt_binding *b;
    mt_disk *disk;                           /* NULL: programs use none */
    mt_file_weights *files;                  /* NULL: nothing is read in place */
    struct mt_disk_op *disk_ops[MT_N_POOLS]; /* by buffer of a host pool */
    bool *resident; /* [n_units] weights that live for the run are on the device; does not change during a run */
    /** The update of an ADAM instruction, on the host queue's thread. */
    int (*update)(void *ctx, const struct mt_program *prog, const struct mt_instr *in, struct mt_err *err);
    void *ctx;
    /* and before each */
    bool pending; /* there is an update to be made */
    bool tracing;
    atomic_bool interrupted; /* any thread */

    /* The run under way. Workers, one a queue but COMPUTE, sleep until `run` changes. */
    struct mt_worker {
        struct mt_exec *x;
        enum mt_queue queue;
        pthread_t thread;
        bool started;
    } worker[MT_N_QUEUES];
    pthread_mutex_t lock;
    pthread_cond_t workers; /* `generation`, `quit`, `n_busy` */
    pthread_cond_t moved[MT_N_QUEUES]; /* what is waited for of a queue; all of them when the run is given up */
    struct mt_runnable *run;
    unsigned generation;
    bool quit;
    int n_busy;
    /* newest instruction issued (device queues) or ended, with all before it (the others); under lock */
    int32_t progress[MT_N_QUEUES];
    bool closed[MT_N_QUEUES]; /* nothing more will come of the queue in this run; under lock */
    size_t disk_head[MT_N_QUEUES]; /* of the disk's queues: ended up to there in the queue's list; under lock */
    int disk_in_flight[MT_N_QUEUES];
    bool stop;   /* the run is given up, but for the pending update; under lock */
    bool broken; /* that too; under lock */
    pthread_mutex_t drain_lock;
    bool drained; /* the device is idle and stays so; under drain_lock */
    int error_code;
    struct mt_err error; /* the first, or what came after an interruption */

    /* what came out of it */
    struct mt_disk_traffic traffic; /* each half is of its queue's thread */
    const struct mt_runnable *traced; /* the last traced step's */
    int64_t adam_ns;
    bool updated; /* all of the pending update was made, whatever else failed */
};

/** Starts the threads; `disk` is set. mt_exec_stop() also after a failure. */
int mt_exec_start(struct mt_exec *x, struct mt_err *err);
void mt_exec_stop(struct mt_exec *x);
int mt_exec_run(struct mt_exec *x, struct mt_runnable *r, struct mt_err *err);

/** An update alone does not: it is not interrupted, and a device that has failed does not keep it back. */
static inline bool mt_runnable_uses_device(const struct mt_runnable *r)
{
    return r->mode != MT_MODE_UPDATE;
}

/* trace.c: around an instruction; nothing where the run is not traced. */
int mt_exec_trace_prepare(struct mt_exec *x, struct mt_runnable *r, struct mt_err *err);
int mt_exec_trace_begin(struct mt_exec *x, struct mt_runnable *r, size_t i, struct mt_err *err);
int mt_exec_trace_end(struct mt_exec *x, struct mt_runnable *r, size_t i, struct mt_err *err);
void mt_exec_trace_destroy(struct mt_runnable *r);

#endif

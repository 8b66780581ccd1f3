/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_ENGINE_ENGINE_PRIV_H
#define MT_ENGINE_ENGINE_PRIV_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/pool.h"
#include "engine/engine.h"
#include "model/model.h"

/** A program and the events its device instructions signal by. */
struct mt_runnable {
    struct mt_program prog;
    enum mt_program_mode mode;
    mt_event **done;   /* [n_instrs] of those that signal, else NULL */
    mt_event **before; /* [n_instrs] compute instructions that wait for a copy: when they began to */
    mt_event **after;  /* and when the wait was over */
    mt_event *start, *turn, *end; /* of the step; turn: the last forward instruction */
    size_t turn_at;
    struct mt_exec_trace *trace; /* NULL: not traced */
    struct mt_runnable *next;
};

/** The update that is pending. */
struct mt_pending {
    bool any;
    double lr;
    float clip;
    uint64_t t;
};

struct mt_engine {
    struct mt_engine_params p;
    struct mt_engine_plan plan;
    mt_device *dev;
    const struct mt_layout *layout;
    mt_model *model;
    void **buffers[MT_N_POOLS];
    char *spill;
    size_t planes_registered;
    struct mt_runnable *programs;

    mt_pool *adam_pool;
    struct mt_pending pending;
    uint64_t updates;

    /* The run under way. Workers sleep until `run` changes. */
    pthread_t h2d_thread, host_thread;
    int n_threads;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct mt_runnable *run;
    unsigned generation;
    bool quit;
    int n_busy;
    /* newest instruction issued (device queues) or ended (host), by queue; under lock */
    int32_t progress[MT_N_QUEUES];
    bool stop; /* the run is given up; under lock */
    int error_code;
    struct mt_err error; /* the first */
    atomic_bool interrupted;
    bool tracing;
    const struct mt_runnable *traced; /* the last traced step's */
    int64_t adam_ns;
    const struct mt_step_data *data;
    float *host_logits;
};

/* exec.c */
int mt_exec_start(mt_engine *e, struct mt_err *err);
void mt_exec_stop(mt_engine *e);
int mt_exec_run(mt_engine *e, struct mt_runnable *r, struct mt_err *err);
int mt_runnable_get(struct mt_runnable **out, mt_engine *e, enum mt_program_mode mode,
                    size_t n_micro, struct mt_err *err);
void mt_runnable_destroy_all(mt_engine *e);

/* exec.c: the device stream that a queue's instructions go to; false for queues of the host. */
bool mt_exec_stream_of(int queue, enum mt_stream *s);

/* exec_ops.c: submits one instruction of a device queue. */
int mt_exec_submit(mt_engine *e, const struct mt_program *prog, const struct mt_instr *in,
                   struct mt_err *err);

/* trace.c: around an instruction; nothing where the run is not traced. */
int mt_exec_trace_prepare(mt_engine *e, struct mt_runnable *r, struct mt_err *err);
int mt_exec_trace_begin(mt_engine *e, struct mt_runnable *r, size_t i, struct mt_err *err);
int mt_exec_trace_end(mt_engine *e, struct mt_runnable *r, size_t i, struct mt_err *err);
void mt_exec_trace_destroy(struct mt_runnable *r);

/* optimizer.c */
int mt_optimizer_update_unit(mt_engine *e, size_t unit, struct mt_err *err);
/** Sums the partial squares; NaN or infinite where the gradient is. *bad: first tensor at fault. */
double mt_optimizer_grad_norm(const mt_engine *e, const struct mt_tensor **bad);

#endif

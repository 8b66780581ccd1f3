/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_ENGINE_ENGINE_PRIV_H
#define MT_ENGINE_ENGINE_PRIV_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/pool.h"
#include "engine/engine.h"
#include "model/model.h"
#include "model/ranges.h"

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
    bool *ended; /* [n_instrs] of queues that end in any order, in this run */
    struct mt_exec_trace *trace; /* NULL: not traced */
    struct mt_runnable *next;
};

/** A transfer of the disk queues under way; one a buffer of host staging. */
struct mt_disk_op {
    struct mt_disk_request r;
    mt_engine *e;
    struct mt_runnable *run;
    int32_t at; /* instruction */
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
    char *staging; /* host pools' buffers */
    size_t staging_bytes;
    struct mt_disk_op *disk_ops[MT_N_POOLS]; /* by buffer of a host pool */
    void *locked_planes[MT_N_PLANES]; /* ranges registered with the device; NULL: none of the kind */
    struct mt_runnable *programs;

    mt_pool *adam_pool;
    struct mt_pending pending;
    uint64_t updates;

    /* The run under way. Workers, one a queue but COMPUTE, sleep until `run` changes. */
    struct mt_worker {
        mt_engine *e;
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
    bool *resident; /* [n_units] weights that live for the run are on the device; does not change during a run */
    bool drained; /* the device is idle and stays so; under drain_lock */
    int error_code;
    struct mt_err error; /* the first, or what came after an interruption */
    atomic_bool interrupted;
    struct mt_disk_traffic traffic; /* of the run; each half is of its queue's thread */
    bool tracing;
    const struct mt_runnable *traced; /* the last traced step's */
    int64_t adam_ns;
    bool updated; /* all of the pending update was made, whatever else failed */
    const struct mt_step_data *data;
    float *host_logits;
};

/* exec.c */
/** Locks alone: an engine without threads. mt_exec_stop() undoes either. */
void mt_exec_init(mt_engine *e);
int mt_exec_start(mt_engine *e, struct mt_err *err);
void mt_exec_stop(mt_engine *e);
int mt_exec_run(mt_engine *e, struct mt_runnable *r, struct mt_err *err);

/* runnable.c */
/** The program of the mode, made when it is first asked for. */
int mt_runnable_get(struct mt_runnable **out, mt_engine *e, enum mt_program_mode mode,
                    size_t n_micro, struct mt_err *err);
void mt_runnable_destroy_all(mt_engine *e);
/** An update alone does not: it is not interrupted, and a device that has failed does not keep it back. */
static inline bool mt_runnable_uses_device(const struct mt_runnable *r)
{
    return r->mode != MT_MODE_UPDATE;
}

/* exec_ops.c: submits one instruction of a device queue. */
int mt_exec_submit(mt_engine *e, const struct mt_program *prog, const struct mt_instr *in,
                   struct mt_err *err);

/* disk_ops.c: where objects of host staging lie on the disk, and planes in them. */

/** Fills spans and direction of the transfer that a READ or WRITE is. */
void mt_disk_op_fill(const mt_engine *e, const struct mt_program *prog, const struct mt_instr *in,
                     struct mt_disk_request *r);
/** A unit's plane as a load or an update sees it: element i at data + (i - first) * size. */
struct mt_plane_view {
    char *data;
    size_t first;
};
/** `state` and `staged` are the instruction's buffers, or NULL; `piece` is the update's. */
struct mt_plane_view mt_plane_view(const mt_engine *e, size_t unit, enum mt_plane_kind k, size_t piece,
                                   char *state, char *staged);

/** Bytes [first, first + bytes) of a plane. */
struct mt_byte_span {
    size_t first, bytes;
};
enum { MT_WRITTEN_SPANS = 4 };
/** What of a plane an update changes, in whole pages: no more than MT_WRITTEN_SPANS spans, none where the plane
 * holds frozen ranges alone. Returns their number. */
int mt_unit_written_spans(struct mt_byte_span span[MT_WRITTEN_SPANS], const struct mt_layout *l, size_t unit,
                          const struct mt_plane_desc *d);

/* tiers.c */
/** Decides what lives on the disk; sizes the host pools. `wanted`: by host pool, objects that leave the
 * device for it in a step. Returns the host memory that the plan takes, which may be more than there is. */
uint64_t mt_tiers_choose(struct mt_engine_plan *plan, const struct mt_engine_params *p,
                     const int wanted[MT_N_POOLS]);
/* trace.c: around an instruction; nothing where the run is not traced. */
int mt_exec_trace_prepare(mt_engine *e, struct mt_runnable *r, struct mt_err *err);
int mt_exec_trace_begin(mt_engine *e, struct mt_runnable *r, size_t i, struct mt_err *err);
int mt_exec_trace_end(mt_engine *e, struct mt_runnable *r, size_t i, struct mt_err *err);
void mt_exec_trace_destroy(struct mt_runnable *r);

/* budget.c */
struct mt_model_params mt_engine_model_params(const struct mt_engine_params *p);

/* optimizer.c */
/** The update of an ADAM instruction. */
int mt_optimizer_update(mt_engine *e, const struct mt_program *prog, const struct mt_instr *in,
                        struct mt_err *err);
/** Sums the partial squares; NaN or infinite where the gradient is. *bad: first tensor at fault. */
double mt_optimizer_grad_norm(const mt_engine *e, const struct mt_tensor **bad);
/** Sums per-tensor squares in a fixed order (blocks last to first, tensors in layout order) so that splitting layers
 * does not change the result. */
double mt_grad_norm(const struct mt_layout *l, double (*square_sum)(const void *ctx, size_t tensor), const void *ctx,
                    const struct mt_tensor **bad);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/mem.h"
#include "base/pool.h"
#include "engine/engine.h"
#include "engine/exec.h"
#include "engine/lane.h"
#include "engine/learner.h"
#include "engine/share.h"

/* The state of an engine, and what its files do with it. */

/** Rows of the embedding's gradient at the beginning of its plane, until UNPACK; then at their places, until the
 * update (row_gradient.c). */
struct mt_row_gradient {
    char *table;      /* NULL: the gradient leaves the device as a whole */
    size_t row_bytes;
    int32_t *ids;     /* [n] ascending */
    size_t n;
};

/** What hosts tell each other beside the messages of a program (hosts.c). */
struct mt_hosts {
    char *buf; /* owned: what is sent or received after a step */
    size_t cap;
    struct mt_net_op *ops; /* [MT_NET_UNDER_WAY] of the executor; NULL: one host */
    int64_t *routed;   /* [groups, n_experts] rows of experts that this host has sent or received in a step */
    atomic_bool asked; /* this host was asked to stop */
    bool stop;         /* any was, after the last step */
};

struct mt_engine {
    struct mt_engine_params p;
    struct mt_engine_plan plan;
    struct mt_arrays arrays;    /* of which what follows has its arrays, but where it says that it owns them */
    struct mt_binding b;        /* what all lanes share: no device, no model, host pools alone */
    struct mt_lane *lane;       /* [n_lanes] devices, as many as there are */
    size_t n_lanes;
    struct mt_learner *learner; /* [n_learners] results, as many as there are */
    size_t n_learners;
    struct mt_model_learner *step_learner; /* [n_learners] of the step under way */
    size_t n_micro;             /* of the step or evaluation that was uploaded last */
    struct mt_batch *micro;     /* [p.max_micro] the micro-batches of a step, of one learner after the other */
    struct mt_exec x;
    char *staging; /* host pools' buffers */
    size_t staging_bytes;
    void *locked_planes[MT_N_PLANES]; /* ranges registered with the devices, or NULL */
    struct mt_runnable *programs;
    mt_pool *update_pool;
    struct mt_row_gradient rows;
    struct mt_perturbing perturbing;
    struct mt_hosts hosts;
    bool torn; /* an update was made in part, or planes could not be written */
};

/** Whether any learner has a pending update. */
static inline bool mt_engine_is_pending(const mt_engine *e)
{
    bool any = false;
    for (size_t i = 0; i < e->n_learners; i++)
        any |= e->learner[i].pending.any;
    return any;
}
/** The learner whose the tensor is. */
static inline const struct mt_learner *mt_engine_learner_of(const mt_engine *e, const struct mt_tensor *t)
{
    return &e->learner[t->learner];
}
/** The model of a lane, of all hosts' lanes. Statistics of other hosts' lanes come to that of the first here. */
static inline mt_model *mt_engine_model_on(const mt_engine *e, size_t lane)
{
    size_t first = e->n_lanes * (size_t)e->plan.program.host;
    return e->lane[lane >= first && lane < first + e->n_lanes ? lane - first : 0].b.model;
}
/** The model of the lane that computes the unit's forward: it has its statistics. */
static inline mt_model *mt_engine_model_of(const mt_engine *e, size_t unit)
{
    return mt_engine_model_on(e, e->plan.units[unit].lane);
}
/** That of the lane that computes its backward: it has the gradients' statistics. */
static inline mt_model *mt_engine_gradient_model_of(const mt_engine *e, size_t unit)
{
    return mt_engine_model_on(e, e->plan.units[unit].lane_back);
}
/** The model of the lane that computes a unit's forward for the micro-batch: it has its routing; of the head, its losses. */
static inline mt_model *mt_engine_model_for(const mt_engine *e, size_t unit, size_t mb)
{
    const struct mt_program_params *p = &e->plan.program;
    return p->by_data ? mt_engine_model_on(e, (size_t)mt_micro_lane(p, mb)) : mt_engine_model_of(e, unit);
}
/** The model that is asked for the inputs of a step: they are the same on all lanes. */
static inline mt_model *mt_engine_inputs(const mt_engine *e)
{
    return e->lane[0].b.model;
}

/* host_memory.c */
/** Before the lanes are made: spill space and host pools. */
int mt_host_memory_alloc(mt_engine *e, struct mt_err *err);
/** When they are: registers that memory, and planes that are copied, with all devices. */
int mt_host_memory_lock(mt_engine *e, struct mt_err *err);
/** Makes spill space larger, between two runs; what is in it is lost. */
int mt_host_memory_grow_spill(mt_engine *e, size_t bytes, struct mt_err *err);
void mt_host_memory_unlock(mt_engine *e);
void mt_host_memory_free(mt_engine *e);

/* runnable.c */
/** The program of the mode, built on first use. */
int mt_runnable_get(struct mt_runnable **out, mt_engine *e, enum mt_program_mode mode,
                    size_t n_micro, struct mt_err *err);
void mt_runnable_destroy_all(mt_engine *e);

/* hosts.c */
/** Messages that are under way at once, of an engine with other hosts. -ENOMEM. */
int mt_hosts_create(mt_engine *e, struct mt_err *err);
/** The rows of experts in a group of another host's lanes: [n_experts]. */
int64_t *mt_hosts_routed(const mt_engine *e, size_t group);
/** Where the content of a program's message is on this host. Returns the number of parts. */
size_t mt_hosts_content(const mt_engine *e, const struct mt_program *prog, const struct mt_instr *in,
                        struct mt_net_part part[MT_NET_PARTS]);
/** After a run, on all hosts: the statistics of every lane are with all of them. */
int mt_hosts_share_stats(mt_engine *e, const struct mt_runnable *r, struct mt_err *err);
/** A number that all hosts must have: -EPROTO, and which differs, if one has another. what: what it is of. */
int mt_hosts_agree(const mt_engine *e, uint64_t number, const char *what, struct mt_err *err);

/* row_gradient.c */
/** Before the first step: makes the plane zero. No effect if the program does not pack rows. */
int mt_row_gradient_init(mt_engine *e, struct mt_err *err);
/** After a run that made the pending update: the rows that it has stored, or may have if it was abandoned. */
void mt_row_gradient_note(mt_engine *e);
/** UNPACK: moves the rows to their places, and makes the rest zero; without a pending update all of it. Returns 0. */
int mt_row_gradient_scatter(mt_engine *e);
/** Elements [first, first + n) of the gradient of the pending update, before UNPACK; false: the plane has them. */
bool mt_row_gradient_read(const mt_engine *e, char *out, size_t first, size_t n);
/** After the update: makes the rows zero again. */
void mt_row_gradient_clear(mt_engine *e);

/* objective.c */
/** What a learner's objective measures of the step that has run. */
void mt_engine_measure(const mt_engine *e, const struct mt_learner *l, const struct mt_step_data *data,
                       struct mt_measure *sum);
/** Adds the same of an evaluation to res->measures, unless a reference is missing. */
void mt_engine_measure_eval(const mt_engine *e, const struct mt_learner *l, const struct mt_step_data *data,
                            struct mt_eval_result *res);

/* balance.c */
/** Before a BALANCE is submitted: gives its lane's model the rows that experts have in the whole step. */
void mt_engine_balance(const mt_engine *e, const struct mt_instr *in);
/** After a step, of all hosts: the loss that balances experts, without its coefficient; 0: there is none. */
double mt_engine_aux_loss(const mt_engine *e);

/* optimizer.c */
/** Executes an instruction of the host queue (an update, UNPACK, GATHER), on its thread. */
int mt_optimizer_update(mt_engine *e, const struct mt_program *prog, const struct mt_instr *in, struct mt_err *err);

/* limits.c */
/** Before the first step, with mezo.small: finds the limits of tensors that have none yet. */
int mt_engine_find_limits(mt_engine *e, struct mt_err *err);

/* decide.c */
/** After a step: the norm of a learner's gradient, how it is clipped, and what of it is skipped. Its update is pending
 * then, unless all of it is skipped. */
void mt_engine_decide(mt_engine *e, size_t learner, double lr, struct mt_step_result *res);
/** After a step with variants of the weights: by their losses, which are measured, too. */
void mt_engine_decide_along(mt_engine *e, size_t learner, const struct mt_learner_step *of, struct mt_step_result *res);
/** The same as mt_engine_decide() for one block, units [first, end), alone. */
void mt_engine_decide_block(mt_engine *e, size_t learner, size_t first, size_t end);
/** Sums squares by tensor in a fixed order (blocks last to first, tensors in layout order) so that splitting layers
 * does not change the result. */
double mt_grad_norm(const struct mt_layout *l, int learner, double (*square_sum)(const void *ctx, size_t tensor),
                    const void *ctx, const struct mt_tensor **bad);

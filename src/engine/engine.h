/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_ENGINE_ENGINE_H
#define MT_ENGINE_ENGINE_H

#include "data/batch.h"
#include "device/device.h"
#include "schedule/program.h"
#include "model/layout.h"
#include "objective/objective.h"
#include "optim/optimizer.h"
#include "settings/settings.h"
#include "net/net.h"
#include "store/guard.h"
#include "store/planes.h"

/**
 * The streaming engine: trains a model whose planes are in host memory or on a disk, on a device that holds a few units
 * at a time. The update of a step is pending until the next step, which runs it on host threads during its forward
 * pass, or until mt_engine_flush().
 *
 * Placement (slots, buffers, threads, budget) never changes a bit of the result.
 *
 * With several hosts (mt_engine_params.net) each has an engine, and all call mt_engine_step() and mt_engine_eval() with
 * the same data: each computes its share, and all have the same results. An error of one ends the others' step: they wait
 * for it in vain, and fail.
 *
 * Thread-safety: one thread, except mt_engine_interrupt().
 */
typedef struct mt_engine mt_engine;

struct mt_engine_params {
    mt_device *dev;                 /* the first lane's; borrowed, like all pointers below */
    mt_device *const *other_dev;    /* [placement.lanes - 1] those of the other lanes, each with limits like dev's; not
                                       read by mt_engine_plan() */
    const struct mt_layout *layout;
    mt_plane_set *planes;           /* may be NULL for mt_engine_plan() */
    struct mt_numerics numerics;    /* nothing auto; consistent with the sizes below */
    const struct mt_numerics *learner; /* [n_learners] of each: its optimizer's keys, clipping and seed are read */
    size_t n_learners;              /* 0: one, with `numerics` */
    struct mt_placement placement;  /* auto: decided by budget.c; unit and budgets are not read */
    size_t max_tokens, max_docs, max_len, max_micro; /* of a micro-batch; max_micro: of a step, of all learners */
    size_t assumed_rows;            /* to predict times: tokens of a step, spread evenly over experts; else 0 */
    size_t top;                     /* how many of the likeliest tokens of each loss row an evaluation finds; 0: none */
    bool train;                     /* false: evaluation only, no gradients or optimizer */
    enum mt_isa isa;
    const int *update_cpus;           /* [placement.threads] or NULL */
    bool may_use_disk;              /* there are folders for scratch files */
    uint64_t host_bytes;            /* host memory for planes, staging and, if the device shares host
                                       memory, the device's; UINT64_MAX: unlimited */
    uint64_t drive_bytes;           /* part of host_bytes that the process itself needs if anything is on the disk */
    mt_disk *disk;                  /* may be NULL for mt_engine_plan(), and if nothing is on the disk */
    struct mt_file_weights *files;  /* weights that are read in place; NULL as for disk */
    mt_guard *guard;                /* of the planes in host memory; NULL: updates are not checked */
    struct mt_net *net;             /* between the placement's hosts; NULL: one host */
    uint64_t disk_spill_at;         /* offset of the engine's spill space (plan.disk_spill_bytes) */
};

/** Planes of a unit, in any tier. */
struct mt_unit_planes {
    mt_plane_bits has;
    size_t bytes[MT_N_PLANES]; /* 0: none of the kind */
};

/** How the device budget is divided; the engine allocates exactly this. */
struct mt_engine_plan {
    struct mt_program_params program; /* `units` and `values` are owned by the plan */
    struct mt_unit_shape *units;
    struct mt_value *values;
    size_t pool_bytes[MT_N_POOLS];    /* all buffers of the pool on all lanes, alignment included */
    size_t scratch, logits, inputs, tables; /* of each lane */
    size_t device_bytes;              /* sum of the above on all devices */
    size_t lane_bytes[MT_MAX_LANES];  /* of these, on each */
    size_t spill_bytes;               /* host memory: spilled boundaries, their gradients and records */
    size_t staging_bytes;             /* host memory: inputs and statistics */
    size_t h2d_bytes, d2h_bytes;      /* over the link in a full step, at most: of a packed gradient all rows count */
    enum mt_activations activations;  /* as chosen */
    mt_plane_bits *on_disk;           /* [n_units] planes on the disk; owned by the plan */
    struct mt_unit_planes *planes; /* [n_units] */
    bool uses_disk;
    mt_plane_bits *in_files;          /* [n_units] planes read in place from the model's files; owned, too */
    bool uses_files;
    int64_t base_blocks;              /* blocks that could be read in place but are in host memory */
    size_t file_bytes;                /* host memory for reading them: blocks under way */
    size_t top_bytes;                 /* host memory for a teacher's tokens: of two steps, or of one that finds them */
    uint64_t disk_spill_bytes;
    struct mt_disk_traffic traffic;   /* of a full step that makes an update */
};

/**
 * Chooses buffers for the device's budget. -ENOSPC (MT_ERR_NO_FIT): the message names what is short, by how much, and
 * what would help. Finish with mt_engine_plan_finish().
 */
int mt_engine_plan(struct mt_engine_plan *out, const struct mt_engine_params *p, struct mt_err *err);
/**
 * The same; *step is the program of a full step with an update, which the caller finishes. *host_bytes: host memory
 * that it takes, the device's included if the device shares host memory. If that is more than p->host_bytes: -ENOSPC,
 * and the step is not built.
 */
int mt_engine_plan_step(struct mt_engine_plan *out, struct mt_program *step, uint64_t *host_bytes,
                        const struct mt_engine_params *p, struct mt_err *err);
/** The same without building the step: spill_bytes, h2d_bytes and d2h_bytes stay 0. */
int mt_engine_divide(struct mt_engine_plan *out, const struct mt_engine_params *p, struct mt_err *err);
/** Whether updates can be made under backward: no learner needs the norm of its whole gradient. */
bool mt_engine_may_update_under_backward(const struct mt_engine_params *p);
/** Whether the device's budget is enough. */
bool mt_engine_fits(const struct mt_engine_params *p);
void mt_engine_plan_finish(struct mt_engine_plan *plan);
/** Takes from *planes, those of the whole layout, the ones that a run with this plan does not have. */
void mt_engine_plan_trim(const struct mt_engine_plan *plan, struct mt_plane_set_params *planes);

int mt_engine_create(mt_engine **out, const struct mt_engine_params *p, struct mt_err *err);
/** Accepts NULL. A pending update is lost: flush first. */
void mt_engine_destroy(mt_engine **e);

struct mt_step_result {
    double loss;          /* the objective's: measures[0] */
    struct mt_measure measures[MT_MAX_MEASURES];
    double aux_loss;      /* with train.router_aux_loss: the load-balancing loss, not multiplied by its coefficient */
    double grad_norm;     /* before clipping; of the gradient as the optimizer sees it */
    float clip;           /* factor, 1 = not clipped; with train.clip = unit the smallest of any block */
    bool skipped;         /* nothing is updated */
    size_t n_skipped;     /* blocks that are not, because their gradient, or with a global norm any, is not finite */
    char bad_tensor[128]; /* if any is skipped: the first tensor at fault, in backward order */
    bool bad_router;      /* bad_tensor is a router whose logits were not finite */
    bool other_attention; /* the caller's: the gradient was not finite, and is with attention computed in another way */
    double t_step, t_forward, t_backward; /* seconds */
    double t_wait_h2d;    /* compute waits for a copy: mean of the devices */
    double t_update;        /* optimizer threads busy, mostly during forward */
    double t_disk_read, t_disk_write; /* at least one request under way */
    double t_disk_sums;   /* CPU time of checksums of data on drives, on separate threads */
    struct mt_disk_traffic traffic;
};

/** What a learner does in a step: its micro-batches, and the rate of their update. data NULL: nothing. */
struct mt_learner_step {
    const struct mt_step_data *data;
    double lr;
    const double *reference; /* for its objective (objective.h); NULL if that needs none */
};

/**
 * One optimizer step of all learners: the pending updates, forward, backward; then the updates of this step are
 * pending. of: [n_learners]; res: [n_learners], those without data stay as they are; times are the whole step's.
 * -ECANCELED after mt_engine_interrupt(): the step is abandoned. Then, and after an error of the device, the pending
 * updates have still been made, once. With updates under backward or states on the device, a step is not abandoned any
 * more once one of its own has begun or such states are stored, and an error of the device after that loses the state:
 * mt_engine_whole().
 */
int mt_engine_step(mt_engine *e, const struct mt_learner_step *of, struct mt_step_result *res, struct mt_err *err);
/** The last step once more, from the same weights: the updates that it left pending are dropped. Not with updates under
 * backward, nor with directions made on the device (Adafactor, Muon): a step changes weights or states then. */
int mt_engine_step_again(mt_engine *e, const struct mt_learner_step *of, struct mt_step_result *res,
                         struct mt_err *err);
/** Makes the pending updates. After this the planes have the current weights. */
int mt_engine_flush(mt_engine *e, struct mt_err *err);
/**
 * Whether the planes and the pending updates, if there are any, are the state after the last step: true after errors,
 * too, unless an update was made in part (under backward any error does that) or a drive that holds planes failed. Then
 * the state is lost.
 */
bool mt_engine_whole(const mt_engine *e);

/** With several learners: -EDOM if an update made this one's weights not finite; its state is lost, the others go on. With
 * one, the step or flush has failed with that. */
int mt_engine_check_learner(const mt_engine *e, size_t learner, struct mt_err *err);

struct mt_eval_result {
    double loss_sum;      /* over loss tokens */
    uint64_t n_loss, n_correct;
    struct mt_measure measures[MT_MAX_MEASURES]; /* of the objective */
    const double *reference; /* as in mt_learner_step; NULL: an objective that needs it measures nothing */
    double *doc_loss;     /* caller's [n_docs of all micro-batches], or NULL: loss sum of each document's answer */
    float *row_loss;      /* caller's [n_loss of all micro-batches], or NULL: of each loss row */
    int32_t *row_correct; /* the same: whether the target was the likeliest token; set where row_loss is */
    struct mt_top *row_top; /* with mt_engine_params.top, caller's [n_loss, top]: the likeliest tokens of each loss row; or NULL */
    float *row_rest;      /* set where row_top is: probability of all others */
};
/** Losses of micro-batches (data->n of them) with a learner's weights, added to *res. Flush first. */
int mt_engine_eval(mt_engine *e, int learner, const struct mt_step_data *data, struct mt_eval_result *res,
                   struct mt_err *err);
/** Logits of the batch's last token, f32 [vocab]. Flush first. */
int mt_engine_logits(mt_engine *e, const struct mt_batch *batch, float *logits, struct mt_err *err);
/** Bytes that the last run copied to the device: of a step, an evaluation or logits. */
size_t mt_engine_loaded_bytes(const mt_engine *e);

/** rows[n_experts]: of each expert of a layer in the last step. false: the layer is no mixture. */
bool mt_engine_expert_rows(const mt_engine *e, int layer, int32_t *rows);

/** One instruction of the last step as it ran; times of the device's clock. */
struct mt_trace_span {
    uint8_t queue, op; /* queue: its number */
    int32_t unit, mb, piece; /* as of the instruction */
    size_t bytes;
    int64_t begin_ns, end_ns;
};
/** Sets whether later steps record the begin and end of every instruction: two events each. */
void mt_engine_trace(mt_engine *e, bool on);
/** Spans of the last traced step, in program order; the caller frees *spans. -ENODATA: none. */
int mt_engine_trace_read(const mt_engine *e, struct mt_trace_span **spans, size_t *n, struct mt_err *err);

/** Abandons the step under way at its next instruction; with several hosts none is, but all hear of it after the step
 * (mt_engine_is_asked()). Any thread, signal handlers included. */
void mt_engine_interrupt(mt_engine *e);
/** Whether any host was interrupted before the end of the last step: the same on all hosts. */
bool mt_engine_is_asked(const mt_engine *e);
void mt_engine_clear_interrupt(mt_engine *e);
/** From now on updates check what they read, and sum what they write. The guard is borrowed. */
void mt_engine_set_guard(mt_engine *e, mt_guard *guard);

/** Index (from 0) of a learner's update of the next step, on which its learning rate depends. */
uint64_t mt_engine_next_update(const mt_engine *e, size_t learner);
/** Updates applied so far, without the pending one; set it on resume. t0: how many of them were made before the
 * optimizer's states were new: Adam's t counts from there. */
uint64_t mt_engine_updates(const mt_engine *e, size_t learner);
void mt_engine_set_updates(mt_engine *e, size_t learner, uint64_t updates, uint64_t t0);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "data/batch.h"
#include "engine/budget.h"
#include "objective/objective.h"

/**
 * The streaming engine: trains a model whose planes are in host memory or on a disk, on a device that holds a few units
 * at a time. The update of a step is pending until the next step, which runs it on host threads during its forward
 * pass, or until mt_engine_flush().
 *
 * Placement (slots, buffers, threads, budget) never changes a bit of the result.
 *
 * With several hosts (mt_engine_params.net) each has an engine, and all call mt_engine_step() and mt_engine_eval() with
 * the same data: each computes its share, and all have the same results. An error of one ends the others' step: they
 * wait for it in vain, and fail. Where each unit's states are on one of them (placement.host_states), an update and what
 * follows it is made by all: they call mt_engine_flush() together, too, and none is whole any more after such an error.
 *
 * Thread-safety: one thread, except mt_engine_interrupt().
 */
typedef struct mt_engine mt_engine;

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
/** Of mt_mezo_keys.on_load, before the first use: which step's noise weights get from now on, and which variant of it
 * (mt_mezo_variants()). */
void mt_engine_perturb(mt_engine *e, uint64_t step, size_t variant);
/** The last step once more, from the same weights: the updates that it left pending are dropped. Not with updates under
 * backward, nor with directions made on the device (mt_optimizer.direct): a step changes weights or states then. */
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

/** With several learners: -EDOM if an update made this one's weights not finite; its state is lost, the others go on.
 * With one, the step or flush has failed with that. */
int mt_engine_check_learner(const mt_engine *e, size_t learner, struct mt_err *err);

struct mt_eval_result {
    double loss_sum;      /* over loss tokens */
    uint64_t n_loss, n_correct;
    struct mt_measure measures[MT_MAX_MEASURES]; /* of the objective */
    const double *reference; /* as in mt_learner_step; NULL: an objective that needs it measures nothing */
    double *doc_loss;     /* caller's [n_docs of mt_step_whole()], or NULL: loss sum of each document's answer */
    float *row_loss;      /* caller's [n_loss of all micro-batches], or NULL: of each loss row */
    int32_t *row_correct; /* the same: whether the target was the likeliest token; set where row_loss is */
    struct mt_top *row_top; /* with mt_engine_params.top, caller's [n_loss, top]: the likeliest tokens of each loss row;
    or NULL */ float *row_rest;      /* set where row_top is: probability of all others */
};
/** Losses of micro-batches (data->n of them) with a learner's weights, added to *res. Flush first. */
int mt_engine_eval(mt_engine *e, int learner, const struct mt_step_data *data, struct mt_eval_result *res,
                   struct mt_err *err);
/**
 * By one pass through the weights, the next tokens of texts: for each loss row of n micro-batches the one that `draw`
 * chose by its logits, ids, and its loss, the negative log-probability, both [all loss rows]. An engine with a cache
 * (mt_engine_params.cache) takes one micro-batch, whose documents go on from what it has of them. Needs
 * mt_engine_params.draws; flush first.
 */
int mt_engine_draw(mt_engine *e, const struct mt_batch *micro, size_t n, const struct mt_draw *draw, int32_t *ids,
                   float *losses, struct mt_err *err);
/** Micro-batches that a step may have at most. */
size_t mt_engine_max_micro(const mt_engine *e);
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
/** Whether an interruption had not been cleared yet: the last -ECANCELED was of it. */
bool mt_engine_clear_interrupt(mt_engine *e);
/** From now on updates check what they read, and sum what they write. The guard is borrowed. */
void mt_engine_set_guard(mt_engine *e, mt_guard *guard);

/** Index (from 0) of a learner's update of the next step, on which its learning rate depends. */
uint64_t mt_engine_next_update(const mt_engine *e, size_t learner);
/** Updates applied so far, without the pending one; set it on resume. t0: how many of them were made before the
 * optimizer's states were new: Adam's t counts from there. */
uint64_t mt_engine_updates(const mt_engine *e, size_t learner);
void mt_engine_set_updates(mt_engine *e, size_t learner, uint64_t updates, uint64_t t0);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdatomic.h>

#include "checkpoint/hf_dir.h"
#include "checkpoint/output.h"
#include "checkpoint/state.h"
#include "train/session.h"

/* What a training run is given, and what it tells. */

/** Why a learner is to end beside a signal's number: its time limit. */
enum { MT_STOP_TIME = -1 };

/** What is asked of one learner. The watch (train/watch.h) sets it, the loop answers. */
struct mt_train_asked {
    atomic_int stop;    /* save as configured, then end: SIGTERM for the file STOP, or MT_STOP_TIME; 0: no */
    atomic_bool save;   /* write a checkpoint and go on */
    atomic_bool unsaved; /* of the loop: a step has been made that no checkpoint has */
    _Atomic int64_t reserve_ns; /* of the loop: what the last save needs of the time limit */
};

/** Requests from outside, and what the run is doing. Signal handlers and threads may use it. */
struct mt_train_control {
    atomic_int stop;   /* asked of all learners: a signal's number */
    atomic_int signals; /* how many requests to stop came, but for time limits */
    atomic_bool begun;  /* training may have changed the state; before that there is nothing to save */
    atomic_bool waiting; /* the last save is waiting to be tried again; a signal ends the wait */
    atomic_bool save;  /* asked of all learners; the watch passes it on */
    atomic_bool status; /* tell the status; of the watch */
    mt_engine *_Atomic engine; /* set by the loop: lets a handler interrupt a step */
    bool hosts;        /* set before the watch starts: several, so a step is never cut short for a save */
    struct mt_train_asked *asked; /* [n] the learners'; set before the watch starts, NULL where there is none */
    size_t n;
    /* Of the loop, while phases run: saves and ends learners as they are asked, but does not end `learner`. */
    void (*answer)(void *ctx, size_t learner);
    void *ctx;
    /* What the run is doing: a string literal, NULL before it begins. */
    const char *_Atomic phase;
    _Atomic int64_t phase_ns; /* mt_now_ns() when it, or the step under way, began */
    _Atomic uint64_t step, total_steps; /* done; of all. total_steps 0: training has not begun */
    _Atomic uint64_t part, n_parts;     /* pieces of the phase that are done, of all; 0: unknown */
};
void mt_train_phase(struct mt_train_control *c, const char *phase);
/** Async-signal-safe: notes the request and interrupts what the engine does. */
void mt_train_request_stop(struct mt_train_control *c, int signo);
/** Why the learner is to end: a signal's number or MT_STOP_TIME; 0: it is not. */
int mt_train_is_stopped(const struct mt_train_control *c, size_t learner);
/**
 * Every long phase of a learner asks this after each piece of its work (a step of an evaluation, say), of which `done`
 * of `all` are done, with the piece's result. What was asked meanwhile of it or of others is answered here. Returns 0:
 * go on; MT_AGAIN: the piece was cut short for that, make it again; -ECANCELED: the learner is to end, so end the
 * phase; or the piece's own error. c NULL: rc.
 */
enum { MT_AGAIN = 1 };
int mt_train_heed(struct mt_train_control *c, size_t learner, uint64_t done, uint64_t all, int rc, struct mt_err *err);

struct mt_step_report {
    uint64_t step, total_steps; /* step: the one just done, counted from 1 */
    double epoch;
    const struct mt_objective *objective; /* names the result's measures; NULL: there are none but the loss */
    struct mt_step_result result;
    double lr, seconds;         /* wall time of the step, with waiting for data */
    uint64_t tokens, loss_tokens; /* of this step */
    uint64_t total_tokens;
    size_t h2d_bytes, d2h_bytes;
    bool uses_disk;
    double eta_seconds;
};
struct mt_eval_report {
    uint64_t step, n_loss;
    const struct mt_objective *objective; /* as in mt_step_report */
    struct mt_measure measures[MT_MAX_MEASURES];
    double loss, accuracy, seconds; /* loss: the objective's; accuracy: of all loss tokens */
    struct mt_eval_of_set {
        const char *name;
        uint64_t n_loss;
        double loss, accuracy;
    } sets[MT_EVAL_SETS]; /* [n_sets] of eval.sets */
    size_t n_sets;
    size_t n_answers;    /* to prompts of eval.generate */
    double reward;       /* their mean; NaN: none is given */
    double merged_share; /* with adapter.merge_aware: of weights with adapters that differ from the base; else NaN */
    bool best;
};

/** Callbacks of the loop; any may be NULL. Called from the training thread. */
struct mt_train_events {
    void *ctx;
    void (*step)(void *ctx, const struct mt_step_report *r);
    void (*eval)(void *ctx, const struct mt_eval_report *r);
    void (*saved)(void *ctx, uint64_t step, double seconds);
};

/** MT_END_BLOCK: a block has had its steps, and the next one is to be trained (train/blocks.h). */
enum mt_train_end { MT_END_DONE, MT_END_BLOCK, MT_END_EARLY, MT_END_TIME, MT_END_SIGNAL };

/** When a run is saved next, which goes on over the phases of train.blocks; all 0 before the first. */
struct mt_save_clock {
    int64_t saved_ns, retry_ns, wait_ns; /* wait_ns: the pause after the last failure; 0: it did not fail */
    double seconds;                      /* that the last save took; 0: there was none */
    double fastest;                      /* of all saves of training state */
    bool unsettled;                      /* the last try failed: it may have left a checkpoint that is not durable */
};

/** What a learner of a run is given. Session, control, start and the last four are the same for all. */
struct mt_train_params {
    struct mt_session *session;    /* started, weights in place */
    size_t learner;                /* index in the session's setup */
    struct mt_train_state *state;  /* where to start; updated */
    struct mt_history *history;    /* of dir's checkpoints; updated */
    struct mt_save_clock *clock;   /* updated */
    const struct mt_hf_files *files; /* of the model's folder, for checkpoints; NULL: they are read at each save */
    int64_t start_ns;              /* mt_boot_ns() when the process began, for checkpoint.time_limit */
    struct mt_watch *watch;        /* learns of each new path of the output folder; NULL: none */
    struct mt_train_control *control;
    struct mt_train_events events;
    uint64_t first_step, first_update; /* steps and updates done when the process began */
    uint64_t max_steps;            /* stop after this many in this process; 0 = none */
    uint64_t block_end;            /* step after which the next block is trained (train.blocks); 0 = none */
    const char *dir;               /* the output folder; output->dir where there is one */
    struct mt_output *output;      /* looked for again before a save; NULL: it is taken to stay */
    struct mt_feed *feed;          /* the command that is given the metrics; NULL: none */
    bool no_save;                  /* do not save at the end: for benchmarks */
    /* Answers the prompts of eval.generate: sets n_answers and reward. NULL: there are none. */
    int (*answer)(void *of, struct mt_eval_report *r, struct mt_err *err);
    void *answers;
    const char *trace;             /* file for the trace of this run's third step (or its last); or NULL */
};

/** Steps at which libraries are compared with our own once more: training data change, and so may what is wrong. */
bool mt_is_doubtful(uint64_t step);
/** Makes the pending updates; fails, too, if the learner's state is lost. */
int mt_train_flush(const struct mt_train_params *p, struct mt_err *err);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "checkpoint/lineage.h"
#include "checkpoint/log_rows.h"

#define MT_EVAL_UNKNOWN UINT64_MAX
/** The state of a run besides its planes, in megatrain/state.json. */
struct mt_train_state {
    uint64_t step;            /* data steps done */
    uint64_t rows;            /* of the data in all epochs so far: the data continue here. 0 after steps: an earlier
                                 version did not count them */
    uint64_t rows_per_epoch;
    uint64_t share_layers;    /* mt_layout.share of its planes; 0: an earlier version, 1 */
    uint64_t shares_up;       /* 1: a share of the steps is rounded up; 0: to the nearest, as an earlier version did */
    uint64_t updates;         /* applied: Adam's t, index of the learning rate */
    uint64_t skips, skips_in_row;
    uint64_t tokens, loss_tokens;
    uint64_t steps_per_epoch, total_steps;
    uint64_t data_hash, eval_hash; /* of what is trained and evaluated on; 0: not known, or nothing apart */
    char best_by[128];        /* what evaluations were compared by; "": loss */
    double best_loss;         /* or another measure; NaN: none yet */
    uint64_t best_step;
    double best_saved_loss;   /* of the best evaluation of which there is a checkpoint, */
    uint64_t best_saved_step; /* of this step; 0: there is none */
    uint64_t bad_evals;       /* in a row, for early stopping */
    uint64_t eval_step;       /* of the last evaluation; 0: none yet; MT_EVAL_UNKNOWN: of an earlier version */
    double seconds;           /* trained so far */
    double *reference;        /* [n_reference] log-probabilities under the reference, in a file of their own; owned */
    size_t n_reference;
    char *reference_of;       /* preference.reference; NULL: start; owned */
    uint64_t reference_data, reference_eval; /* mt_dataset_hash() of what it is of, training's and evaluation's; 0: not
                                                known, or none */
    char *config;             /* INI text; owned */
    cJSON *frozen;            /* after reading a checkpoint: tensors that it names, each with its sum; empty: none */
    char *findings;           /* of the device (mt_device_findings()), or NULL; owned */
    struct {
        bool on;
        uint64_t phase;       /* which of the run's blocks is trained, counted from 0 */
        uint64_t updates;     /* applied before it: the optimizer's states are new since then */
        char *overlay;        /* folder beside the checkpoint with what was trained before; NULL: none yet; owned */
    } blocks;                 /* train.blocks; else all 0 */
    struct mt_log_rows log;   /* for trainer_state.json; owned */
    struct mt_lineage lineage; /* owned */
    char sum[MT_RUN_ID];      /* of the state.json it was read from; not written */
};

void mt_train_state_finish(struct mt_train_state *s);
/** XXH3 of the log-probabilities under the reference. */
uint64_t mt_train_state_reference_hash(const struct mt_train_state *s);
/** The value of a key of the run's configuration, into buf; "": it has none. Returns buf. */
const char *mt_train_state_value(const struct mt_train_state *s, const char *section, const char *key, char *buf,
                                 size_t len);
cJSON *mt_train_state_to_json(const struct mt_train_state *s);
int mt_train_state_from_json(struct mt_train_state *out, const cJSON *o, const char *name,
                             struct mt_err *err);
/** Passes over the data so far. */
double mt_train_state_epochs(const struct mt_train_state *s);
/** trainer_state.json, with Hugging Face's names. */
cJSON *mt_trainer_state_json(const struct mt_train_state *s);

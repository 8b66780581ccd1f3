/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_TRAIN_INPUTS_H
#define MT_TRAIN_INPUTS_H

#include "base/json.h"
#include "config/config.h"
#include "data/dataset.h"
#include "hf/hf_config.h"
#include "model/layout.h"
#include "optim/lr.h"

/** What a command reads before it opens a device: the model's description, the data, and what of them makes a step. */
struct mt_inputs {
    struct mt_config *cfg; /* borrowed */
    const cJSON *from_files; /* of a run that goes on: frozen tensors that come from the model's files; NULL: all do; borrowed */
    char *model_dir;
    struct mt_hf_config hf;
    struct mt_layout *layout;      /* as memory.unit cuts layers */
    struct mt_layout *halves;      /* where that is open: layers cut in halves; else NULL */
    struct mt_numerics numerics;   /* as configured, with the rows of a step */
    mt_dataset *data, *eval_data;  /* NULL: not opened; eval_data: a file of its own */
    struct mt_split split, held_out;
    mt_sampler *sampler, *eval_sampler; /* NULL where there is nothing to train or to evaluate on */
    uint64_t total_steps;               /* optimizer steps of the whole run */
    struct mt_lr lr;                    /* its learning rates */
};

enum mt_inputs_use { MT_USE_EVAL, MT_USE_TRAIN };
/**
 * Model and data. For an evaluation on a file of its own, train's data are not opened. Whatever comes back, the caller
 * finishes it. Errors: MT_ERR_USAGE for the configuration, MT_ERR_INPUT for what the files hold.
 */
int mt_inputs_open(struct mt_inputs *in, struct mt_config *cfg, enum mt_inputs_use use, const cJSON *from_files,
                   struct mt_err *err);
/** A model alone, for samples of up to max_len tokens, one at a time. */
int mt_inputs_open_model(struct mt_inputs *in, struct mt_config *cfg, size_t max_len, struct mt_err *err);
/** Samplers, number of steps and learning rates, for the micro-batches of `n`; those of a rule where it has none. */
int mt_inputs_lay_out_steps(struct mt_inputs *in, struct mt_numerics *n, struct mt_err *err);
void mt_inputs_finish(struct mt_inputs *in);

#endif

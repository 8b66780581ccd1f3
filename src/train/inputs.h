/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/json.h"
#include "config/config.h"
#include "data/dataset.h"
#include "data/teacher.h"
#include "hf/hf_config.h"
#include "model/layout.h"
#include "optim/lr.h"
#include "plan/resolve.h"

/** An evaluation set of eval.sets. */
struct mt_eval_set {
    char *name;
    mt_dataset *data;
    struct mt_split rows;
    mt_sampler *sampler; /* NULL: it has no sample */
};

/** Texts that are to be generated. */
struct mt_texts {
    size_t n;               /* in all */
    size_t len;             /* tokens of one at most, with what is added */
    const uint64_t *tokens; /* [n] of all together, without the shortest, and so on; NULL: len of each. Borrowed */
};
enum { MT_TEXTS_FEW = 16 }; /* that share a pass where nothing is known of the machine's memory */

/** What a command reads before it opens a device: the model's description, the data, and how data make up steps. */
struct mt_inputs {
    struct mt_config *cfg; /* borrowed */
    struct mt_resumed resumed;
    char *model_dir;
    char *weights_dir;             /* with the weights: model_dir, or an overlay over it (checkpoint/overlay.h) */
    struct mt_hf_config hf;
    struct mt_layout *layout;      /* as memory.unit cuts layers */
    struct mt_layout *halves;      /* layers cut in halves, where memory.unit = auto leaves that open; else NULL */
    const char *auto_rate;         /* what the run trains, which has decided train.learning_rate; NULL: it was set */
    struct mt_numerics numerics;   /* as configured; rows_per_step is computed */
    mt_dataset *data, *eval_data;  /* NULL: not opened; eval_data: where data.eval is a file */
    mt_teacher *teacher;                /* of `data`; NULL: the objective has none */
    bool prepared_only;                 /* data that the token cache lacks are not opened */
    bool begins;                        /* of a use that trains nothing: weights are those that training begins
                                           with, random ones if model.init says so */
    struct mt_cache_shape cache;        /* that generation is to have, and */
    size_t draws;                       /* most tokens of its passes; 0: it does not generate */
    struct mt_texts texts;              /* of which the setup chooses how many have it at once; n 0: that is given */
    size_t n_answers, answer_len;       /* of a run: prompts that it answers; most tokens of one with its answer */
    size_t top;                         /* likeliest tokens of each row that an evaluation finds; 0: none */
    struct mt_split split, held_out;
    mt_sampler *sampler, *eval_sampler; /* NULL: nothing to train, or to evaluate, on */
    struct mt_eval_set *sets;           /* [n_sets] evaluated after eval_sampler's */
    size_t n_sets;
    bool moved;                         /* steps before `resumed` had other numbers of rows */
    uint64_t resident;                  /* bytes of the process when the first setup had opened its device, which
                                           are those of later phases, too; 0: not known */
    uint64_t total_steps;               /* optimizer steps of the whole run */
    struct mt_lr lr;                    /* its schedule of learning rates */
};

enum mt_inputs_use { MT_RUN_EVAL, MT_RUN_TRAIN };
/**
 * Opens model and data. For an evaluation whose data.eval is a file, data.train is not opened. The caller finishes *in,
 * also after a failure. resumed: NULL for a new run. Errors: MT_ERR_USAGE for the configuration, MT_ERR_INPUT for what
 * the files hold.
 */
int mt_inputs_open(struct mt_inputs *in, struct mt_config *cfg, enum mt_inputs_use use,
                   const struct mt_resumed *resumed, struct mt_err *err);
/** Says which learning rate was chosen, if it was auto. */
void mt_inputs_say_rate(const struct mt_inputs *in);
/** Rows of an epoch of data that are in the token cache; 0: they are not, or cannot be read. */
uint64_t mt_inputs_prepared_rows(struct mt_config *cfg, const struct mt_hf_config *hf, const char *model_dir,
                                 const struct mt_numerics *n);
/** The cache of n_texts texts of up to max_len tokens, together of most_tokens (0: of any), and the tokens of a pass at
 * most. slots 0: the model has none. */
struct mt_cache_shape mt_inputs_cache(size_t *draws, const struct mt_layout *l, size_t max_len, size_t n_texts,
                                      size_t most_tokens);
/** The same for n of these texts at once. */
struct mt_cache_shape mt_inputs_texts_cache(size_t *draws, const struct mt_layout *l, const struct mt_texts *of,
                                            size_t n);
/** The same for answers that a run makes between its steps (eval.generate), in passes no larger than a row. */
struct mt_cache_shape mt_inputs_answers_cache(size_t *draws, const struct mt_layout *l, size_t row, size_t max_len,
                                              size_t n_texts);
/** Opens a model without data, to generate these texts, so many at a time (0: the setup chooses), with a cache if the
 * model's layers have one. */
int mt_inputs_open_model(struct mt_inputs *in, struct mt_config *cfg, const struct mt_texts *texts, size_t at_once,
                         struct mt_err *err);
/** Makes samplers, number of steps and learning rates for n->micro_batch, which a rule sets if it is still auto. */
int mt_inputs_lay_out_steps(struct mt_inputs *in, struct mt_numerics *n, struct mt_err *err);
/**
 * For a use that trains nothing: one phase, and all is frozen. Weights that nothing trains need no master, and may be
 * read in place from the model's files; their values are the same. Adapters stay as they are; so does model.freeze under
 * model.base_dtype, which packs what is frozen and nothing else, and with mezo.on_load, which perturbs what is trained.
 * why: as of mt_config_override().
 */
int mt_inputs_freeze_all(struct mt_config *cfg, const char *why, struct mt_err *err);
/** Opens a model with the numerics that the configuration trains it with, without data, and freezes it. */
int mt_inputs_open_without_data(struct mt_inputs *in, struct mt_config *cfg, struct mt_err *err);
/** Sets the keys of [adapter], and model.freeze, to what a PEFT folder has; NULL: to no adapters.
 * why: as of mt_config_override(). */
int mt_inputs_use_adapter(struct mt_config *cfg, const char *dir, const char *why,
                          struct mt_err *err);
/** Says which tokenizer makes the run's tokens: equal for equal tokens and ids. 0: it is not known. */
int mt_inputs_tokenizer_hash(uint64_t *out, const struct mt_inputs *in, struct mt_err *err);
/** Of all files that are evaluated on; 0: there are none. */
uint64_t mt_inputs_eval_hash(const struct mt_inputs *in);
/** Lays the same model out for another phase of train.blocks, once the setup of the last one is finished; the data stay
 * open. */
int mt_inputs_next_block(struct mt_inputs *in, struct mt_config *cfg, const struct mt_resumed *resumed,
                         struct mt_err *err);
void mt_inputs_finish(struct mt_inputs *in);

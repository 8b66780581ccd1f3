/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "answers.h"
#include "checkpoint/hf_dir.h"
#include "checkpoint/history.h"
#include "checkpoint/output.h"
#include "cli.h"
#include "report.h"
#include "train/feed.h"
#include "train/memory.h"
#include "train/train.h"

/** What a configuration is trained to: its data, state and output folder. */
struct learner {
    const struct cli_args *args;
    struct mt_config *cfg;
    struct mt_inputs *in;
    struct mt_train_state state;
    struct mt_history history;
    struct mt_save_clock clock;
    struct mt_hf_files files; /* of the model's folder */
    char *resume; /* checkpoint to continue from, or NULL; read before the first block alone */
    char *resumed_from; /* what it was, for run.json */
    struct mt_feed *feed; /* the command of log.exec, over all blocks; or NULL */
    uint64_t first_step, first_update; /* done when the process began */
    struct mt_output out;
    struct cli_progress progress;
    struct cli_answers answers; /* of eval.generate, where it is set */
};

/** Reads the configuration, locks the output folder, and reads what the run goes on from; alone: no other runs beside
 * it. Close with learner_close() also after an error. */
int learner_open(struct learner *l, const char *path, bool alone, struct mt_err *err);
void learner_close(struct learner *l);

/** What the checkpoint says of tensors' files. Borrows from l. */
struct mt_resumed learner_resumed(const struct learner *l);
/** Once data and plan are known; nothing was trained yet. */
int learner_check(struct learner *l, struct mt_err *err);
/** Warns if there is too little space: a new checkpoint is complete before an old one is removed. Without the space,
 * saves are retried and the run goes on. */
void learner_check_space(const struct learner *l, const struct mt_memory *m);
/** Begins what stays over all blocks of a run. */
int learner_begin(struct learner *l, struct mt_err *err);
/** Keeps earlier findings about libraries, so that results have the same bits. */
void learner_adopt_findings(const struct learner *l, struct mt_setup *s);
/** Writes the output folder's config.effective.ini and run.json. */
int learner_write_files(struct learner *l, const struct mt_setup *setup, struct mt_err *err);

/** Says why no step is left, and where the best weights are. */
void learner_say_stopped_early(const struct learner *l);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "generate.h"
#include "train/train.h"

/** Answers to the prompts of eval.generate, which a run makes at each evaluation with its own session. */
struct cli_answers {
    struct cli_generation g;
    struct mt_train_control *control; /* the run's */
    const char *dir;                  /* its output folder */
    size_t learner;
};

/** Reads the prompts of eval.generate; each must fit in a row with its answer. Sets in `in`, the open inputs of the run, how
 * many prompts there are and the length of the longest with its answer, which size the key-value cache. Finish in any
 * case. */
int cli_answers_open(struct cli_answers *a, struct mt_config *cfg, struct mt_inputs *in, struct mt_err *err);
/** mt_train_params.answer: writes answers-STEP.jsonl, with rewards where policy.reward is set, and answers.jsonl, which
 * is the newest of them. a->g.session is the run's. */
int cli_answer(void *answers, struct mt_eval_report *r, struct mt_err *err);
void cli_answers_finish(struct cli_answers *a);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "train/readback.h"
#include "train/control.h"

/**
 * When and how a run is saved. The state in memory is worth more than any one write: a periodic save that fails is
 * reported and tried again later; the last one waits until it can be written.
 */
struct mt_saves {
    const struct mt_train_params *p;
    struct mt_save_clock *clock;         /* p's */
    mt_readback *readback;               /* of the newest checkpoint, of `read_step`; then others are pruned. Owned */
    uint64_t read_step;
    uint64_t n_corrected, n_uncorrected; /* errors of memory that have been told */
    bool final;                          /* the run ends */
    uint64_t eval_step;                  /* of the last evaluation, with what eval.best_by compares */
    double eval_value;
    bool is_best;                        /* it is the best so far, and to be saved */
    bool news;                           /* the last evaluation is in no checkpoint yet */
    bool asked;                          /* somebody waits for the save that is made */
};
void mt_saves_init(struct mt_saves *s, const struct mt_train_params *p);
/** Tells of an evaluation of the state as it is. The best so far is saved, with checkpoint.keep_best. */
void mt_saves_evaluated(struct mt_saves *s, double value, bool is_best);
/** Whether a periodic save is due after the step that the state is at; also if the last one reads back wrong. */
bool mt_saves_due(struct mt_saves *s);
/** A failed write is a warning. It is an error only when the training state itself could not be read. asked: somebody
 * waits for it, so it waits for nothing else. */
int mt_saves_periodic(struct mt_saves *s, bool asked, struct mt_err *err);
/**
 * At the end of a block, whose session goes: waits until the last checkpoint has been read back, and prunes; if it
 * reads back wrong, saves again. Fails as mt_saves_periodic().
 */
int mt_saves_end_block(struct mt_saves *s, struct mt_err *err);
/**
 * The last save. If space is short, all but one of this run's older checkpoints are removed; then it is tried until it
 * succeeds, another signal comes, or `seconds` are over; then only weights are saved. The error returned is that of the
 * wanted save, and names the newest good checkpoint.
 */
int mt_saves_final(struct mt_saves *s, bool full, double seconds, struct mt_err *err);
/**
 * After the last save and the last evaluation, adds what that found to the checkpoint, in one step. That it cannot be
 * written is a warning: a run that resumes there evaluates again. full, seconds: as of mt_saves_final().
 */
int mt_saves_last_evaluation(struct mt_saves *s, bool full, double seconds, struct mt_err *err);
/** What of a second look at the model's weights that is under way: wait for it, unless the learner is asked to end; let it
 * go on; or give it up, since the run ends. */
enum mt_settle { MT_SETTLE_WAIT, MT_SETTLE_NOW, MT_SETTLE_LAST };
/**
 * Before the planes are written anywhere: makes the pending update, and checks what can be checked. *lost: the training
 * state itself could not be read.
 */
int mt_saves_settle(const struct mt_train_params *p, enum mt_settle how, bool *lost, struct mt_err *err);
/** mt_output_find(), of which the watch hears. */
int mt_saves_find_folder(const struct mt_train_params *p, struct mt_err *err);
/** Records in the state what was found wrong with a library: a resumed run avoids it too, and has the same bits. */
int mt_saves_note_findings(struct mt_train_state *st, const struct mt_setup *setup, struct mt_err *err);
/** Seconds that a save is likely to take. */
double mt_saves_expect(const struct mt_saves *s);

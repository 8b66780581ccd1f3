/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_TRAIN_SAVES_H
#define MT_TRAIN_SAVES_H

#include "train/train.h"

/**
 * When and how a run is saved. What is in memory is worth more than any one write: a periodic save that fails is
 * reported and tried again later; the last one waits for what it lacks.
 */
struct mt_saves {
    const struct mt_train_params *p;
    int64_t saved_ns, retry_ns, wait_ns; /* wait: after the last failure; 0: none */
    double seconds;                      /* the last save took; 0: none was made */
    bool unsettled;                      /* the last try failed: it may have left a checkpoint that is not durable */
};
void mt_saves_init(struct mt_saves *s, const struct mt_train_params *p);
/** Whether a periodic save is due after the step that the state is at. */
bool mt_saves_due(const struct mt_saves *s);
/** Only what the state itself has lost is an error. */
int mt_saves_periodic(struct mt_saves *s, struct mt_err *err);
/**
 * The last save. Where it fails for want of space, older checkpoints of the run go, but for one; then it is tried until
 * it succeeds, a (further) signal comes or `seconds` are over; then weights are saved alone. The error is that of the
 * save that was wanted, and names the newest good checkpoint.
 */
int mt_saves_final(struct mt_saves *s, bool full, double seconds, struct mt_err *err);
/** Seconds that a save is likely to take. */
double mt_saves_expect(const struct mt_saves *s);

#endif

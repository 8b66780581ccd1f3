/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_CHECKPOINT_HISTORY_H
#define MT_CHECKPOINT_HISTORY_H

#include "checkpoint/lineage.h"
#include "checkpoint/manifest.h"
#include "checkpoint/vfs.h"

/**
 * A run's own checkpoints among all that may lie in its output folder: those of a run that went further from an
 * earlier step, damaged ones, copies, those of another run. Nothing that another history wrote is ever taken for
 * this run's, counted or deleted; what is in the way is renamed to checkpoint-<step>.abandoned-<run id>.
 */
struct mt_history {
    const struct mt_lineage *lineage; /* borrowed */
    bool removes;                     /* --force: what this run set aside goes, once it has a checkpoint */
    bool settled;                     /* what other histories left is set aside */
    bool has;                         /* DIR/checkpoint-<step> is this process's own, or what it went on from: */
    bool full;
    uint64_t step;
    char sum[MT_SUM_TEXT];            /* of its sealed file */
};

/** Whether DIR has, from this process, what a save of `step` would write. */
bool mt_history_holds(const struct mt_history *h, const char *dir, uint64_t step, bool full);
/** Renames DIR/checkpoint-<step> out of the way; `to` may be NULL. */
int mt_history_set_aside(const struct mt_history *h, const struct mt_vfs *vfs, const char *dir, uint64_t step,
                         char to[4096], struct mt_err *err);
/** Sets all checkpoints of DIR aside: a run that starts anew. */
int mt_history_set_all_aside(const struct mt_history *h, const struct mt_vfs *vfs, const char *dir, struct mt_err *err);
/** After the first save of this process: sets aside what is not of its history, as later steps than it began at. */
int mt_history_settle(struct mt_history *h, const struct mt_vfs *vfs, const char *dir, struct mt_err *err);

/** A checkpoint that was complete but for its last rename gets its name. */
void mt_history_adopt(const struct mt_vfs *vfs, const char *dir);

struct mt_prune_policy {
    uint64_t keep, keep_every; /* newest; multiples of */
    bool keep_best;
    uint64_t best_step;
    const struct mt_lineage *lineage; /* NULL: of checkpoints without a run id */
};
/**
 * Removes older checkpoints of this lineage, and what a killed save or prune left. Those with training state and
 * those with weights alone are counted apart; what is not whole (a file missing or of another size; sums are not
 * read again) is neither counted nor removed.
 */
int mt_checkpoint_prune(const struct mt_vfs *vfs, const char *dir, const struct mt_prune_policy *p,
                        struct mt_err *err);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "checkpoint/lineage.h"
#include "checkpoint/manifest.h"
#include "checkpoint/vfs.h"

/**
 * Which checkpoints of an output folder are a run's own. Others may be from a run that resumed from an earlier step, or
 * from another run; damaged; or copies. Those of another history are never used as this run's, counted or deleted; one
 * with a name that this run needs is renamed to checkpoint-<step>.abandoned-<run id>.
 */
struct mt_history {
    const struct mt_lineage *lineage; /* borrowed */
    bool removes;                     /* --force: what this run set aside is removed once it has a checkpoint */
    bool settled;                     /* checkpoints of other histories have been set aside */
    bool has;                         /* DIR/checkpoint-<step> was written, or resumed from, by this process: */
    bool full;
    uint64_t step;
    char sum[MT_SUM_TEXT];            /* of its sealed file */
};

/** Does DIR have from this process what a save of `step` would write? Also where that cannot be read at the moment. */
bool mt_history_holds(const struct mt_history *h, const char *dir, uint64_t step, bool full);
/** Sets DIR/checkpoint-<step> aside: renames it to *to, which may be NULL. */
int mt_history_set_aside(const struct mt_history *h, const struct mt_vfs *vfs, const char *dir, uint64_t step,
                         char to[4096], struct mt_err *err);
/** Sets all checkpoints of DIR aside, for a run that starts over. */
int mt_history_set_all_aside(const struct mt_history *h, const struct mt_vfs *vfs, const char *dir, struct mt_err *err);
/** After the first save of this process: sets aside what is not of its history, such as steps after its start. */
int mt_history_settle(struct mt_history *h, const struct mt_vfs *vfs, const char *dir, struct mt_err *err);

/** Renames checkpoints that were completely written, but not yet renamed from .tmp. */
void mt_history_adopt(const struct mt_vfs *vfs, const char *dir);

struct mt_prune_policy {
    uint64_t keep, keep_every; /* number of newest ones to keep; steps to keep: multiples of this */
    bool keep_best;
    uint64_t best_step;
    const struct mt_lineage *lineage; /* NULL: prunes checkpoints without a run id */
};
/**
 * Removes older checkpoints of this lineage, and leftovers of a killed save or prune. Those with training state and
 * those with weights alone are counted separately; incomplete ones (a file is missing or has another size; checksums
 * are not verified) are neither counted nor removed.
 */
int mt_checkpoint_prune(const struct mt_vfs *vfs, const char *dir, const struct mt_prune_policy *p,
                        struct mt_err *err);
/** Makes DIR/best a symbolic link to the checkpoint of step *best, a convenience like `latest`. If that is not there
 * any more, *best becomes 0 and the link is removed. */
void mt_checkpoint_link_best(const struct mt_vfs *vfs, const char *dir, uint64_t *best);

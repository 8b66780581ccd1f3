/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_TRAIN_READBACK_H
#define MT_TRAIN_READBACK_H

#include "base/err.h"

/**
 * Reads a checkpoint back from its drive, on a thread of low priority, while training goes on: a drive may have taken
 * it and lost it all the same. Nothing older is removed before that.
 *
 * Thread-safety: one thread.
 */
typedef struct mt_readback mt_readback;

enum mt_readback_state { MT_READBACK_RUNS, MT_READBACK_GOOD, MT_READBACK_BAD };

/** `older`: another checkpoint that is read after it, whose damage is only warned of; or NULL. */
int mt_readback_start(mt_readback **out, const char *path, const char *older, struct mt_err *err);
/** *err: what is wrong with it. */
enum mt_readback_state mt_readback_poll(const mt_readback *r, struct mt_err *err);
/** Accepts NULL. One that runs is left to itself, and ends with the process at the latest. */
void mt_readback_drop(mt_readback **r);

#endif

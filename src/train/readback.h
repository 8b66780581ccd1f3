/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/err.h"

/**
 * Reads a checkpoint back from its drive, on a thread of low priority, while training goes on: a drive may have taken
 * it and lost it all the same. Nothing older is removed before that.
 *
 * Thread-safety: one thread.
 */
typedef struct mt_readback mt_readback;

/** BAD: it holds other bytes than were written. UNREAD: it could not be read, and may be good. */
enum mt_readback_state { MT_READBACK_RUNS, MT_READBACK_GOOD, MT_READBACK_BAD, MT_READBACK_UNREAD };

/** `older`: another checkpoint that is read after it, whose damage is only warned of; or NULL. */
int mt_readback_start(mt_readback **out, const char *path, const char *older, struct mt_err *err);
/** What a verification of a checkpoint says of it. */
enum mt_readback_state mt_readback_of(int rc);
/** *err: what is wrong with it, or why it could not be read. */
enum mt_readback_state mt_readback_poll(const mt_readback *r, struct mt_err *err);
/** Accepts NULL. One that runs is left to itself, and ends with the process at the latest. */
void mt_readback_drop(mt_readback **r);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "store/planes.h"

/**
 * Sums of planes in host memory, so that a bit that flips there is found. Memory without ECC loses bits, rarely, and
 * runs last weeks; drives have sums of their own (disk_sums.h).
 *
 * Frozen planes do not change: each block of MT_SUM_BLOCK bytes is summed once, and a thread checks a part of all
 * blocks at a time, so that MT_GUARD_PASSES passes check each. Trained planes change in updates alone: what an update
 * leaves is summed while it is in a core's cache, and compared when the next one reads it. States that are kept apart,
 * few bytes of small tensors, are not summed.
 *
 * Thread-safety: mt_guard_before() and mt_guard_after() from any threads, of ranges that do not overlap; everything
 * else from one thread.
 */
typedef struct mt_guard mt_guard;

enum { MT_GUARD_PASSES = 16 };

struct mt_guard_params {
    mt_plane_set *planes; /* borrowed; what is frozen is in place */
    size_t n_units;
    bool trained;         /* also what is trained */
    int n_threads;        /* to sum what is frozen, and to check all of it at once */
};
/** Sums what is frozen. */
int mt_guard_create(mt_guard **out, const struct mt_guard_params *p, struct mt_err *err);
/** Accepts NULL. Waits for the pass under way. */
void mt_guard_destroy(mt_guard **g);
/** Host memory of the sums. */
size_t mt_guard_bytes(const struct mt_plane_set_params *p, bool trained);

/** Starts the next pass over what is frozen; does nothing while the last one is under way. */
void mt_guard_pass(mt_guard *g);
/** One pass over all that is frozen, by all threads, once the pass under way is over. */
int mt_guard_check_frozen(mt_guard *g, struct mt_err *err);
/** A block of a frozen plane that is not what it was. */
struct mt_guard_block {
    size_t unit;
    enum mt_plane_kind kind;
    size_t first, bytes; /* of the plane */
    size_t at;           /* used by the module */
};
/** Takes a block that a pass has found; false: there is none. */
bool mt_guard_take(mt_guard *g, struct mt_guard_block *b);
/** Whether it is now again what it was. */
bool mt_guard_is_mended(mt_guard *g, const struct mt_guard_block *b);

/** Before an update of elements [first, first + n) of a unit's trained planes; false: they are not what the last one left.
 * True where that is not known, or `g` is NULL. */
bool mt_guard_before(mt_guard *g, size_t unit, size_t first, size_t n);
/** After it. */
void mt_guard_after(mt_guard *g, size_t unit, size_t first, size_t n);
/** Checks all that is trained, with no update under way. -EBADMSG (MT_ERR_RUNTIME). */
int mt_guard_check_trained(mt_guard *g, struct mt_err *err);

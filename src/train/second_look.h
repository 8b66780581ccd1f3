/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/layout.h"

/**
 * Reads the weights that a run has loaded from its model's files a second time, past the page cache, on a thread of low
 * priority beside the first steps: a bit that flipped while they were first read would be trained on, and its sum
 * would be taken for the model's.
 *
 * Thread-safety: one thread.
 */
typedef struct mt_second_look mt_second_look;

/** The layout is borrowed. sum: [n_tensors] of what was loaded (mt_base_sums.all); copied. began_ns: on the wall clock,
 * when it was loaded: files that changed since are not compared. */
int mt_second_look_start(mt_second_look **out, const struct mt_layout *l, const char *dir, const uint64_t *sum,
                         int64_t began_ns, struct mt_err *err);
/** Whether it has ended. */
bool mt_second_look_over(const mt_second_look *s);
/** Waits, and ends it. -EBADMSG (MT_ERR_INPUT): a tensor is not what was loaded. Accepts NULL. */
int mt_second_look_end(mt_second_look **s, struct mt_err *err);
/** Gives it up. Accepts NULL. */
void mt_second_look_drop(mt_second_look **s);

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_TRAIN_SHARED_H
#define MT_TRAIN_SHARED_H

#include "train/setup.h"

/* Several learners on one base: what setup.c does besides for them. One learner: nothing. */

/** -EINVAL: names a key in which a learner differs from the first, though all share it. */
int mt_shared_check(const struct mt_setup *s, struct mt_err *err);
/** Lays out the base with the adapters of all; sets the request's layouts, its learners and the rows of a step. */
int mt_shared_request(struct mt_setup *s, struct mt_err *err);
/** Once the plan is chosen: each learner's numerics and steps, and its layout in the places of the shared one. */
int mt_shared_take_choice(struct mt_setup *s, struct mt_err *err);

#endif

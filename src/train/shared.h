/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "train/setup.h"

/* Several learners on one base: what setup.c does besides for them. One learner: nothing. */

/** What decides whether configurations may share a base; all borrowed. */
struct mt_shared_of {
    const struct mt_config *cfg;
    const struct mt_numerics *numerics;
    const char *model; /* its folder, or a name: compared as text */
};
/** Why it cannot share a base with any other, as "it changes it (adapter.merge_every)"; NULL: it may. What only the
 * model can tell is not looked at. */
const char *mt_shared_alone(const struct mt_shared_of *a);
/** A key in which the two differ, though runs on one base share it; NULL: none. */
const char *mt_shared_difference(const struct mt_shared_of *a, const struct mt_shared_of *b);
/** What the plan chooses for all, and is auto in a learner, is taken from one that has it, from its checkpoint, say.
 * Then -EINVAL: names a key in which a learner differs from the first, though all share it. */
int mt_shared_check(const struct mt_setup *s, struct mt_err *err);
/** Lays out the base with the adapters of all; sets the request's layouts, its learners and the rows of a step. */
int mt_shared_request(struct mt_setup *s, struct mt_err *err);
/** Once the plan is chosen: each learner's numerics and steps, and its layout in the places of the shared one. */
int mt_shared_take_choice(struct mt_setup *s, struct mt_err *err);

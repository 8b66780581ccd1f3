/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "train/control.h"

/**
 * Runs all learners to their ends, or until asked to stop; each state is saved as its configuration says. If one ends,
 * or its data or saves fail, the others go on. p: [n], in the order of the setup's. *end: why the run
 * ended, of several reasons the last in the enumeration. Returns the first learner's error.
 */
int mt_train_run(const struct mt_train_params *p, size_t n, enum mt_train_end *end, struct mt_err *err);

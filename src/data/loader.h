/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "data/dataset.h"

/**
 * Makes the micro-batches of the next step on a thread of its own while the caller trains on those of
 * this one. The sampler alone decides what a step holds; the loader only works one step ahead.
 *
 * Thread-safety: one caller; nobody else may use the sampler while the loader exists.
 */
typedef struct mt_loader mt_loader;

/** Starts to make `first_step` at once. Never makes `end_step` or later steps ahead. */
int mt_loader_create(mt_loader **out, mt_sampler *s, uint64_t first_step, uint64_t end_step,
                     struct mt_err *err);
/** Accepts NULL; sets *l to NULL. */
void mt_loader_destroy(mt_loader **l);
/** The micro-batches of `step`, valid until the next call. Any step may be asked for; only the one after the last
 * is made ahead. */
int mt_loader_get(mt_loader *l, uint64_t step, const struct mt_step_data **out, struct mt_err *err);

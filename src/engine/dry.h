/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "engine/engine.h"

/**
 * Submits single instructions of the COMPUTE queue to a device that only counts (device/meter.h), so that their
 * device operations can be priced. It has no planes, threads or plan.
 *
 * Thread-safety: one thread.
 */
typedef struct mt_dry_engine mt_dry_engine;

/** Uses of `p` only dev, layout, numerics and the sizes of a micro-batch. */
int mt_dry_engine_create(mt_dry_engine **out, const struct mt_engine_params *p, struct mt_err *err);
/** Accepts NULL. */
void mt_dry_engine_destroy(mt_dry_engine **d);
/** Sets the step's micro-batches. Call it before mt_dry_engine_submit(); n <= p->max_micro. */
int mt_dry_engine_upload(mt_dry_engine *d, const struct mt_batch *micro, size_t n, struct mt_err *err);
int mt_dry_engine_submit(mt_dry_engine *d, const struct mt_program *prog, const struct mt_instr *in,
                         struct mt_err *err);

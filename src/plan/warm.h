/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "data/batch.h"
#include "engine/engine.h"

/**
 * Runs each device operation of a step once, on zeros, on p->dev, whose memory is still free: libraries load kernels
 * and make plans now, in memory beside the budget, and not in the middle of a run. Operations for which the free memory
 * is too little are left out. Does nothing on a device that shares the host's memory: it loads nothing later.
 *
 * Attention also depends on the documents of a micro-batch (cuda/fused.c has a plan for each of a bounded number of
 * shapes), so it runs, with the model's own arguments, over those of `step`'s micro-batches, the first MT_WARM_CALLS that
 * differ.
 *
 * `program`: of the step, as planned. `step`: NULL: none. Fails with the device's errors, or -ENOMEM of the host.
 */
enum { MT_WARM_CALLS = 16 };
int mt_plan_warm(const struct mt_engine_params *p, const struct mt_program_params *program,
                 const struct mt_step_data *step, struct mt_err *err);

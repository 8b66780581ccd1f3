/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_PLAN_WARM_H
#define MT_PLAN_WARM_H

#include "engine/engine.h"

/**
 * Runs each device operation of a step once, on zeros, on p->dev, whose memory is still free: libraries load kernels
 * and make plans now, in memory beside the budget, and not in the middle of a run. Operations for which the free memory
 * is too little are left out. Does nothing on a device that shares the host's memory: it loads nothing later.
 *
 * `program`: of the step, as planned. Fails with the device's errors, or -ENOMEM of the host.
 */
int mt_plan_warm(const struct mt_engine_params *p, const struct mt_program_params *program, struct mt_err *err);

#endif

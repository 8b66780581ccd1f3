/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "engine/binding.h"
#include "engine/budget.h"

/**
 * A lane: a device that units stream through, and what lives on it: a model's scratch and inputs, the buffers of the
 * device pools. An engine has as many as devices. Its binding shares planes, spill memory and host pools with all
 * others. Whose gradients are computed is no matter of a lane: learner.h.
 */
struct mt_lane {
    struct mt_binding b;
    bool *resident; /* [n_units] weights that stay on the device are loaded; constant during a run */
};

/** The lane of an instruction, of those of a host. */
static inline struct mt_lane *mt_lane_of(struct mt_lane *lanes, const struct mt_instr *in)
{
    return &lanes[in->lane];
}

/** number: of all hosts' lanes. shared: what all lanes of this host use, with the host pools' buffers. The caller
 * finishes the lane, on failure too. */
int mt_lane_init(struct mt_lane *lane, const struct mt_binding *shared, mt_device *dev, int number,
                 const struct mt_engine_params *p, const struct mt_engine_plan *plan, struct mt_err *err);
/** Accepts a lane of zeros. The device becomes idle. */
void mt_lane_finish(struct mt_lane *lane);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "engine/budget.h"

/* What the schedule knows of a layout's units: sizes of what they load, keep and send, and where that is. */

/** Sets plan->units and plan->values, of the layout's units and the choices that the plan has so far, and the number of
 * values of plan->program. */
void mt_engine_describe_units(struct mt_engine_plan *plan, const struct mt_engine_params *p);
/** Is the pool one of records? */
bool mt_engine_is_record_pool(int pool);
/** Number of records of a step, of those of the lane in that pool, that stay on the device. */
size_t mt_engine_kept_records(const struct mt_engine_plan *plan, const struct mt_engine_params *p, int lane, int pool);

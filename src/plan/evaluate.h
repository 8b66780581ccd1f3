/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_PLAN_EVALUATE_H
#define MT_PLAN_EVALUATE_H

#include "plan/search.h"

/** Prices for all placements of the request's micro-batch and logits chunk. */
int mt_plan_costs(mt_cost_table **out, const struct mt_plan_request *r, struct mt_err *err);
/** mt_plan_evaluate() with prices at hand; `graph` may be NULL. */
int mt_plan_with_costs(struct mt_plan_choice *out, const struct mt_plan_request *r, mt_cost_table *costs,
                       struct mt_sim_graph *graph, struct mt_err *err);
struct mt_engine_params mt_plan_engine_params(const struct mt_plan_request *r, mt_device *dev);

#endif

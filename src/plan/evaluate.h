/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "plan/search.h"

/** Prices for all placements of the request's micro-batch and logits chunk. */
int mt_plan_costs(mt_cost_table **out, const struct mt_plan_request *r, struct mt_err *err);
/** mt_plan_evaluate() with existing prices; `graph` may be NULL. */
int mt_plan_with_costs(struct mt_plan_choice *out, const struct mt_plan_request *r, mt_cost_table *costs,
                       struct mt_sim_graph *graph, struct mt_err *err);
/** The request for halves of layers. */
static inline struct mt_plan_request mt_plan_request_in_halves(const struct mt_plan_request *r)
{
    struct mt_plan_request t = *r;
    t.layout = r->halves;
    t.halves = NULL;
    return t;
}
/** Whether the order of updates is open, and backward possible. */
bool mt_plan_orders(const struct mt_plan_request *r);
/** Whether it fits the device without cutting layers, if every open choice is made to save memory. */
bool mt_plan_fits_device(const struct mt_plan_request *r);
/** Of generation: not all weights of the choice, decoded, stay on the device, and more of their codes may; or products
 * of a device with these limits.coded_rows take the codes. */
bool mt_plan_wants_codes(const struct mt_plan_choice *c, const struct mt_plan_request *r, size_t coded_rows);
enum { MT_PLAN_MAX_CHUNKS = 3, MT_PLAN_MAX_MICRO_BATCHES = 16 };
/** Logits chunks to try, ascending: the model's own, and longer ones, with faster matrix products. Returns how many. */
size_t mt_plan_chunks(const struct mt_plan_request *r, int64_t chunk[MT_PLAN_MAX_CHUNKS]);
/** Sets the request's chunk, and its pieces if they are auto. */
void mt_plan_take_chunk(struct mt_plan_request *r, int64_t chunk);
/** Micro-batches to try: the configured one, or 1, 2, 4 ... while they fit the device. Returns how many. */
size_t mt_plan_micro_batches(const struct mt_plan_request *r, int64_t list[MT_PLAN_MAX_MICRO_BATCHES]);
/** A counting device of the request's kind with this budget, less the memory that such a device needs itself. */
int mt_plan_meter(mt_device **dev, const struct mt_plan_request *r, uint64_t budget, struct mt_err *err);
/** The request's placement on an open device, not simulated; does not fail if host memory is too small. */
int mt_plan_place(struct mt_plan_choice *out, const struct mt_plan_request *r, mt_device *dev, struct mt_err *err);
/** The engine's parameters except the threads' CPUs, planes and disk. */
struct mt_engine_params mt_plan_engine_params(const struct mt_plan_request *r, mt_device *dev);
/** Both at once: *p are these parameters, *out is mt_engine_divide() of them. */
int mt_plan_divide(struct mt_engine_plan *out, struct mt_engine_params *p, const struct mt_plan_request *r,
                   mt_device *dev, struct mt_err *err);

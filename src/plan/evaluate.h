/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_PLAN_EVALUATE_H
#define MT_PLAN_EVALUATE_H

#include "plan/search.h"

/** Prices for all placements of the request's micro-batch and logits chunk. */
int mt_plan_costs(mt_cost_table **out, const struct mt_plan_request *r, struct mt_err *err);
/** mt_plan_evaluate() with prices at hand; `graph` may be NULL. */
int mt_plan_with_costs(struct mt_plan_choice *out, const struct mt_plan_request *r, mt_cost_table *costs,
                       struct mt_sim_graph *graph, struct mt_err *err);
/** The request with layers cut, which leaves nothing more to cut. */
static inline struct mt_plan_request mt_plan_request_in_halves(const struct mt_plan_request *r)
{
    struct mt_plan_request t = *r;
    t.layout = r->halves;
    t.halves = NULL;
    return t;
}
/** Does it fit the device at all: whole layers, and every open choice made to save memory? */
bool mt_plan_fits_device(const struct mt_plan_request *r);
enum { MT_PLAN_MAX_CHUNKS = 3, MT_PLAN_MAX_MICRO_BATCHES = 16 };
/** Logits chunks worth a look, rising: the model's own, and longer ones for the products' sake. How many. */
size_t mt_plan_chunks(const struct mt_plan_request *r, int64_t chunk[MT_PLAN_MAX_CHUNKS]);
/** Decides on one of them, and on its pieces where they are open. */
void mt_plan_take_chunk(struct mt_plan_request *r, int64_t chunk);
/** Micro-batches to look at: the one that is asked for, or 1, 2, 4 ... as far as their scratch fits. How many. */
size_t mt_plan_micro_batches(const struct mt_plan_request *r, int64_t list[MT_PLAN_MAX_MICRO_BATCHES]);
/** A device of the request's kind and this budget that only counts; a device of the kind takes its own bytes of it. */
int mt_plan_meter(mt_device **dev, const struct mt_plan_request *r, uint64_t budget, struct mt_err *err);
/** The request's placement on an open device, not simulated; what is too much for the host is not refused. */
int mt_plan_place(struct mt_plan_choice *out, const struct mt_plan_request *r, mt_device *dev, struct mt_err *err);
/** The engine's parameters, all of them but threads' CPUs, planes and disk; the only function that makes them. */
struct mt_engine_params mt_plan_engine_params(const struct mt_plan_request *r, mt_device *dev);

#endif

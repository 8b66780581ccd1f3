/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "engine/budget.h"

/* Facts of an engine's parameters, for its files: between which hosts, lanes and groups a step is divided, and what
 * its learners' objectives need. */

/** mt_optimizer_variants() of a step; max_micro counts each micro-batch as often. */
static inline size_t mt_engine_variants(const struct mt_engine_params *p)
{
    return p->train ? mt_optimizer_variants(&p->numerics) : 0;
}
/** How often a step has each micro-batch. */
static inline size_t mt_engine_times(const struct mt_engine_params *p)
{
    return p->train && p->numerics.mezo.rewards ? 0 : MT_MAX(mt_engine_variants(p), (size_t)1);
}
/** Groups of a step's micro-batches: variants of the weights are a group each. */
static inline struct mt_groups mt_engine_groups(const struct mt_engine_params *p)
{
    size_t variants = mt_engine_variants(p), own = p->numerics.groups > 1 ? (size_t)p->numerics.groups : 1;
    return (struct mt_groups){variants ? variants : own, p->max_micro};
}
/** Of a step. */
static inline enum mt_program_mode mt_engine_mode(const struct mt_engine_params *p)
{
    return !p->train ? MT_MODE_EVAL : mt_engine_variants(p) ? MT_MODE_ZEROTH : MT_MODE_TRAIN;
}
/** Lanes of an engine with these parameters. */
static inline size_t mt_engine_n_lanes(const struct mt_engine_params *p)
{
    return p->placement.lanes > 1 ? (size_t)p->placement.lanes : 1;
}
/** Hosts that share a step; lanes of all of them; and the first of this one's. */
static inline size_t mt_engine_n_hosts(const struct mt_engine_params *p)
{
    return p->placement.hosts > 1 ? (size_t)p->placement.hosts : 1;
}
static inline size_t mt_engine_all_lanes(const struct mt_engine_params *p)
{
    return mt_engine_n_hosts(p) * mt_engine_n_lanes(p);
}
static inline size_t mt_engine_first_lane(const struct mt_engine_params *p)
{
    return mt_engine_n_hosts(p) > 1 ? (size_t)p->placement.host * mt_engine_n_lanes(p) : 0;
}
/** Whether each unit's states are on one of several hosts alone: that of its lane_back. */
static inline bool mt_engine_is_owned(const struct mt_engine_params *p)
{
    return p->train && mt_engine_n_hosts(p) > 1 && p->placement.host_states == MT_HOST_STATES_OWNED;
}
/** Whether lanes share the groups of micro-batches, not the units: those of several hosts do. */
static inline bool mt_engine_by_data(const struct mt_engine_params *p)
{
    return mt_engine_n_hosts(p) > 1 || (p->placement.lanes > 1 && p->placement.map == MT_MAP_DATA);
}
/** Are weights encoded once a load for products in FP8? Where a load serves one micro-batch this would gain nothing. */
static inline bool mt_engine_codes_weights(const struct mt_engine_params *p)
{
    const struct mt_numerics *n = &p->numerics;
    bool passes = p->cache.slots && !p->train;                       /* of generation */
    bool directs = p->train && n->optimizer && n->optimizer->direct; /* reads weights, too */
    int64_t loads = mt_engine_by_data(p) ? (int64_t)mt_engine_all_lanes(p) : 1;
    bool several = n->rows_per_step * (int64_t)mt_row_chunks(n) > n->micro_batch * loads;
    return n->compute == MT_COMPUTE_FP8 && several && !passes && !directs;
}

/* objective.c */
/** Whether training rows of a learner are weighed in that way, or a later one of the list. */
bool mt_engine_weighs(const struct mt_engine_params *p, enum mt_row_weights how);
/** Further tokens of a loss row that a learner's objective gives gradients of. */
size_t mt_engine_few(const struct mt_engine_params *p);
/** Host memory for a teacher's tokens, which the data have beside a step's rows, or which an evaluation finds. */
size_t mt_engine_top_bytes(const struct mt_engine_params *p, const struct mt_model_params *mp);

/* tiers.c */
/** Decides what is kept on the disk; sizes the host pools. `wanted`: by host pool, number of objects that a step spills
 * to it. Returns the host memory that the plan takes, which may be more than p->host_bytes. */
uint64_t mt_tiers_choose(struct mt_engine_plan *plan, const struct mt_engine_params *p,
                     const int wanted[MT_N_POOLS]);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "plan/evaluate.h"
#include "plan/search.h"

/* A search of one layout's placements: search_try.c tries a candidate, search.c groups of them,
 * search_mixtures.c mixtures. */

enum {
    MT_SEARCH_MAX_KEPT = 5, /* numbers of kept layers to try */
    MT_SEARCH_MAX_GROUPS = MT_PLAN_MAX_CHUNKS * MT_PLAN_MAX_MICRO_BATCHES * (3 + MT_SEARCH_MAX_KEPT),
};
#define MT_SEARCH_WORTH_WEARING 1.05 /* a candidate that writes more to drives must be this much faster */
#define MT_SEARCH_NEAR_ENOUGH 1.002  /* a group this close to its bound is not refined */

struct mt_search {
    const struct mt_plan_request *r;
    struct mt_plan_choice best;
    bool found;
    struct mt_plan_tried *tried;
    size_t n_tried, cap_tried;
    struct mt_err err; /* why nothing fits: of the candidate that lacks least */
    bool has_err;
    bool mixing; /* candidates trade host memory for time: some write more to drives */
    double lean_writes; /* mixing: bytes that the best candidate before these writes to drives */
    double gain;        /* the most that other numbers of slots have shortened a group's step: a factor below 1, or 0 */
};

/** Candidates with the same compute work, which is a lower bound of their time. */
struct mt_search_group {
    struct mt_plan_request r;
    mt_cost_table *costs; /* borrowed */
    double least;         /* seconds of compute, without any waiting */
    bool fits;            /* it was tried, and fits */
};

struct mt_search_groups {
    struct mt_search_group g[MT_SEARCH_MAX_GROUPS];
    size_t n;
    mt_cost_table *costs[MT_PLAN_MAX_CHUNKS * MT_PLAN_MAX_MICRO_BATCHES];
    size_t n_costs;
};

/* search_try.c */

/** Tries a candidate and keeps the better one. *sim is its simulation, or all 0 if it does not fit. */
int mt_search_try(struct mt_search *s, const struct mt_plan_request *r, mt_cost_table *costs, struct mt_sim_result *sim,
                  struct mt_err *err);
/** Seconds of a candidate by which it is chosen: what wears drives more must be worth it. */
double mt_search_seconds(const struct mt_search *s, const struct mt_sim_result *sim);
/** Sets g->least: compute seconds of the step's draft, which has no buffers yet. */
int mt_search_bound(struct mt_search_group *g, struct mt_err *err);
/** Whether a step takes long to simulate. */
bool mt_search_is_long(const struct mt_search_group *g);

/* search_mixtures.c */

/** After all groups: tries to offload some layers' records and to recompute the others. */
int mt_search_mixtures(struct mt_search *s, const struct mt_search_groups *all, struct mt_err *err);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "plan/evaluate.h"
#include "plan/search.h"

/* A search of one layout's placements: search.c makes groups of them, search_try.c tries a candidate, search_moves.c
 * looks for better ones near it. */

enum {
    MT_SEARCH_MAX_KEPT = 5, /* numbers of kept layers to try */
    MT_SEARCH_MAX_GROUPS = MT_PLAN_MAX_CHUNKS * MT_PLAN_MAX_MICRO_BATCHES * (3 + MT_SEARCH_MAX_KEPT),
};
#define MT_SEARCH_WORTH_WEARING 1.05 /* a candidate that writes more to drives must be this much faster */
#define MT_SEARCH_NEAR_ENOUGH 1.002  /* a group this close to its bound is not refined */

/** Candidates with the same compute work, which is a lower bound of their time, and the best of them. */
struct mt_search_group {
    struct mt_plan_request r;
    mt_cost_table *costs;     /* borrowed */
    double least;             /* seconds of compute, without any waiting */
    double seconds;           /* of the best so far, of equals that with least host memory; INFINITY: none fits yet */
    uint64_t host_bytes;
    struct mt_placement best; /* its placement, with slots */
};

struct mt_search {
    const struct mt_plan_request *r;
    struct mt_plan_choice best;
    bool found;
    struct mt_plan_tried *tried;
    size_t n_tried, cap_tried;
    struct mt_err err;  /* why nothing fits: of the candidate that lacks least */
    bool has_err;
    double lean_writes; /* bytes to drives of the best candidate before host memory was traded for time; INFINITY */
    struct mt_search_group g[MT_SEARCH_MAX_GROUPS];
    size_t n;
    mt_cost_table *costs[MT_PLAN_MAX_CHUNKS * MT_PLAN_MAX_MICRO_BATCHES];
    size_t n_costs;
};

/* search_try.c */

/** Tries a candidate of the group and keeps the better one, in it and in the search. *seconds, unless NULL: by which it
 * is chosen, where what wears drives more must be worth it; INFINITY: it does not fit. */
int mt_search_try(struct mt_search *s, struct mt_search_group *g, const struct mt_placement *p, double *seconds,
                  struct mt_err *err);
/** Sets g->least: compute seconds of the step's draft, which has no buffers yet. */
int mt_search_bound(struct mt_search_group *g, struct mt_err *err);
/** Whether a step takes long to simulate. */
bool mt_search_is_long(const struct mt_search_group *g);

/* search_moves.c */

/** After all groups, in order of their bounds: offloads some layers' records and recomputes the others, and goes on from
 * the best candidates by small changes. */
int mt_search_refine(struct mt_search *s, struct mt_err *err);

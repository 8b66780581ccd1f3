/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "engine/memory.h"
#include "plan/sim.h"

/** A layout, and its halves or NULL. */
struct mt_plan_cuts {
    struct mt_layout *layout, *halves;
};

/** The run, the machine, and what the user has fixed; the search chooses what is auto. */
struct mt_plan_request {
    const struct mt_machine *machine; /* borrowed, like layout */
    const struct mt_layout *layout;
    const struct mt_layout *halves;   /* the same model in halves of layers, or, to generate, with packed weights that
                                         stay codes; used if the other does not fit or is slower; or NULL */
    const struct mt_plan_cuts *also; /* [n_also] what has to fit, too, where changes are looked for: of other blocks */
    size_t n_also;
    struct mt_numerics numerics;   /* micro_batch and logits_chunk may be auto; rows_per_step: of all learners */
    const struct mt_numerics *learner; /* [n_learners] of each; borrowed */
    size_t n_learners;             /* 0: one, with `numerics` */
    struct mt_placement placement; /* threads and budgets are not auto */
    bool train;                    /* false: evaluation only */
    struct mt_cache_shape cache;   /* of that: with which texts are generated; slots 0: without */
    size_t draws;                  /* of that: most tokens of a pass that generates; 0: none does */
    size_t top;                    /* of that: likeliest tokens of each loss row to find; 0: none */
    uint64_t more[MT_MAX_LANES];   /* of several hosts: what each may use beyond placement.host_budget, which is the
                                      least of theirs */
    uint64_t drive_room[MT_MAX_LANES]; /* of several hosts: bytes that each one's drives may take; 0: unknown, 1: none */
    size_t docs_per_row;           /* upper bound */
    uint64_t resident;    /* bytes that the process has in memory already; 0: unknown */
    bool makes_products;  /* of the device, which is here (struct mt_device_limits) */
    uint64_t process;     /* of several hosts: the first one's mt_plan_process_bytes(), so that all divide as much; 0: own */
    uint64_t loading;     /* mt_plan_loading_bytes(); 0: computed each time */
    uint64_t disk_budget; /* 0: what the machine's drives hold */
    int drives;           /* 0: nothing may be on the disk */
    double link_gbps;
    struct mt_network net; /* between hosts; gbs 0: MT_NET_GBS */
};

/** What the host may use of its memory. */
uint64_t mt_plan_host_limit(const struct mt_plan_request *r);

/** A candidate of a search and its simulated step; seconds 0: it does not fit. */
struct mt_plan_tried {
    struct mt_numerics numerics;
    struct mt_placement placement;
    double seconds, written; /* to drives, in bytes */
    int64_t asked_slots;     /* those of the request, which may be MT_AUTO */
    uint64_t host_bytes, device_bytes;
};

/** Where a unit's planes are. */
enum mt_unit_tier {
    MT_UNIT_ON_HOST,
    MT_UNIT_STATES_ON_DISK, /* lo and optimizer states, and gradients if host memory is short; weights
                               stay in host memory */
    MT_UNIT_ON_DISK,        /* weights, too: they are read for every load */
    MT_N_UNIT_TIERS,
};

/** Bytes of all units' planes of a kind, in host memory and on drives. */
struct mt_plan_plane {
    const char *use; /* in the memory table */
    uint64_t host_bytes, disk_bytes;
};

struct mt_plan_choice {
    const struct mt_layout *layout; /* the request's, or its halves */
    double whole_seconds;           /* with halves: of a step with whole layers, if they fit and both were searched */
    struct mt_numerics numerics;    /* the request's with nothing auto, like placement */
    struct mt_placement placement;
    size_t n_micro;                 /* micro-batches of a step */
    struct mt_engine_plan engine;   /* its `program.units` and `on_disk` are those of training */
    size_t n_tier[MT_N_UNIT_TIERS]; /* units in each tier */
    uint64_t host_bytes; /* planes, spill, staging, the process; on the cpu device also its arena */
    struct mt_plan_plane plane[MT_N_PLANES];
    uint64_t windows_bytes, sums_bytes, guard_bytes, process_bytes, disk_bytes;
    struct mt_sim_result sim;
    struct mt_plan_tried *tried; /* [n_tried], owned; NULL after mt_plan_evaluate() */
    size_t n_tried;
    size_t n_searched; /* candidates, with those of the layout not chosen */
};
void mt_plan_choice_finish(struct mt_plan_choice *c);
/** The memory table: rows of all tiers, the process's included. */
void mt_plan_add_rows(struct mt_memory_rows *rows, const struct mt_plan_choice *c);

/**
 * One placement of `layout`, all of it fixed by the request (the engine's rules decide what is `auto`): its memory and
 * its simulated step. -ENOSPC (MT_ERR_NO_FIT): the message says what is short by how much. `graph`: receives the
 * simulated tasks; may be NULL.
 */
int mt_plan_evaluate(struct mt_plan_choice *out, const struct mt_plan_request *r,
                     struct mt_sim_graph *graph, struct mt_err *err);

/** The request with all choices fixed, to be evaluated and not searched. */
struct mt_plan_request mt_plan_request_as(const struct mt_plan_request *r, const struct mt_plan_choice *c);

/** 0 if it fits, in halves of layers if necessary; -ENOSPC if not. The same arithmetic, without simulating. */
int mt_plan_fits(const struct mt_plan_request *r, struct mt_err *err);

/** Whether the placement with the least memory that the request allows fits: if not, a search finds nothing. */
bool mt_plan_could_fit(const struct mt_plan_request *r);

/**
 * The placement with the least simulated time of a step within the budgets. Candidates with the same micro-batch,
 * activation mode and logits chunk share their compute time, which is a lower bound: groups that cannot win are
 * skipped. If whole layers do not fit the device, or leave too little memory for all records or separate cast buffers,
 * the request's halves are searched, too. Deterministic.
 */
int mt_plan_search(struct mt_plan_choice *out, const struct mt_plan_request *r, struct mt_err *err);

/** The distinct device operations of the request's steps, for every open micro-batch and cut; the caller frees *ops.
 * None if nothing fits. */
int mt_plan_operations(struct mt_metered **ops, size_t *n, const struct mt_plan_request *r,
                       struct mt_err *err);

/** A change that would make it fit. */
struct mt_plan_change {
    char what[256];  /* "memory.activations = recompute", "--set adapter.kind=lora", "host memory of 125 GiB instead of
                        64 GiB (--host-mem 125GiB)": followed as it stands, it fits */
    double seconds;  /* of a step with the change */
    bool hardware;   /* costs money */
};
/** Up to `max` changes, each sufficient alone, cheapest first: settings by time per token, then hardware, of which
 * memory that no workstation takes comes last. */
size_t mt_plan_changes(struct mt_plan_change *out, size_t max, const struct mt_plan_request *r);

/**
 * Memory of the program itself, not part of the placement: what is resident before the engine is made (code, libraries,
 * tables of data sets, scratch of the compute threads), and what it allocates later: threads, the engine's lists,
 * tokens of the steps under way, a piece of a tensor that is being saved. Or what the request says (r->process).
 */
uint64_t mt_plan_process_bytes(const struct mt_plan_request *r, uint64_t tokens_per_step);
/** Of that, what a tensor takes that is being loaded or saved (a mixture has tens of thousands), and after loading the
 * code of products. */
uint64_t mt_plan_loading_bytes(const struct mt_plan_request *r);
/** Additional memory if anything is on drives: requests, and the longer lists of steps that make them. */
uint64_t mt_plan_drive_bytes(const struct mt_layout *layout);

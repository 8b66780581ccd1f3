/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/mem.h"
#include "device/device.h"
#include "model/model.h"
#include "net/net.h"
#include "optim/optimizer.h"
#include "schedule/program.h"
#include "settings/settings.h"
#include "store/guard.h"
#include "store/planes.h"

/** What an engine is made of, and how budgets are divided for it, before there is one. */

struct mt_engine_params {
    mt_device *dev;                 /* the first lane's; borrowed, like all pointers below */
    mt_device *const *other_dev;    /* [placement.lanes - 1] those of the other lanes, each with limits like dev's; not
                                       read by mt_engine_plan() */
    const struct mt_layout *layout;
    mt_plane_set *planes;           /* may be NULL for mt_engine_plan() */
    struct mt_numerics numerics;    /* nothing auto; consistent with the sizes below */
    const struct mt_numerics *learner; /* [n_learners] of each: its optimizer's keys, clipping and seed are read */
    size_t n_learners;              /* 0: one, with `numerics` */
    struct mt_placement placement;  /* auto: decided by budget.c; unit and budgets are not read */
    size_t max_tokens, max_docs, max_len, max_micro; /* of a micro-batch; max_micro: of a step, of all learners */
    size_t assumed_rows;            /* to predict times: tokens of a step, spread evenly over experts; else 0 */
    struct mt_cache_shape cache;    /* of generation; slots 0: none. Of one micro-batch; where the engine
                                       trains, of mt_engine_draw() alone */
    bool draws;                     /* tokens are drawn: mt_engine_draw() */
    size_t top;                     /* how many of the likeliest tokens of each loss row an evaluation finds; 0: none */
    bool train;                     /* false: evaluation only, no gradients or optimizer */
    enum mt_isa isa;
    const int *update_cpus;           /* [placement.threads] or NULL */
    bool may_use_disk;              /* there are folders for scratch files */
    uint64_t host_bytes;            /* host memory for planes, staging and, if the device shares host
                                       memory, the device's; UINT64_MAX: unlimited */
    uint64_t more[MT_MAX_LANES];    /* of several hosts: what each has beyond host_bytes, for units that it owns */
    uint64_t drive_room[MT_MAX_LANES]; /* of several hosts: bytes that each one's drives may take; 0: unknown, 1: none */
    uint64_t drive_bytes;           /* part of host_bytes that the process itself needs if anything is on the disk */
    mt_disk *disk;                  /* may be NULL for mt_engine_plan(), and if nothing is on the disk */
    struct mt_file_weights *files;  /* weights that are read in place; NULL as for disk */
    mt_guard *guard;                /* of the planes in host memory; NULL: updates are not checked */
    struct mt_net *net;             /* between the placement's hosts; NULL: one host */
    uint64_t disk_spill_at;         /* offset of the engine's spill space (plan.disk_spill_bytes) */
};

/** Planes of a unit, in any tier. */
struct mt_unit_planes {
    mt_plane_bits has;
    size_t bytes[MT_N_PLANES]; /* 0: none of the kind */
};

/** How the device budget is divided; the engine allocates exactly this. */
struct mt_engine_plan {
    struct mt_arrays arrays;          /* what follows, and the program's `units` and `values` */
    struct mt_program_params program;
    struct mt_unit_shape *units;
    struct mt_value *values;
    size_t pool_bytes[MT_N_POOLS];    /* all buffers of the pool on all lanes, alignment included */
    size_t scratch, logits, inputs, tables; /* of each lane */
    size_t device_bytes;              /* sum of the above on all devices */
    size_t lane_bytes[MT_MAX_LANES];  /* of these, on each */
    size_t bytes_of_host[MT_MAX_LANES]; /* device_bytes of each host */
    size_t spill_bytes;               /* host memory: spilled boundaries, their gradients and records */
    size_t sum_bytes;                 /* part of it, which is never on the disk: sums of groups */
    size_t staging_bytes;             /* host memory: inputs and statistics */
    size_t h2d_bytes, d2h_bytes;      /* over the link in a full step, at most: of a packed gradient all rows count */
    enum mt_activations activations;  /* as chosen */
    size_t n_stay, n_caches_stay;     /* where tokens are drawn: units whose weights, and whose cache, keep
                                         their buffers */
    mt_plane_bits *on_disk;           /* [n_units] planes on the disk */
    struct mt_unit_planes *planes; /* [n_units] */
    bool uses_disk;
    int n_deals;                      /* times that units were dealt anew, by the room that their owners have */
    bool loads_table;                 /* the embedding's, though its rows were to be gathered */
    mt_plane_bits *in_files;          /* [n_units] planes read in place from the model's files */
    bool uses_files;
    mt_plane_bits *owned, *elsewhere; /* [n_units] planes that one of several hosts alone has; that this one has not */
    int64_t base_blocks;              /* blocks that could be read in place but are in host memory */
    size_t file_bytes;                /* host memory for reading them: blocks under way */
    size_t top_bytes;                 /* host memory for a teacher's tokens: of two steps, or of one that finds them */
    uint64_t disk_spill_bytes;
    struct mt_disk_traffic traffic;   /* of a full step that makes an update */
};

/**
 * Chooses buffers for the device's budget. -ENOSPC (MT_ERR_NO_FIT): the message names what is short, by how much, and
 * what would help. Finish with mt_engine_plan_finish().
 */
int mt_engine_plan(struct mt_engine_plan *out, const struct mt_engine_params *p, struct mt_err *err);
/** The same without building the step: spill_bytes, h2d_bytes and d2h_bytes stay 0. */
int mt_engine_divide(struct mt_engine_plan *out, const struct mt_engine_params *p, struct mt_err *err);
/**
 * The rest of a plan that mt_engine_divide() made from *p; *step is the program of a full step with an update, which
 * the caller finishes. *host_bytes: host memory that it takes, the device's included if the device shares host memory.
 * If that is more than p->host_bytes: -ENOSPC, and the step is not built; NULL: the caller checks it. The plan is to be
 * finished in any case, *step, which must be all 0, after success.
 */
int mt_engine_plan_step(struct mt_engine_plan *plan, struct mt_program *step, uint64_t *host_bytes,
                        const struct mt_engine_params *p, struct mt_err *err);
/** Whether updates can be made under backward: no learner needs the norm of its whole gradient. */
bool mt_engine_may_update_under_backward(const struct mt_engine_params *p);
/** Whether the device's budget is enough. */
bool mt_engine_fits(const struct mt_engine_params *p);
void mt_engine_plan_finish(struct mt_engine_plan *plan);
/** Takes from *planes, those of the whole layout, the ones that a run with this plan does not have, and says where the
 * others are; borrows from plan. */
void mt_engine_plan_trim(const struct mt_engine_plan *plan, struct mt_plane_set_params *planes);
/** The same parameters, as the model has them. */
struct mt_model_params mt_engine_model_params(const struct mt_engine_params *p);

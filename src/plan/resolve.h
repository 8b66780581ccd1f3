/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "config/config.h"
#include "plan/search.h"

/**
 * The only place where `auto` is resolved and budgets are computed. Run, plan and bench all use it, so that a run does
 * what was planned.
 *
 *   mt_plan_limits_here()    what this machine has now (mt_plan_limits_of(): another machine)
 *   mt_resolve_request()     from the configuration: rows of a step, dtypes, threads, budgets in bytes
 *                            The caller opens a device and adds layouts, resident bytes and the machine's profile.
 *   mt_resolve()             all that is still auto: by the search, or without a profile by mt_resolve_by_rules()
 */

/** Resources of a machine. Budgets are shares of them. */
struct mt_plan_limits {
    const char *kind;      /* device that a run of the configuration opens: "cpu" or "cuda" */
    uint64_t host_bytes;   /* that a process may use */
    int n_hosts;           /* that share a run; 0: one */
    uint64_t each[MT_MAX_LANES]; /* [n_hosts] host_bytes of each; 0: the same */
    uint64_t drive_room[MT_MAX_LANES]; /* [n_hosts] bytes that the drives of each may take; 0: unknown, 1: none */
    uint64_t device_bytes; /* of the GPU's own memory, of several the least; on this machine only what is free */
    uint64_t device_share; /* of each host's memory, which a device without its own has: in `each`, not in host_bytes */
    uint64_t device_reserve; /* of them, left free by a budget of `auto`: mt_plan_device_reserve() */
    int threads;           /* one per core that may be used */
    int drives;            /* that may hold states and records */
    int n_gpus;            /* devices that device.gpus names; 0: of another machine, which has what is named */
    int gpu[MT_MAX_DEVICES]; /* their indices */
};
/** Of this machine, now. Call it before a device is opened, which takes some of the free memory. */
int mt_plan_limits_here(struct mt_plan_limits *out, const struct mt_config *c, struct mt_err *err);
/** Of a machine, from its profile: all of its memory, free or not. */
struct mt_plan_limits mt_plan_limits_of(const struct mt_machine *m);

/**
 * Device memory outside the arena on a GPU of `total_bytes`: kernels that libraries load or build on first use, their
 * stacks, the page tables by which it finds the host's memory, of `host_bytes`, and more if a display uses the GPU.
 */
uint64_t mt_plan_device_reserve(uint64_t total_bytes, uint64_t host_bytes, bool display);
/** What a budget of `auto` takes of host memory. */
uint64_t mt_plan_host_budget(uint64_t total_bytes);

/**
 * The configuration's numerics with the rows of a step, the gradient's dtype and the optimizer; micro_batch and
 * logits_chunk stay as they are. -EINVAL (MT_ERR_USAGE): tokens per step are not a multiple of the row length.
 */
int mt_resolve_numerics(struct mt_numerics *out, const struct mt_config *c, struct mt_err *err);
/** By its type and its states; NULL: it has no such states. */
const struct mt_optimizer *mt_plan_optimizer(const struct mt_config *c);
/** Rows of a micro-batch without a search: from the numerics only, so the same on every machine. */
int64_t mt_resolve_micro_batch(const struct mt_numerics *n);
/** The request of a training run, except layout, halves, machine and resident, which the caller sets. */
int mt_resolve_request(struct mt_plan_request *out, const struct mt_config *c, const struct mt_plan_limits *limits,
                       struct mt_err *err);
/** Shares the request out to the hosts of its placement (placement.hosts); this is `host`. -EINVAL: names what only one
 * can do. */
int mt_plan_on_hosts(struct mt_plan_request *r, const struct mt_config *cfg, int host, struct mt_err *err);
/**
 * The search's choice. -ENOSPC (MT_ERR_NO_FIT): nothing fits; -ENOENT: the profile has no rates of the drives that the
 * request uses.
 */
int mt_resolve(struct mt_plan_choice *out, const struct mt_plan_request *r, struct mt_err *err);
/**
 * Without a search, by rules: on an open device, with its budget, and with halves if layers do not fit. No step is
 * simulated, and too little host memory is no error: see choice.host_bytes. -ENOSPC: the device is too small.
 */
int mt_resolve_by_rules(struct mt_plan_choice *out, const struct mt_plan_request *r, mt_device *dev,
                        struct mt_err *err);

/** What a resumed run takes from its checkpoint before anything is laid out. All NULL: a new run. Borrowed. */
struct mt_resumed {
    const cJSON *from_files; /* an object whose keys are the frozen tensors that are loaded from the model's folder; NULL:
                                all, unless weights are random */
    const char *dir;         /* the checkpoint: it says which modules have the adapters that came from adapter.path, so
                                that the run no longer needs that folder */
    uint64_t phase;          /* train.blocks: which one; without a struct mt_resumed the lowest block is trained */
    const char *overlay;     /* name of the overlay with the blocks that were trained before; NULL: none */
    const cJSON *unpacked;   /* on a host without the overlay: mt_weights_mark_stored()'s. NULL: none */
    uint64_t step, rows, rows_per_epoch; /* steps done, their rows of the data, and those of an epoch then; rows 0: an
                                earlier version did not count them */
    bool rounds;             /* an earlier version began the run: a share of the steps is rounded to the nearest */
};
/** -EINVAL: model.freeze leaves nothing to train. */
int mt_plan_check_trained(const struct mt_layout *l, struct mt_err *err);
/**
 * The model as memory.unit cuts it; *halves: in halves of layers if memory.unit is auto, else NULL. The caller destroys
 * both, on failure too. dir: the model's folder, or NULL. resumed: NULL for a new run.
 */
int mt_plan_lay_out(struct mt_layout **layout, struct mt_layout **halves, const struct mt_config *cfg,
                    const struct mt_hf_config *hf, const char *dir, const struct mt_resumed *resumed,
                    struct mt_err *err);
/** The same for generation: if weights are packed, *halves is not cut, but leaves them codes in their buffers
 * (mt_layout_keep_codes()). */
int mt_plan_lay_out_to_generate(struct mt_layout **layout, struct mt_layout **halves, const struct mt_config *cfg,
                                const struct mt_hf_config *hf, const char *dir, struct mt_err *err);
/** What a model is laid out from; the arguments above. */
struct mt_lay_out {
    const struct mt_config *cfg;
    const struct mt_hf_config *hf;
    const char *dir;
    const struct mt_resumed *resumed;
};
/** The same for the adapters of several configurations on one base: o: [n]; what is not of adapters is o[0]'s. */
int mt_plan_lay_out_shared(struct mt_layout **layout, struct mt_layout **halves, const struct mt_lay_out *o, size_t n,
                           struct mt_err *err);
/** The blocks of train.blocks that a run has yet to train, but for the one that is laid out. */
struct mt_plan_blocks {
    struct mt_lay_out of;           /* resumed: the phase under way; NULL: none is, and the lowest block is laid out */
    const struct mt_layout *layout; /* that one's */
    uint64_t steps;                 /* of the run; 0: not known, and so all blocks */
    /* may take both (MT_GIVE) */
    int (*fits)(void *ctx, struct mt_layout **layout, struct mt_layout **halves, struct mt_err *err);
    void *ctx;
};
/** Calls `fits` for them, of those with equal layers for the lowest alone, which takes the most memory. Returns what that
 * does, if not 0, with the block's layers before its error. */
int mt_plan_check_blocks(const struct mt_plan_blocks *p, struct mt_err *err);
/** Bytes that a merge of adapters (adapter.merge_every) writes: what they were added to, and modules trained whole, in
 * bf16. */
uint64_t mt_plan_merged_bytes(const struct mt_layout *l);
/** Disk that overlays of the run (checkpoint/overlay.h) have yet to take, at least; p->of.resumed is not NULL. */
uint64_t mt_plan_overlay_bytes(const struct mt_plan_blocks *p);
/** Whether variants of the weights sample, each with noise (mt_objective.by_rewards). */
bool mt_plan_by_rewards(const struct mt_config *c);
/** Texts that a round of a policy samples: each of such variants has its own. */
int64_t mt_plan_rollouts(const struct mt_config *c);
/** Replaces train.learning_rate = auto by a number, and sets its origin to the reason; *why, unless NULL: that in words
 * for a message, or NULL if it was set. */
int mt_resolve_learning_rate(struct mt_config *cfg, const char **why, struct mt_err *err);

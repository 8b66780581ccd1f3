/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_PLAN_RESOLVE_H
#define MT_PLAN_RESOLVE_H

#include "config/config.h"
#include "plan/search.h"

/**
 * The one place where `auto` ends and budgets are computed: run, plan, bench and their searches all go through it, so
 * that what is planned is what is run.
 *
 *   mt_plan_limits_here()    what the machine has now (mt_plan_limits_of(): another machine)
 *   mt_resolve_request()     from the configuration: rows of a step, dtypes, threads, budgets in bytes
 *                            The caller opens a device and adds layouts, resident bytes and the machine's profile.
 *   mt_resolve()             what is left of auto: by the search, or by rules where there is no profile
 */

/** What there is on a machine. Budgets are shares of it. */
struct mt_plan_limits {
    const char *kind;      /* device that a run of the configuration opens: "cpu" or "cuda" */
    uint64_t host_bytes;   /* that a process may take */
    uint64_t device_bytes; /* of the GPU's own memory; here, what is free of it */
    uint64_t device_reserve; /* of them, what a budget of `auto` leaves: mt_plan_device_reserve() */
    int threads;           /* one a core that may be used */
    int drives;            /* that may hold states and records */
};
/** Of this machine as it is now. Ask before a device is opened: that takes some of what is free. */
int mt_plan_limits_here(struct mt_plan_limits *out, const struct mt_config *c, struct mt_err *err);
/** Of a machine by its profile: all that it has. */
struct mt_plan_limits mt_plan_limits_of(const struct mt_machine *m);

/**
 * Device memory for what lives outside the arena of a GPU of `total_bytes`: kernels that libraries load or build when
 * they are first asked for, and their stacks; what a display takes more.
 */
uint64_t mt_plan_device_reserve(uint64_t total_bytes, bool display);

/**
 * The configuration's numerics with the rows of a step, the gradient's dtype and the optimizer; micro_batch and
 * logits_chunk stay as they are. -EINVAL (MT_ERR_USAGE) where tokens a step are no whole number of rows.
 */
int mt_resolve_numerics(struct mt_numerics *out, const struct mt_config *c, struct mt_err *err);
/** Rows of a micro-batch where no search chooses them: a rule of the numerics alone, the same on every machine. */
int64_t mt_resolve_micro_batch(const struct mt_numerics *n);
/** The request of a training run, but for layout, halves, machine and resident, which are the caller's to set. */
int mt_resolve_request(struct mt_plan_request *out, const struct mt_config *c, const struct mt_plan_limits *limits,
                       struct mt_err *err);
/**
 * The search's choice. -ENOSPC (MT_ERR_NO_FIT): nothing fits; -ENOENT: the request uses drives that the profile has no
 * rates of.
 */
int mt_resolve(struct mt_plan_choice *out, const struct mt_plan_request *r, struct mt_err *err);
/**
 * Without a search, by rules: on an open device whose budget it takes, with halves where layers do not fit. No step is
 * simulated, and what is too much for the host is not refused: choice.host_bytes says it. -ENOSPC where the
 * device is too small.
 */
int mt_resolve_by_rules(struct mt_plan_choice *out, const struct mt_plan_request *r, mt_device *dev,
                        struct mt_err *err);

/**
 * The model as memory.unit cuts it; *halves: in halves of layers where that is left open, or NULL. The caller's, on
 * failure too. dir: the model's folder, where there is one. from_files: an object with the names of
 * the frozen tensors that come from there; NULL: all, unless they are random.
 */
int mt_plan_lay_out(struct mt_layout **layout, struct mt_layout **halves, const struct mt_config *cfg,
                    const struct mt_hf_config *hf, const char *dir, const cJSON *from_files, struct mt_err *err);
/** train.learning_rate = auto becomes a number, with its reason as origin. */
int mt_resolve_learning_rate(struct mt_config *cfg, struct mt_err *err);
/** The kind of device that a run of the configuration opens, and what was found of the GPU (mt_device_choose()). */
const char *mt_plan_device_kind(const struct mt_config *cfg, struct mt_device_info *gpu);

#endif

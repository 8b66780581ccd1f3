/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "hw/homes.h"
#include "plan/resolve.h"
#include "train/inputs.h"

/** What was decided for inputs on this machine: the device, every `auto`, the plan. Nothing large is allocated yet. */
struct mt_setup {
    struct mt_inputs *in;          /* [n_learners] borrowed; steps are laid out once the micro-batch is decided. What is
                                      not a learner's own is that of the first */
    struct mt_cluster *cluster;    /* the hosts that share the run; NULL: one; borrowed */
    size_t n_learners;             /* results of the run; several share the base */
    struct mt_layout *shared[2];   /* with several learners: whole layers, and halves of them or NULL; owned */
    struct mt_numerics *learner;   /* with several: [n_learners] of each, every `auto` decided; owned */

    int device_index;              /* of the first lane's device */
    mt_device *dev[MT_MAX_LANES];  /* [n_devs] of each lane */
    int n_devs;
    int *cpus;                     /* [placement.threads] or NULL */
    struct mt_numa numa;           /* homes of the planes */
    struct mt_machine machine;     /* the profile: measured, or a stored one, which has no fingerprint */
    struct mt_plan_request request; /* what was asked; its layouts, numerics and placement are not those that are run */
    struct mt_plan_choice choice;  /* what is run: layout (one of the two of `in` or of `shared`), numerics and
                                      placement, every `auto` decided; the engine's plan, memory */
    bool predicted;                /* the search chose, with `machine`; then choice.sim describes the step */
};

/**
 * Opens the device and decides; lays out the steps if `in` has data, and writes what was decided into its
 * configuration. The caller finishes *s, also after a failure, before `in`. err->kind says whose fault it is.
 */
int mt_setup_open(struct mt_setup *s, struct mt_inputs *in, enum mt_inputs_use use, struct mt_err *err);
/** The same for n learners on one base, in: [n], or for one on several hosts (cluster; NULL: one). -EINVAL: names what
 * two learners differ in, but share, or what only one host can do. */
int mt_setup_open_all(struct mt_setup *s, struct mt_inputs *in, size_t n, enum mt_inputs_use use,
                      struct mt_cluster *cluster, struct mt_err *err);
/** What the devices have found out (device/device.h), as one: each then acts on all of it. -ENOMEM.
 * Between steps. */
int mt_setup_findings(const struct mt_setup *s, struct mt_str *out);
/** Takes over the findings of an earlier run; false: they are of another device or library. Before
 * the first step. */
bool mt_setup_adopt_findings(struct mt_setup *s, const char *text);
/** The same for an evaluation of what a run has made: of the checkpoint that it reads, or the adapters', so that it has
 * the bits of the run's own. What is of another device or library is said at level DEBUG. */
void mt_setup_adopt_checkpoint(struct mt_setup *s);
/** mt_device_doubt(), mt_device_distrust() and mt_device_trust() of all devices. */
void mt_setup_doubt(const struct mt_setup *s);
size_t mt_setup_distrust(const struct mt_setup *s);
void mt_setup_trust(const struct mt_setup *s);
/** Of an engine that runs the choice, as the planner itself derives them: what is planned is what is run. Without
 * planes, drives and files, which a session adds. */
struct mt_engine_params mt_setup_engine_params(const struct mt_setup *s);
/** The numerics of a learner. */
const struct mt_numerics *mt_setup_numerics_of(const struct mt_setup *s, size_t learner);
/** The layout of a learner's checkpoints: its tensors and the base's, in the places of the choice's. */
const struct mt_layout *mt_setup_layout_of(const struct mt_setup *s, size_t learner);
/**
 * The tasks of the predicted step, as the simulator ran them. -ENOENT where this machine has not been
 * measured (megatrain probe all).
 */
int mt_setup_predict(const struct mt_setup *s, struct mt_sim_graph *graph, struct mt_err *err);
/** The distinct device operations of a step; *ops is the caller's to free. -ENOENT as above. */
int mt_setup_operations(const struct mt_setup *s, struct mt_metered **ops, size_t *n, struct mt_err *err);
/** Do full checkpoints name the base's tensors by their sums, instead of holding them? Those of adapters always do. */
bool mt_setup_names_base(const struct mt_setup *s, size_t learner);
/** The planes' parameters, without drives and files; p->elems is allocated, the caller's to free. */
int mt_setup_plane_params(const struct mt_setup *s, struct mt_plane_set_params *p, struct mt_err *err);
void mt_setup_finish(struct mt_setup *s);

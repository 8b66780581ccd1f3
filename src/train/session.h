/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_TRAIN_SESSION_H
#define MT_TRAIN_SESSION_H

#include "checkpoint/checkpoint.h"
#include "config/config.h"
#include "data/dataset.h"
#include "engine/memory.h"
#include "model/model.h"
#include "hf/hf_config.h"
#include "model/layout.h"
#include "optim/lr.h"
#include "plan/resolve.h"
#include "store/file_weights.h"
#include "store/planes.h"

/**
 * All that a training run or an evaluation stands on, from configuration to engine. Opened in two parts
 * so that nothing large is touched before the user has seen whether it fits:
 *
 *   mt_session_prepare()   model config, data, device, plan: seconds, little memory
 *   mt_session_memory()    what it will take, against what there is
 *   mt_session_start()     planes, engine; then weights are loaded or a checkpoint is resumed
 */
struct mt_session {
    struct mt_config *cfg; /* borrowed; `auto` numerics are written back into it */
    const cJSON *from_files; /* of a run that goes on: frozen tensors that come from the model's files; NULL: all do; borrowed */
    char *model_dir;
    struct mt_hf_config hf;
    struct mt_layout *layout;
    struct mt_layout *halves; /* while it is open how layers are cut */
    mt_dataset *data, *eval_data; /* eval_data: a file of its own, else NULL */
    struct mt_split split, held_out;
    mt_sampler *sampler, *eval_sampler; /* NULL where there is nothing to train or evaluate on */
    uint64_t total_steps;         /* optimizer steps of the whole run */
    struct mt_lr lr;              /* its learning rates */
    struct mt_numerics numerics;   /* the configuration's, `auto` replaced by what was decided; as placement: */
    struct mt_placement placement;

    mt_device *dev;
    int *cpus;                     /* [placement.threads] or NULL */
    struct mt_engine_params engine_params;

    mt_disk *disk;  /* NULL where nothing is on one */
    mt_file_weights *files; /* NULL where nothing is read in place */
    struct mt_machine machine;    /* where the request has it: measured, or a stored one without a fingerprint */
    struct mt_plan_request request;
    struct mt_plan_choice choice; /* what is run: the settings, the engine's plan, memory */
    bool predicted;               /* by the search, with `machine`: then choice.sim is the step */

    mt_plane_set *planes;
    mt_engine *engine;
    uint64_t *base_sum; /* [n_tensors] what frozen tensors of the model's files are known by (in_base) */
};

enum mt_session_use { MT_USE_EVAL, MT_USE_TRAIN };
/** On failure the session is finished; err->kind says whose fault it is. */
int mt_session_prepare(struct mt_session *s, struct mt_config *cfg, enum mt_session_use use, const cJSON *from_files,
                       struct mt_err *err);
/** The first part alone: model config, data, samplers, number of steps. No device. */
int mt_session_prepare_data(struct mt_session *s, struct mt_config *cfg, struct mt_err *err);
/** For a model alone, without data: samples of up to max_len tokens. */
int mt_session_prepare_model(struct mt_session *s, struct mt_config *cfg, size_t max_len,
                             struct mt_err *err);
/**
 * The tasks of the predicted step, as the simulator ran them. -ENOENT where this machine has not been
 * measured (megatrain probe all).
 */
int mt_session_predict(const struct mt_session *s, struct mt_sim_graph *graph, struct mt_err *err);
/** The distinct device operations of a step; *ops is the caller's to free. -ENOENT as above. */
int mt_session_operations(const struct mt_session *s, struct mt_metered **ops, size_t *n, struct mt_err *err);
int mt_session_start(struct mt_session *s, struct mt_err *err);
/** Sums of all tensors of the base (in_base), into base_sum: reads what no pass has read yet. */
int mt_session_sum_base(struct mt_session *s, struct mt_err *err);
/** Fills the planes: the model's weights, and what of them comes from the checkpoint `resume` or from adapter.path. */
int mt_session_fill_weights(struct mt_session *s, const char *resume, struct mt_err *err);
void mt_session_finish(struct mt_session *s);

/** What a tier must offer. */
struct mt_memory_limit {
    const char *tier, *source; /* "host", "MemAvailable" */
    uint64_t wanted, available;
};
enum { MT_MEMORY_MAX_LIMITS = 8 };
struct mt_memory {
    struct mt_memory_rows rows;
    struct mt_memory_limit limits[MT_MEMORY_MAX_LIMITS];
    int n_limits;
    uint64_t device_bytes, host_bytes, disk_bytes; /* disk: checkpoint and scratch */
    uint64_t checkpoint_bytes, checkpoint_free;    /* of one; where they go, beside scratch. 0: not known */
};
/**
 * The memory table by tier and tag, from the same arithmetic that allocates, and what it is held against:
 * the budgets, MemAvailable, cgroup, RLIMIT_AS, free disk for checkpoints.
 */
int mt_session_memory(const struct mt_session *s, struct mt_memory *out, struct mt_err *err);
/** 0, or -ENOSPC (MT_ERR_NO_FIT) with the first limit that is short, by how much, and what helps. */
int mt_memory_check(const struct mt_memory *m, struct mt_err *err);

#endif

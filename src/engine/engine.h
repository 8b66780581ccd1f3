/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_ENGINE_ENGINE_H
#define MT_ENGINE_ENGINE_H

#include "data/batch.h"
#include "device/device.h"
#include "schedule/program.h"
#include "model/layout.h"
#include "optim/optimizer.h"
#include "settings/settings.h"
#include "store/planes.h"

/**
 * The streaming engine: trains a model whose planes are in host memory or on a disk, on a device that
 * holds a few units at a time. A step runs forward and backward while the update of the step before runs
 * under its forward on host threads; the update of the newest step is pending until the next step or
 * mt_engine_flush().
 *
 * Placement (slots, buffers, threads, budget) never changes a bit of the result.
 *
 * Thread-safety: one thread, except mt_engine_interrupt().
 */
typedef struct mt_engine mt_engine;

struct mt_engine_params {
    mt_device *dev;                 /* borrowed, as all below */
    const struct mt_layout *layout;
    mt_plane_set *planes;           /* may be NULL for mt_engine_plan() */
    struct mt_numerics numerics;    /* none is auto; rows and micro-batches as the sizes that follow */
    struct mt_placement placement;  /* what is auto takes the rules of budget.c; not read: unit, budgets */
    size_t max_tokens, max_docs, max_len, max_micro; /* of a micro-batch; micro-batches of a step */
    size_t assumed_rows;            /* for prices: tokens of a step that are spread evenly over experts; else 0 */
    bool train;                     /* false: evaluation alone, no gradients or optimizer */
    enum mt_adam_isa isa;
    const int *adam_cpus;           /* [placement.threads] or NULL */
    bool may_use_disk;              /* there are folders to put it in */
    uint64_t host_bytes;            /* host memory for planes, staging and, where it is of the host, the
                                       device's; UINT64_MAX: any amount */
    uint64_t drive_bytes;           /* of it, what else the process takes once anything is on the disk */
    mt_disk *disk;                  /* may be NULL for mt_engine_plan(), and where nothing is there */
    struct mt_file_weights *files;  /* the same, of weights that are read in place */
    uint64_t disk_spill_at;         /* plan.disk_spill_bytes from there on are the engine's */
};

/** What planes a unit has, wherever they live. */
struct mt_unit_planes {
    mt_plane_bits has;
    size_t bytes[MT_N_PLANES]; /* 0: it has none of the kind */
};

/** Where the device budget goes; the engine allocates exactly this. */
struct mt_engine_plan {
    struct mt_program_params program; /* `units` and `values` are owned by the plan */
    struct mt_unit_shape *units;
    struct mt_value *values;
    size_t pool_bytes[MT_N_POOLS];    /* all buffers of the pool, alignment included */
    size_t scratch, logits, inputs, tables;
    size_t device_bytes;              /* the sum of what is on the device */
    size_t spill_bytes;               /* host memory: boundaries, records and gradients on their way */
    size_t staging_bytes;             /* host memory: inputs and statistics */
    size_t h2d_bytes, d2h_bytes;      /* over the link in a full step */
    enum mt_activations activations;  /* as decided */
    mt_plane_bits *on_disk;           /* [n_units] the planes that live on the disk; owned by the plan */
    struct mt_unit_planes *planes; /* [n_units] */
    bool uses_disk;
    mt_plane_bits *in_files;          /* [n_units] those that are read in place from the model's files; as on_disk */
    bool uses_files;
    int64_t base_blocks;              /* frozen weights of so many blocks that could be, and are in host memory */
    size_t file_bytes;                /* host memory of blocks that are being read from them */
    uint64_t disk_spill_bytes;
    struct mt_disk_traffic traffic;   /* of a full step that makes an update */
};

/**
 * Chooses buffers for the device's budget. -ENOSPC (MT_ERR_NO_FIT) with what is short by how much, and
 * what would help. Finish with mt_engine_plan_finish().
 */
int mt_engine_plan(struct mt_engine_plan *out, const struct mt_engine_params *p, struct mt_err *err);
/**
 * The same; *step is the program of a full step that makes an update, the caller's to finish. *host_bytes:
 * host memory that it takes (where the device's is of the host, that too). More than p->host_bytes:
 * -ENOSPC, and the step is not built.
 */
int mt_engine_plan_step(struct mt_engine_plan *out, struct mt_program *step, uint64_t *host_bytes,
                        const struct mt_engine_params *p, struct mt_err *err);
/** The same without building the step: spill_bytes, h2d_bytes and d2h_bytes stay 0. */
int mt_engine_divide(struct mt_engine_plan *out, const struct mt_engine_params *p, struct mt_err *err);
/** Does the device's budget suffice? */
bool mt_engine_fits(const struct mt_engine_params *p);
void mt_engine_plan_finish(struct mt_engine_plan *plan);

int mt_engine_create(mt_engine **out, const struct mt_engine_params *p, struct mt_err *err);
/** Accepts NULL. A pending update is lost: flush first. */
void mt_engine_destroy(mt_engine **e);
const struct mt_engine_plan *mt_engine_plan_of(const mt_engine *e);

struct mt_step_result {
    double loss;          /* mean over the step's loss tokens */
    double aux_loss;      /* with train.router_aux_loss: the loss that balances experts, before its coefficient */
    double grad_norm;     /* before clipping; of the gradient as the optimizer sees it */
    float clip;           /* factor, 1 = not clipped */
    bool skipped;         /* the norm was not finite: no update */
    char bad_tensor[128]; /* then: the first in backward order */
    bool bad_router;      /* bad_tensor is a router's, and it is its logits that were not finite */
    double t_step, t_forward, t_backward; /* seconds */
    double t_wait_h2d;    /* compute idle for a copy */
    double t_adam;        /* optimizer threads busy, mostly under the forward */
    double t_disk_read, t_disk_write; /* at least one request under way */
    double t_disk_sums;   /* CPU time of the drives' checksums, on threads of their own */
    struct mt_disk_traffic traffic;
};

/**
 * One optimizer step: the pending update, forward, backward; then the update of this step with rate `lr`
 * is pending. -ECANCELED after mt_engine_interrupt(): the step is abandoned. On this and on any error of
 * the device the pending update is done all the same, once.
 */
int mt_engine_step(mt_engine *e, const struct mt_step_data *data, double lr,
                   struct mt_step_result *res, struct mt_err *err);
/** Completes the pending update. After this the planes are the model. */
int mt_engine_flush(mt_engine *e, struct mt_err *err);

struct mt_eval_result {
    double loss_sum;      /* over loss tokens */
    uint64_t n_loss, n_correct;
    double *doc_loss;     /* caller's [n_docs of all micro-batches], or NULL: loss sum by document */
};
/** Losses of micro-batches (data->n of them), added to *res. Flush first. */
int mt_engine_eval(mt_engine *e, const struct mt_step_data *data, struct mt_eval_result *res,
                   struct mt_err *err);
/** Logits of the batch's last token, f32 [vocab]. Flush first. */
int mt_engine_logits(mt_engine *e, const struct mt_batch *batch, float *logits, struct mt_err *err);

/** Rows of each expert of a layer in the last step, [n_experts]; NULL: the layer has none. */
const int32_t *mt_engine_expert_rows(const mt_engine *e, int layer);

/** One instruction of the last step as it ran; times of the device's clock. */
struct mt_trace_span {
    uint8_t queue, op;
    int32_t unit, mb, piece; /* as of the instruction */
    size_t bytes;
    int64_t begin_ns, end_ns;
};
/** From the next step on, every instruction's begin and end are kept: two events each. */
void mt_engine_trace(mt_engine *e, bool on);
/** Spans of the last traced step, in program order; *spans is the caller's to free. -ENODATA: none. */
int mt_engine_trace_read(const mt_engine *e, struct mt_trace_span **spans, size_t *n, struct mt_err *err);

/** Abandons the step under way at its next instruction. Any thread, signal handlers included. */
void mt_engine_interrupt(mt_engine *e);
void mt_engine_clear_interrupt(mt_engine *e);

/** Index (from 0) of the update that the next step makes: what its learning rate depends on. */
uint64_t mt_engine_next_update(const mt_engine *e);
/** Updates applied so far (Adam's t), the pending one not counted; to be set on resume. */
uint64_t mt_engine_updates(const mt_engine *e);
void mt_engine_set_updates(mt_engine *e, uint64_t updates);

#endif

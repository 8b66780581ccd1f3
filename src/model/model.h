/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "data/batch.h"
#include "data/teacher.h"
#include "device/device.h"
#include "model/layout.h"
#include "schedule/port.h"

/**
 * Forward and backward of a unit as device operations. Holds the device memory that all units share:
 * rotary tables, the scratch of one unit and one micro-batch, and the inputs of a whole step.
 *
 * All functions enqueue on the COMPUTE stream and return; buffers are borrowed as device.h says. `w` is
 * the unit's weights in the compute dtype, at mt_param.at; `g` its FP32 gradient, at mt_param.grad, which backward
 * adds to or begins; frozen parameters have none.
 *
 * Thread-safety: the thread that feeds the COMPUTE stream.
 */
typedef struct mt_model mt_model;

struct mt_model_params {
    const struct mt_layout *layout; /* borrowed */
    enum mt_dtype dtype;            /* of weights, activations and their gradients */
    bool fp8;                       /* products of linear layers in E4M3 */
    bool coded_weights;             /* fp8: weights become codes when they are loaded (mt_model_encode()) */
    size_t max_tokens, max_docs;    /* of a micro-batch */
    size_t max_len;                 /* of a document: rotary tables, attention's workspace */
    size_t max_micro;               /* micro-batches of a step */
    size_t row_tokens;              /* tokens of a row, of which micro-batches are chunks; 0: they have whole rows */
    struct mt_groups groups;        /* of these: experts run over the rows of a group */
    bool groups_of_step;            /* of the micro-batches that are uploaded, however few */
    size_t assumed_rows;            /* for estimates, where nothing is computed: tokens of a group, spread evenly over
                                       experts; 0: the step's own, as routed */
    double router_aux_loss;         /* coefficient of the loss that balances experts; 0: off */
    size_t logits_chunk;            /* rows whose logits' gradients are in memory at once */
    size_t logits_piece;            /* of these, rows of FP32 logits; 0 or logits_chunk: gradients overwrite logits */
    float temperature;              /* losses are of logits divided by it; 0: 1 */
    bool entropy;                   /* the head computes that of each loss row */
    bool row_weights;               /* a learner has other rows than MT_ROWS_ALIKE */
    size_t few;                     /* further ids of each loss row that a learner's gradient is given for; 0: none */
    struct mt_cache_shape cache;    /* of generation; slots 0: documents begin in their micro-batch */
    bool draws;                     /* mt_model_step.draw is used */
    size_t top;                     /* how many of the largest logits of each loss row an evaluation finds; 0: none */
    bool used_rows;                 /* mt_model_used_rows() is needed */
    double optimizer_keys[MT_OPTIMIZER_SLOTS]; /* of the layout's optimizer, in its order */
    int expert_streams;             /* side streams that experts may run on; below 2: none */
    int expert_sums;                /* times a layer that experts' outputs are summed, about; 0: for each unit */
    bool backward;                  /* false: memory for the forward pass alone */
    bool poison;                    /* for tests: scratch that is dead becomes NaN */
};

/** Bytes of device memory by use; the same arithmetic allocates them. */
struct mt_model_bytes {
    size_t scratch, logits, inputs, tables;
    size_t counts; /* of host memory: rows of each expert */
};
int mt_model_bytes(struct mt_model_bytes *out, mt_device *dev, const struct mt_model_params *p,
                   struct mt_err *err);
/** The default logits_chunk: small beside a layer's scratch; depends on the model alone. */
size_t mt_model_auto_logits_chunk(const struct mt_layout *l);

int mt_model_create(mt_model **out, mt_device *dev, const struct mt_model_params *p,
                    struct mt_err *err);
/** Accepts NULL; the device must be idle. */
void mt_model_destroy(mt_model **m);

/** Has the unit weights that only products in FP8 read? */
bool mt_unit_becomes_codes(const struct mt_layout *l, size_t unit);
/** Submits the encoding of such weights in w, the unit's loaded and decoded ones, in their own place: the micro-batches
 * that follow take these codes. Without coded_weights nothing is done. */
int mt_model_encode(mt_model *m, size_t unit, void *w, struct mt_err *err);

/** Of a hidden state: [max_tokens, hidden]. */
size_t mt_model_boundary_bytes(const mt_model *m);

/** Copies the constants that stay on the device during the run; once, when the planes hold the weights. */
int mt_model_load_constants(mt_model *m, mt_plane_set *planes, struct mt_err *err);

/** What a loss row's gradient is multiplied by. */
enum mt_row_weights {
    MT_ROWS_ALIKE,       /* the same factor for all */
    MT_ROWS_WEIGHED,     /* a weight for each, known before the step */
    MT_ROWS_WEIGHED_LATE, /* the same, when the micro-batch's losses are known: the head computes these first */
    MT_ROWS_WEIGHED_BY_ROW /* the same, when those of all chunks of its row are: in mt_model_head() without dx */
};

/** What a micro-batch's rows are weighed by, and their weights; of chunks that are weighed by row, its row's. */
struct mt_row_values {
    const float *loss; /* [n_loss]; NULL: not known yet */
    float *few; /* [n_loss, mt_model_params.few] logits of the chosen tokens, to be replaced by their gradients */
    float *weight; /* [n_loss] to be filled */
};

/** What a learner's micro-batches of a step have in common. */
struct mt_model_learner {
    enum mt_row_weights rows;
    float loss_scale; /* with MT_ROWS_ALIKE: multiplies every token's gradient */
    /** Else: weighs rows of micro-batch mb, or of the row of which it is a chunk: once, for any of these. Called by
     * mt_model_upload(), or on a thread of the device while the step runs. NULL: nothing is computed. */
    void (*weigh)(void *ctx, size_t mb, const struct mt_row_values *of);
    void *weigh_ctx;
    /** Fills ids[n_loss, mt_model_params.few] before the step: tokens whose logits weigh() is to know, and whose
     * gradients it gives; each once in a row, -1: none. NULL: no learner has such tokens. */
    void (*choose)(void *ctx, size_t mb, int32_t *ids);
    uint64_t step;    /* number of its step since the beginning, for dropout */
    uint64_t seed;    /* of its adapters' dropout, and of projections */
    uint64_t update;  /* with the step's gradient: its number since its states were new */
};

/** Most rows whose logits are handed over at once; as many are on their way then: 19 MB for both, of 152k tokens. */
enum { MT_DRAWN_TOGETHER = 16 };
/** Draws the targets of loss rows by their logits, in evaluations that generate. */
struct mt_draw {
    /** ids[n]: the tokens after loss rows [first, first + n) of micro-batch mb, by logits [n, vocab], which it may
     * overwrite. Called on a thread of the device while the step runs, for one row after the other. */
    void (*draw)(void *ctx, size_t mb, size_t first, size_t n, float *logits, int32_t *ids);
    void *ctx;
};

/** The micro-batches of a step, or of an evaluation. */
struct mt_model_step {
    const struct mt_batch *micro; /* [n]; unchanged until the COMPUTE stream has passed the upload */
    size_t n;
    const struct mt_model_learner *learner; /* by mt_batch.learner; NULL: an evaluation, without dropout */
    const struct mt_draw *draw;             /* borrowed until it ends; NULL: targets are the micro-batches' */
};
/** Uploads the inputs of the micro-batches. */
int mt_model_upload(mt_model *m, const struct mt_model_step *step, struct mt_err *err);
/** -EINVAL: a token stands for an image, video or sound. The upload does not ask: what is measured has any tokens. */
int mt_model_check_text(const mt_model *m, const struct mt_batch *micro, size_t n, struct mt_err *err);

/** The tokens of a micro-batch by their ids, in host memory until the next upload; those of run i are
 * order[starts[i]..starts[i + 1]). */
struct mt_token_runs {
    size_t n;
    const int32_t *ids, *starts, *order;
};
struct mt_token_runs mt_model_token_runs(const mt_model *m, size_t mb);

/** The different tokens of the step that was uploaded last, ascending; in host memory until the next upload. Needs
 * mt_model_params.used_rows. */
struct mt_used_rows {
    size_t n;
    const int32_t *ids;
};
struct mt_used_rows mt_model_used_rows(const mt_model *m);
/** The most of them that a step can have. */
size_t mt_model_max_used_rows(const struct mt_model_params *p);

/** What the embedding does to n elements of a row of its table, of the compute dtype: on the host, with the bits of the
 * device. */
void mt_embed_scale_row(const struct mt_hf_config *cfg, enum mt_dtype dtype, void *row, size_t n);

/**
 * One run of a unit other than the head, over a micro-batch or over the whole step, with the buffers of its values by
 * role. Device pointers; NULL for what the unit does not use.
 *
 * WEIGHTS, X (input), Y (forward: output), DX (backward: in, the gradient of the unit's output; out, of x; embed:
 * unchanged), GRAD, CAST (units of experts: the gradient after the cast, laid out like GRAD). ADAPTERS: the unit's
 * adapters, in the order of the trained plane; NULL: they are among its weights. RECORD...: forward: receives what
 * backward needs, NULL: not kept; backward: consumed, NULL: recomputed from x and the other part of the record. The
 * others are of the whole step, in layers with experts (hf/moe.h): the ports of their parts say how large they are.
 */
struct mt_unit_run {
    size_t unit, mb;
    void *at[MT_N_ROLES];
    bool first; /* backward: the content of the gradient is undefined, and is overwritten */
    enum mt_dtype cast_dtype;
};
int mt_model_forward(mt_model *m, const struct mt_unit_run *r, struct mt_err *err);
int mt_model_backward(mt_model *m, const struct mt_unit_run *r, struct mt_err *err);

/**
 * Final norm, logits in chunks, losses, and all gradients unless dx is NULL. `table` and `g_table` are the weights and
 * the gradient of the unit that holds the output matrix (the embedding's, if tied). With MT_ROWS_WEIGHED_BY_ROW all
 * chunks of a row run without dx first.
 */
struct mt_model_head {
    size_t mb;
    const void *w, *table; /* weights of the head; of the unit with the output matrix */
    const void *adapters;  /* as in mt_unit_run */
    const void *x;
    void *dx;              /* NULL: loss only */
    float *g, *g_table;
    bool first, first_table; /* as in mt_unit_run, for g and g_table; an untied head has one gradient */
};
int mt_model_head(mt_model *m, const struct mt_model_head *a, struct mt_err *err);

/**
 * Name of the weight of the layer's router if its logits were not finite in the last step; else NULL. Such a gradient
 * must not be applied, whatever it is.
 */
const char *mt_model_bad_router(const mt_model *m, int layer);

/** With router_aux_loss. Adds the rows that each expert had in all layers of a group to rows[n_experts]: when its last
 * layer has been routed. */
void mt_model_add_routed(const mt_model *m, size_t group, int64_t *rows);
/** Before backward: those of the whole step, of all groups wherever they were routed; then mt_model_balance() copies to
 * the device what backward balances experts by. */
void mt_model_set_routed(mt_model *m, const int64_t *rows);
int mt_model_balance(mt_model *m, struct mt_err *err);
/** After mt_model_fetch_stats(): adds the sums of probabilities of a group's routers to sum[n_experts]. */
void mt_model_add_probabilities(const mt_model *m, size_t group, double *sum);
/** The loss of the step, without its coefficient, by both of the whole step. */
double mt_model_aux_loss(const mt_model *m, const int64_t *rows, const double *probabilities);
/** Adds the rows that each expert of a layer had in a group of the last step to rows[n_experts], if it is a mixture. */
void mt_model_add_expert_rows(const mt_model *m, int layer, size_t group, int32_t *rows);
/** After the layer's lists in this step: whether the unit is a group of experts to which no row was sent. */
bool mt_model_unit_is_idle(const mt_model *m, size_t unit);

/** Before the cast: makes directions of the gradient's tensors, by WEIGHTS and MOMENTS, where the layout's optimizer
 * does so on the device; and the partial sums of their squares before that. */
int mt_model_direct(mt_model *m, const struct mt_unit_run *r, struct mt_err *err);

/** Casts a unit's gradient tensor by tensor into `dst` (plane layout; may be g, whose first bytes then hold the cast)
 * and writes the partial sums of squares of its trainable tensors that are no directions. */
int mt_model_grad_cast(mt_model *m, size_t unit, float *g, void *dst, enum mt_dtype dst_dtype,
                       struct mt_err *err);

/** Copies the used rows of the embedding's gradient, as cast, one after the other to `packed`. */
int mt_model_compact_rows(mt_model *m, const void *cast, enum mt_dtype dtype, void *packed, struct mt_err *err);

/** Copies token losses, correct flags and the partial sums of the first n_tensors tensors to the host block (on the D2H
 * stream). */
int mt_model_fetch_stats(mt_model *m, size_t n_micro, bool with_gradients, size_t n_tensors, struct mt_err *err);
/** The same for the partial sums of a unit's tensors alone, after its gradient was cast. */
int mt_model_fetch_partials(mt_model *m, size_t unit, struct mt_err *err);
/** After that copy has completed: what was found of a micro-batch's loss rows, in their order. In host memory until the
 * next upload. */
struct mt_micro_stats {
    const float *loss;      /* [n_loss] of the target */
    const int32_t *correct; /* [n_loss] */
    const float *entropy;   /* [n_loss]; NULL: without mt_model_params.entropy */
    const float *few;       /* [n_loss, mt_model_params.few] what weigh() left in mt_row_values.few */
    const int32_t *drawn;   /* [n_loss] after an evaluation with `draw`: the targets */
    /* After one with mt_model_params.top: the largest log-probabilities, falling, [n_loss, top], and how much
     * probability all other tokens have, [n_loss]. */
    const struct mt_top *top;
    const float *rest;
};
struct mt_micro_stats mt_model_micro_stats(const mt_model *m, size_t mb);
/** Host memory that mt_model_params.top takes. */
size_t mt_model_top_bytes(const struct mt_model_params *p);
/** What several hosts send each other, of a micro-batch, a group or a unit: a part of the host block. */
enum mt_stats_part {
    MT_STATS_OF_MICRO,      /* losses and flags */
    MT_STATS_OF_FEW,        /* of a micro-batch, what weigh() left of it; 0 bytes without few */
    MT_STATS_OF_GROUP,      /* the rows of experts; 0 bytes without these */
    MT_STATS_PROBABILITIES, /* of a group, the sums of its routers'; 0 bytes without router_aux_loss */
    MT_STATS_OF_UNIT,       /* partial sums */
};
void *mt_model_stats_of(mt_model *m, enum mt_stats_part part, size_t i, size_t *bytes);
/** Partial sums of squares of tensor t: *n entries. */
const float *mt_model_partials(const mt_model *m, size_t tensor, size_t *n);

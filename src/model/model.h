/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_MODEL_MODEL_H
#define MT_MODEL_MODEL_H

#include "data/batch.h"
#include "device/device.h"
#include "model/layout.h"

/**
 * Forward and backward of a unit as device operations. Holds what is common to all units on the device:
 * rotary tables, the scratch of one unit and one micro-batch, and the inputs of a whole step.
 *
 * All functions enqueue on the COMPUTE stream and return; buffers are borrowed as device.h says. `w` is
 * the unit's weights as its planes lay them out, in the compute dtype; `g` its FP32 gradient, laid out
 * alike and accumulated into, or begun; parameters that are frozen get none.
 *
 * Thread-safety: the thread that feeds the COMPUTE stream.
 */
typedef struct mt_model mt_model;

struct mt_model_params {
    const struct mt_layout *layout; /* borrowed */
    enum mt_dtype dtype;            /* of weights, activations and their gradients */
    size_t max_tokens, max_docs;    /* of a micro-batch */
    size_t max_len;                 /* of a document: rotary tables, attention's workspace */
    size_t max_micro;               /* micro-batches of a step */
    size_t assumed_rows;            /* tokens of a step, spread evenly over experts: for prices, where nothing is
                                       computed; 0: the step's own, as they are routed */
    double router_aux_loss;         /* coefficient of the loss that balances experts; 0: off */
    size_t logits_chunk;            /* rows whose logits' gradients are there at once */
    size_t logits_piece;            /* of them, rows of FP32 logits; 0 or a chunk's: gradients take the logits' place */
    uint64_t seed;                  /* of the adapters' dropout */
    bool backward;                  /* false: room for the forward pass alone */
};

/** Bytes of device memory by use; the same arithmetic allocates them. */
struct mt_model_bytes {
    size_t scratch, logits, inputs, tables;
    size_t counts; /* of host memory: rows of each expert */
};
int mt_model_bytes(struct mt_model_bytes *out, mt_device *dev, const struct mt_model_params *p,
                   struct mt_err *err);
/** A chunk of logits that is small beside a layer's scratch; depends on the model alone. */
size_t mt_model_auto_logits_chunk(const struct mt_layout *l);

int mt_model_create(mt_model **out, mt_device *dev, const struct mt_model_params *p,
                    struct mt_err *err);
/** Accepts NULL; the device must be idle. */
void mt_model_destroy(mt_model **m);

size_t mt_model_boundary_bytes(const mt_model *m);

/** Copies what stays on the device for the run and is never trained; once, when the planes hold the weights. */
int mt_model_load_constants(mt_model *m, mt_plane_set *planes, struct mt_err *err);

/** The micro-batches of a step, or of an evaluation. */
struct mt_model_step {
    const struct mt_batch *micro; /* [n]; unchanged until the COMPUTE stream has passed the upload */
    size_t n;
    float loss_scale; /* multiplies every token's gradient; 0: evaluation, nothing is dropped out */
    uint64_t step;    /* number of the step since the beginning, for dropout */
};
/** Uploads their inputs. */
int mt_model_upload(mt_model *m, const struct mt_model_step *step, struct mt_err *err);

/** One run of a unit that is not the head, over a micro-batch. Device pointers; NULL where a unit has no such thing. */
struct mt_unit_run {
    size_t unit, mb;
    const void *w;
    const void *x; /* input; embed has none */
    void *y;       /* forward: output */
    void *record[MT_N_RECORD_PARTS]; /* forward: get what backward needs, NULL: kept nowhere; backward: NULL: recomputed
                                        from x and the other part. Records are consumed */
    void *dx;      /* backward: in, the gradient of the unit's output; out, of x (embed: as it was) */
    float *g;
    bool first;    /* backward: there is nothing in g yet, whose content is undefined */
    /* of the whole step, in layers with experts (hf/moe.h); units that run once a step take no micro-batch */
    void *rows;       /* [step rows, hidden] the router's norm of x */
    float *sum;       /* [step rows, hidden] what the layer gives, as far as it has been added up */
    void *routing;    /* of mt_layout_step_bytes().routing */
    void *dy;         /* [step rows, hidden] gradient of the sum */
    float *dn;        /* [step rows, hidden] of rows, as far as experts have added to it */
    float *dweights;  /* [step rows, top_k] of the routing's weights */
    void *cast;       /* an experts' unit's gradient as cast, laid out like g; NULL: none of it is trained */
    enum mt_dtype cast_dtype;
};
int mt_model_forward(mt_model *m, const struct mt_unit_run *r, struct mt_err *err);
int mt_model_backward(mt_model *m, const struct mt_unit_run *r, struct mt_err *err);

/**
 * Final norm, logits in chunks, losses, and with dx not NULL all gradients. `table` and `g_table` are
 * the start of the planes that hold the output matrix (the embedding's where tied).
 */
struct mt_model_head {
    size_t mb;
    const void *w, *table; /* head's plane; plane of the output matrix */
    const void *x;
    void *dx;              /* NULL: loss only */
    float *g, *g_table;
    bool first, first_table; /* as in mt_unit_run, of g and g_table; of an untied head they are one */
};
int mt_model_head(mt_model *m, const struct mt_model_head *a, struct mt_err *err);
/** Logits of the micro-batch's last token, f32 [vocab], into host memory (on the COMPUTE stream). */
int mt_model_logits(mt_model *m, const struct mt_model_head *a, float *host_logits,
                    struct mt_err *err);

/**
 * Of the last step: name of the router's weight of the first layer in which a row of logits was not finite; NULL: none.
 * Such a step must not be applied, whatever its gradient.
 */
const char *mt_model_bad_router(const mt_model *m);

/** With router_aux_loss, after the statistics have come: that loss of the step, before its coefficient; else 0. */
double mt_model_aux_loss(const mt_model *m);
/** Rows that each expert of a layer had in the last step, [n_experts]; NULL: the layer has none. */
const int32_t *mt_model_expert_rows(const mt_model *m, int layer);

/** Casts a unit's gradient tensor by tensor into `dst` (plane layout; may be g: then its front holds the cast, as
 * many bytes as that has) and writes the partial sums of squares of its trainable tensors. */
int mt_model_grad_cast(mt_model *m, size_t unit, float *g, void *dst, enum mt_dtype dst_dtype,
                       struct mt_err *err);

/** Copies token losses, correct flags and all partial sums to the host block (on the D2H stream). */
int mt_model_fetch_stats(mt_model *m, size_t n_micro, bool with_gradients, struct mt_err *err);
/** After that copy has ended: token losses of micro-batch mb, [n_loss], in row order. */
const float *mt_model_losses(const mt_model *m, size_t mb);
const int32_t *mt_model_correct(const mt_model *m, size_t mb);
/** Partial sums of squares of tensor t: *n entries. */
const float *mt_model_partials(const mt_model *m, size_t tensor, size_t *n);

#endif

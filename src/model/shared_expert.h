/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/linear.h"
#include "model/moe.h"
#include "model/part.h"

/** One run of a router, of which the shared expert is a part, with its memory: of the record, and scratch. */
struct mt_router_run {
    const struct mt_part_run *run;
    mt_model *m;
    const struct mt_moe *moe;
    const struct mt_param *p;    /* the part's */
    size_t n;                    /* tokens */
    enum mt_dtype logits_dtype;  /* FP32 where the family says so */
    enum mt_dtype product_dtype; /* of the router's product and of the logits' gradient: FP32 if the router is F32 in
                                    files of bf16 */
    /* the record */
    float *rstd;   /* [n] of the norm */
    void *gate_up; /* [n, mt_moe_inner() of shared_width]; its gradient after backward */
    float *gate;   /* [n] scale of the shared expert's output, if it has one */
    float *own_rstd; /* [n] 1 / sqrt of the router's own norm, if it has one */
    /* scratch */
    void *logits;  /* [n, experts] */
    void *act;     /* [n, shared_width] the shared expert's gated product, and its gradient */
    void *dlogits; /* for backward: [n, experts] */
    float *dgate;  /* [n] */
    float *dn;     /* [n, hidden] gradient of the norm's output, summed in FP32 */
    float *n32;    /* [n, hidden] the norm's output, for a router that computes in FP32 */
    void *score;   /* [n] logit of the shared expert's gate, or its gradient; only with adapters */
    float *dscore; /* [n] that gradient in FP32 */
    void *own;     /* [n, hidden] output of the router's own norm, and its gradient */
    float *dscale; /* [n, experts] gradient of the experts' own scales, by rows */
    float *wide;   /* [n, hidden] with latent rows: what the layer's end adds; for backward, the gradient through them */
    void *dlatent; /* [n, latent] for backward: that of the rows */
};

/** gate_up and gate of n, the norm's output; act, if the output or the gate's value needs it. */
int mt_shared_expert_open(const struct mt_router_run *x, const void *n, struct mt_err *err);
/** sum [n, hidden] += the output. */
int mt_shared_expert_add(const struct mt_router_run *x, float *sum, struct mt_err *err);
/** dn += the gradient through it; the norm's output is in m->h. */
int mt_shared_expert_backward(const struct mt_router_run *x, struct mt_err *err);

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_MODEL_MLP_H
#define MT_MODEL_MLP_H

#include "model/branch.h"

/**
 * One run of an MLP, of a part that has the parameters MT_MLP_* at these roles and `roles`: out = (act(h Wgate) *
 * (h Wup)) Wdown, or without a gate (mt_layer_spec.ungated) act(h Wup) Wdown, with biases where there are some.
 */
struct mt_mlp {
    const struct mt_part_run *run;
    int roles;
    void *gate_up; /* [n, mt_mlp_width()], of the record: made by mt_mlp_open(), in backward overwritten by its
                      gradient */
    void *act;     /* [n, ffn] scratch */
    void *dh;      /* [n, hidden] gradient of the branch's input, written by mt_mlp_backward() */
};

/** Columns of gate and up, or of up alone. */
static inline size_t mt_mlp_width(const struct mt_layer_spec *s)
{
    return (s->ungated ? 1 : 2) * (size_t)s->ffn;
}
/** The parameters, without norms. */
void mt_mlp_lay_out(struct mt_layout_builder *b, struct mt_part *p, int roles);
/** gate_up, of the branch's input; again: with the recorded rstd. */
int mt_mlp_open(const struct mt_mlp *a, const struct mt_branch *branch, bool again, struct mt_err *err);
/** out, plus `residual` (NULL: 0). */
int mt_mlp_project(const struct mt_mlp *a, const void *residual, void *out, struct mt_err *err);
/** From the gradient of out, which may be a->dh, to that of the branch's input. */
int mt_mlp_backward(const struct mt_mlp *a, const struct mt_branch *branch, const void *dy, struct mt_err *err);

#endif

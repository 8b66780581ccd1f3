/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/linear.h"
#include "model/part.h"

/** One run of the shared expert, of a part that has the parameters MT_ROUTER_SHARED_*. */
struct mt_shared_expert {
    const struct mt_part_run *run;
    void *gate_up;        /* [n, mt_moe_inner() of shared_width] of the record; its gradient after backward */
    float *gate;          /* [n] of the record: scale of the output, if it has a gate */
    void *act;            /* [n, shared_width] scratch: the gated product, and its gradient */
    void *score;          /* [n] scratch, with adapters: logit of the gate, or its gradient */
    float *dscore, *dgate; /* [n] scratch of backward */
    float *dn;            /* [n, hidden] backward: gradient of the norm's output, added to */
    const void *dy;       /* [n, hidden] backward: gradient of the output */
};

/** gate_up and gate of n, the norm's output; act, if the output or the gate's value needs it. */
int mt_shared_expert_open(const struct mt_shared_expert *a, const void *n, struct mt_err *err);
/** sum [n, hidden] += the output. */
int mt_shared_expert_add(const struct mt_shared_expert *a, float *sum, struct mt_err *err);
/** dn += the gradient through it; the norm's output is in m->h. */
int mt_shared_expert_backward(const struct mt_shared_expert *a, struct mt_err *err);

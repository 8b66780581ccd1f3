/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The shared expert of a mixture: gate(n) * (act(n Wgate) * (n Wup)) Wdown, where it has a gate. A residual factor is
 * in the gated product, before Wdown; then there is no gate. Or without a gate of its own: act(n Wup) Wdown.
 */
#include "model/shared_expert.h"

/* The gated product, or its gradient, times the residual factor. */
static int scale_act(const struct mt_router_run *x, struct mt_err *err)
{
    struct mt_add scaled = {.n = x->n * (size_t)x->moe->shared_width, .dtype = x->m->dt, .b = x->act, .out = x->act,
                            .scale = (float)x->run->part->spec->residual};
    return x->run->part->spec->residual == 1 ? 0 : mt_op_add(x->m->dev, &scaled, err);
}

static struct mt_mlp_act act_of(const struct mt_router_run *x)
{
    bool ungated = x->moe->ungated;
    return (struct mt_mlp_act){.n = x->n, .f = (size_t)x->moe->shared_width, .ungated = ungated,
                               .kind = ungated ? (int)MT_ACTIVATE_RELU2 : (int)mt_activation(x->run->part->spec),
                               .x = x->gate_up, .dout = x->act, .out = x->act, .dx = x->gate_up};
}

int mt_shared_expert_open(const struct mt_router_run *x, const void *n, struct mt_err *err)
{
    mt_model *m = x->m;
    const void *w = x->run->w;
    const struct mt_param none = {0}, of_gate = x->p[MT_ROUTER_SHARED_GATE];
    struct mt_shared_gate gate = {.n = x->n, .c = m->c, .f = (size_t)x->moe->shared_width, .dtype = m->dt, .x = n,
                                  .w = mt_elem(m, w, of_gate.at), .act = x->act, .gate = x->gate};
    int rc = mt_linear(m, x->n, m->c, (size_t)mt_moe_inner(x->moe, x->moe->shared_width), n, w,
                       x->p[MT_ROUTER_SHARED_GATE_UP], none, NULL, x->gate_up, err);
    bool needed = mt_value(x->run, MT_ROLE_ROWS) || x->moe->shared_gate;
    struct mt_mlp_act act = act_of(x);
    if (!rc && needed)
        rc = mt_mlp_act(m, &act, err) ?: scale_act(x, err);
    if (!rc && of_gate.adapter) { /* the product is a linear layer's, the rest the operation's */
        rc = mt_linear(m, x->n, m->c, 1, n, w, of_gate, none, NULL, x->score, err);
        gate.c = 1;
        gate.x = x->score;
        gate.w = m->one;
    }
    return rc || !x->moe->shared_gate ? rc : mt_op_shared_gate(m->dev, &gate, err);
}

int mt_shared_expert_add(const struct mt_router_run *x, float *sum, struct mt_err *err)
{
    struct mt_linear_add down = {.n = x->n, .in = (size_t)x->moe->shared_width, .out = x->m->c, .x = x->act,
                                 .w = x->run->w, .p = x->p[MT_ROUTER_SHARED_DOWN]};
    return mt_linear_add(x->m, &down, sum, err);
}

/* From the gradient of the gated product, in x->act, to those of gate and up, and of the scaling gate's value; the
 * product itself is made again in x->act. */
static int act_backward(const struct mt_router_run *x, struct mt_err *err)
{
    struct mt_mlp_act act = act_of(x);
    struct mt_expert_glu_bwd scaled = {.n = act.n, .n_padded = act.n, .f = act.f, .k = 1, .dtype = x->m->dt,
                                       .kind = (enum mt_glu_kind)act.kind, .gate_up = x->gate_up, .dout = x->act,
                                       .weights = x->gate, .dgate_up = x->gate_up, .out = x->act,
                                       .dweights = x->dgate};
    return x->moe->shared_gate ? mt_op_expert_glu_bwd(x->m->dev, &scaled, err) : mt_mlp_act_backward(x->m, &act, err);
}

/* dn and the scaling gate's gradients, from that of its value; with an adapter by way of that of its logit. */
static int gate_backward(const struct mt_router_run *x, struct mt_err *err)
{
    mt_model *m = x->m;
    struct mt_param w = x->p[MT_ROUTER_SHARED_GATE];
    struct mt_shared_gate_bwd gate = {.n = x->n, .c = m->c, .dtype = m->dt, .x = m->h,
                                      .w = mt_elem(m, x->run->w, w.at), .gate = x->gate, .dgate = x->dgate, .dx = x->dn,
                                      .dw = mt_grad_of(x->run->g, w), .workspace = m->own.workspace};
    struct mt_shared_gate_bwd of_score = {.n = x->n, .c = 1, .dtype = m->dt, .x = x->score, .w = m->one,
                                          .gate = x->gate, .dgate = x->dgate, .dx = x->dscore};
    const struct mt_linear_shape shape = {x->n, m->c, 1, m->dt, MT_F32};
    struct mt_gemm dn = mt_gemm_input_grad(&shape, x->score, gate.w, x->dn);
    struct mt_adapter_run run = {.adapter = w.adapter, .n = x->n, .ld = 1, .dx_dtype = MT_F32, .x = m->h,
                                 .w = x->run->w, .dy = x->score, .dx = x->dn, .g = x->run->g};
    if (!x->moe->shared_gate || !w.adapter)
        return x->moe->shared_gate ? mt_op_shared_gate_bwd(m->dev, &gate, err) : 0;
    mt_gemm_add(&dn);
    return mt_op_zero(m->dev, &(struct mt_zero){x->dscore, x->n * sizeof(float)}, err)
        ?: mt_op_shared_gate_bwd(m->dev, &of_score, err)
        ?: mt_op_cast(m->dev, &(struct mt_cast){x->n, MT_F32, m->dt, x->dscore, x->score}, err)
        ?: mt_product(m, &dn, err)
        ?: mt_adapter_input_grad(m, &run, err)
        ?: mt_adapter_weight_grad(m, &run, err);
}

int mt_shared_expert_backward(const struct mt_router_run *x, struct mt_err *err)
{
    mt_model *m = x->m;
    const struct mt_part_run *r = x->run;
    const void *dsum = mt_moe_own_rows(r, MT_ROLE_DY, mt_dtype_size(m->dt));
    struct mt_linear_bwd down = {.n = x->n, .in = (size_t)x->moe->shared_width, .out = m->c, .x = x->act, .w = r->w,
                                 .dy = dsum ?: r->dx, .p = x->p[MT_ROUTER_SHARED_DOWN], .g = r->g, .dx = x->act};
    struct mt_linear_bwd gate_up = {.n = x->n, .in = m->c,
                                    .out = (size_t)mt_moe_inner(x->moe, x->moe->shared_width), .x = m->h, .w = r->w,
                                    .dy = x->gate_up, .p = x->p[MT_ROUTER_SHARED_GATE_UP], .g = r->g};
    return mt_linear_input_grad(m, &down, err)
        ?: scale_act(x, err)
        ?: act_backward(x, err)
        ?: scale_act(x, err)
        ?: mt_linear_weight_grad(m, &down, err) /* of adapters by what is left of the input's: before any other's */
        ?: gate_backward(x, err)
        ?: mt_linear_add_backward(m, &gate_up, x->dn, err);
}

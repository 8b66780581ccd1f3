/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The shared expert of a mixture: gate(n) * (act(n Wgate) * (n Wup)) Wdown, where it has a gate. A residual factor is
 * in the gated product, before Wdown; then there is no gate. Or without a gate of its own: act(n Wup) Wdown.
 */
#include "model/shared_expert.h"

/* The gated product, or its gradient, times the residual factor. */
static int scale_act(const struct mt_shared_expert *a, struct mt_err *err)
{
    const struct mt_part_run *r = a->run;
    const mt_model *m = r->m;
    struct mt_add scaled = {.n = r->in->n_tokens * (size_t)m->layout->cfg.moe.shared_width, .dtype = m->dt, .b = a->act,
                            .out = a->act, .scale = (float)r->part->spec->residual};
    return r->part->spec->residual == 1 ? 0 : mt_op_add(m->dev, &scaled, err);
}

static struct mt_mlp_act act_of(const struct mt_shared_expert *a)
{
    const struct mt_part_run *r = a->run;
    const struct mt_moe *moe = &r->m->layout->cfg.moe;
    return (struct mt_mlp_act){.n = r->in->n_tokens, .f = (size_t)moe->shared_width, .ungated = moe->ungated,
                           .kind = moe->ungated ? (int)MT_ACTIVATE_RELU2 : (int)mt_activation(r->part->spec),
                           .x = a->gate_up, .dout = a->act, .out = a->act, .dx = a->gate_up};
}

int mt_shared_expert_open(const struct mt_shared_expert *a, const void *n, struct mt_err *err)
{
    const struct mt_part_run *r = a->run;
    mt_model *m = r->m;
    const struct mt_moe *moe = &m->layout->cfg.moe;
    const struct mt_param *p = r->part->param;
    size_t rows = r->in->n_tokens, width = (size_t)moe->shared_width;
    struct mt_shared_gate gate = {.n = rows, .c = m->wd.c, .f = width, .dtype = m->dt, .x = n,
                                  .w = mt_elem(m, r->w, p[MT_ROUTER_SHARED_GATE].at), .act = a->act, .gate = a->gate};
    const struct mt_param none = {0};
    int rc = mt_linear(m, rows, m->wd.c, (size_t)mt_moe_inner(moe, moe->shared_width), n, r->w,
                       p[MT_ROUTER_SHARED_GATE_UP], none, NULL, a->gate_up, err);
    bool needed = mt_value(r, MT_ROLE_ROWS) || moe->shared_gate;
    struct mt_mlp_act act = act_of(a);
    if (!rc && needed)
        rc = mt_mlp_act(m, &act, err) ?: scale_act(a, err);
    if (!rc && p[MT_ROUTER_SHARED_GATE].adapter) { /* the product is a linear layer's, the rest the operation's */
        rc = mt_linear(m, rows, m->wd.c, 1, n, r->w, p[MT_ROUTER_SHARED_GATE], none, NULL, a->score, err);
        gate.c = 1;
        gate.x = a->score;
        gate.w = m->one;
    }
    return rc || !moe->shared_gate ? rc : mt_op_shared_gate(m->dev, &gate, err);
}

int mt_shared_expert_add(const struct mt_shared_expert *a, float *sum, struct mt_err *err)
{
    const struct mt_part_run *r = a->run;
    mt_model *m = r->m;
    struct mt_linear_add down = {.n = r->in->n_tokens, .in = (size_t)m->layout->cfg.moe.shared_width, .out = m->wd.c,
                                 .x = a->act, .w = r->w, .p = r->part->param[MT_ROUTER_SHARED_DOWN]};
    return mt_linear_add(m, &down, sum, err);
}

/* dn and the adapter's gradients, if the gate has one, from that of the gate's value. */
static int adapted_gate_backward(const struct mt_shared_expert *a, struct mt_err *err)
{
    const struct mt_part_run *r = a->run;
    mt_model *m = r->m;
    size_t n = r->in->n_tokens;
    struct mt_param w = r->part->param[MT_ROUTER_SHARED_GATE];
    struct mt_shared_gate_bwd gate = {.n = n, .c = 1, .dtype = m->dt, .x = a->score, .w = m->one, .gate = a->gate,
                                      .dgate = a->dgate, .dx = a->dscore};
    const struct mt_linear_shape shape = {n, m->wd.c, 1, m->dt, MT_F32};
    struct mt_gemm dn = mt_gemm_input_grad(&shape, a->score, mt_elem(m, r->w, w.at), a->dn);
    struct mt_adapter_run run = {.adapter = w.adapter, .n = n, .ld = 1, .dx_dtype = MT_F32, .x = m->h, .w = r->w,
                                 .dy = a->score, .dx = a->dn, .g = r->g};
    mt_gemm_add(&dn);
    return mt_op_zero(m->dev, &(struct mt_zero){a->dscore, n * sizeof(float)}, err)
        ?: mt_op_shared_gate_bwd(m->dev, &gate, err)
        ?: mt_op_cast(m->dev, &(struct mt_cast){n, MT_F32, m->dt, a->dscore, a->score}, err)
        ?: mt_product(m, &dn, err)
        ?: mt_adapter_input_grad(m, &run, err)
        ?: mt_adapter_weight_grad(m, &run, err);
}

/* From the gradient of the gated product, in a->act, to those of gate and up, and of the scaling gate's value; the
 * product itself is made again in a->act. */
static int act_backward(const struct mt_shared_expert *a, struct mt_err *err)
{
    mt_model *m = a->run->m;
    struct mt_mlp_act act = act_of(a);
    struct mt_expert_glu_bwd scaled = {.n = act.n, .n_padded = act.n, .f = act.f, .k = 1, .dtype = m->dt,
                                       .kind = (enum mt_glu_kind)act.kind, .gate_up = a->gate_up, .dout = a->act,
                                       .weights = a->gate, .dgate_up = a->gate_up, .out = a->act,
                                       .dweights = a->dgate};
    return m->layout->cfg.moe.shared_gate ? mt_op_expert_glu_bwd(m->dev, &scaled, err)
                                          : mt_mlp_act_backward(m, &act, err);
}

/* dn and the scaling gate's gradients, from that of its value. */
static int gate_backward(const struct mt_shared_expert *a, struct mt_err *err)
{
    const struct mt_part_run *r = a->run;
    mt_model *m = r->m;
    struct mt_param w = r->part->param[MT_ROUTER_SHARED_GATE];
    struct mt_shared_gate_bwd gate = {.n = r->in->n_tokens, .c = m->wd.c, .dtype = m->dt, .x = m->h,
                                      .w = mt_elem(m, r->w, w.at), .gate = a->gate, .dgate = a->dgate, .dx = a->dn,
                                      .dw = mt_grad_of(r->g, w), .workspace = m->own.workspace};
    if (!m->layout->cfg.moe.shared_gate)
        return 0;
    return w.adapter ? adapted_gate_backward(a, err) : mt_op_shared_gate_bwd(m->dev, &gate, err);
}

int mt_shared_expert_backward(const struct mt_shared_expert *a, struct mt_err *err)
{
    const struct mt_part_run *r = a->run;
    mt_model *m = r->m;
    const struct mt_param *p = r->part->param;
    size_t n = r->in->n_tokens, width = (size_t)m->layout->cfg.moe.shared_width;
    size_t inner = (size_t)mt_moe_inner(&m->layout->cfg.moe, m->layout->cfg.moe.shared_width);
    struct mt_linear_bwd down = {.n = n, .in = width, .out = m->wd.c, .x = a->act, .w = r->w, .dy = a->dy,
                                 .p = p[MT_ROUTER_SHARED_DOWN], .g = r->g, .dx = a->act};
    struct mt_linear_bwd gate_up = {.n = n, .in = m->wd.c, .out = inner, .x = m->h, .w = r->w, .dy = a->gate_up,
                                    .p = p[MT_ROUTER_SHARED_GATE_UP], .g = r->g};
    int rc = mt_linear_input_grad(m, &down, err)
          ?: scale_act(a, err)
          ?: act_backward(a, err)
          ?: scale_act(a, err);
    if (!rc) /* with adapters, by what its input's gradient left: before any other adapter's */
        rc = mt_linear_weight_grad(m, &down, err);
    return rc ?: gate_backward(a, err) ?: mt_linear_add_backward(m, &gate_up, a->dn, err);
}

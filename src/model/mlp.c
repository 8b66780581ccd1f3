/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The MLP of a decoder layer, a branch (branch.h):
 *
 *   h = before(x);  y = x + after((act(h Wgate) * (h Wup)) Wdown)       (Shazeer 2020)
 *                   y = x + after(act(h Wup) Wdown)                     without a gate
 *
 * and at last y is multiplied by the layer's number, if it has one.
 *
 * The record keeps gate and up, and the norm's statistics; backward recomputes the norm's output and the activation:
 * a cheap pass each, the activation's together with its gradient.
 */
#include "base/mem.h"
#include "model/mlp.h"

struct record {
    void *gate_up; /* [n, mt_mlp_width()] */
    float *rstd;   /* [n] of the norm before */
    void *out;     /* [n, hidden] the last product, if a norm comes after it */
};

static void lay_out_record(struct record *r, const struct mt_part_shape *s, struct mt_part_record *at)
{
    struct mt_widths w = mt_widths(s->cfg, s->spec);
    size_t n = s->max_tokens, size = mt_dtype_size(s->dtype);
    r->gate_up = mt_record_take(at, 0, n * mt_mlp_width(s->spec) * size);
    r->rstd = mt_record_take(at, 0, n * 4);
    r->out = s->spec->norms.mlp.after ? mt_record_take(at, 0, n * w.c * size) : NULL;
}

MT_PART_RECORD()

struct scratch {
    void *act;   /* [n, f] the activation, and its gradient */
    float *rstd; /* [n] of the norm after */
};

static size_t lay_out_scratch(struct scratch *s, const struct mt_model_params *p, const struct mt_layer_spec *spec,
                              void *base)
{
    size_t at = 0, n = p->max_tokens;
    s->act = mt_take(base, &at, n * (size_t)spec->ffn * mt_dtype_size(p->dtype));
    s->rstd = mt_take(base, &at, spec->norms.mlp.after ? n * sizeof(float) : 0);
    return at;
}

static size_t scratch_bytes(const struct mt_model_params *p, const struct mt_layer_spec *spec, mt_device *dev)
{
    struct scratch s;
    (void)dev;
    return lay_out_scratch(&s, p, spec, NULL);
}

static struct scratch scratch_of(const struct mt_part_run *r)
{
    struct scratch s;
    lay_out_scratch(&s, &r->m->p, r->part->spec, r->scratch);
    return s;
}

static size_t workspace_bytes(const struct mt_model_params *p, const struct mt_layer_spec *s, mt_device *dev)
{
    struct mt_widths w = mt_widths(&p->layout->cfg, s);
    struct mt_bias_bwd bias = {.n = p->max_tokens, .c = MT_MAX(mt_mlp_width(s), w.c)};
    struct mt_xielu_bwd curve = {.n = p->max_tokens, .f = (size_t)s->ffn};
    size_t need = MT_MAX(mt_norm_workspace(p, &s->norm, dev), mt_op_bias_bwd_workspace(dev, &bias));
    return s->activation == MT_ACTIVATION_XIELU ? MT_MAX(need, mt_op_xielu_bwd_workspace(dev, &curve)) : need;
}

void mt_mlp_lay_out(struct mt_layout_builder *b, struct mt_part *p, int roles)
{
    const struct mt_layer_spec *s = p->spec;
    int64_t hidden = mt_layout_builder_config(b)->hidden;
    const struct mt_param_tensor weights[] = {{"mlp.gate_proj.weight", s->ffn}, {"mlp.up_proj.weight", s->ffn}},
                                 biases[] = {{"mlp.gate_proj.bias", s->ffn}, {"mlp.up_proj.bias", s->ffn}};
    int gates = s->ungated ? 0 : 1;
    if (s->gate_up_name)
        mt_layout_add_tensor(b, p, roles + MT_MLP_GATE_UP, (int64_t)mt_mlp_width(s), hidden, s->gate_up_name);
    else
        mt_layout_add_param(b, p, roles + MT_MLP_GATE_UP, hidden, 1 + gates, weights + 1 - gates);
    if (s->mlp_bias)
        mt_layout_add_param(b, p, roles + MT_MLP_GATE_UP_BIAS, 0, 1 + gates, biases + 1 - gates);
    mt_layout_add_tensor(b, p, roles + MT_MLP_DOWN, hidden, s->ffn, "mlp.down_proj.weight");
    if (s->mlp_bias)
        mt_layout_add_tensor(b, p, roles + MT_MLP_DOWN_BIAS, hidden, 0, "mlp.down_proj.bias");
}

/* alpha_p and alpha_n, of which softplus is 0.8 and 0.3 in random weights, and two constants. */
static void lay_out_curve(struct mt_layout_builder *b, struct mt_part *p)
{
    static const struct mt_param_tensor curve[] = {{"mlp.act_fn.alpha_p", 1, .start = 0.20325218f},
                                                   {"mlp.act_fn.alpha_n", 1, .start = -1.0502256f},
                                                   {"mlp.act_fn.beta", 1, .constant = true, .start = 0.5f},
                                                   {"mlp.act_fn.eps", 1, .constant = true, .start = -1e-6f}};
    if (p->spec->activation == MT_ACTIVATION_XIELU)
        mt_layout_add_param(b, p, MT_MLP_CURVE, 0, MT_ARRAY_LEN(curve), curve);
}

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    const struct mt_layer_spec *s = p->spec;
    const struct mt_branch_norms *norms = &s->norms.mlp;
    int64_t hidden = mt_layout_builder_config(b)->hidden;
    if (norms->before)
        mt_layout_add_norm(b, p, MT_MLP_NORM, hidden, norms->before, &s->norm);
    mt_layout_add_norm_bias(b, p, MT_MLP_NORM, hidden, "post_attention_layernorm.bias", &s->norm);
    mt_mlp_lay_out(b, p, 0);
    lay_out_curve(b, p);
    if (norms->after)
        mt_layout_add_norm(b, p, MT_MLP_NORM_AFTER, hidden, norms->after, &s->norm);
    mt_layout_add_scalar(b, p, MT_MLP_SCALAR);
}

static struct mt_branch branch_of(const struct mt_part_run *r, const struct record *rec)
{
    return (struct mt_branch){.run = r, .before = MT_MLP_NORM, .after = MT_MLP_NORM_AFTER, .rstd = rec->rstd,
                              .out = rec->out, .rstd_after = scratch_of(r).rstd};
}

static enum mt_activate_kind ungated_activation(const struct mt_layer_spec *s)
{
    return s->activation == MT_ACTIVATION_RELU2 ? MT_ACTIVATE_RELU2 : MT_ACTIVATE_GELU_TANH;
}

static int bend(const struct mt_mlp *a, struct mt_err *err)
{
    const struct mt_part_run *r = a->run;
    return mt_op_xielu(r->m->dev,
                       &(struct mt_xielu){
                           .n = r->in->n_tokens,
                           .f = (size_t)r->part->spec->ffn,
                           .dtype = r->m->dt,
                           .x = a->gate_up,
                           .shape = mt_elem(r->m, r->w, r->part->param[MT_MLP_CURVE].at),
                           .out = a->act,
                       },
                       err);
}

static int bend_backward(const struct mt_mlp *a, bool again, struct mt_err *err)
{
    const struct mt_part_run *r = a->run;
    struct mt_param curve = r->part->param[MT_MLP_CURVE];
    return mt_op_xielu_bwd(r->m->dev,
                           &(struct mt_xielu_bwd){
                               .n = r->in->n_tokens,
                               .f = (size_t)r->part->spec->ffn,
                               .dtype = r->m->dt,
                               .x = a->gate_up,
                               .dout = a->act,
                               .shape = mt_elem(r->m, r->w, curve.at),
                               .dx = a->gate_up,
                               .out = again ? a->act : NULL,
                               .dshape = mt_grad_of(r->g, curve),
                               .workspace = r->m->own.workspace,
                           },
                           err);
}

/* act, from gate_up. */
static int activate(const struct mt_mlp *a, struct mt_err *err)
{
    const struct mt_part_run *r = a->run;
    const struct mt_layer_spec *s = r->part->spec;
    mt_model *m = r->m;
    if (s->activation == MT_ACTIVATION_XIELU)
        return bend(a, err);
    size_t n = r->in->n_tokens, f = (size_t)s->ffn;
    struct mt_glu glu = {.n = n, .f = f, .dtype = m->dt, .kind = mt_activation(s), .gate_up = a->gate_up,
                         .out = a->act};
    struct mt_activate plain = {.n = n, .f = f, .dtype = m->dt, .kind = ungated_activation(s),
                                .x = a->gate_up, .out = a->act};
    return s->ungated ? mt_op_activate(m->dev, &plain, err) : mt_op_glu(m->dev, &glu, err);
}

int mt_mlp_project(const struct mt_mlp *a, const void *residual, void *out, struct mt_err *err)
{
    const struct mt_part_run *r = a->run;
    mt_model *m = r->m;
    const struct mt_param *p = r->part->param + a->roles;
    size_t n = r->in->n_tokens, f = (size_t)r->part->spec->ffn;
    int rc = activate(a, err);
    return rc ? rc : mt_linear(m, n, f, m->wd.c, a->act, r->w, p[MT_MLP_DOWN], p[MT_MLP_DOWN_BIAS], residual, out, err);
}

int mt_mlp_open(const struct mt_mlp *a, const struct mt_branch *branch, bool again, struct mt_err *err)
{
    const struct mt_part_run *r = a->run;
    const struct mt_param *p = r->part->param + a->roles;
    const void *h;
    int rc = mt_branch_enter(branch, again, &h, err);
    return rc ? rc : mt_linear(r->m, r->in->n_tokens, r->m->wd.c, mt_mlp_width(r->part->spec), h, r->w,
                               p[MT_MLP_GATE_UP], p[MT_MLP_GATE_UP_BIAS], NULL, a->gate_up, err);
}

static struct mt_mlp mlp_of(const struct mt_part_run *r, const struct record *rec)
{
    return (struct mt_mlp){.run = r, .gate_up = rec->gate_up, .act = scratch_of(r).act, .dh = r->m->dh};
}

static int project(const struct mt_part_run *r, const void *residual, void *out, struct mt_err *err)
{
    struct record rec = record_of(r);
    struct mt_mlp mlp = mlp_of(r, &rec);
    return mt_mlp_project(&mlp, residual, out, err);
}

static int prepare(const struct mt_part_run *r, struct mt_err *err)
{
    struct record rec = record_of(r);
    struct mt_branch branch = branch_of(r, &rec);
    struct mt_mlp mlp = mlp_of(r, &rec);
    int rc = mt_mlp_open(&mlp, &branch, false, err);
    return rc || !rec.out ? rc : project(r, NULL, rec.out, err);
}

static int finish(const struct mt_part_run *r, void *y, struct mt_err *err)
{
    struct record rec = record_of(r);
    struct mt_branch branch = branch_of(r, &rec);
    int rc = mt_branch_leave(&branch, project, y, err);
    return rc ? rc : mt_layer_scale(r, y, err);
}

/* Reads the gradient of activate()'s result from the scratch and, if `again`, overwrites it with the recomputed result. */
static int activate_backward(const struct mt_mlp *a, bool again, struct mt_err *err)
{
    const struct mt_part_run *r = a->run;
    const struct mt_layer_spec *s = r->part->spec;
    if (s->activation == MT_ACTIVATION_XIELU)
        return bend_backward(a, again, err);
    if (s->ungated)
        return mt_op_activate_bwd(r->m->dev,
                                  &(struct mt_activate_bwd){
                                      .n = r->in->n_tokens,
                                      .f = (size_t)s->ffn,
                                      .dtype = r->m->dt,
                                      .kind = ungated_activation(s),
                                      .x = a->gate_up,
                                      .dout = a->act,
                                      .dx = a->gate_up,
                                      .out = again ? a->act : NULL,
                                  },
                                  err);
    return mt_op_glu_bwd(r->m->dev,
                         &(struct mt_glu_bwd){
                             .n = r->in->n_tokens,
                             .f = (size_t)s->ffn,
                             .dtype = r->m->dt,
                             .kind = mt_activation(s),
                             .gate_up = a->gate_up,
                             .dout = a->act,
                             .dgate_up = a->gate_up,
                             .out = again ? a->act : NULL,
                         },
                         err);
}

int mt_mlp_backward(const struct mt_mlp *a, const struct mt_branch *branch, const void *dy, struct mt_err *err)
{
    const struct mt_part_run *r = a->run;
    mt_model *m = r->m;
    const struct mt_param *p = r->part->param + a->roles;
    size_t f = (size_t)r->part->spec->ffn, hidden = m->wd.c;
    struct mt_linear_bwd down = mt_linear_bwd_of(r, f, hidden, a->roles + MT_MLP_DOWN);
    struct mt_linear_bwd gate_up = mt_linear_bwd_of(r, hidden, mt_mlp_width(r->part->spec), a->roles + MT_MLP_GATE_UP);
    down.bias = p[MT_MLP_DOWN_BIAS];
    down.x = down.dx = a->act;
    down.dy = dy;
    gate_up.bias = p[MT_MLP_GATE_UP_BIAS];
    gate_up.dy = a->gate_up;
    gate_up.dx = a->dh;
    int rc = mt_linear_input_grad(m, &down, err);
    if (!rc)
        rc = activate_backward(a, mt_linear_is_trained(&down), err);
    if (!rc)
        rc = mt_linear_weight_grad(m, &down, err);
    if (!rc)
        rc = mt_branch_enter(branch, true, &gate_up.x, err);
    return rc ? rc : mt_linear_backward(m, &gate_up, err);
}

static int backward(const struct mt_part_run *r, struct mt_err *err)
{
    struct record rec = record_of(r);
    struct mt_branch branch = branch_of(r, &rec);
    struct mt_mlp mlp = mlp_of(r, &rec);
    const void *dy;
    int rc = mt_layer_scale(r, r->dx, err);
    if (!rc)
        rc = mt_branch_leave_backward(&branch, &dy, err);
    if (!rc)
        rc = mt_mlp_backward(&mlp, &branch, dy, err);
    return rc ? rc : mt_branch_enter_backward(&branch, err);
}

static double macs_per_token(const struct mt_hf_config *c, const struct mt_part *p, size_t seq_len)
{
    (void)seq_len;
    return (p->spec->ungated ? 2 : 3) * (double)c->hidden * (double)p->spec->ffn;
}

const struct mt_part_kind mt_part_mlp = {
    .name = "mlp",
    .adapted = 1u << MT_MLP_GATE_UP | 1u << MT_MLP_DOWN,
    .products = 1u << MT_MLP_GATE_UP | 1u << MT_MLP_DOWN,
    .port = {MT_PORTS_OF_HIDDEN_STATE},
    MT_PART_FUNCTIONS,
};

/* SPDX-License-Identifier: Apache-2.0 */
/* The rules of norms, linear layers, activations and sums: what each is as a device operation, and its backward. */
#include "base/mem.h"
#include "model/rule.h"

/* --- norms of hidden states: y, statistics ------------------------------------------------------ */

static struct mt_norm norm_of(const struct mt_rule_run *r)
{
    return (struct mt_norm){.spec = &r->recipe->spec->norm, .eps = r->node->number, .n = r->n,
                            .x = r->in[0].p, .w = r->run->w, .p = mt_rule_param(r, 0), .rstd = r->out[1].p};
}

static int norm(const struct mt_rule_run *r, struct mt_err *err)
{
    struct mt_norm a = norm_of(r);
    return mt_norm(r->m, &a, r->out[0].p, !(r->outs & 2), err);
}

static int norm_backward(const struct mt_rule_run *r, struct mt_err *err)
{
    struct mt_norm a = norm_of(r);
    return mt_norm_backward(r->m, &a, &(struct mt_norm_grad){r->d_out[0].p, r->add, r->d_in[0].p, r->run->g}, err);
}

static size_t norm_workspace(const struct mt_recipe *r, const struct mt_node *, const struct mt_model_params *p,
                             mt_device *dev)
{
    return mt_norm_workspace(p, &r->spec->norm, dev);
}

const struct mt_rule mt_rule_norm = {.name = "norm", .reads_in = 1, .reads_out = 2, .statistics = 2, .adds = true,
                                     .forward = norm, .backward = norm_backward, .workspace = norm_workspace};

/* --- linear layers: of in[0], plus in[1] -------------------------------------------------------- */

static int linear(const struct mt_rule_run *r, struct mt_err *err)
{
    const struct mt_part_run *run = r->run;
    return mt_linear(run->m, run->in->n_tokens, mt_view_width(&r->node->in[0]), mt_view_width(&r->node->out[0]),
                     r->in[0].p, run->w, mt_rule_param(r, 0), mt_rule_param(r, 1), r->in[1].p, r->out[0].p, err);
}

static struct mt_linear_bwd linear_grad(const struct mt_rule_run *r)
{
    return (struct mt_linear_bwd){.n = r->n, .in = mt_view_width(&r->node->in[0]),
                                  .out = mt_view_width(&r->node->out[0]), .x = r->in[0].p, .w = r->run->w,
                                  .dy = r->d_out[0].p, .p = mt_rule_param(r, 0), .bias = mt_rule_param(r, 1),
                                  .g = r->run->g,
                                  .first = r->run->of->first, .dx = r->d_in[0].p};
}

static int linear_input_grad(const struct mt_rule_run *r, struct mt_err *err)
{
    struct mt_linear_bwd a = linear_grad(r);
    return mt_linear_input_grad(r->m, &a, err);
}

static int linear_weight_grad(const struct mt_rule_run *r, struct mt_err *err)
{
    struct mt_linear_bwd a = linear_grad(r);
    return mt_linear_weight_grad(r->m, &a, err);
}

static size_t linear_workspace(const struct mt_recipe *r, const struct mt_node *n, const struct mt_model_params *p,
                               mt_device *dev)
{
    struct mt_bias_bwd bias = {.n = p->max_tokens, .c = mt_view_width(&n->out[0])};
    (void)r; /* magnitudes of DoRA are summed as biases are */
    return mt_op_bias_bwd_workspace(dev, &bias);
}

static double linear_macs(const struct mt_recipe *, const struct mt_node *n, size_t)
{
    return (double)mt_view_width(&n->in[0]) * (double)mt_view_width(&n->out[0]);
}

const struct mt_rule mt_rule_linear = {.name = "linear", .residual = 2, .forward = linear,
                                       .input_grad = linear_input_grad, .weight_grad = linear_weight_grad,
                                       .workspace = linear_workspace, .macs = linear_macs};

/* --- activations: of gate and up, or up alone --------------------------------------------------- */

static struct mt_mlp_act act_of(const struct mt_rule_run *r)
{
    return (struct mt_mlp_act){.n = r->n, .f = mt_view_width(&r->node->out[0]),
                           .ungated = r->recipe->spec->ungated, .kind = r->node->kind,
                           .shape = mt_rule_weight(r, 0), .x = r->in[0].p,
                           .out = r->out[0].p};
}

static int act(const struct mt_rule_run *r, struct mt_err *err)
{
    struct mt_mlp_act a = act_of(r);
    return mt_mlp_act(r->m, &a, err);
}

static int act_backward(const struct mt_rule_run *r, struct mt_err *err)
{
    struct mt_mlp_act a = act_of(r);
    a.dout = r->d_out[0].p;
    a.dx = r->d_in[0].p;
    a.out = r->remake ? r->d_out[0].p : NULL;
    a.dshape = mt_rule_grad(r, 0);
    return mt_mlp_act_backward(r->m, &a, err);
}

static size_t xielu_workspace(const struct mt_recipe *, const struct mt_node *n, const struct mt_model_params *p,
                              mt_device *dev)
{
    return mt_op_xielu_bwd_workspace(dev, &(struct mt_xielu_bwd){.n = p->max_tokens, .f = mt_view_width(&n->out[0])});
}

#define ACTIVATION(called, ...)                                                                                        \
    {.name = called, .reads_in = 1, .consumes = true, .forward = act, .backward = act_backward, __VA_ARGS__}
const struct mt_rule mt_rule_glu = ACTIVATION("glu"), mt_rule_activate = ACTIVATION("activate"),
                     mt_rule_xielu = ACTIVATION("xielu", .workspace = xielu_workspace);

/* --- sums: in[0] + number * in[1] --------------------------------------------------------------- */

static int add(const struct mt_rule_run *r, const void *a, const void *b, void *out, struct mt_err *err)
{
    return mt_op_add(r->m->dev,
                     &(struct mt_add){.n = r->n * mt_view_width(&r->node->out[0]), .dtype = r->m->dt,
                                      .a = a, .b = b, .out = out, .scale = (float)r->node->number},
                     err);
}

static int sum(const struct mt_rule_run *r, struct mt_err *err)
{
    return add(r, r->in[0].p, r->in[1].p, r->out[0].p, err);
}

static int sum_backward(const struct mt_rule_run *r, struct mt_err *err)
{
    return r->d_in[1].p == r->d_out[0].p ? 0 : add(r, NULL, r->d_out[0].p, r->d_in[1].p, err);
}

const struct mt_rule mt_rule_sum = {.name = "sum", .residual = 1, .forward = sum, .backward = sum_backward};

/* A factor: out[0] = number * in[0]. */

static int factor(const struct mt_rule_run *r, struct mt_err *err)
{
    return add(r, NULL, r->in[0].p, r->out[0].p, err);
}

static int factor_backward(const struct mt_rule_run *r, struct mt_err *err)
{
    return add(r, NULL, r->d_out[0].p, r->d_in[0].p, err);
}

const struct mt_rule mt_rule_factor = {.name = "factor", .through = 1, .forward = factor, .backward = factor_backward};

static int scaled(const struct mt_rule_run *r, struct mt_err *err)
{
    return mt_layer_scale(r->run, r->out[0].p, err);
}

static int scaled_backward(const struct mt_rule_run *r, struct mt_err *err)
{
    return mt_layer_scale(r->run, r->d_out[0].p, err);
}

const struct mt_rule mt_rule_scaled = {.name = "scaled", .through = 1, .forward = scaled, .backward = scaled_backward};

/* --- a cast of FP32 sums, which get no gradient ------------------------------------------------- */

static int cast(const struct mt_rule_run *r, struct mt_err *err)
{
    struct mt_cast a = {r->n * mt_view_width(&r->node->in[0]), MT_F32, r->m->dt, r->in[0].p, r->out[0].p};
    return mt_op_cast(r->m->dev, &a, err);
}

const struct mt_rule mt_rule_cast = {.name = "cast", .blind = 1, .forward = cast};

/* SPDX-License-Identifier: Apache-2.0 */
#include "model/linear.h"

static bool has_dora(const mt_model *m, struct mt_param p)
{
    const struct mt_adapter *ad = mt_running_adapter(m, p.adapter);
    return ad && ad->dora;
}

/* Is the adapter in W as it is used? */
static bool is_merged(struct mt_param p)
{
    return p.adapter && p.adapter->merged;
}

int mt_linear(mt_model *m, size_t n, size_t in, size_t out, const void *x, const void *w,
              struct mt_param p, struct mt_param bias, const void *residual, void *y,
              struct mt_err *err)
{
    if (has_dora(m, p) && !is_merged(p))
        return mt_dora_forward(m, &(struct mt_dora_run){.n = n, .x = x, .w = w, .p = p}, bias, residual, y, err);
    struct mt_linear_shape shape = {n, in, out, m->dt, m->dt};
    struct mt_gemm g = mt_gemm_output(&shape, x, NULL, y);
    g.bias = bias.n ? mt_elem(m, w, bias.at) : NULL;
    g.c = residual;
    g.ldc = out;
    int rc = mt_weight_product(m, &g, w, p.at, err);
    if (rc || !p.adapter)
        return rc;
    return mt_adapter_forward(m,
                              &(struct mt_adapter_run){.adapter = p.adapter, .n = n, .ld = out,
                                                       .y_dtype = m->dt, .x = x, .w = w, .y = y},
                              err);
}

int mt_linear_add(mt_model *m, const struct mt_linear_add *a, float *sum, struct mt_err *err)
{
    struct mt_linear_shape shape = {a->n, a->in, a->out, m->dt, MT_F32};
    struct mt_gemm product = mt_gemm_output(&shape, a->x, NULL, sum);
    struct mt_adapter_run run = {.adapter = a->p.adapter, .n = a->n, .ld = a->out, .y_dtype = MT_F32, .x = a->x,
                                 .w = a->w, .y = sum};
    const struct mt_dora_run dora = {.n = a->n, .x = a->x, .w = a->w, .p = a->p, .f32 = true};
    if (has_dora(m, a->p) && !is_merged(a->p))
        return mt_dora_forward(m, &dora, (struct mt_param){0}, sum, sum, err);
    mt_gemm_add(&product);
    return mt_weight_product(m, &product, a->w, a->p.at, err) ?: mt_adapter_forward(m, &run, err);
}

static struct mt_adapter_run adapter_run(const mt_model *m, const struct mt_linear_bwd *a)
{
    return (struct mt_adapter_run){.adapter = a->p.adapter, .n = a->n, .ld = a->out, .dx_dtype = m->dt, .x = a->x,
                                   .w = a->w, .dy = a->dy, .dx = a->dx, .g = a->g};
}

static struct mt_dora_run dora_run(const struct mt_linear_bwd *a)
{
    return (struct mt_dora_run){.n = a->n, .x = a->x, .w = a->w, .p = a->p};
}

int mt_column_sums(mt_model *m, size_t n, size_t c, enum mt_dtype dtype, const void *dy, float *db, struct mt_err *err)
{
    struct mt_bias_bwd a = {.n = n, .c = c, .ld = c, .dtype = dtype, .dy = dy, .db = db,
                            .workspace = m->own.workspace};
    return db ? mt_op_bias_bwd(m->dev, &a, err) : 0;
}

int mt_linear_weight_grad(mt_model *m, const struct mt_linear_bwd *a, struct mt_err *err)
{
    enum mt_dtype dtype = a->f32 ? MT_F32 : m->dt;
    int rc = 0;
    float *dw = mt_grad_of(a->g, a->p), *db = mt_grad_of(a->g, a->bias);
    const struct mt_linear_shape shape = {a->n, a->in, a->out, dtype, MT_F32};
    const struct mt_gemm product = mt_gemm_weight_grad(&shape, a->dy, a->x, dw, !a->first);
    if (dw)
        rc = a->whole ? mt_op_gemm(m->dev, &product, err) : mt_product(m, &product, err);
    rc = rc ?: mt_column_sums(m, a->n, a->out, dtype, a->dy, db, err);
    struct mt_adapter_run run = adapter_run(m, a);
    if (!rc && has_dora(m, a->p)) {
        struct mt_dora_run dora = dora_run(a);
        rc = mt_dora_magnitude_grad(m, &dora, a->dy, a->g, err);
        run.dy = mt_dora_kept_grad(m, &dora);
    }
    rc = rc ?: mt_adapter_weight_grad(m, &run, err);
    if (has_dora(m, a->p))
        mt_dora_end(m);
    return rc;
}

/* The gradient of the product with W and of the adapters' in it: dy, or g dy. */
static int product_grad(mt_model *m, const struct mt_linear_bwd *a, const void **dy, struct mt_err *err)
{
    struct mt_dora_run dora = dora_run(a);
    *dy = a->dy;
    return has_dora(m, a->p) ? mt_dora_output_grad(m, &dora, a->dy, dy, err) : 0;
}

int mt_linear_input_grad(mt_model *m, const struct mt_linear_bwd *a, struct mt_err *err)
{
    struct mt_adapter_run run = adapter_run(m, a);
    int rc = product_grad(m, a, &run.dy, err);
    const struct mt_linear_shape shape = {a->n, a->in, a->out, m->dt, m->dt};
    struct mt_gemm product =
        mt_gemm_input_grad(&shape, is_merged(a->p) ? a->dy : run.dy, mt_elem(m, a->w, a->p.at), a->dx);
    rc = rc ?: mt_product(m, &product, err);
    if (!rc && a->p.trainable) /* its weight's gradient comes next */
        mt_product_again(m, run.dy);
    return rc ?: mt_adapter_input_grad(m, &run, err);
}

int mt_linear_add_backward(mt_model *m, const struct mt_linear_bwd *a, float *sum, struct mt_err *err)
{
    const struct mt_linear_shape shape = {a->n, a->in, a->out, m->dt, MT_F32};
    struct mt_adapter_run run = adapter_run(m, a);
    run.dx = sum;
    run.dx_dtype = MT_F32;
    int rc = product_grad(m, a, &run.dy, err);
    struct mt_gemm product =
        mt_gemm_input_grad(&shape, is_merged(a->p) ? a->dy : run.dy, mt_elem(m, a->w, a->p.at), sum);
    mt_gemm_add(&product);
    return rc ?: mt_adapter_input_grad(m, &run, err)
              ?: mt_product(m, &product, err)
              ?: mt_linear_weight_grad(m, a, err);
}

size_t mt_norm_workspace(const struct mt_model_params *p, const struct mt_norm_spec *s, mt_device *dev)
{
    size_t n = p->max_tokens, c = (size_t)p->layout->cfg.hidden;
    struct mt_layernorm_bwd centred = {.n = n, .c = c, .biased = s->biased};
    struct mt_rmsnorm_bwd usual = {.n = n, .c = c};
    return s->centred ? mt_op_layernorm_bwd_workspace(dev, &centred) : mt_op_rmsnorm_bwd_workspace(dev, &usual);
}

/* Both norms' operations have these fields. */
#define FORWARD_FIELDS                                                                                                 \
    .n = a->n, .c = m->c, .dtype = m->dt, .eps = (float)(a->eps > 0 ? a->eps : a->spec->eps),                       \
    .plus_one = a->spec->plus_one, .x = a->x, .w = mt_elem(m, a->w, a->p.at), .y = y, .rstd = a->rstd,                 \
    .use_rstd = again
#define BACKWARD_FIELDS                                                                                                \
    .n = a->n, .c = m->c, .dtype = m->dt, .plus_one = a->spec->plus_one, .dy = d->dy, .x = a->x,                    \
    .w = mt_elem(m, a->w, a->p.at), .rstd = a->rstd, .dres = d->dres, .dx = d->dx, .dw = mt_grad_of(d->g, a->p),       \
    .workspace = m->own.workspace

int mt_norm(mt_model *m, const struct mt_norm *a, void *y, bool again, struct mt_err *err)
{
    const struct mt_layernorm centred = {FORWARD_FIELDS, .biased = a->spec->biased};
    const struct mt_rmsnorm usual = {FORWARD_FIELDS, .round_once = a->spec->round_once};
    return a->spec->centred ? mt_op_layernorm(m->dev, &centred, err) : mt_op_rmsnorm(m->dev, &usual, err);
}

int mt_norm_backward(mt_model *m, const struct mt_norm *a, const struct mt_norm_grad *d, struct mt_err *err)
{
    const struct mt_layernorm_bwd centred = {BACKWARD_FIELDS, .biased = a->spec->biased};
    const struct mt_rmsnorm_bwd usual = {BACKWARD_FIELDS, .round_once = a->spec->round_once};
    return a->spec->centred ? mt_op_layernorm_bwd(m->dev, &centred, err) : mt_op_rmsnorm_bwd(m->dev, &usual, err);
}

/* All activations' operations have these fields, */
#define ACT_FIELDS .n = a->n, .f = a->f, .dtype = m->dt, .out = a->out
/* and their backward these, too. */
#define ACT_GRAD_FIELDS ACT_FIELDS, .dout = a->dout

int mt_mlp_act(mt_model *m, const struct mt_mlp_act *a, struct mt_err *err)
{
    const struct mt_xielu bent = {ACT_FIELDS, .x = a->x, .shape = a->shape};
    const struct mt_activate plain = {ACT_FIELDS, .x = a->x, .kind = (enum mt_activate_kind)a->kind};
    const struct mt_glu glu = {ACT_FIELDS, .gate_up = a->x, .kind = (enum mt_glu_kind)a->kind, .alpha = a->alpha,
                               .limit = a->limit};
    return a->shape     ? mt_op_xielu(m->dev, &bent, err)
           : a->ungated ? mt_op_activate(m->dev, &plain, err)
                        : mt_op_glu(m->dev, &glu, err);
}

int mt_mlp_act_backward(mt_model *m, const struct mt_mlp_act *a, struct mt_err *err)
{
    const struct mt_xielu_bwd bent = {ACT_GRAD_FIELDS, .x = a->x, .dx = a->dx, .shape = a->shape, .dshape = a->dshape,
                                      .workspace = m->own.workspace};
    const struct mt_activate_bwd plain = {ACT_GRAD_FIELDS, .x = a->x, .dx = a->dx,
                                          .kind = (enum mt_activate_kind)a->kind};
    const struct mt_glu_bwd glu = {ACT_GRAD_FIELDS, .gate_up = a->x, .dgate_up = a->dx,
                                   .kind = (enum mt_glu_kind)a->kind, .alpha = a->alpha, .limit = a->limit};
    return a->shape     ? mt_op_xielu_bwd(m->dev, &bent, err)
           : a->ungated ? mt_op_activate_bwd(m->dev, &plain, err)
                        : mt_op_glu_bwd(m->dev, &glu, err);
}

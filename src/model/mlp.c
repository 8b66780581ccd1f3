/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gated MLP of a decoder layer, pre-norm:
 *
 *   h = norm(x);  y = x + (act(h Wgate) * (h Wup)) Wdown       (Shazeer 2020)
 *
 * The record keeps gate and up, and the norm's statistics; backward recomputes the norm's output and the gated
 * product: a cheap pass each, the product's together with its gradient.
 */
#include "base/mem.h"
#include "model/model_priv.h"
#include "model/part.h"

struct record {
    void *gate_up; /* [n, 2f] */
    float *rstd;   /* [n] */
};

static size_t lay_out_record(struct record *r, const struct mt_part_shape *s, void *base)
{
    struct mt_widths w = mt_widths(s->cfg);
    size_t at = 0;
    r->gate_up = mt_take(base, &at, s->max_tokens * 2 * w.f * mt_dtype_size(s->dtype));
    r->rstd = mt_take(base, &at, s->max_tokens * 4);
    return at;
}

MT_PART_RECORD()

/* The gated product, and its gradient: [n, f]. */
static size_t scratch_bytes(const struct mt_model_params *p, mt_device *dev)
{
    (void)dev;
    return mt_align_up(p->max_tokens * (size_t)p->layout->cfg.ffn * mt_dtype_size(p->dtype), MT_RECORD_ALIGN);
}

static size_t workspace_bytes(const struct mt_model_params *p, mt_device *dev)
{
    struct mt_widths w = mt_widths(&p->layout->cfg);
    struct mt_rmsnorm_bwd norm = {.n = p->max_tokens, .c = w.c};
    struct mt_bias_bwd bias = {.n = p->max_tokens, .c = MT_MAX(2 * w.f, w.c)};
    return MT_MAX(mt_op_rmsnorm_bwd_workspace(dev, &norm), mt_op_bias_bwd_workspace(dev, &bias));
}

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    const struct mt_hf_config *c = mt_layout_builder_config(b);
    const struct mt_param_tensor weights[] = {{"mlp.gate_proj.weight", c->ffn}, {"mlp.up_proj.weight", c->ffn}},
                                 biases[] = {{"mlp.gate_proj.bias", c->ffn}, {"mlp.up_proj.bias", c->ffn}};
    mt_layout_add_tensor(b, p, MT_MLP_NORM, c->hidden, 0, "post_attention_layernorm.weight");
    mt_layout_add_param(b, p, MT_MLP_GATE_UP, c->hidden, 2, weights);
    if (c->mlp_bias)
        mt_layout_add_param(b, p, MT_MLP_GATE_UP_BIAS, 0, 2, biases);
    mt_layout_add_tensor(b, p, MT_MLP_DOWN, c->hidden, c->ffn, "mlp.down_proj.weight");
    if (c->mlp_bias)
        mt_layout_add_tensor(b, p, MT_MLP_DOWN_BIAS, c->hidden, 0, "mlp.down_proj.bias");
}

static int prepare(const struct mt_part_run *r, struct mt_err *err)
{
    mt_model *m = r->m;
    const struct mt_param *p = r->part->param;
    struct record rec = record_of(r);
    size_t n = r->in->n_tokens;
    int rc = mt_norm(m, n, r->x, r->w, p[MT_MLP_NORM], m->h, rec.rstd, false, err);
    return rc ? rc
              : mt_linear(m, n, m->wd.c, 2 * m->wd.f, m->h, r->w, p[MT_MLP_GATE_UP], p[MT_MLP_GATE_UP_BIAS], NULL,
                          rec.gate_up, err);
}

static int finish(const struct mt_part_run *r, void *y, struct mt_err *err)
{
    mt_model *m = r->m;
    const struct mt_param *p = r->part->param;
    struct record rec = record_of(r);
    size_t n = r->in->n_tokens;
    struct mt_glu glu = {.n = n, .f = m->wd.f, .dtype = m->dt, .kind = mt_activation(m), .gate_up = rec.gate_up,
                         .out = r->scratch};
    int rc = mt_op_glu(m->dev, &glu, err);
    return rc ? rc
              : mt_linear(m, n, m->wd.f, m->wd.c, r->scratch, r->w, p[MT_MLP_DOWN], p[MT_MLP_DOWN_BIAS], r->x, y, err);
}

/* Reads the gated product's gradient from the scratch and, if `again`, overwrites it with the recomputed product. */
static int gated_backward(const struct mt_part_run *r, const struct record *rec, bool again, struct mt_err *err)
{
    mt_model *m = r->m;
    return mt_op_glu_bwd(m->dev,
                         &(struct mt_glu_bwd){
                             .n = r->in->n_tokens,
                             .f = m->wd.f,
                             .dtype = m->dt,
                             .kind = mt_activation(m),
                             .gate_up = rec->gate_up,
                             .dout = r->scratch,
                             .dgate_up = rec->gate_up,
                             .out = again ? r->scratch : NULL,
                         },
                         err);
}

static int backward(const struct mt_part_run *r, struct mt_err *err)
{
    mt_model *m = r->m;
    const struct mt_widths *wd = &m->wd;
    const struct mt_param *p = r->part->param;
    struct record rec = record_of(r);
    size_t n = r->in->n_tokens;
    struct mt_linear_bwd down = {.n = n, .in = wd->f, .out = wd->c, .x = r->scratch, .w = r->w, .dy = r->dx,
                                 .p = p[MT_MLP_DOWN], .bias = p[MT_MLP_DOWN_BIAS], .g = r->g, .dx = r->scratch,
                                 .first = r->of->first};
    struct mt_linear_bwd gate_up = {.n = n, .in = wd->c, .out = 2 * wd->f, .x = m->h, .w = r->w, .dy = rec.gate_up,
                                    .p = p[MT_MLP_GATE_UP], .bias = p[MT_MLP_GATE_UP_BIAS], .g = r->g, .dx = m->dh,
                                    .first = r->of->first};
    int rc = mt_linear_input_grad(m, &down, err);
    if (!rc)
        rc = gated_backward(r, &rec, mt_linear_is_trained(&down), err);
    if (!rc)
        rc = mt_linear_weight_grad(m, &down, err);
    if (!rc)
        rc = mt_norm(m, n, r->x, r->w, p[MT_MLP_NORM], m->h, rec.rstd, true, err);
    if (!rc)
        rc = mt_linear_backward(m, &gate_up, err);
    return rc ? rc : mt_norm_backward(m, n, m->dh, r->x, r->w, p[MT_MLP_NORM], rec.rstd, r->dx, r->dx, r->g, err);
}

static double macs_per_token(const struct mt_hf_config *c, const struct mt_part *p, size_t seq_len)
{
    (void)p;
    (void)seq_len;
    return 3 * (double)c->hidden * (double)c->ffn;
}

const struct mt_part_kind mt_part_mlp = {
    .name = "mlp",
    .adapted = 1u << MT_MLP_GATE_UP | 1u << MT_MLP_DOWN,
    .products = 1u << MT_MLP_GATE_UP | 1u << MT_MLP_DOWN,
    .port = {MT_PORTS_OF_HIDDEN_STATE},
    .lay_out = lay_out,
    .record_part = MT_RECORD_REST,
    .record_bytes = record_bytes,
    .scratch_bytes = scratch_bytes,
    .workspace_bytes = workspace_bytes,
    .prepare = prepare,
    .finish = finish,
    .backward = backward,
    .macs_per_token = macs_per_token,
};

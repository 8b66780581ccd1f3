/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A decoder layer, pre-norm, as Llama, Mistral, Qwen2 and Qwen3 have it:
 *
 *   h = norm(x); qkv = h Wqkv + b; q, k = rope(qknorm(q, k)); o = attention(q, k, v)
 *   x2 = x + o Wo;  h = norm(x2); y = x2 + (act(h Wgate) * (h Wup)) Wdown
 *
 * The record keeps what is costly to make again (qkv, o, x2, gate and up, statistics); the norms'
 * outputs and the gated product are made again in backward from these: a cheap pass each, the product's along with its
 * gradient.
 */
#include "model/model_priv.h"

static struct mt_attention attention_args(const mt_model *m, const struct mt_unit *u,
                                          const struct mt_inputs *in, const struct mt_record *r)
{
    const struct mt_hf_config *cfg = &m->layout->cfg;
    const struct mt_widths *wd = &m->wd;
    size_t ld_qk = cfg->qk_norm ? wd->qk : wd->qkv;
    return (struct mt_attention){
        .n = in->n_tokens,
        .n_q = (size_t)cfg->n_heads,
        .n_kv = (size_t)cfg->n_kv_heads,
        .head_dim = (size_t)cfg->head_dim,
        .window = (size_t)cfg->window[u->layer],
        .n_docs = in->n_docs,
        .max_len = in->max_len,
        .dtype = m->dt,
        .scale = (float)(1.0 / sqrt((double)cfg->head_dim)),
        .cu_seqlens = in->cu_seqlens,
        .cu_seqlens_host = in->cu_seqlens_host,
        .q = r->qk,
        .ld_q = ld_qk,
        .k = mt_elem(m, r->qk, wd->q),
        .ld_k = ld_qk,
        .v = mt_elem(m, r->qkv, wd->qk),
        .ld_v = wd->qkv,
        .o = r->o,
        .ld_o = wd->q,
        .lse = r->lse,
        .workspace = m->attention_workspace,
    };
}

static int rotate(mt_model *m, const struct mt_unit *u, const struct mt_inputs *in, const void *w,
                  const struct mt_record *r, struct mt_err *err)
{
    const struct mt_hf_config *cfg = &m->layout->cfg;
    return mt_op_qk_rope(m->dev,
                         &(struct mt_qk_rope){
                             .n = in->n_tokens,
                             .n_q = (size_t)cfg->n_heads,
                             .n_kv = (size_t)cfg->n_kv_heads,
                             .head_dim = (size_t)cfg->head_dim,
                             .rot = m->wd.rot,
                             .dtype = m->dt,
                             .eps = (float)cfg->rms_eps,
                             .qkv = r->qkv,
                             .ld_qkv = m->wd.qkv,
                             .qk = r->qk,
                             .ld_qk = cfg->qk_norm ? m->wd.qk : m->wd.qkv,
                             .positions = in->positions,
                             .cos_t = m->cos_t,
                             .sin_t = m->sin_t,
                             .max_pos = m->p.max_len,
                             .q_norm = cfg->qk_norm ? mt_elem(m, w, u->q_norm.at) : NULL,
                             .k_norm = cfg->qk_norm ? mt_elem(m, w, u->k_norm.at) : NULL,
                             .rstd = r->rstd_qk,
                         },
                         err);
}

static int rotate_backward(mt_model *m, const struct mt_unit *u, const struct mt_inputs *in,
                           const void *w, const struct mt_record *r, float *g, struct mt_err *err)
{
    const struct mt_hf_config *cfg = &m->layout->cfg;
    return mt_op_qk_rope_bwd(m->dev,
                             &(struct mt_qk_rope_bwd){
                                 .n = in->n_tokens,
                                 .n_q = (size_t)cfg->n_heads,
                                 .n_kv = (size_t)cfg->n_kv_heads,
                                 .head_dim = (size_t)cfg->head_dim,
                                 .rot = m->wd.rot,
                                 .dtype = m->dt,
                                 .dqk = m->dqkv,
                                 .ld_dqk = m->wd.qkv,
                                 .dqkv = m->dqkv,
                                 .ld_dqkv = m->wd.qkv,
                                 .qkv = r->qkv,
                                 .ld_qkv = m->wd.qkv,
                                 .positions = in->positions,
                                 .cos_t = m->cos_t,
                                 .sin_t = m->sin_t,
                                 .max_pos = m->p.max_len,
                                 .q_norm = cfg->qk_norm ? mt_elem(m, w, u->q_norm.at) : NULL,
                                 .k_norm = cfg->qk_norm ? mt_elem(m, w, u->k_norm.at) : NULL,
                                 .rstd = r->rstd_qk,
                                 .dq_norm = mt_grad_of(g, u->q_norm),
                                 .dk_norm = mt_grad_of(g, u->k_norm),
                                 .workspace = m->workspace,
                             },
                             err);
}

/* The attention half's record from x; what it gives follows by project(). */
static int attend(mt_model *m, const struct mt_unit *u, const struct mt_inputs *in, const void *w,
                  const void *x, const struct mt_record *r, struct mt_err *err)
{
    const struct mt_widths *wd = &m->wd;
    size_t n = in->n_tokens;
    struct mt_attention at = attention_args(m, u, in, r);
    int rc = mt_norm(m, n, x, w, u->ln1, m->h, r->rstd1, false, err);
    if (!rc)
        rc = mt_linear(m, n, wd->c, wd->qkv, m->h, w, u->qkv, u->qkv_b, NULL, r->qkv, err);
    if (!rc)
        rc = rotate(m, u, in, w, r, err);
    return rc ? rc : mt_op_attention(m->dev, &at, err);
}

static int project(mt_model *m, const struct mt_unit *u, size_t n, const void *w, const void *x,
                   const struct mt_record *r, struct mt_err *err)
{
    return mt_linear(m, n, m->wd.q, m->wd.c, r->o, w, u->o, u->o_b, x, r->x2, err);
}

/* The MLP half's record from x2. */
static int expand(mt_model *m, const struct mt_unit *u, size_t n, const void *w, const struct mt_record *r,
                  struct mt_err *err)
{
    const struct mt_widths *wd = &m->wd;
    int rc = mt_norm(m, n, r->x2, w, u->ln2, m->h, r->rstd2, false, err);
    if (!rc)
        rc = mt_linear(m, n, wd->c, 2 * wd->f, m->h, w, u->gate_up, u->gate_up_b, NULL, r->gate_up,
                       err);
    return rc;
}

static int gated(mt_model *m, size_t n, const struct mt_record *r, struct mt_err *err)
{
    return mt_op_glu(m->dev,
                     &(struct mt_glu){
                         .n = n,
                         .f = m->wd.f,
                         .dtype = m->dt,
                         .kind = m->layout->cfg.gelu ? MT_GLU_GELU_TANH : MT_GLU_SILU,
                         .gate_up = r->gate_up,
                         .out = m->s,
                     },
                     err);
}

/* The gradient in m->s makes way for what gated() gave, where that is wanted. */
static int gated_backward(mt_model *m, size_t n, const struct mt_record *r, bool again, struct mt_err *err)
{
    return mt_op_glu_bwd(m->dev,
                         &(struct mt_glu_bwd){
                             .n = n,
                             .f = m->wd.f,
                             .dtype = m->dt,
                             .kind = m->layout->cfg.gelu ? MT_GLU_GELU_TANH : MT_GLU_SILU,
                             .gate_up = r->gate_up,
                             .dout = m->s,
                             .dgate_up = r->gate_up,
                             .out = again ? m->s : NULL,
                         },
                         err);
}

/* `x2` is where a half has what lies between the two: its own output, or its input. */
static struct mt_record layer_record(mt_model *m, const struct mt_unit *u, void *record, const void *x2)
{
    struct mt_record r;
    mt_record_layout(&r, &m->layout->cfg, u->part, m->dt, m->p.max_tokens, record ? record : m->record);
    if (u->part != MT_PART_BOTH)
        r.x2 = (void *)(uintptr_t)x2;
    return r;
}

int mt_model_forward(mt_model *m, size_t unit, size_t mb, const void *w, const void *x, void *y,
                     void *record, struct mt_err *err)
{
    const struct mt_unit *u = &m->layout->units[unit];
    const struct mt_inputs *in = &m->inputs[mb];
    struct mt_record r = layer_record(m, u, record, u->part == MT_PART_MLP ? x : y);
    size_t n = in->n_tokens;
    int rc = 0;
    if (u->part & MT_PART_ATTENTION) {
        rc = attend(m, u, in, w, x, &r, err);
        if (!rc)
            rc = project(m, u, n, w, x, &r, err);
    }
    if (rc || !(u->part & MT_PART_MLP))
        return rc;
    rc = expand(m, u, n, w, &r, err);
    if (!rc)
        rc = gated(m, n, &r, err);
    if (!rc)
        rc = mt_linear(m, n, m->wd.f, m->wd.c, m->s, w, u->down, u->down_b, r.x2, y, err);
    return rc;
}

static int backward_mlp(mt_model *m, const struct mt_unit *u, size_t n, const void *w,
                        const struct mt_record *r, void *dx, float *g, struct mt_err *err)
{
    const struct mt_widths *wd = &m->wd;
    struct mt_linear_bwd down = {.n = n, .in = wd->f, .out = wd->c, .x = m->s, .w = w, .dy = dx,
                                 .p = u->down, .bias = u->down_b, .g = g, .dx = m->s};
    struct mt_linear_bwd gate_up = {.n = n, .in = wd->c, .out = 2 * wd->f, .x = m->h, .w = w,
                                    .dy = r->gate_up, .p = u->gate_up, .bias = u->gate_up_b, .g = g,
                                    .dx = m->dh};
    int rc = mt_linear_input_grad(m, &down, err);
    if (!rc)
        rc = gated_backward(m, n, r, mt_grad_of(g, u->down) != NULL, err);
    if (!rc)
        rc = mt_linear_weight_grad(m, &down, err);
    if (!rc)
        rc = mt_norm(m, n, r->x2, w, u->ln2, m->h, r->rstd2, true, err);
    if (!rc)
        rc = mt_linear_backward(m, &gate_up, err);
    if (!rc)
        rc = mt_norm_backward(m, n, m->dh, r->x2, w, u->ln2, r->rstd2, dx, dx, g, err);
    return rc;
}

static int backward_attention(mt_model *m, const struct mt_unit *u, const struct mt_inputs *in,
                              const void *w, const void *x, const struct mt_record *r, void *dx,
                              float *g, struct mt_err *err)
{
    const struct mt_widths *wd = &m->wd;
    size_t n = in->n_tokens;
    struct mt_linear_bwd o = {.n = n, .in = wd->q, .out = wd->c, .x = r->o, .w = w, .dy = dx,
                              .p = u->o, .bias = u->o_b, .g = g, .dx = m->d_o};
    struct mt_attention_bwd at = {
        .fwd = attention_args(m, u, in, r),
        .d_o = m->d_o,
        .dq = m->dqkv,
        .ld_dq = wd->qkv,
        .dk = mt_elem(m, m->dqkv, wd->q),
        .ld_dk = wd->qkv,
        .dv = mt_elem(m, m->dqkv, wd->qk),
        .ld_dv = wd->qkv,
    };
    struct mt_linear_bwd qkv = {.n = n, .in = wd->c, .out = wd->qkv, .x = m->h, .w = w,
                                .dy = m->dqkv, .p = u->qkv, .bias = u->qkv_b, .g = g, .dx = m->dh};
    int rc = mt_linear_backward(m, &o, err);
    if (!rc)
        rc = mt_op_attention_bwd(m->dev, &at, err);
    if (!rc)
        rc = rotate_backward(m, u, in, w, r, g, err);
    if (!rc)
        rc = mt_norm(m, n, x, w, u->ln1, m->h, r->rstd1, true, err);
    if (!rc)
        rc = mt_linear_backward(m, &qkv, err);
    if (!rc)
        rc = mt_norm_backward(m, n, m->dh, x, w, u->ln1, r->rstd1, dx, dx, g, err);
    return rc;
}

/* What backward takes of forward, made again. */
static int recompute(mt_model *m, const struct mt_unit *u, const struct mt_inputs *in, const void *w,
                     const void *x, const struct mt_record *r, struct mt_err *err)
{
    int rc = 0;
    if (u->part & MT_PART_ATTENTION)
        rc = attend(m, u, in, w, x, r, err);
    if (!rc && u->part == MT_PART_BOTH)
        rc = project(m, u, in->n_tokens, w, x, r, err);
    if (!rc && u->part & MT_PART_MLP)
        rc = expand(m, u, in->n_tokens, w, r, err);
    return rc;
}

int mt_model_backward(mt_model *m, size_t unit, size_t mb, const void *w, const void *x,
                      void *record, void *dx, float *g, struct mt_err *err)
{
    const struct mt_unit *u = &m->layout->units[unit];
    const struct mt_inputs *in = &m->inputs[mb];
    struct mt_record r = layer_record(m, u, record, x); /* an attention half alone wants no x2 */
    int rc = record ? 0 : recompute(m, u, in, w, x, &r, err);
    if (!rc && u->part & MT_PART_MLP)
        rc = backward_mlp(m, u, in->n_tokens, w, &r, dx, g, err);
    if (!rc && u->part & MT_PART_ATTENTION)
        rc = backward_attention(m, u, in, w, x, &r, dx, g, err);
    return rc;
}

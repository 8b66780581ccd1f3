/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The router of a mixture of experts, pre-norm, with the shared expert:
 *
 *   n = norm(x);  ids, w = route(n Wr + br);  s = x + gate(n) * shared(n)
 *
 * n, ids and w are for the experts, which add their outputs to s (hf/moe.h has the whole block). With a norm of the
 * router's own, the logits are of that; with an MLP beside the experts, s begins at 0. If experts
 * take fewer dimensions than x has, their rows are n Wlatent, and the layer's end adds s.
 */
#include <math.h>

#include "base/mem.h"
#include "model/linear.h"
#include "model/moe.h"
#include "model/packing.h"
#include "model/part.h"
#include "model/shared_expert.h"

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    const struct mt_hf_config *c = mt_layout_builder_config(b);
    const struct mt_moe *m = &c->moe;
    const struct mt_param_tensor select[] = {{"mlp.gate.e_score_correction_bias", m->n_experts, .constant = true}},
                                 shared[] = {{"mlp.shared_expert.gate_proj.weight", m->shared_width},
                                             {"mlp.shared_expert.up_proj.weight", m->shared_width}};
    const char *norm = m->beside ? p->spec->norms.experts.before : p->spec->norms.mlp.before;
    const struct mt_param_tensor scale[] = {{"router.per_expert_scale", m->n_experts, .start = 1}};
    mt_layout_add_norm(b, p, MT_ROUTER_NORM, c->hidden, norm, &p->spec->norm);
    if (m->router_norm)
        mt_layout_add_norm(b, p, MT_ROUTER_OWN_NORM, c->hidden, "router.scale", &c->router_norm);
    if (m->expert_scale)
        mt_layout_add_param(b, p, MT_ROUTER_EXPERT_SCALE, 0, 1, scale);
    mt_layout_add_tensor(b, p, MT_ROUTER_WEIGHT, m->n_experts, c->hidden, "mlp.gate.weight");
    if (m->router_bias)
        mt_layout_add_tensor(b, p, MT_ROUTER_BIAS, m->n_experts, 0, "mlp.gate.bias");
    if (m->select_bias)
        mt_layout_add_param(b, p, MT_ROUTER_SELECT_BIAS, 0, 1, select);
    if (m->latent)
        mt_layout_add_tensor(b, p, MT_ROUTER_LATENT, m->latent, c->hidden, "mlp.fc1_latent_proj.weight");
    if (!m->shared_width)
        return;
    int gates = m->ungated ? 0 : 1;
    if (p->spec->gate_up_name)
        mt_layout_add_tensor(b, p, MT_ROUTER_SHARED_GATE_UP, 2 * m->shared_width, c->hidden, p->spec->gate_up_name);
    else
        mt_layout_add_param(b, p, MT_ROUTER_SHARED_GATE_UP, c->hidden, 1 + gates, shared + 1 - gates);
    mt_layout_add_tensor(b, p, MT_ROUTER_SHARED_DOWN, c->hidden, m->shared_width, "mlp.shared_expert.down_proj.weight");
    if (m->shared_gate)
        mt_layout_add_tensor(b, p, MT_ROUTER_SHARED_GATE, 1, c->hidden, "mlp.shared_expert_gate.weight");
}

struct record {
    float *rstd;   /* [n] of the norm */
    void *gate_up; /* [n, mt_moe_inner() of shared_width] */
    float *gate;   /* [n] scale of the shared expert's output, if it has one */
    float *own;    /* [n] 1 / sqrt of the router's own norm, if it has one */
};

static void lay_out_record(struct record *r, const struct mt_part_shape *s, struct mt_part_record *at)
{
    size_t n = s->max_tokens, inner = (size_t)mt_moe_inner(&s->cfg->moe, s->cfg->moe.shared_width);
    r->rstd = mt_record_take(at, 0, n * 4);
    r->gate_up = mt_record_take(at, 0, n * inner * mt_dtype_size(s->dtype));
    r->gate = mt_record_take(at, 0, s->cfg->moe.shared_gate ? n * 4 : 0);
    r->own = mt_record_take(at, 0, s->cfg->moe.router_norm ? n * 4 : 0);
}

static void record_bytes(const struct mt_part_shape *s, struct mt_part_record *at)
{
    struct record r;
    lay_out_record(&r, s, at);
}

static struct record record_of(const struct mt_part_run *run)
{
    struct mt_part_record at = run->record;
    struct record r;
    lay_out_record(&r, &run->shape, &at);
    return r;
}

struct scratch {
    void *logits;  /* [n, experts] */
    void *act;     /* [n, shared_width], and its gradient */
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

/* The dtype of the router's product and of the logits' gradient: FP32 if the router is F32 in files of bf16. */
static enum mt_dtype product_dtype(const struct mt_layout *l, enum mt_dtype dtype)
{
    return l->f32_routers ? MT_F32 : dtype;
}

static enum mt_dtype logits_dtype(const struct mt_moe *moe, enum mt_dtype dtype)
{
    return moe->router_f32 ? MT_F32 : dtype;
}

static size_t lay_out_scratch(struct scratch *s, const struct mt_model_params *p, void *base)
{
    const struct mt_hf_config *c = &p->layout->cfg;
    enum mt_dtype product = product_dtype(p->layout, p->dtype);
    size_t at = 0, n = p->max_tokens, size = mt_dtype_size(p->dtype), back = p->backward ? n : 0;
    s->logits = mt_take(base, &at, n * (size_t)c->moe.n_experts * mt_dtype_size(logits_dtype(&c->moe, p->dtype)));
    s->act = mt_take(base, &at, n * (size_t)c->moe.shared_width * size);
    s->dgate = mt_take(base, &at, c->moe.shared_gate ? back * sizeof(float) : 0);
    s->dlogits = mt_take(base, &at, back * (size_t)c->moe.n_experts * mt_dtype_size(product));
    s->dn = mt_take(base, &at, back * (size_t)c->hidden * sizeof(float));
    s->n32 = mt_take(base, &at, product == p->dtype ? 0 : n * (size_t)c->hidden * sizeof(float));
    bool score = c->moe.shared_gate && p->layout->n_adapters;
    s->score = mt_take(base, &at, score ? n * size : 0);
    s->dscore = mt_take(base, &at, score ? back * sizeof(float) : 0);
    s->own = mt_take(base, &at, c->moe.router_norm ? n * (size_t)c->hidden * size : 0);
    s->dscale = mt_take(base, &at, c->moe.expert_scale ? back * (size_t)c->moe.n_experts * sizeof(float) : 0);
    s->wide = mt_take(base, &at, c->moe.latent ? n * (size_t)c->hidden * sizeof(float) : 0);
    s->dlatent = mt_take(base, &at, back * (size_t)c->moe.latent * size);
    return at;
}

static size_t scratch_bytes(const struct mt_model_params *p, const struct mt_layer_spec *, mt_device *)
{
    struct scratch s;
    return lay_out_scratch(&s, p, NULL);
}

static struct scratch scratch_of(const struct mt_part_run *run)
{
    struct scratch s;
    lay_out_scratch(&s, &run->m->p, run->scratch);
    return s;
}

static size_t workspace_bytes(const struct mt_model_params *p, const struct mt_layer_spec *, mt_device *dev)
{
    const struct mt_hf_config *c = &p->layout->cfg;
    struct mt_rmsnorm_bwd norm = {.n = p->max_tokens, .c = (size_t)c->hidden};
    struct mt_bias_bwd bias = {.n = p->max_tokens, .c = (size_t)c->moe.n_experts};
    struct mt_router_stats stats = {.n = p->max_tokens, .e = (size_t)c->moe.n_experts, .dtype = p->dtype};
    struct mt_shared_gate_bwd gate = {.n = p->max_tokens, .c = (size_t)c->hidden, .dtype = p->dtype};
    size_t need = MT_MAX(mt_op_rmsnorm_bwd_workspace(dev, &norm), mt_op_bias_bwd_workspace(dev, &bias));
    need = MT_MAX(need, mt_op_router_stats_workspace(dev, &stats));
    return MT_MAX(need, c->moe.shared_gate ? mt_op_shared_gate_bwd_workspace(dev, &gate) : 0);
}

static struct mt_router_rule rule_of(const struct mt_moe *moe)
{
    static const enum mt_router_score score[] = {
        [MT_MOE_SOFTMAX] = MT_SCORE_SOFTMAX,
        [MT_MOE_SIGMOID] = MT_SCORE_SIGMOID,
        [MT_MOE_CHOSEN_SOFTMAX] = MT_SCORE_RAW,
    };
    static const enum mt_router_renorm renorm[] = {
        [MT_MOE_NO_RENORM] = MT_RENORM_NONE, [MT_MOE_RENORM_SUM] = MT_RENORM_SUM, [MT_MOE_RENORM_MOST] = MT_RENORM_MAX};
    return (struct mt_router_rule){
        .score = score[moe->score],
        .softmax_chosen = moe->score == MT_MOE_CHOSEN_SOFTMAX,
        .n_group = (size_t)moe->n_group,
        .topk_group = (size_t)moe->topk_group,
        .group = moe->group_score == MT_MOE_GROUP_MAX ? MT_GROUP_MAX : MT_GROUP_TOP2,
        .renorm = renorm[moe->renorm],
        .eps = (float)moe->renorm_eps,
        .scale = (float)moe->scale,
        .round_weights = moe->weights_rounded,
    };
}

static struct mt_routing own_routing(const struct mt_part_run *r)
{
    struct mt_routing t;
    size_t first = mt_model_first_row(r->m, r->of->mb) * (size_t)r->m->layout->cfg.moe.top_k;
    mt_routing_layout(&t, &r->m->layout->cfg.moe, mt_model_group_rows(&r->m->p), mt_value(r, MT_ROLE_ROUTING));
    t.ids += first;
    t.weights += first;
    return t;
}

static const void *router_weight(const struct mt_part_run *r)
{
    const mt_model *m = r->m;
    return mt_unit_f32_tensor(m->layout, r->of->unit, m->dt)
               ? (const char *)mt_value(r, MT_ROLE_WEIGHTS) + mt_unit_f32_at(m->layout, r->of->unit, m->dt)
               : mt_elem(m, r->w, r->part->param[MT_ROUTER_WEIGHT].at);
}

/* Converts n to the dtype of the router's product: replaces *n. */
static int widen(const struct mt_part_run *r, const struct scratch *s, const void **n, struct mt_err *err)
{
    const mt_model *m = r->m;
    struct mt_cast cast = {r->in->n_tokens * m->wd.c, m->dt, MT_F32, *n, s->n32};
    if (product_dtype(m->layout, m->dt) == m->dt)
        return 0;
    *n = s->n32;
    return mt_op_cast(m->dev, &cast, err);
}

/* The router's adapter. n: the norm's output, in the compute dtype. */
static struct mt_adapter_run router_adapter(const struct mt_part_run *r, const void *n)
{
    const mt_model *m = r->m;
    const struct mt_moe *moe = &m->layout->cfg.moe;
    return (struct mt_adapter_run){.adapter = r->part->param[MT_ROUTER_WEIGHT].adapter, .n = r->in->n_tokens,
                                   .ld = (size_t)moe->n_experts, .y_dtype = logits_dtype(moe, m->dt), .x = n, .w = r->w,
                                   .g = r->g};
}

/* The router's own products are never in FP8. */
static struct mt_linear_shape router_shape(const struct mt_part_run *r, enum mt_dtype d_dtype)
{
    const mt_model *m = r->m;
    return (struct mt_linear_shape){r->in->n_tokens, m->wd.c, (size_t)m->layout->cfg.moe.n_experts,
                                    product_dtype(m->layout, m->dt), d_dtype};
}

/* Of n, the norm's output, which *product becomes in the dtype of the router's product. */
static int router_logits(const struct mt_part_run *r, const struct scratch *s, const void *n, const void **product,
                         struct mt_err *err)
{
    mt_model *m = r->m;
    const struct mt_moe *moe = &m->layout->cfg.moe;
    const struct mt_param *p = r->part->param;
    struct mt_adapter_run adapter = router_adapter(r, n);
    void *logits = adapter.y = s->logits;
    *product = n;
    int rc = widen(r, s, product, err);
    const struct mt_linear_shape shape = router_shape(r, logits_dtype(moe, m->dt));
    struct mt_gemm g = mt_gemm_output(&shape, *product, router_weight(r), logits);
    g.bias = p[MT_ROUTER_BIAS].n ? mt_elem(m, r->w, p[MT_ROUTER_BIAS].at) : NULL;
    rc = rc ?: mt_op_gemm(m->dev, &g, err);
    return rc ?: mt_adapter_forward(m, &adapter, err);
}

static const void *expert_scale(const struct mt_part_run *r)
{
    const struct mt_param *p = &r->part->param[MT_ROUTER_EXPERT_SCALE];
    return p->n ? mt_elem(r->m, r->w, p->at) : NULL;
}

static int route(const struct mt_part_run *r, const void *logits, struct mt_err *err)
{
    const mt_model *m = r->m;
    const struct mt_moe *moe = &m->layout->cfg.moe;
    struct mt_routing own = own_routing(r);
    return mt_op_router(m->dev,
                        &(struct mt_router){
                            .n = r->in->n_tokens,
                            .n_padded = m->p.max_tokens,
                            .e = (size_t)moe->n_experts,
                            .k = (size_t)moe->top_k,
                            .dtype = m->dt,
                            .logits_dtype = logits_dtype(moe, m->dt),
                            .rule = rule_of(moe),
                            .logits = logits,
                            .select_bias = mt_model_select_bias(m, r->part->layer),
                            .expert_scale = expert_scale(r),
                            .ids = own.ids,
                            .weights = own.weights,
                        },
                        err);
}

/* The norm's output goes to the group's rows; if these are of other dimensions, or only the record is recomputed, to
 * scratch. */
static void *norm_output(const struct mt_part_run *r)
{
    void *rows = r->m->layout->cfg.moe.latent ? NULL : mt_moe_own_rows(r, MT_ROLE_ROWS, mt_dtype_size(r->m->dt));
    return rows ?: r->m->h;
}

/* The group's rows, if they are of other dimensions than n. */
static int fill_latent(const struct mt_part_run *r, const void *n, struct mt_err *err)
{
    mt_model *m = r->m;
    const struct mt_param none = {0};
    size_t latent = (size_t)m->layout->cfg.moe.latent;
    void *rows = mt_moe_own_rows(r, MT_ROLE_ROWS, mt_dtype_size(m->dt));
    if (!latent || !rows)
        return 0;
    return mt_linear(m, r->in->n_tokens, m->wd.c, latent, n, r->w, r->part->param[MT_ROUTER_LATENT], none, NULL, rows,
                     err);
}

static struct mt_shared_expert shared_of(const struct mt_part_run *r)
{
    struct record rec = record_of(r);
    struct scratch s = scratch_of(r);
    const void *dsum = mt_moe_own_rows(r, MT_ROLE_DY, mt_dtype_size(r->m->dt));
    return (struct mt_shared_expert){.run = r, .gate_up = rec.gate_up, .gate = rec.gate, .act = s.act, .score = s.score,
                                     .dscore = s.dscore, .dgate = s.dgate, .dn = s.dn,
                                     .dy = dsum ? dsum : r->dx};
}

static struct mt_norm norm_of(const struct mt_part_run *r, const struct record *rec)
{
    return (struct mt_norm){.spec = &r->part->spec->norm, .n = r->in->n_tokens, .x = r->x, .w = r->w,
                            .p = r->part->param[MT_ROUTER_NORM], .rstd = rec->rstd};
}

static struct mt_norm own_norm_of(const struct mt_part_run *r, const struct record *rec)
{
    return (struct mt_norm){.spec = &r->m->layout->cfg.router_norm, .n = r->in->n_tokens, .x = r->x, .w = r->w,
                            .p = r->part->param[MT_ROUTER_OWN_NORM], .rstd = rec->own};
}

/* h /= sqrt(hidden) */
static int shrink(const struct mt_part_run *r, void *h, struct mt_err *err)
{
    const mt_model *m = r->m;
    struct mt_add a = {.n = r->in->n_tokens * m->wd.c, .dtype = m->dt, .b = h, .out = h,
                       .scale = 1 / sqrtf((float)m->wd.c)};
    return mt_op_add(m->dev, &a, err);
}

/* The output of the router's own norm, if it has one, to scratch. again: with the recorded statistics. */
static int prepare_own(const struct mt_part_run *r, const struct record *rec, bool again, struct mt_err *err)
{
    struct mt_norm own = own_norm_of(r, rec);
    void *out = scratch_of(r).own;
    if (!own.p.n)
        return 0;
    return mt_norm(r->m, &own, out, again, err) ?: shrink(r, out, err);
}

/* What the logits are of, if n is the norm's output. */
static const void *router_input(const struct mt_part_run *r, const void *n)
{
    return r->part->param[MT_ROUTER_OWN_NORM].n ? scratch_of(r).own : n;
}

static int prepare(const struct mt_part_run *r, struct mt_err *err)
{
    mt_model *m = r->m;
    struct record rec = record_of(r);
    void *n = norm_output(r);
    struct mt_norm norm = norm_of(r, &rec);
    int rc = mt_norm(m, &norm, n, false, err)
          ?: prepare_own(r, &rec, false, err)
          ?: fill_latent(r, n, err);
    struct mt_shared_expert shared = shared_of(r);
    return rc || !m->layout->cfg.moe.shared_width ? rc : mt_shared_expert_open(&shared, n, err);
}

static int count_probabilities(const struct mt_part_run *r, const void *logits, struct mt_err *err)
{
    mt_model *m = r->m;
    const struct mt_moe *moe = &m->layout->cfg.moe;
    return mt_op_router_stats(m->dev,
                              &(struct mt_router_stats){
                                  .n = r->in->n_tokens,
                                  .e = (size_t)moe->n_experts,
                                  .dtype = logits_dtype(moe, m->dt),
                                  .logits = logits,
                                  .prob_sum = mt_model_prob_sum(m, m->stats_dev, mt_group_of(m->p.groups, r->of->mb)),
                                  .workspace = m->own.workspace,
                              },
                              err);
}

/* What the sum of the experts' outputs begins with: x, or if the layer's end adds that, 0. */
static int begin_sum(const struct mt_part_run *r, float *sum, struct mt_err *err)
{
    const mt_model *m = r->m;
    size_t n = r->in->n_tokens * m->wd.c;
    struct mt_cast x = {n, m->dt, MT_F32, r->x, sum};
    if (!mt_moe_adds_last(&m->layout->cfg.moe))
        return mt_op_cast(m->dev, &x, err);
    x = (struct mt_cast){n, m->dt, m->dt, r->x,
                         mt_moe_own_rows(r, MT_ROLE_RESIDUAL, mt_dtype_size(m->dt))};
    int rc = mt_op_cast(m->dev, &x, err);
    return rc ?: mt_op_zero(m->dev, &(struct mt_zero){sum, n * sizeof(float)}, err);
}

/* With latent rows: what the layer's end adds, the shared expert's output in it, rounded once; and a sum of 0. */
static int begin_latent(const struct mt_part_run *r, float *sum, struct mt_err *err)
{
    mt_model *m = r->m;
    size_t n = r->in->n_tokens, elems = n * m->wd.c, of_sum = n * mt_moe_row(&m->layout->cfg);
    float *wide = scratch_of(r).wide;
    struct mt_shared_expert shared = shared_of(r);
    struct mt_cast rounded = {elems, MT_F32, m->dt, wide, mt_moe_own_rows(r, MT_ROLE_RESIDUAL, mt_dtype_size(m->dt))};
    int rc = mt_op_cast(m->dev, &(struct mt_cast){elems, m->dt, MT_F32, r->x, wide}, err);
    if (!rc && m->layout->cfg.moe.shared_width)
        rc = mt_shared_expert_add(&shared, wide, err);
    return rc ?: mt_op_cast(m->dev, &rounded, err)
              ?: mt_op_zero(m->dev, &(struct mt_zero){sum, of_sum * sizeof(float)}, err);
}

static int finish(const struct mt_part_run *r, void *y, struct mt_err *err)
{
    mt_model *m = r->m;
    struct scratch s = scratch_of(r);
    float *sum = mt_moe_own_rows(r, MT_ROLE_SUM, sizeof(float));
    struct mt_shared_expert shared = shared_of(r);
    const void *product;
    (void)y; /* the combine part makes it from the sum */
    int rc = router_logits(r, &s, router_input(r, norm_output(r)), &product, err)
          ?: route(r, s.logits, err);
    if (!rc && mt_model_balances(m))
        rc = count_probabilities(r, s.logits, err);
    if (!rc && m->layout->cfg.moe.latent)
        return begin_latent(r, sum, err);
    rc = rc ?: begin_sum(r, sum, err);
    return rc || !m->layout->cfg.moe.shared_width ? rc : mt_shared_expert_add(&shared, sum, err);
}

static int router_backward(const struct mt_part_run *r, const struct scratch *s, struct mt_err *err)
{
    const mt_model *m = r->m;
    const struct mt_moe *moe = &m->layout->cfg.moe;
    float *dweights = (float *)mt_value(r, MT_ROLE_DWEIGHTS) + mt_model_first_row(m, r->of->mb) * (size_t)moe->top_k;
    return mt_op_router_bwd(m->dev,
                            &(struct mt_router_bwd){
                                .n = r->in->n_tokens,
                                .e = (size_t)moe->n_experts,
                                .k = (size_t)moe->top_k,
                                .dtype = product_dtype(m->layout, m->dt),
                                .logits_dtype = logits_dtype(moe, m->dt),
                                .rule = rule_of(moe),
                                .logits = s->logits,
                                .expert_scale = expert_scale(r),
                                .dscale = mt_grad_of(r->g, r->part->param[MT_ROUTER_EXPERT_SCALE]) ? s->dscale : NULL,
                                .ids = own_routing(r).ids,
                                .dweights = dweights,
                                .aux = mt_model_balances(m) ? m->shares : NULL,
                                .aux_scale = mt_model_balances(m) ? mt_model_balance_scale(m) : 0,
                                .dlogits = s->dlogits,
                            },
                            err);
}

/* After the logits' gradient was used for the router's own weight. s->logits is free: it may have to hold dlogits, cast. */
static int router_adapter_backward(const struct mt_part_run *r, const struct scratch *s, const void *in,
                                   struct mt_err *err)
{
    mt_model *m = r->m;
    struct mt_adapter_run a = router_adapter(r, in);
    enum mt_dtype have = product_dtype(m->layout, m->dt);
    size_t elems = r->in->n_tokens * a.ld;
    if (!a.adapter)
        return 0;
    a.dy = have == m->dt ? s->dlogits : s->logits;
    a.dx = s->dn;
    a.dx_dtype = MT_F32;
    int rc = have == m->dt ? 0 : mt_op_cast(m->dev, &(struct mt_cast){elems, have, m->dt, s->dlogits, s->logits}, err);
    return rc ?: mt_adapter_input_grad(m, &a, err) ?: mt_adapter_weight_grad(m, &a, err);
}

/* The gradient of the experts' own scales: column sums of the rows that the router's operation left. */
static int scale_backward(const struct mt_part_run *r, const struct scratch *s, struct mt_err *err)
{
    const mt_model *m = r->m;
    size_t experts = (size_t)m->layout->cfg.moe.n_experts;
    struct mt_bias_bwd sums = {.n = r->in->n_tokens, .c = experts, .ld = experts, .dtype = MT_F32, .dy = s->dscale,
                               .db = mt_grad_of(r->g, r->part->param[MT_ROUTER_EXPERT_SCALE]),
                               .workspace = m->own.workspace};
    return sums.db ? mt_op_bias_bwd(m->dev, &sums, err) : 0;
}

/* r->dx += gradient of x from that of the router's own norm, in s->dn; then s->dn is that of the rows alone. */
static int own_norm_backward(const struct mt_part_run *r, const struct scratch *s, struct mt_err *err)
{
    mt_model *m = r->m;
    size_t n = r->in->n_tokens * m->wd.c;
    struct record rec = record_of(r);
    struct mt_norm own = own_norm_of(r, &rec);
    const float *rows = mt_moe_own_rows(r, MT_ROLE_DN, sizeof(float));
    return mt_op_cast(m->dev, &(struct mt_cast){n, MT_F32, m->dt, s->dn, m->dh}, err)
        ?: shrink(r, m->dh, err)
        ?: mt_norm_backward(m, &own, &(struct mt_norm_grad){m->dh, r->dx, r->dx, r->g}, err)
        ?: mt_op_cast(m->dev, &(struct mt_cast){n, MT_F32, MT_F32, rows, s->dn}, err);
}

/* s->dn += the gradient through the latent rows, if there are any; their norm's output is in m->h. */
static int latent_backward(const struct mt_part_run *r, const struct scratch *s, struct mt_err *err)
{
    mt_model *m = r->m;
    size_t n = r->in->n_tokens, elems = n * m->wd.c, latent = (size_t)m->layout->cfg.moe.latent;
    struct mt_linear_bwd down = {.n = n, .in = m->wd.c, .out = latent, .x = m->h, .w = r->w, .dy = s->dlatent,
                                 .p = r->part->param[MT_ROUTER_LATENT], .g = r->g, .dx = m->dh};
    struct mt_cast rows = {n * latent, MT_F32, m->dt, mt_moe_own_rows(r, MT_ROLE_DN, sizeof(float)), s->dlatent};
    struct mt_add sum = {.n = elems, .dtype = MT_F32, .a = s->dn, .b = s->wide, .out = s->dn};
    if (!latent)
        return 0;
    return mt_op_cast(m->dev, &rows, err)
        ?: mt_linear_backward(m, &down, err)
        ?: mt_op_cast(m->dev, &(struct mt_cast){elems, m->dt, MT_F32, m->dh, s->wide}, err)
        ?: mt_op_add(m->dev, &sum, err);
}

/* Recomputes the logits, but not the choice of experts: a tie that fell the other way would not be noticed. */
static int backward(const struct mt_part_run *r, struct mt_err *err)
{
    mt_model *m = r->m;
    const struct mt_param *p = r->part->param;
    size_t n = r->in->n_tokens, experts = (size_t)m->layout->cfg.moe.n_experts;
    struct record rec = record_of(r);
    struct scratch s = scratch_of(r);
    struct mt_shared_expert shared = shared_of(r);
    const struct mt_linear_shape shape = router_shape(r, MT_F32);
    struct mt_gemm sum = mt_gemm_input_grad(&shape, s.dlogits, router_weight(r), s.dn);
    struct mt_linear_bwd gate = {.n = n, .in = m->wd.c, .out = experts, .w = r->w, .dy = s.dlogits,
                                 .f32 = product_dtype(m->layout, m->dt) == MT_F32, .whole = true,
                                 .p = p[MT_ROUTER_WEIGHT], .bias = p[MT_ROUTER_BIAS], .g = r->g};
    struct mt_norm norm = norm_of(r, &rec);
    const void *in = router_input(r, m->h);
    bool own = p[MT_ROUTER_OWN_NORM].n;
    int rc = mt_norm(m, &norm, m->h, true, err);
    gate.p.adapter = NULL; /* by itself: its products may be of another dtype */
    if (!own && !m->layout->cfg.moe.latent) { /* else the rows are of something else than the logits */
        sum.c = mt_moe_own_rows(r, MT_ROLE_DN, sizeof(float));
        sum.ldc = sum.ldd;
    }
    rc = rc ?: prepare_own(r, &rec, true, err)
            ?: router_logits(r, &s, in, &gate.x, err)
            ?: router_backward(r, &s, err)
            ?: scale_backward(r, &s, err)
            ?: mt_linear_weight_grad(m, &gate, err)
            ?: mt_op_gemm(m->dev, &sum, err)
            ?: router_adapter_backward(r, &s, in, err);
    if (!rc && own)
        rc = own_norm_backward(r, &s, err);
    if (!rc && m->layout->cfg.moe.shared_width)
        rc = mt_shared_expert_backward(&shared, err);
    return rc ?: latent_backward(r, &s, err)
              ?: mt_op_cast(m->dev, &(struct mt_cast){n * m->wd.c, MT_F32, m->dt, s.dn, m->dh}, err)
              ?: mt_norm_backward(m, &norm, &(struct mt_norm_grad){m->dh, r->dx, r->dx, r->g}, err);
}

static double macs_per_token(const struct mt_hf_config *c, const struct mt_part *, size_t)
{
    const struct mt_moe *m = &c->moe;
    int64_t shared = mt_moe_inner(m, m->shared_width) + m->shared_width;
    return (double)c->hidden * (double)(m->n_experts + shared + m->shared_gate + m->latent);
}

static bool adds_last(const struct mt_hf_config *c)
{
    return mt_moe_adds_last(&c->moe);
}

/* The shared expert's gradient is that of the sum, which is not that of the layer's output. */
static bool shares_normed(const struct mt_hf_config *c)
{
    return c->moe.normed && c->moe.shared_width;
}

const struct mt_part_kind mt_part_router = {
    .name = "router",
    .routes = true,
    .adapted = 1u << MT_ROUTER_SHARED_GATE_UP | 1u << MT_ROUTER_SHARED_DOWN | 1u << MT_ROUTER_LATENT,
    .adapted_by_name = 1u << MT_ROUTER_WEIGHT | 1u << MT_ROUTER_SHARED_GATE,
    .port = {{MT_ROLE_WEIGHTS, MT_READ, MT_READ},
             {MT_ROLE_X, MT_READ, MT_READ},
             {MT_ROLE_ROWS, MT_FILL, MT_NO_ACCESS, mt_rows_bytes},
             {MT_ROLE_SUM, MT_FILL, MT_NO_ACCESS, mt_sum_bytes},
             {MT_ROLE_ROUTING, MT_FILL, MT_READ, mt_routing_bytes},
             {MT_ROLE_DN, MT_NO_ACCESS, MT_READ, mt_sum_bytes},
             {MT_ROLE_DWEIGHTS, MT_NO_ACCESS, MT_READ, mt_routing_weights_bytes},
             {MT_ROLE_RESIDUAL, MT_FILL, MT_NO_ACCESS, mt_residual_bytes, adds_last},
             {MT_ROLE_DY, MT_NO_ACCESS, MT_READ, mt_rows_bytes, shares_normed},
             {MT_ROLE_DX, MT_NO_ACCESS, MT_UPDATE, mt_hidden_bytes},
             {MT_ROLE_GRAD, MT_NO_ACCESS, MT_SUM}},
    .lay_out = lay_out,
    .record_bytes = record_bytes,
    .scratch_bytes = scratch_bytes,
    .workspace_bytes = workspace_bytes,
    .prepare = prepare,
    .finish = finish,
    .backward = backward,
    .macs_per_token = macs_per_token,
};

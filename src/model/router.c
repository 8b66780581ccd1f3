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
#include "model/packing.h"
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

static void lay_out_record(struct mt_router_run *x, const struct mt_part_shape *s, struct mt_part_record *at)
{
    size_t n = s->max_tokens, inner = (size_t)mt_moe_inner(&s->cfg->moe, s->cfg->moe.shared_width);
    x->rstd = mt_record_take(at, 0, n * 4);
    x->gate_up = mt_record_take(at, 0, n * inner * mt_dtype_size(s->dtype));
    x->gate = mt_record_take(at, 0, s->cfg->moe.shared_gate ? n * 4 : 0);
    x->own_rstd = mt_record_take(at, 0, s->cfg->moe.router_norm ? n * 4 : 0);
}

static void record_bytes(const struct mt_part_shape *s, struct mt_part_record *at)
{
    struct mt_router_run x;
    lay_out_record(&x, s, at);
}

static size_t lay_out_scratch(struct mt_router_run *x, const struct mt_model_params *p, void *base)
{
    const struct mt_hf_config *c = &p->layout->cfg;
    size_t at = 0, n = p->max_tokens, size = mt_dtype_size(p->dtype), back = p->backward ? n : 0;
    size_t experts = (size_t)c->moe.n_experts, hidden = (size_t)c->hidden;
    bool score = c->moe.shared_gate && p->layout->n_adapters;
    x->logits_dtype = c->moe.router_f32 ? MT_F32 : p->dtype;
    x->product_dtype = p->layout->f32_routers ? MT_F32 : p->dtype;
    x->logits = mt_take(base, &at, n * experts * mt_dtype_size(x->logits_dtype));
    x->act = mt_take(base, &at, n * (size_t)c->moe.shared_width * size);
    x->dgate = mt_take(base, &at, c->moe.shared_gate ? back * sizeof(float) : 0);
    x->dlogits = mt_take(base, &at, back * experts * mt_dtype_size(x->product_dtype));
    x->dn = mt_take(base, &at, back * hidden * sizeof(float));
    x->n32 = mt_take(base, &at, x->product_dtype == p->dtype ? 0 : n * hidden * sizeof(float));
    x->score = mt_take(base, &at, score ? n * size : 0);
    x->dscore = mt_take(base, &at, score ? back * sizeof(float) : 0);
    x->own = mt_take(base, &at, c->moe.router_norm ? n * hidden * size : 0);
    x->dscale = mt_take(base, &at, c->moe.expert_scale ? back * experts * sizeof(float) : 0);
    x->wide = mt_take(base, &at, c->moe.latent ? n * hidden * sizeof(float) : 0);
    x->dlatent = mt_take(base, &at, back * (size_t)c->moe.latent * size);
    return at;
}

static size_t scratch_bytes(const struct mt_model_params *p, const struct mt_layer_spec *, mt_device *)
{
    struct mt_router_run x;
    return lay_out_scratch(&x, p, NULL);
}

/* Tokens that go to experts, and that the load-balancing loss counts. */
static size_t routed(const struct mt_router_run *x)
{
    return x->n - x->run->in->n_padding;
}

static struct mt_router_run begin(const struct mt_part_run *r)
{
    struct mt_part_record at = r->record;
    struct mt_router_run x = {.run = r, .m = r->m, .moe = &r->m->layout->cfg.moe, .p = r->part->param,
                              .n = r->in->n_tokens};
    lay_out_record(&x, &r->shape, &at);
    lay_out_scratch(&x, &r->m->p, r->scratch);
    return x;
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

static struct mt_routing own_routing(const struct mt_router_run *x)
{
    struct mt_routing t;
    size_t first = mt_model_first_row(x->m, x->run->of->mb) * (size_t)x->moe->top_k;
    mt_routing_layout(&t, x->moe, mt_model_group_rows(&x->m->p), mt_value(x->run, MT_ROLE_ROUTING));
    t.ids += first;
    t.weights += first;
    return t;
}

/* The micro-batch's rows, of elements of the compute dtype, or of FP32. */
static void *own_rows(const struct mt_router_run *x, enum mt_role role)
{
    return mt_moe_own_rows(x->run, role, mt_dtype_size(x->m->dt));
}

static float *own_sums(const struct mt_router_run *x, enum mt_role role)
{
    return mt_moe_own_rows(x->run, role, sizeof(float));
}

/* n elements, from one dtype to another. */
static int cast(const struct mt_router_run *x, size_t n, enum mt_dtype from, const void *src, enum mt_dtype to,
                void *dst, struct mt_err *err)
{
    return mt_op_cast(x->m->dev, &(struct mt_cast){n, from, to, src, dst}, err);
}

/* Elements of the hidden state. */
static size_t hidden_elems(const struct mt_router_run *x)
{
    return x->n * x->m->c;
}

static const void *router_weight(const struct mt_router_run *x)
{
    const mt_model *m = x->m;
    size_t unit = m->layout->units[x->run->of->unit].weights;
    return mt_unit_f32_tensor(m->layout, unit, m->dt)
               ? (const char *)mt_value(x->run, MT_ROLE_WEIGHTS) + mt_unit_f32_at(m->layout, unit, m->dt)
               : mt_elem(m, x->run->w, x->p[MT_ROUTER_WEIGHT].at);
}

/* The router's adapter. n: the norm's output, in the compute dtype. */
static struct mt_adapter_run router_adapter(const struct mt_router_run *x, const void *n)
{
    return (struct mt_adapter_run){.adapter = x->p[MT_ROUTER_WEIGHT].adapter, .n = x->n,
                                   .ld = (size_t)x->moe->n_experts, .y_dtype = x->logits_dtype, .x = n,
                                   .w = x->run->w, .g = x->run->g};
}

/* The router's own products are never in FP8. */
static struct mt_linear_shape router_shape(const struct mt_router_run *x, enum mt_dtype d_dtype)
{
    return (struct mt_linear_shape){x->n, x->m->c, (size_t)x->moe->n_experts, x->product_dtype, d_dtype};
}

/* Of n, the norm's output, which *product becomes in the dtype of the router's product. */
static int router_logits(const struct mt_router_run *x, const void *n, const void **product, struct mt_err *err)
{
    mt_model *m = x->m;
    const struct mt_param bias = x->p[MT_ROUTER_BIAS];
    struct mt_adapter_run adapter = router_adapter(x, n);
    bool widens = x->product_dtype != m->dt;
    *product = widens ? x->n32 : n;
    int rc = widens ? cast(x, hidden_elems(x), m->dt, n, MT_F32, x->n32, err) : 0;
    const struct mt_linear_shape shape = router_shape(x, x->logits_dtype);
    struct mt_gemm g = mt_gemm_output(&shape, *product, router_weight(x), x->logits);
    g.bias = bias.n ? mt_elem(m, x->run->w, bias.at) : NULL;
    adapter.y = x->logits;
    return rc ?: mt_op_gemm(m->dev, &g, err) ?: mt_adapter_forward(m, &adapter, err);
}

static const void *expert_scale(const struct mt_router_run *x)
{
    const struct mt_param *p = &x->p[MT_ROUTER_EXPERT_SCALE];
    return p->n ? mt_elem(x->m, x->run->w, p->at) : NULL;
}

static int route(const struct mt_router_run *x, struct mt_err *err)
{
    const mt_model *m = x->m;
    struct mt_routing own = own_routing(x);
    return mt_op_router(m->dev,
                        &(struct mt_router){
                            .n = routed(x),
                            .n_padded = m->p.max_tokens,
                            .e = (size_t)x->moe->n_experts,
                            .k = (size_t)x->moe->top_k,
                            .dtype = m->dt,
                            .logits_dtype = x->logits_dtype,
                            .rule = rule_of(x->moe),
                            .logits = x->logits,
                            .select_bias = mt_model_select_bias(m, x->run->part->layer),
                            .expert_scale = expert_scale(x),
                            .ids = own.ids,
                            .weights = own.weights,
                        },
                        err);
}

/* The norm's output goes to the group's rows; if these are of other dimensions, or only the record is recomputed, to
 * scratch. */
static void *norm_output(const struct mt_router_run *x)
{
    void *rows = x->moe->latent ? NULL : own_rows(x, MT_ROLE_ROWS);
    return rows ?: x->m->h;
}

/* The group's rows, if they are of other dimensions than n. */
static int fill_latent(const struct mt_router_run *x, const void *n, struct mt_err *err)
{
    const struct mt_param none = {0};
    void *rows = own_rows(x, MT_ROLE_ROWS);
    return !x->moe->latent || !rows ? 0
                                    : mt_linear(x->m, x->n, x->m->c, (size_t)x->moe->latent, n, x->run->w,
                                                x->p[MT_ROUTER_LATENT], none, NULL, rows, err);
}

static struct mt_norm norm_of(const struct mt_router_run *x)
{
    return (struct mt_norm){.spec = &x->run->part->spec->norm, .n = x->n, .x = x->run->x, .w = x->run->w,
                            .p = x->p[MT_ROUTER_NORM], .rstd = x->rstd};
}

static struct mt_norm own_norm_of(const struct mt_router_run *x)
{
    return (struct mt_norm){.spec = &x->m->layout->cfg.router_norm, .n = x->n, .x = x->run->x, .w = x->run->w,
                            .p = x->p[MT_ROUTER_OWN_NORM], .rstd = x->own_rstd};
}

/* h /= sqrt(hidden) */
static int shrink(const struct mt_router_run *x, void *h, struct mt_err *err)
{
    struct mt_add a = {.n = hidden_elems(x), .dtype = x->m->dt, .b = h, .out = h,
                       .scale = 1 / sqrtf((float)x->m->c)};
    return mt_op_add(x->m->dev, &a, err);
}

/* The output of the router's own norm, if it has one, to scratch. again: with the recorded statistics. */
static int prepare_own(const struct mt_router_run *x, bool again, struct mt_err *err)
{
    struct mt_norm own = own_norm_of(x);
    return own.p.n ? mt_norm(x->m, &own, x->own, again, err) ?: shrink(x, x->own, err) : 0;
}

/* What the logits are of, if n is the norm's output. */
static const void *router_input(const struct mt_router_run *x, const void *n)
{
    return x->p[MT_ROUTER_OWN_NORM].n ? x->own : n;
}

static int prepare(const struct mt_part_run *r, struct mt_err *err)
{
    const struct mt_router_run x = begin(r);
    void *n = norm_output(&x);
    struct mt_norm norm = norm_of(&x);
    int rc = mt_norm(x.m, &norm, n, false, err)
          ?: prepare_own(&x, false, err)
          ?: fill_latent(&x, n, err);
    return rc || !x.moe->shared_width ? rc : mt_shared_expert_open(&x, n, err);
}

static int count_probabilities(const struct mt_router_run *x, struct mt_err *err)
{
    mt_model *m = x->m;
    size_t group = mt_group_of(m->p.groups, x->run->of->mb);
    struct mt_router_stats a = {.n = routed(x), .e = (size_t)x->moe->n_experts, .dtype = x->logits_dtype,
                                .logits = x->logits, .prob_sum = mt_model_prob_sum(m, m->stats_dev, group),
                                .workspace = m->own.workspace};
    return mt_model_balances(m) && a.n ? mt_op_router_stats(m->dev, &a, err) : 0;
}

/* What the sum of the experts' outputs begins with: x, or if the layer's end adds that, 0. With latent rows the end
 * adds the shared expert's output, too, rounded once. */
static int begin_sum(const struct mt_router_run *x, float *sum, struct mt_err *err)
{
    const mt_model *m = x->m;
    size_t n = hidden_elems(x), of_sum = x->n * mt_moe_row(&m->layout->cfg);
    void *residual = own_rows(x, MT_ROLE_RESIDUAL);
    int rc;
    if (!mt_moe_adds_last(x->moe))
        return cast(x, n, m->dt, x->run->x, MT_F32, sum, err);
    if (x->moe->latent) {
        rc = cast(x, n, m->dt, x->run->x, MT_F32, x->wide, err);
        if (!rc && x->moe->shared_width)
            rc = mt_shared_expert_add(x, x->wide, err);
        rc = rc ?: cast(x, n, MT_F32, x->wide, m->dt, residual, err);
    } else {
        rc = cast(x, n, m->dt, x->run->x, m->dt, residual, err);
    }
    return rc ?: mt_op_zero(m->dev, &(struct mt_zero){sum, of_sum * sizeof(float)}, err);
}

static int finish(const struct mt_part_run *r, void *y, struct mt_err *err)
{
    const struct mt_router_run x = begin(r);
    float *sum = own_sums(&x, MT_ROLE_SUM);
    const void *product;
    (void)y; /* the combine part makes it from the sum */
    int rc = router_logits(&x, router_input(&x, norm_output(&x)), &product, err)
          ?: route(&x, err)
          ?: count_probabilities(&x, err)
          ?: begin_sum(&x, sum, err);
    return rc || x.moe->latent || !x.moe->shared_width ? rc : mt_shared_expert_add(&x, sum, err);
}

static int router_backward(const struct mt_router_run *x, struct mt_err *err)
{
    const mt_model *m = x->m;
    bool balances = mt_model_balances(m);
    size_t first = mt_model_first_row(m, x->run->of->mb) * (size_t)x->moe->top_k;
    return mt_op_router_bwd(m->dev,
                            &(struct mt_router_bwd){
                                .n = x->n,
                                .e = (size_t)x->moe->n_experts,
                                .k = (size_t)x->moe->top_k,
                                .dtype = x->product_dtype,
                                .logits_dtype = x->logits_dtype,
                                .rule = rule_of(x->moe),
                                .logits = x->logits,
                                .expert_scale = expert_scale(x),
                                .dscale = mt_grad_of(x->run->g, x->p[MT_ROUTER_EXPERT_SCALE]) ? x->dscale : NULL,
                                .ids = own_routing(x).ids,
                                .dweights = (float *)mt_value(x->run, MT_ROLE_DWEIGHTS) + first,
                                .aux = balances ? m->shares : NULL,
                                .aux_scale = balances ? mt_model_balance_scale(m) : 0,
                                .dlogits = x->dlogits,
                            },
                            err);
}

/* After the logits' gradient was used for the router's own weight. x->logits is free: it may have to hold dlogits,
 * cast. */
static int router_adapter_backward(const struct mt_router_run *x, const void *in, struct mt_err *err)
{
    mt_model *m = x->m;
    struct mt_adapter_run a = router_adapter(x, in);
    bool narrows = x->product_dtype != m->dt;
    if (!a.adapter)
        return 0;
    a.dy = narrows ? x->logits : x->dlogits;
    a.dx = x->dn;
    a.dx_dtype = MT_F32;
    int rc = narrows ? cast(x, x->n * a.ld, x->product_dtype, x->dlogits, m->dt, x->logits, err) : 0;
    return rc ?: mt_adapter_input_grad(m, &a, err) ?: mt_adapter_weight_grad(m, &a, err);
}

/* r->dx += gradient of x from that of the router's own norm, in x->dn; then x->dn is that of the rows alone. */
static int own_norm_backward(const struct mt_router_run *x, struct mt_err *err)
{
    mt_model *m = x->m;
    size_t n = hidden_elems(x);
    struct mt_norm own = own_norm_of(x);
    struct mt_norm_grad d = {m->dh, x->run->dx, x->run->dx, x->run->g};
    if (!own.p.n)
        return 0;
    return cast(x, n, MT_F32, x->dn, m->dt, m->dh, err)
        ?: shrink(x, m->dh, err)
        ?: mt_norm_backward(m, &own, &d, err)
        ?: cast(x, n, MT_F32, own_sums(x, MT_ROLE_DN), MT_F32, x->dn, err);
}

/* x->dn += the gradient through the latent rows, if there are any; their norm's output is in m->h. */
static int latent_backward(const struct mt_router_run *x, struct mt_err *err)
{
    mt_model *m = x->m;
    size_t elems = hidden_elems(x), latent = (size_t)x->moe->latent;
    struct mt_linear_bwd down = {.n = x->n, .in = m->c, .out = latent, .x = m->h, .w = x->run->w, .dy = x->dlatent,
                                 .p = x->p[MT_ROUTER_LATENT], .g = x->run->g, .dx = m->dh};
    struct mt_add sum = {.n = elems, .dtype = MT_F32, .a = x->dn, .b = x->wide, .out = x->dn};
    if (!latent)
        return 0;
    return cast(x, x->n * latent, MT_F32, own_sums(x, MT_ROLE_DN), m->dt, x->dlatent, err)
        ?: mt_linear_input_grad(m, &down, err)
        ?: mt_linear_weight_grad(m, &down, err)
        ?: cast(x, elems, m->dt, m->dh, MT_F32, x->wide, err)
        ?: mt_op_add(m->dev, &sum, err);
}

/* Recomputes the logits, but not the choice of experts: a tie that fell the other way would not be noticed. */
static int backward(const struct mt_part_run *r, struct mt_err *err)
{
    const struct mt_router_run x = begin(r);
    mt_model *m = x.m;
    size_t experts = (size_t)x.moe->n_experts;
    const struct mt_linear_shape shape = router_shape(&x, MT_F32);
    struct mt_gemm sum = mt_gemm_input_grad(&shape, x.dlogits, router_weight(&x), x.dn);
    struct mt_linear_bwd gate = {.n = x.n, .in = m->c, .out = experts, .w = r->w, .dy = x.dlogits,
                                 .f32 = x.product_dtype == MT_F32, .whole = true,
                                 .p = x.p[MT_ROUTER_WEIGHT], .bias = x.p[MT_ROUTER_BIAS], .g = r->g};
    struct mt_norm norm = norm_of(&x);
    const void *in = router_input(&x, m->h);
    float *dscale = mt_grad_of(r->g, x.p[MT_ROUTER_EXPERT_SCALE]);
    gate.p.adapter = NULL; /* by itself: its products may be of another dtype */
    if (!x.p[MT_ROUTER_OWN_NORM].n && !x.moe->latent) { /* else the rows are of something else than the logits */
        sum.c = own_sums(&x, MT_ROLE_DN);
        sum.ldc = sum.ldd;
    }
    int rc = mt_norm(m, &norm, m->h, true, err)
          ?: prepare_own(&x, true, err)
          ?: router_logits(&x, in, &gate.x, err)
          ?: router_backward(&x, err)
          ?: mt_column_sums(m, x.n, experts, MT_F32, x.dscale, dscale, err)
          ?: mt_linear_weight_grad(m, &gate, err)
          ?: mt_op_gemm(m->dev, &sum, err)
          ?: router_adapter_backward(&x, in, err)
          ?: own_norm_backward(&x, err);
    if (!rc && x.moe->shared_width)
        rc = mt_shared_expert_backward(&x, err);
    return rc ?: latent_backward(&x, err)
              ?: cast(&x, hidden_elems(&x), MT_F32, x.dn, m->dt, m->dh, err)
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

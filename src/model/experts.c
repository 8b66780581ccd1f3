/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Some experts. Each is an MLP, gated or not, run once a group over the rows of all its micro-batches that were sent to
 * it; its output, times the row's weight, is added to the sum of the layer, together with those of other experts
 * (outputs.h).
 *
 *   expert(n) = (act(n Wgate + b) * (n Wup + b)) Wdown + b, or act(n Wup) Wdown
 */
#include "base/mem.h"
#include "model/linear.h"
#include "model/outputs.h"
#include "model/packing.h"
#include "model/part.h"
#include "model/sides.h"

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    const struct mt_hf_config *c = mt_layout_builder_config(b);
    const struct mt_moe *m = &c->moe;
    const struct mt_param_tensor gate_up[] = {{"mlp.experts.*.gate_proj.weight", m->width},
                                              {"mlp.experts.*.up_proj.weight", m->width}},
                                 gate_up_bias[] = {{"mlp.experts.*.gate_proj.bias", m->width},
                                                   {"mlp.experts.*.up_proj.bias", m->width}},
                                 down[] = {{"mlp.experts.*.down_proj.weight", (int64_t)mt_moe_row(c)}},
                                 down_bias[] = {{"mlp.experts.*.down_proj.bias", (int64_t)mt_moe_row(c)}};
    int gates = m->ungated ? 0 : 1;
    for (int i = 0; i < p->n_experts; i++) {
        mt_layout_add_expert_param(b, p, i, MT_EXPERT_GATE_UP, (int64_t)mt_moe_row(c), 1 + gates, gate_up + 1 - gates);
        if (m->expert_bias)
            mt_layout_add_expert_param(b, p, i, MT_EXPERT_GATE_UP_BIAS, 0, 2, gate_up_bias);
        mt_layout_add_expert_param(b, p, i, MT_EXPERT_DOWN, m->width, 1, down);
        if (m->expert_bias)
            mt_layout_add_expert_param(b, p, i, MT_EXPERT_DOWN_BIAS, 0, 1, down_bias);
        mt_layout_end_expert(b, p, i);
    }
}

struct scratch {
    void *x, *d_o; /* [rows, hidden]: gathered input, gradient of the output */
    void *gate_up; /* [rows, inner_of()] */
    void *act;     /* [rows, width] */
    void *out;     /* [rows, hidden] of the model's outputs: output, or gradient of the input; before it, for a bias's
                      gradient, weighted d_o */
    /* for each side stream, or once: */
    struct {
        float *grad; /* of one expert: its parameters end to end, then its adapters'; with one group */
        void *w;     /* one expert's decoded parameters, if its unit keeps codes */
    } of[MT_MAX_SIDES];
};

static size_t padded_rows(mt_device *dev, size_t n)
{
    return mt_align_up(n, mt_device_limits(dev)->row_bucket);
}

/* Rows of the first matrix: of gate and up, or of up alone. */
static size_t inner_of(const struct mt_hf_config *c)
{
    return (size_t)mt_moe_inner(&c->moe, c->moe.width);
}

/* Offsets of the gradients of an expert's parameters; returns the elements of all of them. */
static size_t lay_out_gradient(size_t at[MT_EXPERT_MAX_PARAMS], const struct mt_param *p)
{
    size_t n = 0;
    for (int i = 0; i < MT_EXPERT_MAX_PARAMS; i++) {
        at[i] = n;
        n += mt_align_up(p[i].n, MT_PARAM_ALIGN);
    }
    return n;
}

static size_t lay_out_scratch(struct scratch *s, const struct mt_model_params *p, mt_device *dev, size_t grad_elems,
                              int sides, void *base)
{
    const struct mt_hf_config *c = &p->layout->cfg;
    size_t rows = mt_expert_tile_rows(p, dev), at = 0;
    size_t hidden = rows * mt_moe_row(c) * mt_dtype_size(p->dtype);
    size_t width = rows * (size_t)c->moe.width * mt_dtype_size(p->dtype);
    s->x = mt_take(base, &at, hidden);
    s->gate_up = mt_take(base, &at, rows * inner_of(c) * mt_dtype_size(p->dtype));
    s->act = mt_take(base, &at, width);
    s->out = NULL;
    s->d_o = mt_take(base, &at, p->backward ? hidden : 0);
    bool own = p->backward && mt_groups_n(p->groups) == 1; /* else sums of groups are added in the unit's gradient */
    bool codes = p->dtype == MT_BF16 && p->layout->codes_stay;
    for (int i = 0; i < MT_MAX(sides, 1); i++) {
        s->of[i].grad = mt_take(base, &at, own ? grad_elems * sizeof(float) : 0);
        s->of[i].w = mt_take(base, &at, codes ? mt_expert_elems(p->layout) * mt_dtype_size(p->dtype) : 0);
    }
    return at;
}

/* Elements [first, end) of the unit's gradient: those of an expert's adapters, which follow its parameters. */
struct span {
    size_t first, end;
};

static void widen(struct span *s, struct mt_param p)
{
    s->first = s->end ? MT_MIN(s->first, p.grad) : p.grad;
    s->end = MT_MAX(s->end, p.grad + p.n);
}

static struct span adapters_of(const struct mt_param *p)
{
    struct span s = {0};
    for (int i = 0; i < MT_EXPERT_MAX_PARAMS; i++) {
        const struct mt_adapter *ad = p[i].adapter;
        if (ad)
            widen(&s, ad->a);
        for (size_t k = 0; ad && k < ad->n_targets; k++)
            widen(&s, ad->target[k].b);
    }
    return s;
}

size_t mt_expert_gradient_elems(const struct mt_layout *l)
{
    size_t at[MT_EXPERT_MAX_PARAMS], params = 0, adapters = 0;
    for (size_t i = 0; i < l->n_parts; i++)
        if (l->parts[i].n_experts) {
            struct span s = adapters_of(l->parts[i].expert[0]);
            params = lay_out_gradient(at, l->parts[i].expert[0]);
            adapters = MT_MAX(adapters, s.end - s.first);
        }
    return params + adapters;
}

static size_t scratch_bytes(const struct mt_model_params *p, const struct mt_layer_spec *, mt_device *dev)
{
    struct scratch s;
    return lay_out_scratch(&s, p, dev, mt_expert_gradient_elems(p->layout), mt_model_sides(p, dev), NULL);
}

static size_t workspace_bytes(const struct mt_model_params *p, const struct mt_layer_spec *, mt_device *dev)
{
    const struct mt_hf_config *c = &p->layout->cfg;
    size_t rows = mt_expert_tile_rows(p, dev);
    struct mt_bias_bwd bias = {.n = rows, .c = MT_MAX(mt_moe_row(c), inner_of(c))};
    return c->moe.expert_bias ? mt_op_bias_bwd_workspace(dev, &bias) : 0;
}

/* Some rows of one expert. */
struct tile {
    const struct mt_part_run *run;
    mt_model *m;
    const struct mt_moe *moe;
    size_t hidden, width, inner;             /* of rows: of the input, of the activation, of gate and up */
    struct mt_param p[MT_EXPERT_MAX_PARAMS]; /* with offsets in w and grad */
    const void *w;                     /* the unit's buffer, or scratch with this expert alone */
    struct mt_routing routing;
    struct scratch s;                  /* from this tile's rows on */
    size_t piece;                      /* of the sides': the expert */
    int side;                          /* whose grad and w are used */
    size_t n, n_padded;
    const int32_t *list;
    bool by_codes;                     /* its products take the expert's codes, and no row is padding */
    bool first;                        /* of its expert, in the first layer to use it: overwrites the gradients */
    float *grad;                       /* where its gradients go: s.of[side], or the unit's; NULL: it has none */
    size_t adapters_at;                /* in grad, of its adapters */
    struct span adapters;
};

static int gather(const struct tile *t, const void *from, const float *weights, void *to, struct mt_err *err)
{
    return mt_op_moe_gather(t->m->dev,
                            &(struct mt_moe_gather){
                                .n = t->n,
                                .n_padded = t->n_padded,
                                .c = t->hidden,
                                .k = (size_t)t->moe->top_k,
                                .dtype = t->m->dt,
                                .list = t->list,
                                .x = from,
                                .weights = weights,
                                .out = to,
                            },
                            err);
}

static enum mt_glu_kind activation_of(const struct tile *t)
{
    return t->moe->ungated   ? MT_GLU_RELU2
           : t->moe->clamped ? MT_GLU_CLAMPED
                             : mt_activation(t->run->part->spec);
}

/* From the step's rows to gate and up. */
static int open_tile(const struct tile *t, struct mt_err *err)
{
    return gather(t, mt_value(t->run, MT_ROLE_ROWS), NULL, t->s.x, err)
        ?: mt_linear(t->m, t->n_padded, t->hidden, t->inner, t->s.x, t->w, t->p[MT_EXPERT_GATE_UP],
                     t->p[MT_EXPERT_GATE_UP_BIAS], NULL, t->s.gate_up, err);
}

static int activate(const struct tile *t, struct mt_err *err)
{
    bool ungated = t->moe->ungated;
    struct mt_mlp_act a = {.n = t->n_padded, .f = t->width, .ungated = ungated,
                           .kind = ungated ? (int)MT_ACTIVATE_RELU2 : (int)activation_of(t), .x = t->s.gate_up,
                           .out = t->s.act, .alpha = (float)t->moe->alpha, .limit = (float)t->moe->limit};
    return mt_mlp_act(t->m, &a, err);
}

static int forward_tile(const struct tile *t, struct mt_err *err)
{
    return open_tile(t, err)
        ?: activate(t, err)
        ?: mt_linear(t->m, t->n_padded, t->width, t->hidden, t->s.act, t->w, t->p[MT_EXPERT_DOWN],
                     t->p[MT_EXPERT_DOWN_BIAS], NULL, t->s.out, err);
}

/* dW = dy^T x; the second tile and later ones add to it. Its adapters come later. */
static int weight_gradient(const struct tile *t, const struct mt_linear_bwd *of, struct mt_err *err)
{
    struct mt_linear_bwd own = *of;
    own.p.adapter = NULL;
    return t->grad ? mt_linear_weight_grad(t->m, &own, err) : 0;
}

/* db = column sums of dy: rows of padding are zero. */
static int bias_gradient(const struct tile *t, int role, const void *dy, struct mt_err *err)
{
    size_t n = t->p[role].n;
    float *db = t->grad ? mt_grad_of(t->grad, t->p[role]) : NULL;
    int rc = db && t->first ? mt_op_zero(t->m->dev, &(struct mt_zero){db, n * sizeof(*db)}, err) : 0;
    return rc ?: mt_column_sums(t->m, t->n_padded, n, t->m->dt, dy, db, err);
}

/* For the adapters of a linear layer of the expert, after its input's gradient. Down: x is weighted, not dy. */
static int adapter_gradient(const struct tile *t, const struct mt_linear_bwd *of, struct mt_err *err)
{
    struct mt_adapter_run run = {.adapter = of->p.adapter, .n = t->n_padded, .ld = of->out, .x = of->x, .w = of->w,
                                 .dy = of->dy, .g = t->grad ? t->grad + t->adapters_at : NULL,
                                 .g_first = t->adapters.first};
    return t->grad ? mt_adapter_weight_grad(t->m, &run, err) : 0;
}

static int gated_backward(const struct tile *t, struct mt_err *err)
{
    const struct mt_param *b = &t->p[MT_EXPERT_DOWN_BIAS];
    const void *bias = b->n ? mt_elem(t->m, t->w, b->at) : NULL;
    return mt_op_expert_glu_bwd(t->m->dev,
                                &(struct mt_expert_glu_bwd){
                                    .n = t->n,
                                    .n_padded = t->n_padded,
                                    .f = t->width,
                                    .k = (size_t)t->moe->top_k,
                                    .dtype = t->m->dt,
                                    .kind = activation_of(t),
                                    .alpha = (float)t->moe->alpha,
                                    .limit = (float)t->moe->limit,
                                    .gate_up = t->s.gate_up,
                                    .dout = t->s.act,
                                    .list = t->list,
                                    .weights = t->routing.weights,
                                    .c = t->hidden,
                                    .down_bias = bias,
                                    .d_o = bias ? t->s.d_o : NULL,
                                    .dgate_up = t->s.gate_up,
                                    .out = t->s.act,
                                    .dweights = mt_value(t->run, MT_ROLE_DWEIGHTS),
                                },
                                err);
}

/* Does not recompute the output: mt_expert_glu_bwd computes the gradient of a row's weight without it. */
static int backward_tile(const struct tile *t, struct mt_err *err)
{
    mt_model *m = t->m;
    struct mt_linear_bwd down = {.n = t->n_padded, .in = t->width, .out = t->hidden, .x = t->s.act, .w = t->w,
                                 .dy = t->s.d_o, .p = t->p[MT_EXPERT_DOWN], .g = t->grad, .first = t->first,
                                 .dx = t->s.act};
    struct mt_linear_bwd gate_up = {.n = t->n_padded, .in = t->hidden, .out = t->inner, .x = t->s.x, .w = t->w,
                                    .dy = t->s.gate_up, .p = t->p[MT_EXPERT_GATE_UP], .g = t->grad,
                                    .first = t->first, .dx = t->s.out};
    const struct mt_param *bias = &t->p[MT_EXPERT_DOWN_BIAS];
    bool weighted = bias->n && bias->trainable && t->grad;
    int rc = open_tile(t, err)
          ?: gather(t, mt_value(t->run, MT_ROLE_DY), NULL, t->s.d_o, err)
          ?: mt_linear_input_grad(m, &down, err)
          ?: gated_backward(t, err)
          ?: weight_gradient(t, &down, err)
          ?: adapter_gradient(t, &down, err);
    if (!rc && weighted)
        rc = gather(t, mt_value(t->run, MT_ROLE_DY), t->routing.weights, t->s.out, err)
          ?: bias_gradient(t, MT_EXPERT_DOWN_BIAS, t->s.out, err);
    return rc ?: weight_gradient(t, &gate_up, err)
              ?: bias_gradient(t, MT_EXPERT_GATE_UP_BIAS, t->s.gate_up, err)
              ?: mt_linear_input_grad(m, &gate_up, err)
              ?: adapter_gradient(t, &gate_up, err);
}

static struct tile begin_expert(const struct mt_part_run *r, int expert, int side)
{
    mt_model *m = r->m;
    const struct mt_hf_config *c = &m->layout->cfg;
    struct tile t = {.run = r, .m = m, .moe = &c->moe, .hidden = mt_moe_row(c), .width = (size_t)c->moe.width,
                     .inner = inner_of(c), .piece = (size_t)expert, .side = MT_MAX(side - 1, 0), .w = r->w};
    const struct mt_param *p = r->part->expert[expert];
    size_t at[MT_EXPERT_MAX_PARAMS];
    mt_routing_layout(&t.routing, t.moe, mt_model_group_rows(&m->p), mt_value(r, MT_ROLE_ROUTING));
    t.adapters = adapters_of(p);
    t.adapters_at = lay_out_gradient(at, p);
    lay_out_scratch(&t.s, &m->p, m->dev, m->expert_gradient, m->n_sides, r->scratch);
    t.grad = r->g ? r->g : mt_value(r, MT_ROLE_CAST) ? t.s.of[t.side].grad : NULL;
    for (int i = 0; i < MT_EXPERT_MAX_PARAMS; i++) {
        t.p[i] = p[i];
        t.p[i].grad = r->g ? p[i].grad : at[i];
    }
    t.adapters_at = r->g ? t.adapters.first : t.adapters_at;
    return t;
}

/* Decodes the expert's weights, if the unit keeps codes and products do not take them. */
static int open_codes(struct tile *t, int expert, struct mt_err *err)
{
    mt_model *m = t->m;
    if (!mt_unit_keeps_codes(m->layout, t->run->of->unit, m->dt))
        return 0;
    t->w = t->s.of[t->side].w;
    const size_t first = t->p[MT_EXPERT_GATE_UP].at;
    for (int i = 0; i < MT_EXPERT_MAX_PARAMS; i++)
        t->p[i].at -= t->p[i].n ? first : 0;
    m->own.codes = (struct mt_codes){t->by_codes ? t->w : NULL, first, t->run->of->unit, t->run->w};
    const struct mt_decoding d = {t->run->of->unit, t->run->w, t->s.of[t->side].w, t->by_codes};
    return mt_expert_decode(m->layout, &d, expert, m->dev, err);
}

/* What is done with an expert's tiles, and where their outputs, or gradients of inputs, are summed. */
struct pass {
    int (*run)(const struct tile *t, struct mt_err *err);
    struct mt_outputs_sum sum;
};

/* The tile's scratch, from these rows on. */
static void skip_rows(struct tile *t, size_t rows)
{
    t->s.x = mt_elem(t->m, t->s.x, rows * t->hidden);
    t->s.d_o = mt_elem(t->m, t->s.d_o, rows * t->hidden);
    t->s.gate_up = mt_elem(t->m, t->s.gate_up, rows * t->inner);
    t->s.act = mt_elem(t->m, t->s.act, rows * t->width);
}

/* The tile on a side stream, which COMPUTE follows. */
static int run_tile(struct tile t, const struct pass *pass, struct mt_sides *sides, struct mt_err *err)
{
    size_t first = 0;
    int rc = mt_sides_take_rows(sides, t.n_padded, &first, err);
    skip_rows(&t, first);
    return rc ?: pass->run(&t, err)
              ?: mt_sides_follow(sides, err)
              ?: mt_sides_give_rows(sides, err);
}

/* Makes room for n rows of outputs; if there is none, all sides wait until those that there are have been summed. */
static int take_outputs(const struct tile *t, size_t place, size_t n, const struct pass *pass, struct mt_sides *sides,
                        struct mt_err *err)
{
    mt_model *m = t->m;
    if (mt_outputs_take(&m->outputs, place, n, pass->sum.down))
        return 0;
    int rc = mt_sides_join(sides, err)
          ?: mt_outputs_sum(m, &pass->sum, err)
          ?: mt_sides_fork(sides, m, mt_expert_tile_rows(&m->p, m->dev), err);
    mt_outputs_take(&m->outputs, place, n, pass->sum.down);
    return rc;
}

/* All tiles of an expert are next to each other, if they fit. */
static int run_tiles(struct tile *t, int expert, const struct pass *pass, struct mt_sides *sides, struct mt_err *err)
{
    mt_model *m = t->m;
    struct mt_expert_list list = mt_model_expert_list(m, t->run->part->layer, expert, t->run->of->mb);
    size_t rows = padded_rows(m->dev, list.n);
    int rc = list.n && rows <= m->outputs.n ? take_outputs(t, list.place, rows, pass, sides, err) : 0;
    mt_sides_turn(sides, t->piece);
    t->by_codes = list.n <= m->coded_rows && mt_unit_keeps_codes(m->layout, t->run->of->unit, m->dt);
    if (!rc && list.n)
        rc = open_codes(t, expert, err);
    for (size_t at = 0; at < list.n && !rc; at += MT_EXPERT_TILE) {
        t->n = MT_MIN(list.n - at, (size_t)MT_EXPERT_TILE);
        t->n_padded = t->by_codes ? t->n : padded_rows(m->dev, t->n);
        t->list = t->routing.list + list.first + at;
        t->first = at == 0 && (t->run->of->first || !t->run->g);
        rc = rows <= m->outputs.n ? 0 : take_outputs(t, list.place + at, t->n_padded, pass, sides, err);
        t->s.out = mt_outputs_at(m, list.place + at);
        mt_sides_turn(sides, t->piece);
        rc = rc ?: run_tile(*t, pass, sides, err);
    }
    mt_sides_turn(sides, t->piece);
    return rc;
}

/* Sums what is left, once no expert has rows that comes after these: their unit may not run. */
static int end_sums(const struct mt_part_run *r, const struct pass *pass, struct mt_err *err)
{
    mt_model *m = r->m;
    const struct mt_part *p = r->part;
    int end = p->first_expert + p->n_experts, all = (int)m->layout->cfg.moe.n_experts;
    size_t rows = 0;
    for (int e = p->first_expert; e < end && m->p.assumed_rows; e++)
        rows += mt_model_expert_list(m, p->layer, e, r->of->mb).n;
    if (m->p.assumed_rows)
        return mt_outputs_assume(m, &pass->sum, rows, err);
    bool more = m->p.expert_sums > 0 &&
                (pass->sum.down ? mt_model_experts_have_rows(m, p->layer, 0, p->first_expert, r->of->mb)
                                : mt_model_experts_have_rows(m, p->layer, end, all, r->of->mb));
    return more ? 0 : mt_outputs_sum(m, &pass->sum, err);
}

static struct pass pass_of(const struct mt_part_run *r, bool back)
{
    float *sum = mt_value(r, back ? MT_ROLE_DN : MT_ROLE_SUM);
    struct pass p = {back ? backward_tile : forward_tile,
                     {.mb = r->of->mb, .weighted = !back, .down = back, .sum = sum}};
    mt_routing_layout(&p.sum.routing, &r->m->layout->cfg.moe, mt_model_group_rows(&r->m->p),
                      mt_value(r, MT_ROLE_ROUTING));
    return p;
}

static int finish(const struct mt_part_run *r, void *y, struct mt_err *err)
{
    const struct pass pass = pass_of(r, false);
    struct mt_sides sides;
    (void)y; /* they add into the sum */
    int rc = mt_sides_fork(&sides, r->m, mt_expert_tile_rows(&r->m->p, r->m->dev), err);
    for (int i = 0; i < r->part->n_experts && !rc; i++) {
        struct tile t = begin_expert(r, i, mt_sides_turn(&sides, (size_t)i));
        rc = run_tiles(&t, r->part->first_expert + i, &pass, &sides, err);
    }
    int joined = mt_sides_join(&sides, rc ? NULL : err);
    rc = rc ? rc : joined;
    return rc ?: end_sums(r, &pass, err);
}

/* Casts the gradients of an expert into the buffer that is copied to the host, with the sums of their squares. */
static int cast_gradients(const struct tile *t, int expert, struct mt_err *err)
{
    mt_model *m = t->m;
    const struct mt_unit *u = &m->layout->units[t->run->of->unit];
    const struct mt_param *own = t->run->part->expert[t->piece];
    int rc = 0;
    for (size_t k = u->first_tensor; k < u->first_tensor + u->n_tensors && !rc; k++) {
        const struct mt_tensor *ten = &m->layout->tensors[k];
        if (ten->expert != expert || !ten->trainable)
            continue;
        float *src = t->grad + (ten->adapter ? t->adapters_at + (ten->grad - t->adapters.first)
                                             : t->p[ten->param - own].grad + (ten->grad - ten->param->grad));
        const struct mt_model_direct to = {src, t->run->w, mt_value(t->run, MT_ROLE_MOMENTS), t->run->of->cast_dtype};
        rc = mt_model_direct_tensor(m, k, &to, err)
          ?: mt_model_cast_tensor(m, k, src, mt_value(t->run, MT_ROLE_CAST), t->run->of->cast_dtype, err);
    }
    return rc;
}

static int backward_expert(const struct mt_part_run *r, int i, const struct pass *pass, struct mt_sides *sides,
                           struct mt_err *err)
{
    mt_model *m = r->m;
    struct tile t = begin_expert(r, i, mt_sides_turn(sides, (size_t)i));
    int expert = r->part->first_expert + i, rc = 0;
    bool idle = !mt_model_expert_list(m, r->part->layer, expert, r->of->mb).n;
    if (mt_value(r, MT_ROLE_CAST) && t.adapters.end)
        rc = mt_op_zero(m->dev, &(struct mt_zero){t.grad + t.adapters_at, (t.adapters.end - t.adapters.first) *
                                                                                sizeof(float)}, err);
    rc = rc ?: run_tiles(&t, expert, pass, sides, err);
    if (!rc && mt_value(r, MT_ROLE_CAST) && idle)
        rc = mt_op_zero(m->dev, &(struct mt_zero){t.grad, m->expert_gradient * sizeof(float)}, err);
    return rc || !mt_value(r, MT_ROLE_CAST) ? rc : cast_gradients(&t, expert, err);
}

/* From the last expert to the first, as backward goes through units: the order of sums does not depend on groups. */
static int backward(const struct mt_part_run *r, struct mt_err *err)
{
    const struct pass pass = pass_of(r, true);
    struct mt_sides sides;
    int rc = mt_sides_fork(&sides, r->m, mt_expert_tile_rows(&r->m->p, r->m->dev), err);
    for (int i = r->part->n_experts; i-- > 0 && !rc;)
        rc = backward_expert(r, i, &pass, &sides, err);
    int joined = mt_sides_join(&sides, rc ? NULL : err);
    rc = rc ? rc : joined;
    return rc ?: end_sums(r, &pass, err);
}

/* A token is sent to top_k of all experts; this is the group's share. */
static double macs_per_token(const struct mt_hf_config *c, const struct mt_part *p, size_t)
{
    const struct mt_moe *m = &c->moe;
    double rows = (double)(mt_moe_inner(m, m->width) + m->width);
    return rows * (double)mt_moe_row(c) * (double)m->top_k * p->n_experts / (double)m->n_experts;
}

const struct mt_part_kind mt_part_experts = {
    .name = "experts",
    .per_step = true,
    .per_group = true,
    .adapted = 1u << MT_EXPERT_GATE_UP | 1u << MT_EXPERT_DOWN,
    .port = {{MT_ROLE_WEIGHTS, MT_READ, MT_READ},
             {MT_ROLE_ROWS, MT_READ, MT_READ},
             {MT_ROLE_SUM, MT_ADD, MT_NO_ACCESS},
             {MT_ROLE_ROUTING, MT_READ, MT_READ},
             {MT_ROLE_DY, MT_NO_ACCESS, MT_READ, mt_rows_bytes},
             {MT_ROLE_DN, MT_NO_ACCESS, MT_ADD},
             {MT_ROLE_DWEIGHTS, MT_NO_ACCESS, MT_FILL},
             {MT_ROLE_CAST, MT_NO_ACCESS, MT_WRITE}, /* by expert, if there is one group: else GRAD (budget.c) */
             {MT_ROLE_MOMENTS, MT_NO_ACCESS, MT_UPDATE}}, /* with CAST */
    .lay_out = lay_out,
    .scratch_bytes = scratch_bytes,
    .workspace_bytes = workspace_bytes,
    .finish = finish,
    .backward = backward,
    .macs_per_token = macs_per_token,
};

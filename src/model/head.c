/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of the model: final norm, and the output matrix with the loss in chunks of rows. Only rows
 * with a target reach the head: they are gathered first and their gradients scattered at the end, so
 * that prompt tokens cost nothing there. Logits are never in memory as a whole. Their gradients are, for `logits_chunk`
 * rows: the two products of backward read the matrix and read and write its FP32 gradient, once for each chunk. Logits
 * in FP32, twice as large in bf16 compute, are for `logits_piece` rows. If a piece is a whole chunk, the gradients
 * overwrite the logits.
 *
 * If the weight of a row depends on the losses, there are two passes over the chunks: one for the losses alone, from
 * which the host computes the weights in the order of the COMPUTE stream, and one with gradients. The normed rows
 * stay, so only the product with the matrix is repeated, and not even that if all rows are one piece.
 */
#include "base/mem.h"
#include "model/linear.h"
#include "model/part.h"

struct scratch {
    void *ds;     /* [n, hidden] gradient of the norm's output: for backward */
    float *rstd;  /* [n] of the norm */
};

static size_t lay_out_scratch(struct scratch *s, const struct mt_model_params *p, void *base)
{
    size_t at = 0, n = p->max_tokens;
    s->ds = mt_take(base, &at, p->backward ? n * (size_t)p->layout->cfg.hidden * mt_dtype_size(p->dtype) : 0);
    s->rstd = mt_take(base, &at, n * 4);
    return at;
}

static size_t scratch_bytes(const struct mt_model_params *p, const struct mt_layer_spec *, mt_device *)
{
    struct scratch s;
    return lay_out_scratch(&s, p, NULL);
}

static size_t workspace_bytes(const struct mt_model_params *p, const struct mt_layer_spec *, mt_device *dev)
{
    return mt_norm_workspace(p, &p->layout->cfg.norm, dev);
}

static struct scratch scratch_of(const mt_model *m)
{
    struct scratch s;
    lay_out_scratch(&s, &m->p, m->unit_scratch);
    return s;
}

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    const struct mt_hf_config *c = mt_layout_builder_config(b);
    if (!c->tied)
        mt_layout_add_tensor(b, p, MT_HEAD_TABLE, c->vocab, c->hidden, "lm_head.weight");
    mt_layout_add_norm(b, p, MT_HEAD_NORM, c->hidden, "model.norm.weight", &c->norm);
    mt_layout_add_norm_bias(b, p, MT_HEAD_NORM, c->hidden, "model.norm.bias", &c->norm);
}

static double macs_per_token(const struct mt_hf_config *c, const struct mt_part *, size_t)
{
    return (double)c->hidden * (double)c->vocab;
}

static bool is_tied(const struct mt_hf_config *cfg)
{
    return cfg->tied;
}

/* Run by mt_model_head(): its result is a loss, and a tied head also uses the embedding's weights and gradient. */
const struct mt_part_kind mt_part_head = {
    .name = "head",
    .adapted = 1u << MT_HEAD_TABLE,
    .port = {{MT_ROLE_WEIGHTS, MT_READ, MT_NO_ACCESS},
             {MT_ROLE_TABLE, MT_READ, MT_NO_ACCESS, NULL, is_tied},
             {MT_ROLE_X, MT_READ, MT_NO_ACCESS},
             {MT_ROLE_DX, MT_WRITE, MT_NO_ACCESS, mt_hidden_bytes},
             {MT_ROLE_GRAD, MT_SUM, MT_NO_ACCESS},
             {MT_ROLE_TABLE_GRAD, MT_SUM, MT_NO_ACCESS, NULL, is_tied}},
    .lay_out = lay_out,
    .scratch_bytes = scratch_bytes,
    .workspace_bytes = workspace_bytes,
    .macs_per_token = macs_per_token,
};

/* The last norm, of n rows of x; w: the head's weights. */
static struct mt_norm norm_of(const mt_model *m, size_t n, const void *x, const void *w)
{
    return (struct mt_norm){.spec = &m->layout->cfg.norm, .n = n, .x = x, .w = w, .rstd = scratch_of(m).rstd,
                            .p = m->layout->parts[m->layout->n_parts - 1].param[MT_HEAD_NORM]};
}

/* x *= logit_scale, of n rows of the norm's output or of its gradient. */
static int scale_rows(mt_model *m, size_t n, void *x, struct mt_err *err)
{
    float scale = (float)m->layout->cfg.logit_scale;
    struct mt_add a = {.n = n * m->wd.c, .dtype = m->dt, .b = x, .out = x, .scale = scale};
    return scale == 1 ? 0 : mt_op_add(m->dev, &a, err);
}

/* The output matrix: the head's own, or the embedding's. */
static struct mt_param output_matrix(const mt_model *m)
{
    const struct mt_layout *l = m->layout;
    return l->tied ? l->parts[0].param[MT_EMBED_TABLE] : l->parts[l->n_parts - 1].param[MT_HEAD_TABLE];
}

static int head_logits(mt_model *m, size_t rows, const void *h, const void *table,
                       struct mt_err *err)
{
    struct mt_param out = output_matrix(m);
    size_t vocab = (size_t)m->layout->cfg.vocab;
    struct mt_adapter_run run = {.adapter = out.adapter, .n = rows, .ld = mt_model_logits_ld(m->layout),
                                 .y_dtype = MT_F32, .x = h, .w = table, .y = m->logits};
    const struct mt_linear_shape shape = {rows, m->wd.c, vocab, m->dt, MT_F32};
    struct mt_gemm g = mt_gemm_output(&shape, h, mt_elem(m, table, out.at), m->logits);
    g.ldd = run.ld;
    int rc = mt_op_gemm(m->dev, &g, err) ?: mt_adapter_forward(m, &run, err);
    struct mt_cap cap = {rows, vocab, run.ld, (float)m->layout->cfg.logit_cap, m->logits};
    return rc || !(cap.cap > 0) ? rc : mt_op_cap(m->dev, &cap, err);
}

/* The logits' gradients of a chunk: rows of ld elements. */
struct gradients {
    void *p;
    size_t ld;
};

static struct gradients gradients_of(const mt_model *m)
{
    size_t ld = mt_model_logits_ld(m->layout);
    return m->dlogits ? (struct gradients){m->dlogits, ld}
                      : (struct gradients){m->logits, ld * 4 / mt_dtype_size(m->dt)};
}

/* dh = dlogits W and dW += dlogits^T h; `first`: dW is overwritten. */
static int head_chunk_backward(mt_model *m, const struct mt_model_head *a, bool first, size_t rows,
                               const void *h, void *dh, struct mt_err *err)
{
    struct mt_param out = output_matrix(m);
    float *dw = mt_grad_of(a->g_table, out);
    size_t vocab = (size_t)m->layout->cfg.vocab;
    struct gradients dlogits = gradients_of(m);
    struct mt_adapter_run run = {.adapter = out.adapter, .n = rows, .ld = dlogits.ld, .dx_dtype = m->dt, .x = h,
                                 .w = a->table, .dy = dlogits.p, .dx = dh, .g = a->g_table};
    const struct mt_linear_shape shape = {rows, m->wd.c, vocab, m->dt, m->dt};
    struct mt_gemm of_h = mt_gemm_input_grad(&shape, dlogits.p, mt_elem(m, a->table, out.at), dh),
                   of_w = mt_gemm_weight_grad(&shape, dlogits.p, h, dw, !first);
    of_h.lda = of_w.lda = dlogits.ld;
    int rc = mt_op_gemm(m->dev, &of_h, err)
          ?: mt_adapter_input_grad(m, &run, err)
          ?: mt_adapter_weight_grad(m, &run, err);
    return rc || !dw ? rc : mt_op_gemm(m->dev, &of_w, err);
}

/* What a pass over the micro-batch's rows computes. */
enum pass { LOSSES, LOSSES_AND_GRADIENTS, GRADIENTS /* after LOSSES */ };

static size_t piece_rows(const mt_model *m)
{
    return m->p.logits_piece ? m->p.logits_piece : m->p.logits_chunk;
}

/* Losses and logits' gradients of rows [first, first + rows) of the micro-batch, from the chunk's row `at` on. */
static int head_piece(mt_model *m, const struct mt_model_head *a, enum pass pass, size_t first, size_t at, size_t rows,
                      struct mt_err *err)
{
    struct gradients dlogits = gradients_of(m);
    bool weighed = pass != LOSSES && m->inputs[a->mb].of.rows != MT_ROWS_ALIKE;
    bool there = pass == GRADIENTS && m->inputs[a->mb].n_loss <= piece_rows(m); /* of the pass before */
    const struct mt_micro_inputs *in = &m->inputs[a->mb];
    size_t few = in->of.choose ? m->p.few : 0;
    float *entropy = mt_model_stats_entropy(m, m->stats_dev, a->mb);
    mt_model_set_rows(m, a->mb, in->loss_rows + first);
    float by = m->p.temperature > 0 ? 1 / m->p.temperature : 1;
    struct mt_add flatten = {
        .n = rows * mt_model_logits_ld(m->layout), .dtype = MT_F32, .b = m->logits, .out = m->logits, .scale = by};
    int rc = there ? 0 : head_logits(m, rows, mt_elem(m, m->dh, first * m->wd.c), a->table, err);
    if (!rc && m->draw)
        rc = mt_model_draw_rows(m, a->mb, first, rows, err);
    if (!rc && !there && by != 1)
        rc = mt_op_add(m->dev, &flatten, err);
    return rc ? rc
              : mt_op_cross_entropy(m->dev,
                                    &(struct mt_cross_entropy){
                                        .n = rows,
                                        .vocab = (size_t)m->layout->cfg.vocab,
                                        .ld = mt_model_logits_ld(m->layout),
                                        .dtype = m->dt,
                                        .logits = m->logits,
                                        .targets = m->inputs[a->mb].targets + first,
                                        .loss = mt_model_stats_loss(m, m->stats_dev, a->mb) + first,
                                        .correct = mt_model_stats_correct(m, m->stats_dev, a->mb) + first,
                                        .entropy = entropy && pass != GRADIENTS ? entropy + first : NULL,
                                        .dlogits = pass == LOSSES ? NULL : mt_elem(m, dlogits.p, at * dlogits.ld),
                                        .ld_dlogits = dlogits.ld,
                                        .scale = m->running->of.loss_scale,
                                        .row_scale = weighed ? m->inputs[a->mb].weights + first : NULL,
                                        .cap = (float)m->layout->cfg.logit_cap * by,
                                        .n_few = few,
                                        .few = few ? in->few + first * few : NULL,
                                        .few_values = few ? in->few_values + first * few : NULL,
                                    },
                                    err);
}

static int head_chunk(mt_model *m, const struct mt_model_head *a, enum pass pass, size_t first, size_t rows,
                      struct mt_err *err)
{
    size_t piece = piece_rows(m);
    int rc = 0;
    for (size_t at = 0; at < rows && !rc; at += piece) {
        size_t n = MT_MIN(piece, rows - at);
        rc = head_piece(m, a, pass, first + at, at, n, err);
        if (!rc && m->p.top && !a->dx)
            rc = mt_model_top_rows(m, a->mb, first + at, n, err);
    }
    if (rc || pass == LOSSES)
        return rc;
    mt_model_set_rows(m, a->mb, m->inputs[a->mb].loss_rows + first);
    return head_chunk_backward(m, a, a->first_table && !first, rows, mt_elem(m, m->dh, first * m->wd.c),
                               mt_elem(m, scratch_of(m).ds, first * m->wd.c), err);
}

static int head_pass(mt_model *m, const struct mt_model_head *a, enum pass pass, struct mt_err *err)
{
    size_t n = m->inputs[a->mb].n_loss, chunk = m->p.logits_chunk;
    int rc = 0;
    for (size_t at = 0; !rc && at < n; at += chunk)
        rc = head_chunk(m, a, pass, at, MT_MIN(chunk, n - at), err);
    return rc;
}

/* On a thread of the device. The losses lie where mt_model_fetch_stats() will put them, too. */
static void weigh_rows(void *ctx)
{
    const struct mt_weighing *w = ctx;
    const struct mt_model_learner *of = &w->m->inputs[w->mb].of;
    struct mt_micro_inputs host = mt_inputs_on_host(w->m, w->mb);
    const struct mt_row_values values = {mt_model_stats_loss(w->m, w->m->stats_host, w->mb), host.few_values};
    of->weigh(of->weigh_ctx, w->mb, &values, host.weights);
}

static int copy_rows(mt_model *m, float *dst, const float *src, size_t n, struct mt_err *err)
{
    return mt_model_copy(m, dst, src, n * sizeof(float), err);
}

/* Sends the losses to the host, and the weights that it computes from them to the device. */
static int take_weights(mt_model *m, size_t mb, struct mt_err *err)
{
    size_t n = m->inputs[mb].n_loss;
    struct mt_micro_inputs host = mt_inputs_on_host(m, mb);
    size_t few = m->inputs[mb].of.choose ? n * m->p.few : 0;
    int rc = copy_rows(m, mt_model_stats_loss(m, m->stats_host, mb), mt_model_stats_loss(m, m->stats_dev, mb), n, err);
    if (!rc && few)
        rc = copy_rows(m, host.few_values, m->inputs[mb].few_values, few, err);
    rc = rc ?: mt_device_call(m->dev, weigh_rows, &m->weighings[mb], err);
    if (!rc && few)
        rc = copy_rows(m, m->inputs[mb].few_values, host.few_values, few, err);
    return rc ?: copy_rows(m, m->inputs[mb].weights, host.weights, n, err);
}

static int head_passes(mt_model *m, const struct mt_model_head *a, struct mt_err *err)
{
    if (!a->dx || m->inputs[a->mb].of.rows != MT_ROWS_WEIGHED_LATE)
        return head_pass(m, a, a->dx ? LOSSES_AND_GRADIENTS : LOSSES, err);
    return head_pass(m, a, LOSSES, err)
        ?: take_weights(m, a->mb, err)
        ?: head_pass(m, a, GRADIENTS, err);
}

static void poison(const mt_model *m)
{
    mt_model sizes;
    mt_model_poison_parts(m, NULL);
    mt_model_poison(m, m->logits, mt_model_lay_out_logits(&sizes, &m->p, NULL));
}

/* The table's gradient is overwritten by a product if there are rows, else it is zeroed. */
static int begin_grads(mt_model *m, const struct mt_model_head *a, struct mt_err *err)
{
    const struct mt_param table = output_matrix(m);
    size_t head = m->layout->n_units - 1, n = m->inputs[a->mb].n_loss > 0;
    bool tied = m->layout->tied;
    int rc = 0;
    if (a->first && a->g)
        rc = mt_model_begin_grad(m, head, a->g, &table, tied ? 0 : n, err);
    if (!rc && tied && a->first_table && a->g_table)
        rc = mt_model_begin_grad(m, 0, a->g_table, &table, n, err);
    return rc;
}

/* Scratch: h = gathered x, dh = its norm, ds = gradient of the norm's output. */
int mt_model_head(mt_model *m, const struct mt_model_head *a, struct mt_err *err)
{
    const struct mt_micro_inputs *in = &m->inputs[a->mb];
    struct scratch s = scratch_of(m);
    struct mt_norm norm = norm_of(m, in->n_loss, m->h, a->w);
    struct mt_rows rows = {.n = in->n_loss, .n_dst = in->n_tokens, .c = m->wd.c, .dtype = m->dt,
                           .rows = in->loss_rows};
    int rc = a->dx ? begin_grads(m, a, err) : 0;
    if (rc)
        return rc;
    poison(m);
    if (!in->n_loss)
        return a->dx ? mt_op_zero(m->dev, &(struct mt_zero){a->dx, in->n_tokens * m->wd.c * mt_dtype_size(m->dt)}, err)
                     : 0;
    m->adapters = a->adapters;
    rows.src = a->x;
    rows.dst = m->h;
    rc = mt_op_gather_rows(m->dev, &rows, err)
      ?: mt_norm(m, &norm, m->dh, false, err)
      ?: scale_rows(m, in->n_loss, m->dh, err)
      ?: head_passes(m, a, err);
    if (rc || !a->dx)
        return rc;
    rc = scale_rows(m, in->n_loss, s.ds, err)
      ?: mt_norm_backward(m, &norm, &(struct mt_norm_grad){s.ds, NULL, s.ds, a->g}, err);
    rows.src = s.ds;
    rows.dst = a->dx;
    return rc ?: mt_op_scatter_rows(m->dev, &rows, err);
}

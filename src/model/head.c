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
 * stay, so only the product with the matrix is repeated, and not even that if all rows are one piece. If it depends on
 * those of other chunks of its row, the first pass is a run of its own, for all of these before the second.
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

/* A run of the head over a micro-batch. */
struct head {
    mt_model *m;
    const struct mt_model_head *a;
    const struct mt_micro_inputs *in;
    struct scratch s;
    struct mt_param out; /* the output matrix: the head's own, or the embedding's */
    size_t c, vocab, ld; /* ld: of rows of logits */
    void *dlogits;       /* their gradients of a chunk: rows of ld_d elements */
    size_t ld_d;
    size_t piece;        /* rows of logits at once */
};

static struct head begin(mt_model *m, const struct mt_model_head *a)
{
    const struct mt_layout *l = m->layout;
    size_t ld = mt_model_logits_ld(l);
    struct head h = {.m = m, .a = a, .in = &m->inputs[a->mb], .c = m->c, .vocab = (size_t)l->cfg.vocab, .ld = ld,
                     .piece = m->p.logits_piece ? m->p.logits_piece : m->p.logits_chunk};
    lay_out_scratch(&h.s, &m->p, m->unit_scratch);
    h.out = l->tied ? l->parts[0].param[MT_EMBED_TABLE] : l->parts[l->n_parts - 1].param[MT_HEAD_TABLE];
    h.dlogits = m->dlogits ? m->dlogits : m->logits;
    h.ld_d = m->dlogits ? ld : ld * 4 / mt_dtype_size(m->dt);
    return h;
}

/* x *= logit_scale, of the rows of the norm's output or of its gradient. */
static int scale_rows(const struct head *h, void *x, struct mt_err *err)
{
    float scale = (float)h->m->layout->cfg.logit_scale;
    struct mt_add a = {.n = h->in->n_loss * h->c, .dtype = h->m->dt, .b = x, .out = x, .scale = scale};
    return scale == 1 ? 0 : mt_op_add(h->m->dev, &a, err);
}

/* Of rows x of the norm's output. */
static int head_logits(const struct head *h, size_t rows, const void *x, struct mt_err *err)
{
    mt_model *m = h->m;
    struct mt_adapter_run run = {.adapter = h->out.adapter, .n = rows, .ld = h->ld, .y_dtype = MT_F32, .x = x,
                                 .w = h->a->table, .y = m->logits};
    const struct mt_linear_shape shape = {rows, h->c, h->vocab, m->dt, MT_F32};
    struct mt_gemm g = mt_gemm_output(&shape, x, mt_elem(m, h->a->table, h->out.at), m->logits);
    g.ldd = run.ld;
    int rc = mt_op_gemm(m->dev, &g, err) ?: mt_adapter_forward(m, &run, err);
    struct mt_cap cap = {rows, h->vocab, run.ld, (float)m->layout->cfg.logit_cap, m->logits};
    return rc || !(cap.cap > 0) ? rc : mt_op_cap(m->dev, &cap, err);
}

/* dx = dlogits W and dW += dlogits^T x, of a chunk that begins at row `first`; the first one may overwrite dW. */
static int head_chunk_backward(const struct head *h, size_t first, size_t rows, struct mt_err *err)
{
    mt_model *m = h->m;
    const void *x = mt_elem(m, m->dh, first * h->c);
    void *dx = mt_elem(m, h->s.ds, first * h->c);
    float *dw = mt_grad_of(h->a->g_table, h->out);
    struct mt_adapter_run run = {.adapter = h->out.adapter, .n = rows, .ld = h->ld_d, .dx_dtype = m->dt, .x = x,
                                 .w = h->a->table, .dy = h->dlogits, .dx = dx, .g = h->a->g_table};
    const struct mt_linear_shape shape = {rows, h->c, h->vocab, m->dt, m->dt};
    struct mt_gemm of_x = mt_gemm_input_grad(&shape, h->dlogits, mt_elem(m, h->a->table, h->out.at), dx),
                   of_w = mt_gemm_weight_grad(&shape, h->dlogits, x, dw, !h->a->first_table || first);
    of_x.lda = of_w.lda = h->ld_d;
    int rc = mt_op_gemm(m->dev, &of_x, err)
          ?: mt_adapter_input_grad(m, &run, err)
          ?: mt_adapter_weight_grad(m, &run, err);
    return rc || !dw ? rc : mt_op_gemm(m->dev, &of_w, err);
}

/* What a pass over the micro-batch's rows computes. */
enum pass { LOSSES, LOSSES_AND_GRADIENTS, GRADIENTS /* after LOSSES */ };

/* Losses and logits' gradients of rows [first, first + rows) of the micro-batch, from the chunk's row `at` on. */
static int head_piece(const struct head *h, enum pass pass, size_t first, size_t at, size_t rows, struct mt_err *err)
{
    mt_model *m = h->m;
    const struct mt_micro_inputs *in = h->in;
    size_t mb = h->a->mb, few = in->of.choose ? m->p.few : 0;
    /* of the pass before */
    bool there = pass == GRADIENTS && in->of.rows == MT_ROWS_WEIGHED_LATE && in->n_loss <= h->piece;
    float *entropy = mt_model_stats_entropy(m, m->stats_dev, mb);
    mt_model_set_rows(m, mb, in->loss_rows + first);
    float by = m->p.temperature > 0 ? 1 / m->p.temperature : 1;
    struct mt_add flatten = {
        .n = rows * h->ld, .dtype = MT_F32, .b = m->logits, .out = m->logits, .scale = by};
    int rc = there ? 0 : head_logits(h, rows, mt_elem(m, m->dh, first * h->c), err);
    if (!rc && m->draw)
        rc = mt_model_draw_rows(m, mb, first, rows, err);
    if (!rc && !there && by != 1)
        rc = mt_op_add(m->dev, &flatten, err);
    return rc ? rc
              : mt_op_cross_entropy(m->dev,
                                    &(struct mt_cross_entropy){
                                        .n = rows,
                                        .vocab = h->vocab,
                                        .ld = h->ld,
                                        .dtype = m->dt,
                                        .logits = m->logits,
                                        .targets = in->targets + first,
                                        .loss = mt_model_stats_loss(m, m->stats_dev, mb) + first,
                                        .correct = mt_model_stats_correct(m, m->stats_dev, mb) + first,
                                        .entropy = entropy && pass != GRADIENTS ? entropy + first : NULL,
                                        .dlogits = pass == LOSSES ? NULL : mt_elem(m, h->dlogits, at * h->ld_d),
                                        .ld_dlogits = h->ld_d,
                                        .scale = m->running->of.loss_scale,
                                        .row_scale = pass != LOSSES && in->of.rows != MT_ROWS_ALIKE
                                                         ? in->weights + first : NULL,
                                        .cap = (float)m->layout->cfg.logit_cap * by,
                                        .n_few = few,
                                        .few = few ? in->few + first * few : NULL,
                                        .few_values = few ? in->few_values + first * few : NULL,
                                    },
                                    err);
}

static int head_chunk(const struct head *h, enum pass pass, size_t first, size_t rows, struct mt_err *err)
{
    mt_model *m = h->m;
    int rc = 0;
    for (size_t at = 0; at < rows && !rc; at += h->piece) {
        size_t n = MT_MIN(h->piece, rows - at);
        rc = head_piece(h, pass, first + at, at, n, err);
        if (!rc && m->p.top && !h->a->dx)
            rc = mt_model_top_rows(m, h->a->mb, first + at, n, err);
    }
    if (rc || pass == LOSSES)
        return rc;
    mt_model_set_rows(m, h->a->mb, h->in->loss_rows + first);
    return head_chunk_backward(h, first, rows, err);
}

static int head_pass(const struct head *h, enum pass pass, struct mt_err *err)
{
    size_t n = h->in->n_loss, chunk = h->m->p.logits_chunk;
    int rc = 0;
    for (size_t at = 0; !rc && at < n; at += chunk)
        rc = head_chunk(h, pass, at, MT_MIN(chunk, n - at), err);
    return rc;
}

/* On a thread of the device. The losses lie where mt_model_fetch_stats() will put them, too. */
static void weigh_rows(void *ctx)
{
    const struct mt_weighing *w = ctx;
    const struct mt_model_learner *of = &w->m->inputs[w->mb].of;
    struct mt_micro_inputs host = mt_inputs_on_host(w->m, w->mb);
    const struct mt_row_values values = {mt_model_stats_loss(w->m, w->m->stats_host, w->mb), host.few_values,
                                         w->m->weights_host + mt_model_loss_at(w->m, w->mb)};
    of->weigh(of->weigh_ctx, w->mb, &values);
}

static int send_losses(const struct head *h, struct mt_err *err)
{
    mt_model *m = h->m;
    size_t mb = h->a->mb;
    return mt_model_copy(m, mt_model_stats_loss(m, m->stats_host, mb), mt_model_stats_loss(m, m->stats_dev, mb),
                         h->in->n_loss * sizeof(float), err);
}

/* Computes weights from the losses on the host, of a row with its first chunk that has some, and sends them back. */
static int take_weights(const struct head *h, struct mt_err *err)
{
    mt_model *m = h->m;
    size_t mb = h->a->mb, bytes = h->in->n_loss * sizeof(float), few = h->in->of.choose ? bytes * m->p.few : 0;
    struct mt_micro_inputs host = mt_inputs_on_host(m, mb);
    int rc = few ? mt_model_copy(m, host.few_values, h->in->few_values, few, err) : 0;
    if (!rc && (h->in->of.rows == MT_ROWS_WEIGHED_LATE || !h->in->first_loss))
        rc = mt_device_call(m->dev, weigh_rows, &m->weighings[mb], err);
    if (!rc && few)
        rc = mt_model_copy(m, h->in->few_values, host.few_values, few, err);
    return rc ?: mt_model_copy(m, h->in->weights, m->weights_host + mt_model_loss_at(m, mb), bytes, err);
}

static int head_passes(const struct head *h, struct mt_err *err)
{
    bool dx = h->a->dx, by_row = h->in->of.rows == MT_ROWS_WEIGHED_BY_ROW;
    if (!by_row && (!dx || h->in->of.rows != MT_ROWS_WEIGHED_LATE))
        return head_pass(h, dx ? LOSSES_AND_GRADIENTS : LOSSES, err);
    int rc = by_row && dx ? 0 : head_pass(h, LOSSES, err) ?: send_losses(h, err);
    return rc || !dx ? rc : take_weights(h, err) ?: head_pass(h, GRADIENTS, err);
}

static void poison(const mt_model *m)
{
    mt_model sizes;
    mt_model_poison_parts(m, NULL);
    mt_model_poison(m, m->logits, mt_model_lay_out_logits(&sizes, &m->p, NULL));
}

/* The table's gradient is overwritten by a product if there are rows, else it is zeroed. */
static int begin_grads(const struct head *h, struct mt_err *err)
{
    const struct mt_model_head *a = h->a;
    size_t head = h->m->layout->n_units - 1, n = h->in->n_loss > 0;
    bool tied = h->m->layout->tied;
    int rc = 0;
    if (a->first && a->g)
        rc = mt_model_begin_grad(h->m, head, a->g, &h->out, tied ? 0 : n, err);
    if (!rc && tied && a->first_table && a->g_table)
        rc = mt_model_begin_grad(h->m, 0, a->g_table, &h->out, n, err);
    return rc;
}

/* Scratch: m->h = gathered x, m->dh = its norm, ds = gradient of the norm's output. */
int mt_model_head(mt_model *m, const struct mt_model_head *a, struct mt_err *err)
{
    const struct head h = begin(m, a);
    const struct mt_layout *l = m->layout;
    const struct mt_micro_inputs *in = h.in;
    struct mt_norm norm = {.spec = &l->cfg.norm, .n = in->n_loss, .x = m->h, .w = a->w, .rstd = h.s.rstd,
                           .p = l->parts[l->n_parts - 1].param[MT_HEAD_NORM]};
    struct mt_rows rows = {.n = in->n_loss, .n_dst = in->n_tokens, .c = h.c, .dtype = m->dt, .rows = in->loss_rows,
                           .src = a->x, .dst = m->h};
    int rc = a->dx ? begin_grads(&h, err) : 0;
    if (rc)
        return rc;
    poison(m);
    if (!in->n_loss)
        return a->dx ? mt_op_zero(m->dev, &(struct mt_zero){a->dx, in->n_tokens * h.c * mt_dtype_size(m->dt)}, err) : 0;
    m->adapters = a->adapters;
    rc = mt_op_gather_rows(m->dev, &rows, err)
      ?: mt_norm(m, &norm, m->dh, false, err)
      ?: scale_rows(&h, m->dh, err)
      ?: head_passes(&h, err);
    if (rc || !a->dx)
        return rc;
    rc = scale_rows(&h, h.s.ds, err)
      ?: mt_norm_backward(m, &norm, &(struct mt_norm_grad){h.s.ds, NULL, h.s.ds, a->g}, err);
    rows.src = h.s.ds;
    rows.dst = a->dx;
    return rc ?: mt_op_scatter_rows(m->dev, &rows, err);
}

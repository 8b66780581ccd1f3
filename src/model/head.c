/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Both ends of the model: embedding, and final norm with the chunked output matrix and loss. Only rows
 * with a target reach the head: they are gathered first and their gradients scattered at the end, so
 * that prompt tokens cost nothing there. Logits are never whole: `logits_chunk` rows at a time, and
 * their gradient takes their place.
 */
#include "base/mem.h"
#include "model/model_priv.h"

int mt_model_embed(mt_model *m, size_t mb, const void *w, void *x, struct mt_err *err)
{
    const struct mt_inputs *in = &m->inputs[mb];
    return mt_op_embedding(m->dev,
                           &(struct mt_embedding){
                               .n = in->n_tokens,
                               .vocab = (size_t)m->layout->cfg.vocab,
                               .c = m->wd.c,
                               .dtype = m->dt,
                               .scale = 1,
                               .ids = in->ids,
                               .table = mt_elem(m, w, m->layout->units[0].table.at),
                               .out = x,
                           },
                           err);
}

int mt_model_embed_bwd(mt_model *m, size_t mb, const void *dx, float *g, struct mt_err *err)
{
    const struct mt_inputs *in = &m->inputs[mb];
    float *dtable = mt_grad_of(g, m->layout->units[0].table);
    if (!dtable)
        return 0;
    return mt_op_embedding_bwd(m->dev,
                               &(struct mt_embedding_bwd){
                                   .n = in->n_tokens,
                                   .vocab = (size_t)m->layout->cfg.vocab,
                                   .c = m->wd.c,
                                   .n_runs = in->n_runs,
                                   .dtype = m->dt,
                                   .scale = 1,
                                   .run_ids = in->run_ids,
                                   .starts = in->run_starts,
                                   .order = in->order,
                                   .dout = dx,
                                   .dtable = dtable,
                               },
                               err);
}

static const struct mt_unit *head_unit(const mt_model *m)
{
    return &m->layout->units[m->layout->n_units - 1];
}

/* The output matrix: the head's own, or the embedding's. */
static struct mt_param output_matrix(const mt_model *m)
{
    return m->layout->tied ? m->layout->units[0].table : head_unit(m)->table;
}

static int head_logits(mt_model *m, size_t rows, const void *h, const void *table,
                       struct mt_err *err)
{
    size_t vocab = (size_t)m->layout->cfg.vocab;
    return mt_op_gemm(m->dev,
                      &(struct mt_gemm){
                          .m = rows,
                          .n = vocab,
                          .k = m->wd.c,
                          .dtype = m->dt,
                          .d_dtype = MT_F32,
                          .trans_b = true,
                          .a = h,
                          .lda = m->wd.c,
                          .b = mt_elem(m, table, output_matrix(m).at),
                          .ldb = m->wd.c,
                          .d = m->logits,
                          .ldd = vocab,
                      },
                      err);
}

/* dh = dlogits W and dW += dlogits^T h; dlogits stand in the logits' memory. */
static int head_chunk_backward(mt_model *m, const struct mt_model_head *a, size_t rows,
                               const void *h, void *dh, struct mt_err *err)
{
    struct mt_param out = output_matrix(m);
    float *dw = mt_grad_of(a->g_table, out);
    size_t vocab = (size_t)m->layout->cfg.vocab, ld = vocab * 4 / mt_dtype_size(m->dt);
    int rc = mt_op_gemm(m->dev,
                        &(struct mt_gemm){
                            .m = rows,
                            .n = m->wd.c,
                            .k = vocab,
                            .dtype = m->dt,
                            .d_dtype = m->dt,
                            .a = m->logits,
                            .lda = ld,
                            .b = mt_elem(m, a->table, out.at),
                            .ldb = m->wd.c,
                            .d = dh,
                            .ldd = m->wd.c,
                        },
                        err);
    if (rc || !dw)
        return rc;
    return mt_op_gemm(m->dev,
                      &(struct mt_gemm){
                          .m = vocab,
                          .n = m->wd.c,
                          .k = rows,
                          .dtype = m->dt,
                          .d_dtype = MT_F32,
                          .trans_a = true,
                          .a = m->logits,
                          .lda = ld,
                          .b = h,
                          .ldb = m->wd.c,
                          .c = dw,
                          .ldc = m->wd.c,
                          .d = dw,
                          .ldd = m->wd.c,
                      },
                      err);
}

static int head_chunk(mt_model *m, const struct mt_model_head *a, size_t first, size_t rows,
                      struct mt_err *err)
{
    const struct mt_inputs *in = &m->inputs[a->mb];
    size_t vocab = (size_t)m->layout->cfg.vocab;
    const void *h = mt_elem(m, m->dh, first * m->wd.c);
    void *dh = mt_elem(m, m->s, first * m->wd.c);
    int rc = head_logits(m, rows, h, a->table, err);
    if (!rc)
        rc = mt_op_cross_entropy(m->dev,
                                 &(struct mt_cross_entropy){
                                     .n = rows,
                                     .vocab = vocab,
                                     .ld = vocab,
                                     .dtype = m->dt,
                                     .logits = m->logits,
                                     .targets = in->targets + first,
                                     .loss = mt_model_stats_loss(m, m->stats_dev, a->mb) + first,
                                     .correct = mt_model_stats_correct(m, m->stats_dev, a->mb) + first,
                                     .dlogits = a->dx ? m->logits : NULL,
                                     .ld_dlogits = vocab * 4 / mt_dtype_size(m->dt),
                                     .scale = m->loss_scale,
                                 },
                                 err);
    if (!rc && a->dx)
        rc = head_chunk_backward(m, a, rows, h, dh, err);
    return rc;
}

/* Scratch: h = gathered x, dh = its norm, ds = gradient of the norm's output. */
int mt_model_head(mt_model *m, const struct mt_model_head *a, struct mt_err *err)
{
    const struct mt_inputs *in = &m->inputs[a->mb];
    const struct mt_unit *u = head_unit(m);
    struct mt_rows rows = {.n = in->n_loss, .n_dst = in->n_tokens, .c = m->wd.c, .dtype = m->dt,
                           .rows = in->loss_rows};
    if (!in->n_loss)
        return a->dx ? mt_op_zero(m->dev, a->dx, in->n_tokens * m->wd.c * mt_dtype_size(m->dt), err)
                     : 0;
    rows.src = a->x;
    rows.dst = m->h;
    int rc = mt_op_gather_rows(m->dev, &rows, err);
    if (!rc)
        rc = mt_norm(m, in->n_loss, m->h, a->w, u->norm, m->dh, m->head_rstd, false, err);
    for (size_t at = 0; !rc && at < in->n_loss; at += m->p.logits_chunk)
        rc = head_chunk(m, a, at, MT_MIN(m->p.logits_chunk, in->n_loss - at), err);
    if (rc || !a->dx)
        return rc;
    rc = mt_norm_backward(m, in->n_loss, m->s, m->h, a->w, u->norm, m->head_rstd, NULL, m->s, a->g,
                          err);
    rows.src = m->s;
    rows.dst = a->dx;
    return rc ? rc : mt_op_scatter_rows(m->dev, &rows, err);
}

int mt_model_logits(mt_model *m, const struct mt_model_head *a, float *host_logits,
                    struct mt_err *err)
{
    const struct mt_inputs *in = &m->inputs[a->mb];
    const void *last = mt_elem(m, a->x, (in->n_tokens - 1) * m->wd.c);
    size_t bytes = (size_t)m->layout->cfg.vocab * sizeof(float);
    int rc = mt_norm(m, 1, last, a->w, head_unit(m)->norm, m->dh, m->head_rstd, false, err);
    if (!rc)
        rc = head_logits(m, 1, m->dh, a->table, err);
    if (!rc)
        rc = mt_device_copy(m->dev, MT_STREAM_COMPUTE,
                            &(struct mt_copy){host_logits, bytes, m->logits, bytes, bytes, 1}, err);
    return rc;
}

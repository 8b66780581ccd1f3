/* SPDX-License-Identifier: Apache-2.0 */
/*
 * RMSNorm of queries and keys as operations of its own, for variants that the rotary embedding's operation does not
 * include: over all heads of a token at once, or of each head but after the embedding. Queries, and then keys, are
 * copied out of the rows that they share, which costs little beside the products around it.
 */
#include "model/attention.h"

/* Queries or keys: their columns in a row, the number of vectors in a row, and their weight. */
struct side {
    size_t first, width, per_row;
    int role;
    float *rstd; /* [n * per_row] */
};

static struct side side_of(const struct mt_qk_norm *a, bool keys)
{
    const mt_model *m = a->run->m;
    const struct mt_hf_config *c = &m->layout->cfg;
    bool whole = c->qk_norm == MT_QK_NORM_PROJECTION;
    size_t n_q = whole ? 1 : (size_t)c->n_heads, n_kv = whole ? 1 : (size_t)c->n_kv_heads;
    return keys ? (struct side){m->wd.q, m->wd.kv, n_kv, MT_ATTENTION_K_NORM, a->rstd + a->run->in->n_tokens * n_q}
                : (struct side){0, m->wd.q, n_q, MT_ATTENTION_Q_NORM, a->rstd};
}

static int copy(const struct mt_qk_norm *a, void *dst, size_t dst_ld, const void *src, size_t src_ld, size_t width,
                struct mt_err *err)
{
    size_t e = mt_dtype_size(a->run->m->dt);
    return mt_device_copy(a->run->m->dev, MT_STREAM_COMPUTE,
                          &(struct mt_copy){dst, dst_ld * e, src, src_ld * e, width * e, a->run->in->n_tokens}, err);
}

static int norm_side(const struct mt_qk_norm *a, bool keys, struct mt_err *err)
{
    mt_model *m = a->run->m;
    struct side s = side_of(a, keys);
    struct mt_rmsnorm norm = {
        .n = a->run->in->n_tokens * s.per_row,
        .c = s.width / s.per_row,
        .dtype = m->dt,
        .eps = (float)m->layout->cfg.rms_eps,
        .x = a->rows[0],
        .w = mt_elem(m, a->run->w, a->run->part->param[s.role].at),
        .y = a->rows[1],
        .rstd = s.rstd,
    };
    int rc = copy(a, a->rows[0], s.width, mt_elem(m, a->qkv, s.first), m->wd.qkv, s.width, err);
    if (!rc)
        rc = mt_op_rmsnorm(m->dev, &norm, err);
    return rc ? rc : copy(a, mt_elem(m, a->qk, s.first), m->wd.qk, a->rows[1], s.width, s.width, err);
}

static int norm_side_backward(const struct mt_qk_norm *a, bool keys, struct mt_err *err)
{
    mt_model *m = a->run->m;
    struct side s = side_of(a, keys);
    struct mt_param p = a->run->part->param[s.role];
    struct mt_rmsnorm_bwd norm = {
        .n = a->run->in->n_tokens * s.per_row,
        .c = s.width / s.per_row,
        .dtype = m->dt,
        .dy = a->rows[1],
        .x = a->rows[0],
        .w = mt_elem(m, a->run->w, p.at),
        .rstd = s.rstd,
        .dx = a->rows[1],
        .dw = mt_grad_of(a->run->g, p),
        .workspace = m->workspace,
    };
    void *d = mt_elem(m, a->dqkv, s.first);
    int rc = copy(a, a->rows[0], s.width, mt_elem(m, a->qkv, s.first), m->wd.qkv, s.width, err);
    if (!rc)
        rc = copy(a, a->rows[1], s.width, d, m->wd.qkv, s.width, err);
    if (!rc)
        rc = mt_op_rmsnorm_bwd(m->dev, &norm, err);
    return rc ? rc : copy(a, d, m->wd.qkv, a->rows[1], s.width, s.width, err);
}

int mt_qk_norm(const struct mt_qk_norm *a, struct mt_err *err)
{
    int rc = norm_side(a, false, err);
    return rc ? rc : norm_side(a, true, err);
}

int mt_qk_norm_backward(const struct mt_qk_norm *a, struct mt_err *err)
{
    int rc = norm_side_backward(a, false, err);
    return rc ? rc : norm_side_backward(a, true, err);
}

size_t mt_qk_norm_workspace(const struct mt_model_params *p, mt_device *dev)
{
    const struct mt_hf_config *c = &p->layout->cfg;
    struct mt_widths w = mt_widths(c);
    size_t n = p->max_tokens, hd = (size_t)c->head_dim;
    struct mt_rmsnorm_bwd whole = {.n = n, .c = w.q}, heads = {.n = n * (size_t)c->n_heads, .c = hd};
    return mt_op_rmsnorm_bwd_workspace(dev, c->qk_norm == MT_QK_NORM_PROJECTION ? &whole : &heads);
}

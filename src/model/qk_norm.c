/* SPDX-License-Identifier: Apache-2.0 */
/*
 * RMSNorm of queries and keys as operations of its own, for variants that the rotary embedding's operation does not
 * include: over all heads of a token at once, of each head but after the embedding, of weights less one, unrotated,
 * without a weight. And that of values, which has none either.
 */
#include "model/attention.h"

/* Queries or keys: their first column in a row of all, the vectors in a row and their width, and their weight. */
struct side {
    size_t first, per_row, width;
    size_t first_in, stride; /* in a row that has gates, too: its first column, and from one vector to the next */
    int role;
    float *rstd; /* [n * per_row] */
};

static struct mt_widths widths_of(const struct mt_qk_norm *a)
{
    return mt_widths(&a->run->m->layout->cfg, a->run->part->spec);
}

static struct side side_of(const struct mt_qk_norm *a, bool keys)
{
    const struct mt_layer_spec *c = a->run->part->spec;
    const struct mt_widths wd = widths_of(a);
    bool whole = c->qk_norm == MT_QK_NORM_PROJECTION, gates = c->gate && !c->gate_name;
    size_t n_q = whole ? 1 : (size_t)c->n_heads, n_kv = whole ? 1 : (size_t)c->n_kv_heads;
    size_t d = (keys ? wd.kv : wd.q) / (keys ? n_kv : n_q);
    if (keys)
        return (struct side){wd.q, n_kv, d, gates ? 2 * wd.q : wd.q, d, MT_ATTENTION_K_NORM,
                             a->rstd + a->run->in->n_tokens * n_q};
    return (struct side){0, n_q, d, 0, gates ? 2 * d : d, MT_ATTENTION_Q_NORM, a->rstd};
}

/* Is it multiplied by 1 + w? */
static bool weighs_more(const struct mt_qk_norm *a)
{
    const struct mt_layer_spec *c = a->run->part->spec;
    return c->norm.plus_one && c->qk_norm != MT_QK_NORM_BARE;
}

static const void *weight_of(const struct mt_qk_norm *a, int role)
{
    const struct mt_param *p = &a->run->part->param[role];
    return p->n ? mt_elem(a->run->m, a->run->w, p->at) : a->run->m->one;
}

static int norm_side(const struct mt_qk_norm *a, bool keys, struct mt_err *err)
{
    mt_model *m = a->run->m;
    struct side s = side_of(a, keys);
    struct mt_rmsnorm norm = {
        .n = a->run->in->n_tokens * s.per_row,
        .c = s.width,
        .dtype = m->dt,
        .eps = (float)a->run->part->spec->norm.eps,
        .plus_one = weighs_more(a),
        .round_once = a->run->part->spec->norm.round_once,
        .x = mt_elem(m, a->qkv, s.first_in),
        .x_at = {s.per_row, widths_of(a).qkv, s.stride},
        .w = weight_of(a, s.role),
        .y = mt_elem(m, a->qk, s.first),
        .y_at = {s.per_row, widths_of(a).qk, s.width},
        .rstd = s.rstd,
    };
    return mt_op_rmsnorm(m->dev, &norm, err);
}

static int norm_side_backward(const struct mt_qk_norm *a, bool keys, struct mt_err *err)
{
    mt_model *m = a->run->m;
    struct side s = side_of(a, keys);
    struct mt_param p = a->run->part->param[s.role];
    void *d = mt_elem(m, a->dqkv, s.first_in);
    struct mt_rmsnorm_bwd norm = {
        .n = a->run->in->n_tokens * s.per_row,
        .c = s.width,
        .dtype = m->dt,
        .plus_one = weighs_more(a),
        .round_once = a->run->part->spec->norm.round_once,
        .dy = d,
        .x = mt_elem(m, a->qkv, s.first_in),
        .x_at = {s.per_row, widths_of(a).qkv, s.stride},
        .w = weight_of(a, s.role),
        .rstd = s.rstd,
        .dx = d,
        .dy_at = {s.per_row, widths_of(a).qkv, s.stride},
        .dx_at = {s.per_row, widths_of(a).qkv, s.stride},
        .dw = mt_grad_of(a->run->g, p),
        .workspace = m->own.workspace,
    };
    return mt_op_rmsnorm_bwd(m->dev, &norm, err);
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

/* The first column of what values are made of, in a row of the product. */
static size_t values_from(const struct mt_qk_norm *a)
{
    const struct mt_widths wd = widths_of(a);
    return wd.qkv - wd.kv;
}

int mt_v_norm(const struct mt_qk_norm *a, struct mt_err *err)
{
    mt_model *m = a->run->m;
    const struct mt_layer_spec *c = a->run->part->spec;
    const struct mt_widths wd = widths_of(a);
    size_t heads = (size_t)c->n_kv_heads, d = (size_t)c->head_dim;
    struct mt_rmsnorm norm = {
        .n = a->run->in->n_tokens * heads,
        .c = d,
        .dtype = m->dt,
        .eps = (float)c->norm.eps,
        .round_once = true,
        .x = mt_elem(m, a->qkv, values_from(a)),
        .x_at = {heads, wd.qkv, d},
        .w = m->one,
        .y = mt_elem(m, a->qk, wd.q + wd.kv),
        .y_at = {heads, wd.qk, d},
        .rstd = a->rstd_v,
    };
    return mt_op_rmsnorm(m->dev, &norm, err);
}

int mt_v_norm_backward(const struct mt_qk_norm *a, struct mt_err *err)
{
    mt_model *m = a->run->m;
    const struct mt_layer_spec *c = a->run->part->spec;
    const struct mt_widths wd = widths_of(a);
    size_t heads = (size_t)c->n_kv_heads, d = (size_t)c->head_dim;
    void *dx = mt_elem(m, a->dqkv, values_from(a));
    struct mt_rmsnorm_bwd norm = {
        .n = a->run->in->n_tokens * heads,
        .c = d,
        .dtype = m->dt,
        .round_once = true,
        .dy = c->v_is_k ? a->dv : dx,
        .x = mt_elem(m, a->qkv, values_from(a)),
        .x_at = {heads, wd.qkv, d},
        .w = m->one,
        .rstd = a->rstd_v,
        .dres = c->v_is_k ? dx : NULL,
        .dx = dx,
        .dy_at = {heads, c->v_is_k ? wd.kv : wd.qkv, d},
        .dx_at = {heads, wd.qkv, d},
        .workspace = m->own.workspace,
    };
    return mt_op_rmsnorm_bwd(m->dev, &norm, err);
}

size_t mt_qk_norm_workspace(const struct mt_model_params *p, const struct mt_layer_spec *s, mt_device *dev)
{
    struct mt_widths w = mt_widths(&p->layout->cfg, s);
    size_t n = p->max_tokens, hd = (size_t)s->head_dim;
    struct mt_rmsnorm_bwd whole = {.n = n, .c = w.q}, heads = {.n = n * (size_t)s->n_heads, .c = hd};
    return mt_op_rmsnorm_bwd_workspace(dev, s->qk_norm == MT_QK_NORM_PROJECTION ? &whole : &heads);
}

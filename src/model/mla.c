/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Multi-head latent attention (DeepSeek-AI 2024), a branch (branch.h):
 *
 *   h = before(x);  [cq | c | kr] = h Win + b;  q = norm(cq) Wq; without a latent of queries: [q | c | kr] = h Win + b
 *   [k | v] = norm(c) Wkv;  the last part of each head of q, and kr, which all heads of keys share, are rotated
 *   o = attention(q, [k | kr], v);  y = x + after(o Wo)
 *
 * The record keeps, in two segments, the latents, which are a twentieth of queries, keys and values in DeepSeek-V3, and
 * o; backward makes queries, keys and values again from the latents. Queries without one are in the record, rotated.
 */
#include "base/mem.h"
#include "model/attention.h"
#include "model/branch.h"

/* Widths of a layer, in elements. */
struct dims {
    size_t heads, nope, rope, v; /* of a head: the part of queries and keys that is not rotated; that is; values */
    size_t q_latent, latent;     /* 0: queries have none */
    size_t first;                /* in a row of the first product: where the latent of keys and values begins */
    size_t in;                   /* the whole row */
    size_t qk, kv, o;            /* of all heads: queries, keys and values as one product makes them, outputs */
};

static struct dims dims_of(const struct mt_layer_spec *s)
{
    struct dims d = {.heads = (size_t)s->n_heads, .nope = (size_t)s->nope_dim, .rope = (size_t)s->rope_dim,
                     .v = (size_t)s->v_dim, .q_latent = (size_t)s->q_latent, .latent = (size_t)s->kv_latent};
    d.qk = d.heads * (d.nope + d.rope);
    d.kv = d.heads * (d.nope + d.v);
    d.o = d.heads * d.v;
    d.first = d.q_latent ? d.q_latent : d.qk;
    d.in = d.first + d.latent + d.rope;
    return d;
}

static struct dims dims_of_run(const struct mt_part_run *r)
{
    return dims_of(r->part->spec);
}

enum { LATENTS, OUT }; /* segments of the record */
struct record {
    void *in, *o;            /* [n, in], [n, o] */
    float *lse;              /* [heads, n] */
    float *rstd;             /* [n] of the norm before */
    float *rstd_q, *rstd_kv; /* [n] of the latents' */
    void *out;               /* [n, hidden] o Wo, if a norm comes after it */
};

static void lay_out_record(struct record *r, const struct mt_part_shape *s, struct mt_part_record *at)
{
    struct dims d = dims_of(s->spec);
    size_t e = mt_dtype_size(s->dtype), n = s->max_tokens;
    r->in = mt_record_take(at, LATENTS, n * d.in * e);
    r->o = mt_record_take(at, OUT, n * d.o * e);
    r->lse = mt_record_take(at, OUT, n * d.heads * sizeof(float));
    r->rstd = mt_record_take(at, LATENTS, n * sizeof(float));
    r->rstd_q = mt_record_take(at, LATENTS, d.q_latent ? n * sizeof(float) : 0);
    r->rstd_kv = mt_record_take(at, LATENTS, n * sizeof(float));
    r->out = s->spec->norms.attention.after ? mt_record_take(at, OUT, n * (size_t)s->cfg->hidden * e) : NULL;
}

MT_PART_RECORD()

struct scratch {
    void *cq, *c;     /* [n, q_latent], [n, latent] after their norms */
    void *q, *kv, *k; /* [n, qk] queries that have a latent; [n, kv]; [n, qk] keys with the rotated part */
    void *d_o, *dq, *dk, *dkv, *d_in, *dcq, *dc; /* backward: gradients of these */
    float *rstd;      /* [n] of the norm after */
    void *workspace;  /* of the attention operations, last in the scratch */
};

static size_t lay_out_scratch(struct scratch *s, const struct mt_model_params *p, const struct mt_layer_spec *spec,
                              void *base)
{
    struct dims d = dims_of(spec);
    size_t at = 0, column = p->max_tokens * mt_dtype_size(p->dtype), back = p->backward ? column : 0;
    size_t q = d.q_latent ? d.qk : 0;
    s->cq = mt_take(base, &at, column * d.q_latent);
    s->c = mt_take(base, &at, column * d.latent);
    s->q = mt_take(base, &at, column * q);
    s->kv = mt_take(base, &at, column * d.kv);
    s->k = mt_take(base, &at, column * d.qk);
    s->d_o = mt_take(base, &at, back * d.o);
    s->dq = mt_take(base, &at, back * q);
    s->dk = mt_take(base, &at, back * d.qk);
    s->dkv = mt_take(base, &at, back * d.kv);
    s->d_in = mt_take(base, &at, back * d.in);
    s->dcq = mt_take(base, &at, back * d.q_latent);
    s->dc = mt_take(base, &at, back * d.latent);
    s->rstd = mt_take(base, &at, spec->norms.attention.after ? p->max_tokens * sizeof(float) : 0);
    s->workspace = mt_take(base, &at, 0);
    return at;
}

static struct scratch scratch_of(const struct mt_part_run *run)
{
    struct scratch s;
    lay_out_scratch(&s, &run->m->p, run->part->spec, run->scratch);
    return s;
}

/* Elements [first, first + dim) of each head. */
static struct mt_heads piece(struct mt_heads h, size_t first, size_t dim, enum mt_dtype t)
{
    h.p = h.p ? (char *)h.p + first * mt_dtype_size(t) : NULL;
    h.dim = dim;
    return h;
}

/* Queries, keys, values: views of rows of each. */
struct views {
    struct mt_heads q, k, kv, v, o;
    struct mt_heads shared; /* the part of keys that all heads have, in the row of the first product */
};

static struct views views_of(const struct dims *d, enum mt_dtype t, const void *in, const void *q, const void *kv,
                             const void *k, const void *o)
{
    size_t e = mt_dtype_size(t), wide = d->nope + d->rope;
    struct views x;
    x.q = d->q_latent ? mt_heads(q, d->qk, d->heads, wide) : mt_heads(in, d->in, d->heads, wide);
    x.k = mt_heads(k, d->qk, d->heads, wide);
    x.kv = mt_heads(kv, d->kv, d->heads, d->nope + d->v);
    x.v = piece(x.kv, d->nope, d->v, t);
    x.o = mt_heads(o, d->o, d->heads, d->v);
    x.shared = mt_heads(in ? (const char *)in + (d->first + d->latent) * e : NULL, d->in, d->heads, d->rope);
    x.shared.stride = 0;
    return x;
}

static size_t scratch_bytes(const struct mt_model_params *p, const struct mt_layer_spec *c, mt_device *dev)
{
    struct scratch s;
    struct dims d = dims_of(c);
    size_t at = lay_out_scratch(&s, p, c, NULL);
    struct views x = views_of(&d, p->dtype, NULL, NULL, NULL, NULL, NULL);
    struct mt_attention a = {.n = p->max_tokens, .max_len = p->max_len, .q = x.q, .k = x.k, .v = x.v, .o = x.o,
                             .dtype = p->dtype, .cap = (float)c->score_cap};
    mt_take(NULL, &at, mt_op_attention_workspace(dev, &a));
    return at;
}

static size_t workspace_bytes(const struct mt_model_params *p, const struct mt_layer_spec *c, mt_device *dev)
{
    struct dims d = dims_of(c);
    size_t hidden = (size_t)p->layout->cfg.hidden, widest = MT_MAX(MT_MAX(d.q_latent, d.latent), hidden);
    struct mt_rmsnorm_bwd norm = {.n = p->max_tokens, .c = widest};
    size_t heads = p->layout->n_adapters ? MT_MAX(d.qk, d.kv) : 0; /* magnitudes of DoRA are summed as biases are */
    struct mt_bias_bwd bias = {.n = p->max_tokens, .c = MT_MAX(heads, MT_MAX(d.in, hidden))};
    return MT_MAX(mt_op_rmsnorm_bwd_workspace(dev, &norm), mt_op_bias_bwd_workspace(dev, &bias));
}

/* The norms of latents, whose eps no configuration changes. */
static const struct mt_norm_spec latent_norm = {.eps = 1e-6};

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    const struct mt_layer_spec *c = p->spec;
    const struct mt_branch_norms *norms = &c->norms.attention;
    struct dims d = dims_of(c);
    int64_t hidden = mt_layout_builder_config(b)->hidden, qk = (int64_t)d.qk, kv = (int64_t)d.kv;
    const struct mt_param_tensor latents[] = {{"self_attn.q_a_proj.weight", c->q_latent},
                                              {"self_attn.kv_a_proj_with_mqa.weight", c->kv_latent + c->rope_dim}},
                                 queries[] = {{"self_attn.q_proj.weight", qk}, latents[1]},
                                 biases[] = {{"self_attn.q_a_proj.bias", c->q_latent},
                                             {"self_attn.kv_a_proj_with_mqa.bias", c->kv_latent + c->rope_dim}};
    if (norms->before)
        mt_layout_add_norm(b, p, MT_MLA_NORM, hidden, norms->before, &c->norm);
    mt_layout_add_param(b, p, MT_MLA_IN, hidden, 2, c->q_latent ? latents : queries);
    if (c->qkv_bias)
        mt_layout_add_param(b, p, MT_MLA_IN_BIAS, 0, 2, biases);
    if (c->q_latent) {
        mt_layout_add_norm(b, p, MT_MLA_Q_NORM, c->q_latent, "self_attn.q_a_layernorm.weight", &latent_norm);
        mt_layout_add_tensor(b, p, MT_MLA_Q, qk, c->q_latent, "self_attn.q_b_proj.weight");
    }
    mt_layout_add_norm(b, p, MT_MLA_KV_NORM, c->kv_latent, "self_attn.kv_a_layernorm.weight", &latent_norm);
    mt_layout_add_tensor(b, p, MT_MLA_KV, kv, c->kv_latent, "self_attn.kv_b_proj.weight");
    mt_layout_add_tensor(b, p, MT_MLA_OUT, hidden, (int64_t)d.o, "self_attn.o_proj.weight");
    if (c->o_bias)
        mt_layout_add_tensor(b, p, MT_MLA_OUT_BIAS, hidden, 0, "self_attn.o_proj.bias");
    if (norms->after)
        mt_layout_add_norm(b, p, MT_MLA_NORM_AFTER, hidden, norms->after, &c->norm);
}

static struct mt_branch branch_of(const struct mt_part_run *r, const struct record *rec)
{
    return (struct mt_branch){.run = r, .before = MT_MLA_NORM, .after = MT_MLA_NORM_AFTER, .rstd = rec->rstd,
                              .out = rec->out, .rstd_after = scratch_of(r).rstd};
}

static struct views forward_views(const struct mt_part_run *r, const struct record *rec, const struct scratch *s)
{
    struct dims d = dims_of_run(r);
    return views_of(&d, r->m->dt, rec->in, s->q, s->kv, s->k, rec->o);
}

static struct mt_attention attention_args(const struct mt_part_run *r, const struct record *rec,
                                          const struct scratch *s)
{
    struct views x = forward_views(r, rec, s);
    struct mt_attention a = mt_attention_of(r);
    a.q = x.q;
    a.k = x.k;
    a.v = x.v;
    a.o = x.o;
    a.lse = rec->lse;
    a.workspace = s->workspace;
    return a;
}

/* A latent: its columns in a row of the first product, its norm. */
struct latent {
    int role;
    size_t first, width;
    float *rstd;
};

static struct latent q_latent_of(const struct mt_part_run *r, const struct record *rec)
{
    return (struct latent){MT_MLA_Q_NORM, 0, dims_of_run(r).q_latent, rec->rstd_q};
}

static struct latent kv_latent_of(const struct mt_part_run *r, const struct record *rec)
{
    struct dims d = dims_of_run(r);
    return (struct latent){MT_MLA_KV_NORM, d.first, d.latent, rec->rstd_kv};
}

static int normalise(const struct mt_part_run *r, const struct record *rec, struct latent l, bool again, void *y,
                     struct mt_err *err)
{
    mt_model *m = r->m;
    return mt_op_rmsnorm(m->dev,
                         &(struct mt_rmsnorm){
                             .n = r->in->n_tokens,
                             .c = l.width,
                             .dtype = m->dt,
                             .eps = (float)latent_norm.eps,
                             .x = mt_elem(m, rec->in, l.first),
                             .x_at = {1, dims_of_run(r).in, l.width},
                             .w = mt_elem(m, r->w, r->part->param[l.role].at),
                             .y = y,
                             .rstd = l.rstd,
                             .use_rstd = again,
                         },
                         err);
}

/* dy is dense; the result goes to the latent's columns of d_in. */
static int normalise_backward(const struct mt_part_run *r, const struct record *rec, struct latent l, const void *dy,
                              void *d_in, struct mt_err *err)
{
    mt_model *m = r->m;
    struct mt_param p = r->part->param[l.role];
    struct mt_row_groups rows = {1, dims_of_run(r).in, l.width};
    return mt_op_rmsnorm_bwd(m->dev,
                             &(struct mt_rmsnorm_bwd){
                                 .n = r->in->n_tokens,
                                 .c = l.width,
                                 .dtype = m->dt,
                                 .dy = dy,
                                 .x = mt_elem(m, rec->in, l.first),
                                 .x_at = rows,
                                 .w = mt_elem(m, r->w, p.at),
                                 .rstd = l.rstd,
                                 .dx = mt_elem(m, d_in, l.first),
                                 .dx_at = rows,
                                 .dw = mt_grad_of(r->g, p),
                                 .workspace = m->own.workspace,
                             },
                             err);
}

/* A rotation of no heads yet, by a table; by none where the layer has no embedding: then heads are only copied. */
static struct mt_qk_rope rope_args(const struct mt_part_run *r, int rope)
{
    struct mt_rope_rows rows = {0};
    if (rope != MT_NO_ROPE)
        rows = r->in->rope[rope];
    return (struct mt_qk_rope){.n = r->in->n_tokens, .rot = rope == MT_NO_ROPE ? 0 : r->m->layout->cfg.rope[rope].dims,
                               .pairs = true, .dtype = r->m->dt, .positions = rows.positions, .cos_t = rows.cos_t,
                               .sin_t = rows.sin_t, .max_pos = rows.n_table_rows};
}

/* The end of each query, of which a table rotates `rot` dimensions: all, if queries grow with their positions. */
static struct mt_heads rotated_queries(const struct mt_part_run *r, const struct views *x, size_t rot)
{
    return piece(x->q, dims_of_run(r).nope + dims_of_run(r).rope - rot, rot, r->m->dt);
}

/* Rotates the queries' part in place, unless they are rotated already, and the keys' to where all heads have it. */
static int rotate(const struct mt_part_run *r, const struct views *x, bool queries, struct mt_err *err)
{
    const struct dims d = dims_of_run(r);
    const struct mt_layer_spec *c = r->part->spec;
    struct mt_qk_rope k = rope_args(r, c->rope), q = rope_args(r, c->q_rope);
    struct mt_qk_rope *of_q = c->q_rope == c->rope ? &k : &q;
    k.k = x->shared;
    k.to_k = piece(x->k, d.nope, d.rope, r->m->dt);
    if (queries && of_q->rot)
        of_q->q = of_q->to_q = rotated_queries(r, x, of_q->rot);
    int rc = mt_op_qk_rope(r->m->dev, &k, err);
    return rc || of_q == &k || !queries ? rc : mt_op_qk_rope(r->m->dev, &q, err);
}

/* The part of keys that is not rotated, from one view to another. */
static int copy_nope(const struct mt_part_run *r, struct mt_heads from, struct mt_heads to, struct mt_err *err)
{
    const struct dims d = dims_of_run(r);
    enum mt_dtype t = r->m->dt;
    struct mt_qk_rope a = {.n = r->in->n_tokens, .dtype = t, .q = piece(from, 0, d.nope, t),
                           .to_q = piece(to, 0, d.nope, t)};
    return mt_op_qk_rope(r->m->dev, &a, err);
}

/* Queries, keys and values of rec->in. Again: for backward. */
static int make_heads(const struct mt_part_run *r, const struct record *rec, const struct scratch *s, bool again,
                      struct mt_err *err)
{
    mt_model *m = r->m;
    const struct mt_param *p = r->part->param, none = {0};
    const struct dims d = dims_of_run(r);
    struct views x = forward_views(r, rec, s);
    int rc = 0;
    if (d.q_latent)
        rc = normalise(r, rec, q_latent_of(r, rec), again, s->cq, err);
    if (!rc && d.q_latent)
        rc = mt_linear(m, r->in->n_tokens, d.q_latent, d.qk, s->cq, r->w, p[MT_MLA_Q], none, NULL, s->q, err);
    if (!rc)
        rc = normalise(r, rec, kv_latent_of(r, rec), again, s->c, err);
    if (!rc)
        rc = mt_linear(m, r->in->n_tokens, d.latent, d.kv, s->c, r->w, p[MT_MLA_KV], none, NULL, s->kv, err);
    if (!rc)
        rc = rotate(r, &x, d.q_latent || !again, err);
    return rc ? rc : copy_nope(r, x.kv, x.k, err);
}

/* out = o Wo, plus `residual`. */
static int project(const struct mt_part_run *r, const void *residual, void *out, struct mt_err *err)
{
    struct record rec = record_of(r);
    const struct mt_param *p = r->part->param;
    return mt_linear(r->m, r->in->n_tokens, dims_of_run(r).o, r->m->wd.c, rec.o, r->w, p[MT_MLA_OUT],
                     p[MT_MLA_OUT_BIAS], residual, out, err);
}

/* rec->in of x, in full once make_heads() has rotated queries without a latent. */
static int make_latents(const struct mt_part_run *r, const struct record *rec, struct mt_err *err)
{
    mt_model *m = r->m;
    const struct mt_param *p = r->part->param;
    struct mt_branch branch = branch_of(r, rec);
    const void *h;
    int rc = mt_branch_enter(&branch, false, &h, err);
    return rc ? rc : mt_linear(m, r->in->n_tokens, m->wd.c, dims_of_run(r).in, h, r->w, p[MT_MLA_IN], p[MT_MLA_IN_BIAS],
                               NULL, rec->in, err);
}

static int prepare(const struct mt_part_run *r, struct mt_err *err)
{
    struct record rec = record_of(r);
    struct scratch s = scratch_of(r);
    bool has_latents = r->kept >> LATENTS & 1, has_out = r->kept >> OUT & 1;
    int rc = has_latents ? 0 : make_latents(r, &rec, err);
    if (!rc && !(has_latents && has_out))
        rc = make_heads(r, &rec, &s, has_latents, err);
    if (rc || has_out)
        return rc;
    struct mt_attention at = attention_args(r, &rec, &s);
    rc = mt_op_attention(r->m->dev, &at, err);
    return rc || !rec.out ? rc : project(r, NULL, rec.out, err);
}

static int finish(const struct mt_part_run *r, void *y, struct mt_err *err)
{
    struct record rec = record_of(r);
    struct mt_branch branch = branch_of(r, &rec);
    return mt_branch_leave(&branch, project, y, err);
}

/* Rotates back the gradients of queries, in place, and of the keys' shared part, whose sum goes to d_in. */
static int rotate_backward(const struct mt_part_run *r, const struct views *dx, struct mt_err *err)
{
    const struct dims d = dims_of_run(r);
    const struct mt_layer_spec *c = r->part->spec;
    struct mt_qk_rope_bwd k = {.fwd = rope_args(r, c->rope), .dk = piece(dx->k, d.nope, d.rope, r->m->dt),
                               .to_dk = dx->shared, .workspace = r->m->own.workspace},
                          q = {.fwd = rope_args(r, c->q_rope), .workspace = r->m->own.workspace},
                          *of_q = c->q_rope == c->rope ? &k : &q;
    if (of_q->fwd.rot)
        of_q->dq = of_q->to_dq = rotated_queries(r, dx, of_q->fwd.rot);
    int rc = mt_op_qk_rope_bwd(r->m->dev, &k, err);
    return rc || of_q == &k ? rc : mt_op_qk_rope_bwd(r->m->dev, &q, err);
}

/* From s->d_o to the gradient of a row of the first product, s->d_in, and those of the weights between. */
static int heads_backward(const struct mt_part_run *r, const struct record *rec, const struct scratch *s,
                          struct mt_err *err)
{
    mt_model *m = r->m;
    const struct dims d = dims_of_run(r);
    struct views dx = views_of(&d, m->dt, s->d_in, s->dq, s->dkv, s->dk, s->d_o);
    struct mt_attention_bwd at = {.fwd = attention_args(r, rec, s), .d_o = dx.o, .dq = dx.q, .dk = dx.k, .dv = dx.v};
    struct mt_linear_bwd q = mt_linear_bwd_of(r, d.q_latent, d.qk, MT_MLA_Q);
    struct mt_linear_bwd kv = mt_linear_bwd_of(r, d.latent, d.kv, MT_MLA_KV);
    q.x = s->cq;
    q.dy = s->dq;
    q.dx = s->dcq;
    kv.x = s->c;
    kv.dy = s->dkv;
    kv.dx = s->dc;
    int rc = mt_op_attention_bwd(m->dev, &at, err);
    if (!rc)
        rc = copy_nope(r, dx.k, dx.kv, err);
    if (!rc)
        rc = rotate_backward(r, &dx, err);
    if (!rc)
        rc = mt_linear_backward(m, &kv, err);
    if (!rc)
        rc = normalise_backward(r, rec, kv_latent_of(r, rec), s->dc, s->d_in, err);
    if (rc || !d.q_latent)
        return rc;
    rc = mt_linear_backward(m, &q, err);
    return rc ? rc : normalise_backward(r, rec, q_latent_of(r, rec), s->dcq, s->d_in, err);
}

static int backward(const struct mt_part_run *r, struct mt_err *err)
{
    mt_model *m = r->m;
    const struct mt_param *p = r->part->param;
    const struct dims d = dims_of_run(r);
    struct record rec = record_of(r);
    struct scratch s = scratch_of(r);
    struct mt_branch branch = branch_of(r, &rec);
    struct mt_linear_bwd o = mt_linear_bwd_of(r, d.o, m->wd.c, MT_MLA_OUT);
    struct mt_linear_bwd in = mt_linear_bwd_of(r, m->wd.c, d.in, MT_MLA_IN);
    o.bias = p[MT_MLA_OUT_BIAS];
    o.x = rec.o;
    o.dx = s.d_o;
    in.bias = p[MT_MLA_IN_BIAS];
    in.dy = s.d_in;
    in.dx = m->dh;
    int rc = mt_branch_leave_backward(&branch, &o.dy, err);
    if (!rc)
        rc = mt_linear_backward(m, &o, err);
    if (!rc)
        rc = make_heads(r, &rec, &s, true, err);
    if (!rc)
        rc = heads_backward(r, &rec, &s, err);
    if (!rc)
        rc = mt_branch_enter(&branch, true, &in.x, err);
    if (!rc)
        rc = mt_linear_backward(m, &in, err);
    return rc ? rc : mt_branch_enter_backward(&branch, err);
}

static double macs_per_token(const struct mt_hf_config *c, const struct mt_part *p, size_t seq_len)
{
    const struct mt_layer_spec *s = p->spec;
    struct dims d = dims_of(s);
    double h = (double)c->hidden, seen = mt_attention_keys_seen(s, seq_len);
    double latents = (double)(d.q_latent * d.qk) + (double)(d.latent * d.kv);
    return h * (double)(d.in + d.o) + latents + seen * (double)(d.qk + d.o);
}

enum { PRODUCTS = 1u << MT_MLA_IN | 1u << MT_MLA_Q | 1u << MT_MLA_KV | 1u << MT_MLA_OUT };

const struct mt_part_kind mt_part_mla = {
    .name = "mla",
    .adapted = PRODUCTS,
    .products = PRODUCTS,
    .port = {MT_PORTS_OF_HIDDEN_STATE},
    .segment = {[LATENTS] = "latents", [OUT] = "out"},
    .attends = true,
    MT_PART_FUNCTIONS,
};

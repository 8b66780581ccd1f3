/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The attention of a decoder layer, a branch (branch.h):
 *
 *   h = before(x); qkv = h Wqkv + b; q, k = rope(qknorm(q, k)); o = attention(q, k, vnorm(v));  y = x + after(o Wo)
 *
 * The record keeps what is expensive to recompute, in two segments (qkv, and o with its statistics); backward
 * recomputes the norm's output, a cheap pass. With QK-norm it also keeps the q and k of attention, which a pass over qkv could make again, for 12%
 * fewer bytes of a layer's record. By the simulator that costs Qwen3's 8B and 32B 0.1 to 0.3% of a step, and gains
 * nothing: where memory or the link is short, attention's records are those that are recomputed anyway.
 */
#include "base/mem.h"
#include "model/attention.h"

struct record {
    void *qkv, *qk, *o; /* [n, qkv]; [n, qk], with values if these have a norm, or qkv without QK-norm; [n, o] */
    float *lse;         /* [n_heads, n] */
    float *rstd;        /* [n] of the norm before */
    float *rstd_qk;     /* [n, n_heads + n_kv_heads] of QK-norm, or fewer */
    float *rstd_v;      /* [n, n_kv_heads] of the values' norm */
    void *out;          /* [n, hidden] o Wo, if a norm comes after it */
};

enum { QKV, OUT }; /* segments of the record */

static void lay_out_record(struct record *r, const struct mt_part_shape *s, struct mt_part_record *at)
{
    const struct mt_layer_spec *c = s->spec;
    struct mt_widths w = mt_widths(s->cfg, c);
    size_t e = mt_dtype_size(s->dtype), n = s->max_tokens;
    r->qkv = mt_record_take(at, QKV, n * w.qkv * e);
    r->qk = c->qk_norm ? mt_record_take(at, QKV, n * w.qk * e) : r->qkv;
    r->o = mt_record_take(at, OUT, n * w.o * e);
    r->lse = mt_record_take(at, OUT, n * (size_t)c->n_heads * 4);
    r->rstd = mt_record_take(at, QKV, n * 4);
    r->rstd_qk = c->qk_norm ? mt_record_take(at, QKV, n * (size_t)(c->n_heads + c->n_kv_heads) * 4) : NULL;
    r->rstd_v = c->v_norm ? mt_record_take(at, QKV, n * (size_t)c->n_kv_heads * 4) : NULL;
    r->out = c->norms.attention.after ? mt_record_take(at, OUT, n * w.c * e) : NULL;
}

MT_PART_RECORD()

/* Are outputs of heads multiplied by something before the output's product? */
static bool changes_outputs(const struct mt_layer_spec *s)
{
    return s->gate || s->o_scale != 1;
}

struct scratch {
    void *d_o, *dqkv; /* [n, o], [n, qkv]: for backward */
    void *dv;         /* [n, kv] gradient of the values, if these are the keys' product */
    void *gated;      /* [n, o] with gates or a factor: o times these */
    float *rstd;      /* [n] of the norm after */
    void *workspace;  /* of the attention operations, last in the scratch */
};

static size_t lay_out_scratch(struct scratch *s, const struct mt_model_params *p, const struct mt_layer_spec *spec,
                              void *base)
{
    struct mt_widths w = mt_widths(&p->layout->cfg, spec);
    size_t at = 0, bytes = p->backward ? p->max_tokens * mt_dtype_size(p->dtype) : 0;
    s->d_o = mt_take(base, &at, bytes * w.o);
    s->dqkv = mt_take(base, &at, bytes * w.qkv);
    s->dv = mt_take(base, &at, spec->v_is_k ? bytes * w.kv : 0);
    s->gated = mt_take(base, &at, changes_outputs(spec) ? p->max_tokens * mt_dtype_size(p->dtype) * w.o : 0);
    s->rstd = mt_take(base, &at, spec->norms.attention.after ? p->max_tokens * sizeof(float) : 0);
    s->workspace = mt_take(base, &at, 0);
    return at;
}

/* Views of rows [q | k | v], or [q | k]: of those, only q and k are there. With gates, which only what the product
 * gives has, that of a head follows its query, or all are at the end. */
struct qkv {
    struct mt_heads q, k, v, gate;
};

static struct qkv split(const struct mt_layer_spec *s, enum mt_dtype t, const void *rows, size_t ld)
{
    bool gates = s->gate && ld == (size_t)((2 * s->n_heads + 2 * s->n_kv_heads) * s->head_dim); /* and no v_norm */
    bool within = gates && !s->gate_name;
    size_t n_q = (size_t)s->n_heads, n_kv = (size_t)s->n_kv_heads, d = (size_t)s->head_dim, e = mt_dtype_size(t);
    size_t q = n_q * (within ? 2 : 1), gate = within ? 1 : q + 2 * n_kv, dv = (size_t)s->v_dim;
    const char *p = rows;
    struct qkv x = {mt_heads(p, ld, n_q, d), mt_heads(p ? p + q * d * e : NULL, ld, n_kv, d),
                    mt_heads(p ? p + (q + n_kv) * d * e : NULL, ld, n_kv, dv),
                    mt_heads(p ? p + gate * d * e : NULL, ld, n_q, d)};
    x.q.stride = x.gate.stride = within ? 2 * d : d;
    return x;
}

static struct qkv split_rows(const struct mt_part_run *r, const void *rows, size_t ld)
{
    return split(r->part->spec, r->m->dt, rows, ld);
}

static struct mt_heads outputs(const struct mt_layer_spec *s, const void *o)
{
    size_t n = (size_t)s->n_heads, d = (size_t)s->v_dim;
    return mt_heads(o, n * d, n, d);
}

static size_t scratch_bytes(const struct mt_model_params *p, const struct mt_layer_spec *c, mt_device *dev)
{
    struct scratch s;
    size_t at = lay_out_scratch(&s, p, c, NULL);
    struct qkv x = split(c, p->dtype, NULL, mt_widths(&p->layout->cfg, c).qkv);
    struct mt_attention a = {.n = p->max_tokens, .max_len = p->max_len, .q = x.q, .k = x.k, .v = x.v,
                             .cap = (float)c->score_cap, .o = outputs(c, NULL), .dtype = p->dtype};
    mt_take(NULL, &at, mt_op_attention_workspace(dev, &a));
    return at;
}

static struct scratch scratch_of(const struct mt_part_run *run)
{
    struct scratch s;
    lay_out_scratch(&s, &run->m->p, run->part->spec, run->scratch);
    return s;
}

static size_t workspace_bytes(const struct mt_model_params *p, const struct mt_layer_spec *c, mt_device *dev)
{
    struct mt_widths w = mt_widths(&p->layout->cfg, c);
    size_t n = p->max_tokens;
    struct mt_bias_bwd bias = {.n = n, .c = MT_MAX(w.qkv, w.c)};
    struct qkv x = split(c, p->dtype, NULL, w.qkv);
    struct mt_qk_rope_bwd rope = {.fwd.n = n, .dq = x.q, .dk = x.k};
    size_t need = MT_MAX(mt_norm_workspace(p, &c->norm, dev), mt_op_bias_bwd_workspace(dev, &bias));
    struct mt_attention_sink_bwd sink = {.n = n, .o = outputs(c, NULL), .dtype = p->dtype};
    need = MT_MAX(need, mt_op_qk_rope_bwd_workspace(dev, &rope));
    if (c->sinks)
        need = MT_MAX(need, mt_op_attention_sink_bwd_workspace(dev, &sink));
    struct mt_rmsnorm_bwd values = {.n = n * (size_t)c->n_kv_heads, .c = (size_t)c->head_dim};
    if (c->v_norm)
        need = MT_MAX(need, mt_op_rmsnorm_bwd_workspace(dev, &values));
    return mt_qk_norm_is_apart(c) ? MT_MAX(need, mt_qk_norm_workspace(p, c, dev)) : need;
}

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    const struct mt_layer_spec *c = p->spec;
    int64_t all = c->n_heads * c->head_dim, q = c->gate && !c->gate_name ? 2 * all : all;
    int64_t kv = c->n_kv_heads * c->head_dim, v = c->n_kv_heads * c->v_dim, out = c->n_heads * c->v_dim;
    int64_t hidden = mt_layout_builder_config(b)->hidden;
    const struct mt_branch_norms *norms = &c->norms.attention;
    const struct mt_param_tensor weights[] = {{"self_attn.q_proj.weight", q, .head_rows = c->head_dim},
                                              {"self_attn.k_proj.weight", kv, .head_rows = c->head_dim},
                                              {"self_attn.v_proj.weight", v},
                                              {c->gate_name, out}},
                                 biases[] = {{"self_attn.q_proj.bias", q, .head_rows = c->head_dim},
                                             {"self_attn.k_proj.bias", kv, .head_rows = c->head_dim},
                                             {"self_attn.v_proj.bias", v}};
    if (norms->before)
        mt_layout_add_norm(b, p, MT_ATTENTION_NORM, hidden, norms->before, &c->norm);
    mt_layout_add_norm_bias(b, p, MT_ATTENTION_NORM, hidden, "input_layernorm.bias", &c->norm);
    if (c->qkv_name)
        mt_layout_add_tensor(b, p, MT_ATTENTION_QKV, q + 2 * kv, hidden, c->qkv_name);
    else
        mt_layout_add_param(b, p, MT_ATTENTION_QKV, hidden, c->v_is_k ? 2 : c->gate_name ? 4 : 3, weights);
    if (c->qkv_bias)
        mt_layout_add_param(b, p, MT_ATTENTION_QKV_BIAS, 0, c->v_is_k ? 2 : 3, biases);
    if (c->qk_norm && c->qk_norm != MT_QK_NORM_BARE) {
        bool whole = c->qk_norm == MT_QK_NORM_PROJECTION;
        mt_layout_add_norm(b, p, MT_ATTENTION_Q_NORM, whole ? all : c->head_dim, "self_attn.q_norm.weight", &c->norm);
        mt_layout_add_norm(b, p, MT_ATTENTION_K_NORM, whole ? kv : c->head_dim, "self_attn.k_norm.weight", &c->norm);
    }
    mt_layout_add_tensor(b, p, MT_ATTENTION_OUT, hidden, out, "self_attn.o_proj.weight");
    if (c->o_bias)
        mt_layout_add_tensor(b, p, MT_ATTENTION_OUT_BIAS, hidden, 0, "self_attn.o_proj.bias");
    if (c->sinks)
        mt_layout_add_tensor(b, p, MT_ATTENTION_SINKS, c->n_heads, 0, "self_attn.sinks");
    if (norms->after)
        mt_layout_add_norm(b, p, MT_ATTENTION_NORM_AFTER, hidden, norms->after, &c->norm);
}

static struct mt_widths widths_of(const struct mt_part_run *r)
{
    return mt_widths(&r->m->layout->cfg, r->part->spec);
}

static struct mt_branch branch_of(const struct mt_part_run *r, const struct record *rec)
{
    return (struct mt_branch){.run = r, .before = MT_ATTENTION_NORM, .after = MT_ATTENTION_NORM_AFTER,
                              .rstd = rec->rstd, .out = rec->out, .rstd_after = scratch_of(r).rstd};
}

static struct mt_attention attention_args(const struct mt_part_run *r, const struct record *rec)
{
    const struct mt_layer_spec *s = r->part->spec;
    struct qkv x = split_rows(r, rec->qkv, widths_of(r).qkv);
    struct qkv qk = s->qk_norm ? split_rows(r, rec->qk, widths_of(r).qk) : x;
    struct mt_attention a = mt_attention_of(r);
    a.q = qk.q;
    a.k = qk.k;
    a.v = s->v_norm ? qk.v : x.v;
    a.o = outputs(s, rec->o);
    a.lse = rec->lse;
    a.workspace = scratch_of(r).workspace;
    return a;
}

/* Weight of the norm that the rotary embedding's operation includes; NULL: none. */
static const void *norm_weight(const struct mt_part_run *r, int role)
{
    const struct mt_param *p = &r->part->param[role];
    return p->n && !mt_qk_norm_is_apart(r->part->spec) ? mt_elem(r->m, r->w, p->at) : NULL;
}

static float *norm_grad(const struct mt_part_run *r, int role)
{
    return mt_qk_norm_is_apart(r->part->spec) ? NULL : mt_grad_of(r->g, r->part->param[role]);
}

/* The norm as an operation of its own: from rec->qkv to rec->qk. */
static struct mt_qk_norm norm_args(const struct mt_part_run *r, const struct record *rec)
{
    return (struct mt_qk_norm){.run = r, .qkv = rec->qkv, .qk = rec->qk, .rstd = rec->rstd_qk,
                               .dqkv = scratch_of(r).dqkv, .dv = scratch_of(r).dv, .rstd_v = rec->rstd_v};
}

/* Which of a layer's vectors one operation rotates, and by which table: all, if one serves both. */
struct turn {
    int rope;
    bool q, k;
};

static size_t turns_of(const struct mt_layer_spec *s, struct turn turn[2])
{
    bool both = s->q_rope == s->rope;
    turn[0] = (struct turn){s->rope, both, true};
    turn[1] = (struct turn){s->q_rope, true, false};
    return s->rope == MT_NO_ROPE ? 0 : both ? 1 : 2;
}

/* Leaves out of a view what is not turned. */
static struct qkv turned(struct qkv x, const struct turn *t)
{
    x.q.n = t->q ? x.q.n : 0;
    x.k.n = t->k ? x.k.n : 0;
    return x;
}

/* What a turn makes of q and k in rows `from`. */
static struct mt_qk_rope turn_args(const struct mt_part_run *r, const struct record *rec, const struct turn *t,
                                   const void *from, size_t ld)
{
    const mt_model *m = r->m;
    const struct mt_rope_rows *rows = &r->in->rope[t->rope];
    struct qkv x = turned(split_rows(r, from, ld), t);
    return (struct mt_qk_rope){
        .n = r->in->n_tokens,
        .rot = m->layout->cfg.rope[t->rope].dims,
        .dtype = m->dt,
        .eps = (float)r->part->spec->norm.eps,
        .q = x.q,
        .k = x.k,
        .positions = rows->positions,
        .cos_t = rows->cos_t,
        .sin_t = rows->sin_t,
        .max_pos = rows->n_table_rows,
        .q_norm = norm_weight(r, MT_ATTENTION_Q_NORM),
        .k_norm = norm_weight(r, MT_ATTENTION_K_NORM),
        .rstd = rec->rstd_qk,
    };
}

/* Applies the rotary embedding to q and k in `from`; `to` may be `from`, and is, if the layer has no embedding. */
static int rotate(const struct mt_part_run *r, const struct record *rec, const void *from, size_t ld_from, void *to,
                  size_t ld_to, struct mt_err *err)
{
    struct turn turn[2];
    size_t n = turns_of(r->part->spec, turn);
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        struct mt_qk_rope a = turn_args(r, rec, &turn[i], from, ld_from);
        struct qkv y = turned(split_rows(r, to, ld_to), &turn[i]);
        a.to_q = y.q;
        a.to_k = y.k;
        rc = mt_op_qk_rope(r->m->dev, &a, err);
    }
    return rc;
}

/* Queries and keys for attention, into rec->qk. */
static int make_qk(const struct mt_part_run *r, const struct record *rec, struct mt_err *err)
{
    const struct mt_widths wd = widths_of(r);
    const struct mt_layer_spec *s = r->part->spec;
    struct mt_qk_norm norm = norm_args(r, rec);
    if (!mt_qk_norm_is_apart(s))
        return rotate(r, rec, rec->qkv, wd.qkv, rec->qk, s->qk_norm ? wd.qk : wd.qkv, err);
    if (s->qk_norm == MT_QK_NORM_AFTER_ROPE) {
        int rc = rotate(r, rec, rec->qkv, wd.qkv, rec->qkv, wd.qkv, err);
        return rc ? rc : mt_qk_norm(&norm, err);
    }
    int rc = mt_qk_norm(&norm, err);
    if (!rc && s->v_norm)
        rc = mt_v_norm(&norm, err);
    return rc ? rc : rotate(r, rec, rec->qk, wd.qk, rec->qk, wd.qk, err);
}

static int rotate_backward(const struct mt_part_run *r, const struct record *rec, void *dqkv, struct mt_err *err)
{
    const size_t ld = widths_of(r).qkv;
    struct turn turn[2];
    size_t n = turns_of(r->part->spec, turn);
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        struct qkv d = turned(split_rows(r, dqkv, ld), &turn[i]);
        struct mt_qk_rope_bwd a = {.fwd = turn_args(r, rec, &turn[i], rec->qkv, ld), .dq = d.q, .dk = d.k, .to_dq = d.q,
                                   .to_dk = d.k, .dq_norm = norm_grad(r, MT_ATTENTION_Q_NORM),
                                   .dk_norm = norm_grad(r, MT_ATTENTION_K_NORM), .workspace = r->m->own.workspace};
        rc = mt_op_qk_rope_bwd(r->m->dev, &a, err);
    }
    return rc;
}

/* From the gradients of q, k and v of attention to that of the product, in place. */
static int make_qk_backward(const struct mt_part_run *r, const struct record *rec, void *dqkv, struct mt_err *err)
{
    bool apart = mt_qk_norm_is_apart(r->part->spec), after = r->part->spec->qk_norm == MT_QK_NORM_AFTER_ROPE;
    struct mt_qk_norm norm = norm_args(r, rec);
    int rc = after ? mt_qk_norm_backward(&norm, err) : 0;
    if (!rc)
        rc = rotate_backward(r, rec, dqkv, err);
    if (!rc && apart && !after)
        rc = mt_qk_norm_backward(&norm, err);
    return !rc && r->part->spec->v_norm ? mt_v_norm_backward(&norm, err) : rc;
}

static struct mt_attention_sink sink_args(const struct mt_part_run *r, const struct record *rec)
{
    const mt_model *m = r->m;
    return (struct mt_attention_sink){.n = r->in->n_tokens, .dtype = m->dt,
                                      .sinks = mt_elem(m, r->w, r->part->param[MT_ATTENTION_SINKS].at),
                                      .o = outputs(r->part->spec, rec->o), .lse = rec->lse};
}

/* The gradient of the sinks, if they are trained. */
static int sink_backward(const struct mt_part_run *r, const struct record *rec, const void *d_o, struct mt_err *err)
{
    float *dsinks = mt_grad_of(r->g, r->part->param[MT_ATTENTION_SINKS]);
    struct mt_attention_sink f = sink_args(r, rec);
    if (!dsinks)
        return 0;
    return mt_op_attention_sink_bwd(r->m->dev,
                                    &(struct mt_attention_sink_bwd){
                                        .n = f.n,
                                        .dtype = f.dtype,
                                        .sinks = f.sinks,
                                        .o = f.o,
                                        .d_o = outputs(r->part->spec, d_o),
                                        .lse = f.lse,
                                        .dsinks = dsinks,
                                        .workspace = r->m->own.workspace,
                                    },
                                    err);
}

/* o, or its gradient, times the factor. */
static int scale_outputs(const struct mt_part_run *r, const void *o, void *y, struct mt_err *err)
{
    const mt_model *m = r->m;
    struct mt_add a = {.n = r->in->n_tokens * widths_of(r).o, .dtype = m->dt, .b = o, .out = y,
                       .scale = (float)r->part->spec->o_scale};
    return mt_op_add(m->dev, &a, err);
}

/* The gates of o, as an operation from o to the output product's input. */
static struct mt_head_gate gate_args(const struct mt_part_run *r, const struct record *rec)
{
    return (struct mt_head_gate){.n = r->in->n_tokens, .dtype = r->m->dt, .x = outputs(r->part->spec, rec->o),
                                 .gate = split_rows(r, rec->qkv, widths_of(r).qkv).gate,
                                 .y = outputs(r->part->spec, scratch_of(r).gated)};
}

/* *in = the output product's input: o, or with gates what they leave of it, in scratch. */
static int output_input(const struct mt_part_run *r, const struct record *rec, const void **in, struct mt_err *err)
{
    struct mt_head_gate gate = gate_args(r, rec);
    *in = changes_outputs(r->part->spec) ? gate.y.p : rec->o;
    if (r->part->spec->o_scale != 1)
        return scale_outputs(r, rec->o, gate.y.p, err);
    return r->part->spec->gate ? mt_op_head_gate(r->m->dev, &gate, err) : 0;
}

/* From the gradient of that, in scratch, to that of o, in place, and of the gates. */
static int gate_backward(const struct mt_part_run *r, const struct record *rec, const struct scratch *s,
                         struct mt_err *err)
{
    struct mt_head_gate_bwd gate = {.fwd = gate_args(r, rec), .dgate = split_rows(r, s->dqkv, widths_of(r).qkv).gate};
    gate.dy = gate.dx = outputs(r->part->spec, s->d_o);
    if (r->part->spec->o_scale != 1)
        return scale_outputs(r, s->d_o, s->d_o, err);
    return r->part->spec->gate ? mt_op_head_gate_bwd(r->m->dev, &gate, err) : 0;
}

/* out = o Wo, plus `residual`. */
static int project(const struct mt_part_run *r, const void *residual, void *out, struct mt_err *err)
{
    struct record rec = record_of(r);
    const struct mt_param *p = r->part->param;
    const void *in;
    int rc = output_input(r, &rec, &in, err);
    return rc ? rc : mt_linear(r->m, r->in->n_tokens, widths_of(r).o, r->m->wd.c, in, r->w, p[MT_ATTENTION_OUT],
                               p[MT_ATTENTION_OUT_BIAS], residual, out, err);
}

static int make_qkv(const struct mt_part_run *r, struct mt_err *err)
{
    mt_model *m = r->m;
    const struct mt_param *p = r->part->param;
    struct record rec = record_of(r);
    struct mt_branch branch = branch_of(r, &rec);
    const void *h;
    int rc = mt_branch_enter(&branch, false, &h, err);
    if (!rc)
        rc = mt_linear(m, r->in->n_tokens, m->wd.c, widths_of(r).qkv, h, r->w, p[MT_ATTENTION_QKV],
                       p[MT_ATTENTION_QKV_BIAS], NULL, rec.qkv, err);
    return rc ? rc : make_qk(r, &rec, err);
}

/* The attention itself, with what comes before a norm after it. */
static int attend(const struct mt_part_run *r, struct mt_err *err)
{
    struct record rec = record_of(r);
    struct mt_attention at = attention_args(r, &rec);
    struct mt_attention_sink sink = sink_args(r, &rec);
    int rc = mt_op_attention(r->m->dev, &at, err);
    if (!rc && r->part->spec->sinks)
        rc = mt_op_attention_sink(r->m->dev, &sink, err);
    return rc || !rec.out ? rc : project(r, NULL, rec.out, err);
}

static int prepare(const struct mt_part_run *r, struct mt_err *err)
{
    int rc = r->kept >> QKV & 1 ? 0 : make_qkv(r, err);
    return rc || r->kept >> OUT & 1 ? rc : attend(r, err);
}

static int finish(const struct mt_part_run *r, void *y, struct mt_err *err)
{
    struct record rec = record_of(r);
    struct mt_branch branch = branch_of(r, &rec);
    return mt_branch_leave(&branch, project, y, err);
}

static int attend_backward(const struct mt_part_run *r, const struct record *rec, const struct scratch *s,
                           struct mt_err *err)
{
    const mt_model *m = r->m;
    const struct mt_layer_spec *spec = r->part->spec;
    struct qkv d = split_rows(r, s->dqkv, widths_of(r).qkv);
    if (spec->v_is_k)
        d.v = mt_heads(s->dv, widths_of(r).kv, (size_t)spec->n_kv_heads, (size_t)spec->head_dim);
    struct mt_attention_bwd at = {.fwd = attention_args(r, rec), .d_o = outputs(r->part->spec, s->d_o), .dq = d.q,
                                  .dk = d.k, .dv = d.v, .sinks = spec->sinks};
    return mt_op_attention_bwd(m->dev, &at, err);
}

struct mt_branch mt_attention_branch(const struct mt_part_run *r)
{
    struct record rec = record_of(r);
    return branch_of(r, &rec);
}

int mt_attention_backward(const struct mt_part_run *r, struct mt_err *err)
{
    mt_model *m = r->m;
    const struct mt_widths wd = widths_of(r);
    const struct mt_param *p = r->part->param;
    struct record rec = record_of(r);
    struct scratch s = scratch_of(r);
    struct mt_branch branch = branch_of(r, &rec);
    struct mt_linear_bwd o = mt_linear_bwd_of(r, wd.o, wd.c, MT_ATTENTION_OUT);
    struct mt_linear_bwd qkv = mt_linear_bwd_of(r, wd.c, wd.qkv, MT_ATTENTION_QKV);
    o.bias = p[MT_ATTENTION_OUT_BIAS];
    o.dx = s.d_o;
    qkv.bias = p[MT_ATTENTION_QKV_BIAS];
    qkv.dy = s.dqkv;
    qkv.dx = m->dh;
    int rc = output_input(r, &rec, &o.x, err);
    if (!rc)
        rc = mt_branch_leave_backward(&branch, &o.dy, err);
    if (!rc)
        rc = mt_linear_backward(m, &o, err);
    if (!rc)
        rc = gate_backward(r, &rec, &s, err);
    if (!rc)
        rc = sink_backward(r, &rec, s.d_o, err);
    if (!rc)
        rc = attend_backward(r, &rec, &s, err);
    if (!rc)
        rc = make_qk_backward(r, &rec, s.dqkv, err);
    if (!rc)
        rc = mt_branch_enter(&branch, true, &qkv.x, err);
    return rc ? rc : mt_linear_backward(m, &qkv, err);
}

static int backward(const struct mt_part_run *r, struct mt_err *err)
{
    struct mt_branch branch = mt_attention_branch(r);
    int rc = mt_attention_backward(r, err);
    return rc ? rc : mt_branch_enter_backward(&branch, err);
}

static double macs_per_token(const struct mt_hf_config *c, const struct mt_part *p, size_t seq_len)
{
    const struct mt_layer_spec *s = p->spec;
    struct mt_widths w = mt_widths(c, s);
    double h = (double)c->hidden, seen = mt_attention_keys_seen(s, seq_len);
    return h * (double)(w.qkv + w.o) + seen * (double)(w.q + w.o);
}

const struct mt_part_kind mt_part_attention = {
    .name = "attention",
    .adapted = 1u << MT_ATTENTION_QKV | 1u << MT_ATTENTION_OUT,
    .products = 1u << MT_ATTENTION_QKV | 1u << MT_ATTENTION_OUT,
    .port = {MT_PORTS_OF_HIDDEN_STATE},
    .segment = {[QKV] = "qkv", [OUT] = "out"},
    .attends = true,
    MT_PART_FUNCTIONS,
};

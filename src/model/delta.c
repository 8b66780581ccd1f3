/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Linear attention by the gated delta rule (Yang et al. 2024) as in Qwen3-Next, a branch (branch.h):
 *
 *   h = before(x);  [q' | k' | v' | z | b | a] = h Win;  q, k, v = silu(conv(q', k', v'))
 *   o = delta rule of q, k, v, beta(b), g(a);  y = x + after((norm(o) silu(z)) Wo)
 *
 * or, plain, by Mamba 2 (Dao and Gu 2024), where C is q, B is k, x is v, and the step dt is a:
 *
 *   [z | v' | k' | q' | a] = h Win;  q, k, v = silu(conv(q', k', v') + bias)
 *   o = plain rule of q, k, v, beta(a), g(a), and D v;  y = x + after(norm(o silu(z)) Wo)
 *
 * The record keeps the product's rows and o; backward makes the convolution, the gates and the states again.
 */
#include <math.h>

#include "base/mem.h"
#include "model/branch.h"
#include "model/linear.h"
#include "model/part.h"

/* Widths of a layer, in elements. */
struct dims {
    size_t k_heads, v_heads, k, v, taps; /* heads of queries and of keys, of values; their widths */
    size_t group;                        /* values of a key head */
    size_t conv, o, in;                  /* channels of the convolution; of the output; of a row of the product */
    bool joined, plain, conv_bias;
};

static struct dims dims_of(const struct mt_layer_spec *s)
{
    struct dims d = {.k_heads = (size_t)s->delta.k_heads, .v_heads = (size_t)s->delta.v_heads,
                     .k = (size_t)s->delta.k_dim, .v = (size_t)s->delta.v_dim, .taps = (size_t)s->delta.taps,
                     .joined = s->delta.joined != 0, .plain = s->delta.plain, .conv_bias = s->delta.conv_bias};
    d.group = d.v_heads / d.k_heads * d.v;
    d.o = d.v_heads * d.v;
    d.conv = 2 * d.k_heads * d.k + d.o;
    d.in = d.conv + d.o + (d.plain ? 1 : 2) * d.v_heads;
    return d;
}

static struct dims dims_of_run(const struct mt_part_run *r)
{
    return dims_of(r->part->spec);
}

/* Parts of a row of the product; each has k_heads heads: values are as wide as all those of a key head. */
struct row {
    struct mt_heads q, k, v, z, b, a;
};

static struct mt_heads piece(const struct dims *d, enum mt_dtype t, const void *in, size_t first, size_t stride,
                             size_t dim)
{
    struct mt_heads h = mt_heads(in ? (const char *)in + first * mt_dtype_size(t) : NULL, d->in, d->k_heads, dim);
    h.stride = stride;
    return h;
}

static struct row row_of(const struct dims *d, enum mt_dtype t, const void *in)
{
    size_t n = d->k_heads, k = d->k, g = d->group, r = d->v_heads / n, rest = d->conv + d->o, all = 2 * (k + g);
    if (d->plain) /* b is not read */
        return (struct row){piece(d, t, in, 2 * d->o + n * k, k, k), piece(d, t, in, 2 * d->o, k, k),
                            piece(d, t, in, d->o, g, g),            piece(d, t, in, 0, g, g),
                            piece(d, t, in, rest, r, r),            piece(d, t, in, rest, r, r)};
    if (d->joined) /* a key head after the other */
        return (struct row){piece(d, t, in, 0, all, k),         piece(d, t, in, k, all, k),
                            piece(d, t, in, 2 * k, all, g),     piece(d, t, in, 2 * k + g, all, g),
                            piece(d, t, in, rest, 2 * r, r),    piece(d, t, in, rest + r, 2 * r, r)};
    return (struct row){piece(d, t, in, 0, k, k),               piece(d, t, in, n * k, k, k),
                        piece(d, t, in, 2 * n * k, g, g),       piece(d, t, in, d->conv, g, g),
                        piece(d, t, in, rest, r, r),            piece(d, t, in, rest + d->v_heads, r, r)};
}

enum { IN, OUT }; /* segments of the record */
struct record {
    void *in, *o; /* [n, in], [n, o] */
    float *rstd;  /* [n] of the norm before */
    void *out;    /* [n, hidden] the output product, if a norm comes after it */
};

static void lay_out_record(struct record *r, const struct mt_part_shape *s, struct mt_part_record *at)
{
    struct dims d = dims_of(s->spec);
    size_t e = mt_dtype_size(s->dtype), n = s->max_tokens;
    r->in = mt_record_take(at, IN, n * d.in * e);
    r->rstd = mt_record_take(at, IN, n * sizeof(float));
    r->o = mt_record_take(at, OUT, n * d.o * e);
    r->out = s->spec->norms.attention.after ? mt_record_take(at, OUT, n * (size_t)s->cfg->hidden * e) : NULL;
}

MT_PART_RECORD()

struct scratch {
    void *conv, *normed;           /* [n, conv]; [n, o] norm(o) silu(z) */
    float *beta, *g;               /* [n, v_heads] */
    void *d_o, *d_conv, *d_in;     /* backward: gradients of these */
    float *dbeta, *dg, *dskip;
    float *rstd;                   /* [n] of the norm after */
    void *workspace;               /* of the delta rule, last in the scratch */
};

static size_t lay_out_scratch(struct scratch *s, const struct mt_model_params *p, const struct mt_layer_spec *spec,
                              void *base)
{
    struct dims d = dims_of(spec);
    size_t at = 0, column = p->max_tokens * mt_dtype_size(p->dtype), gate = p->max_tokens * d.v_heads * sizeof(float);
    size_t back = p->backward ? column : 0;
    s->conv = mt_take(base, &at, column * d.conv);
    s->normed = mt_take(base, &at, column * d.o);
    s->beta = mt_take(base, &at, gate);
    s->g = mt_take(base, &at, gate);
    s->d_o = mt_take(base, &at, back * d.o);
    s->d_conv = mt_take(base, &at, back * d.conv);
    s->d_in = mt_take(base, &at, back * d.in);
    s->dbeta = mt_take(base, &at, p->backward ? gate : 0);
    s->dg = mt_take(base, &at, p->backward ? gate : 0);
    s->dskip = mt_take(base, &at, p->backward && d.plain ? gate : 0);
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

/* Queries, keys and values after the convolution, or their gradients. */
struct qkv {
    struct mt_heads q, k, v;
};

/* Channels of the convolution where each begins. */
struct channels {
    size_t q, k, v;
};

static struct channels channels_of(const struct dims *d)
{
    size_t keys = d->k_heads * d->k;
    return d->plain ? (struct channels){d->o + keys, d->o, 0} : (struct channels){0, keys, 2 * keys};
}

static struct qkv split(const struct dims *d, enum mt_dtype t, const void *conv)
{
    size_t e = mt_dtype_size(t);
    struct channels at = channels_of(d);
    const char *p = conv;
    return (struct qkv){mt_heads(p ? p + at.q * e : p, d->conv, d->k_heads, d->k),
                        mt_heads(p ? p + at.k * e : p, d->conv, d->k_heads, d->k),
                        mt_heads(p ? p + at.v * e : p, d->conv, d->v_heads, d->v)};
}

/* Outputs as their norm takes them. */
static struct mt_heads normed_heads(const struct dims *d, const void *o)
{
    return d->plain ? mt_heads(o, d->o, d->k_heads, d->group) : mt_heads(o, d->o, d->v_heads, d->v);
}

static size_t scratch_bytes(const struct mt_model_params *p, const struct mt_layer_spec *c, mt_device *dev)
{
    struct scratch s;
    struct dims d = dims_of(c);
    size_t at = lay_out_scratch(&s, p, c, NULL);
    struct qkv x = split(&d, p->dtype, NULL);
    struct mt_delta_rule a = {.n = p->max_tokens, .max_len = p->max_len, .dtype = p->dtype, .plain = d.plain, .q = x.q,
                              .k = x.k, .v = x.v, .o = x.v};
    mt_take(NULL, &at, mt_op_delta_rule_workspace(dev, &a));
    return at;
}

static size_t workspace_bytes(const struct mt_model_params *p, const struct mt_layer_spec *c, mt_device *dev)
{
    struct dims d = dims_of(c);
    size_t n = p->max_tokens;
    struct mt_heads keys = mt_heads(NULL, d.in, d.k_heads, MT_MAX(d.k, d.group));
    struct mt_rmsnorm_bwd norm = {.n = n, .c = (size_t)p->layout->cfg.hidden};
    struct mt_short_conv_bwd conv = {.fwd = {.n = n, .taps = d.taps, .x = keys}};
    struct mt_delta_gates_bwd gates = {.fwd = {.n = n, .a = mt_heads(NULL, d.in, d.v_heads, 1)}};
    struct mt_gated_norm_bwd gated = {.fwd = {.n = n, .gate_first = d.plain, .x = normed_heads(&d, NULL)}};
    size_t need = MT_MAX(mt_op_rmsnorm_bwd_workspace(dev, &norm), mt_op_short_conv_bwd_workspace(dev, &conv));
    need = MT_MAX(need, mt_op_delta_gates_bwd_workspace(dev, &gates));
    return MT_MAX(MT_MAX(need, mt_op_gated_norm_bwd_workspace(dev, &gated)), (size_t)MT_RECORD_ALIGN);
}

/* The product's tensors. */
static void lay_out_in(struct mt_layout_builder *b, struct mt_part *p, const struct dims *d)
{
    int64_t hidden = mt_layout_builder_config(b)->hidden, heads = (int64_t)d->v_heads, o = (int64_t)d->o;
    const struct mt_param_tensor apart[] = {{"linear_attn.in_proj_qkv.weight", (int64_t)d->conv},
                                            {"linear_attn.in_proj_z.weight", o},
                                            {"linear_attn.in_proj_b.weight", heads},
                                            {"linear_attn.in_proj_a.weight", heads}},
                                 joined[] = {{"linear_attn.in_proj_qkvz.weight", (int64_t)d->conv + o},
                                             {"linear_attn.in_proj_ba.weight", 2 * heads}};
    if (d->plain)
        mt_layout_add_tensor(b, p, MT_DELTA_IN, (int64_t)d->in, hidden, "linear_attn.in_proj.weight");
    else
        mt_layout_add_param(b, p, MT_DELTA_IN, hidden, d->joined ? 2 : 4, d->joined ? joined : apart);
}

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    const struct mt_layer_spec *c = p->spec;
    const struct mt_branch_norms *norms = &c->norms.attention;
    const struct mt_norm_spec ones = {.plus_one = false}; /* of the outputs: its weights begin at 1 */
    struct dims d = dims_of(c);
    int64_t hidden = mt_layout_builder_config(b)->hidden, heads = (int64_t)d.v_heads, o = (int64_t)d.o;
    const struct mt_param_tensor dt_bias = {.usual = "linear_attn.dt_bias", .rows = heads, .start = 1},
                                 a_log = {.usual = "linear_attn.A_log", .rows = heads, .start = d.plain ? 1 : 0.01f,
                                          .log_to = d.plain ? (float)(heads + 1) : 16},
                                 skip = {.usual = "linear_attn.D", .rows = heads, .start = 1},
                                 bias = {.usual = "linear_attn.conv1d.bias", .rows = (int64_t)d.conv};
    if (norms->before)
        mt_layout_add_norm(b, p, MT_DELTA_NORM, hidden, norms->before, &c->norm);
    lay_out_in(b, p, &d);
    mt_layout_add_tensor(b, p, MT_DELTA_CONV, (int64_t)d.conv, (int64_t)d.taps, "linear_attn.conv1d.weight");
    if (d.conv_bias)
        mt_layout_add_param(b, p, MT_DELTA_CONV_BIAS, 0, 1, &bias);
    mt_layout_add_param(b, p, MT_DELTA_DT_BIAS, 0, 1, &dt_bias);
    mt_layout_add_param(b, p, MT_DELTA_A_LOG, 0, 1, &a_log);
    if (d.plain)
        mt_layout_add_param(b, p, MT_DELTA_SKIP, 0, 1, &skip);
    mt_layout_add_norm(b, p, MT_DELTA_OUT_NORM, d.plain ? o : (int64_t)d.v, "linear_attn.norm.weight", &ones);
    mt_layout_add_tensor(b, p, MT_DELTA_OUT, hidden, o, "linear_attn.out_proj.weight");
    if (norms->after)
        mt_layout_add_norm(b, p, MT_DELTA_NORM_AFTER, hidden, norms->after, &c->norm);
}

static struct mt_branch branch_of(const struct mt_part_run *r, const struct record *rec)
{
    return (struct mt_branch){.run = r, .before = MT_DELTA_NORM, .after = MT_DELTA_NORM_AFTER, .rstd = rec->rstd,
                              .out = rec->out, .rstd_after = scratch_of(r).rstd};
}

static const void *weight(const struct mt_part_run *r, int role)
{
    return mt_elem(r->m, r->w, r->part->param[role].at);
}

/* The convolution's parts: those of q, of k and of v. */
enum { PARTS = 3 };
static void conv_parts(const struct mt_part_run *r, const void *in, const void *conv, struct mt_short_conv part[PARTS])
{
    const struct dims d = dims_of_run(r);
    struct row x = row_of(&d, r->m->dt, in);
    struct channels first = channels_of(&d);
    struct mt_heads from[PARTS] = {x.q, x.k, x.v};
    const size_t at[PARTS] = {first.q, first.k, first.v};
    for (int i = 0; i < PARTS; i++) {
        struct mt_heads y = mt_heads(mt_elem(r->m, conv, at[i]), d.conv, d.k_heads, from[i].dim);
        part[i] = (struct mt_short_conv){.n = r->in->n_tokens, .taps = d.taps, .n_docs = r->in->n_docs,
                                         .dtype = r->m->dt, .cu_seqlens = r->in->cu_seqlens, .x = from[i], .y = y,
                                         .w = mt_elem(r->m, weight(r, MT_DELTA_CONV), at[i] * d.taps)};
        if (d.conv_bias)
            part[i].bias = mt_elem(r->m, weight(r, MT_DELTA_CONV_BIAS), at[i]);
    }
}

static struct mt_delta_gates gates_args(const struct mt_part_run *r, const struct record *rec, const struct scratch *s)
{
    const struct dims d = dims_of_run(r);
    const struct mt_delta_spec *spec = &r->part->spec->delta;
    struct row x = row_of(&d, r->m->dt, rec->in);
    return (struct mt_delta_gates){.n = r->in->n_tokens, .dtype = r->m->dt, .plain = d.plain,
                                   .least = (float)spec->least, .most = (float)spec->most, .a = x.a, .b = x.b,
                                   .a_log = weight(r, MT_DELTA_A_LOG), .dt_bias = weight(r, MT_DELTA_DT_BIAS),
                                   .beta = s->beta, .g = s->g};
}

static struct mt_delta_rule rule_args(const struct mt_part_run *r, const struct record *rec, const struct scratch *s)
{
    const struct dims d = dims_of_run(r);
    struct qkv x = split(&d, r->m->dt, s->conv);
    return (struct mt_delta_rule){.n = r->in->n_tokens, .n_docs = r->in->n_docs, .max_len = r->in->max_len,
                                  .dtype = r->m->dt, .plain = d.plain, .eps = 1e-6f,
                                  .scale = d.plain ? 1 : (float)(1 / sqrt((double)d.k)),
                                  .skip = d.plain ? weight(r, MT_DELTA_SKIP) : NULL,
                                  .cu_seqlens = r->in->cu_seqlens, .cu_seqlens_host = r->in->cu_seqlens_host,
                                  .q = x.q, .k = x.k, .v = x.v, .o = mt_heads(rec->o, d.o, d.v_heads, d.v),
                                  .beta = s->beta, .g = s->g, .workspace = s->workspace};
}

static struct mt_gated_norm gated_args(const struct mt_part_run *r, const struct record *rec, const struct scratch *s)
{
    const struct dims d = dims_of_run(r);
    return (struct mt_gated_norm){.n = r->in->n_tokens, .dtype = r->m->dt, .gate_first = d.plain,
                                  .eps = (float)r->part->spec->norm.eps, .x = normed_heads(&d, rec->o),
                                  .z = row_of(&d, r->m->dt, rec->in).z, .y = normed_heads(&d, s->normed),
                                  .w = weight(r, MT_DELTA_OUT_NORM)};
}

/* What the delta rule takes, in scratch, of the product's rows. */
static int make_inputs(const struct mt_part_run *r, const struct record *rec, const struct scratch *s,
                       struct mt_err *err)
{
    struct mt_short_conv part[PARTS];
    struct mt_delta_gates gates = gates_args(r, rec, s);
    int rc = 0;
    conv_parts(r, rec->in, s->conv, part);
    for (int i = 0; i < PARTS && !rc; i++)
        rc = mt_op_short_conv(r->m->dev, &part[i], err);
    return rc ? rc : mt_op_delta_gates(r->m->dev, &gates, err);
}

/* out = the gated norm of o, times Wo, plus `residual`. */
static int project(const struct mt_part_run *r, const void *residual, void *out, struct mt_err *err)
{
    struct record rec = record_of(r);
    const struct mt_param none = {0};
    const struct scratch s = scratch_of(r);
    struct mt_gated_norm gated = gated_args(r, &rec, &s);
    int rc = mt_op_gated_norm(r->m->dev, &gated, err);
    return rc ? rc : mt_linear(r->m, r->in->n_tokens, dims_of_run(r).o, r->m->wd.c, s.normed, r->w,
                               r->part->param[MT_DELTA_OUT], none, residual, out, err);
}

static int make_rows(const struct mt_part_run *r, const struct record *rec, struct mt_err *err)
{
    const struct mt_param none = {0};
    struct mt_branch branch = branch_of(r, rec);
    const void *h;
    int rc = mt_branch_enter(&branch, false, &h, err);
    return rc ? rc : mt_linear(r->m, r->in->n_tokens, r->m->wd.c, dims_of_run(r).in, h, r->w,
                               r->part->param[MT_DELTA_IN], none, NULL, rec->in, err);
}

static int prepare(const struct mt_part_run *r, struct mt_err *err)
{
    struct record rec = record_of(r);
    struct scratch s = scratch_of(r);
    int rc = r->kept >> IN & 1 ? 0 : make_rows(r, &rec, err);
    if (rc || r->kept >> OUT & 1)
        return rc;
    rc = make_inputs(r, &rec, &s, err);
    struct mt_delta_rule rule = rule_args(r, &rec, &s);
    if (!rc)
        rc = mt_op_delta_rule(r->m->dev, &rule, err);
    return rc || !rec.out ? rc : project(r, NULL, rec.out, err);
}

static int finish(const struct mt_part_run *r, void *y, struct mt_err *err)
{
    struct record rec = record_of(r);
    struct mt_branch branch = branch_of(r, &rec);
    return mt_branch_leave(&branch, project, y, err);
}

static float *grad(const struct mt_part_run *r, int role)
{
    return mt_grad_of(r->g, r->part->param[role]);
}

/* From s->d_o, the gradient of the output product's input, to that of o, in place, and of z. */
static int gate_backward(const struct mt_part_run *r, const struct record *rec, const struct scratch *s,
                         struct mt_err *err)
{
    const struct dims d = dims_of_run(r);
    struct mt_gated_norm_bwd b = {.fwd = gated_args(r, rec, s), .dz = row_of(&d, r->m->dt, s->d_in).z,
                                  .dw = grad(r, MT_DELTA_OUT_NORM), .workspace = r->m->own.workspace};
    b.dy = b.dx = normed_heads(&d, s->d_o);
    return mt_op_gated_norm_bwd(r->m->dev, &b, err);
}

/* From s->d_o to s->d_in, but for z's columns. */
static int rule_backward(const struct mt_part_run *r, const struct record *rec, const struct scratch *s,
                         struct mt_err *err)
{
    const struct dims d = dims_of_run(r);
    struct row dx = row_of(&d, r->m->dt, s->d_in);
    struct qkv dy = split(&d, r->m->dt, s->d_conv);
    struct mt_delta_rule_bwd rule = {.fwd = rule_args(r, rec, s), .d_o = mt_heads(s->d_o, d.o, d.v_heads, d.v),
                                     .dq = dy.q, .dk = dy.k, .dv = dy.v, .dbeta = s->dbeta, .dg = s->dg,
                                     .dskip = s->dskip};
    struct mt_delta_gates_bwd gates = {.fwd = gates_args(r, rec, s), .dbeta = s->dbeta, .dg = s->dg, .da = dx.a,
                                       .db = dx.b, .dskip = d.plain ? s->dskip : NULL,
                                       .da_log = grad(r, MT_DELTA_A_LOG), .dd = grad(r, MT_DELTA_SKIP),
                                       .ddt_bias = grad(r, MT_DELTA_DT_BIAS), .workspace = r->m->own.workspace};
    struct mt_heads to[PARTS] = {dx.q, dx.k, dx.v};
    struct mt_short_conv x[PARTS], y[PARTS];
    struct channels first = channels_of(&d);
    const size_t at[PARTS] = {first.q, first.k, first.v};
    float *dw = grad(r, MT_DELTA_CONV), *dbias = grad(r, MT_DELTA_CONV_BIAS);
    int rc = mt_op_delta_rule_bwd(r->m->dev, &rule, err);
    if (!rc)
        rc = mt_op_delta_gates_bwd(r->m->dev, &gates, err);
    conv_parts(r, rec->in, s->conv, x);
    conv_parts(r, rec->in, s->d_conv, y);
    for (int i = 0; i < PARTS && !rc; i++) {
        struct mt_short_conv_bwd conv = {.fwd = x[i], .dy = y[i].y, .dx = to[i], .dw = dw ? dw + at[i] * d.taps : NULL,
                                         .dbias = dbias ? dbias + at[i] : NULL, .workspace = r->m->own.workspace};
        rc = mt_op_short_conv_bwd(r->m->dev, &conv, err);
    }
    return rc;
}

static int backward(const struct mt_part_run *r, struct mt_err *err)
{
    mt_model *m = r->m;
    const struct dims d = dims_of_run(r);
    struct record rec = record_of(r);
    struct scratch s = scratch_of(r);
    struct mt_branch branch = branch_of(r, &rec);
    struct mt_gated_norm gated = gated_args(r, &rec, &s);
    struct mt_linear_bwd out = mt_linear_bwd_of(r, d.o, m->wd.c, MT_DELTA_OUT);
    struct mt_linear_bwd in = mt_linear_bwd_of(r, m->wd.c, d.in, MT_DELTA_IN);
    out.x = s.normed;
    out.dx = s.d_o;
    in.dy = s.d_in;
    in.dx = m->dh;
    int rc = mt_op_gated_norm(m->dev, &gated, err);
    if (!rc)
        rc = mt_branch_leave_backward(&branch, &out.dy, err);
    if (!rc)
        rc = mt_linear_backward(m, &out, err);
    if (!rc)
        rc = gate_backward(r, &rec, &s, err);
    if (!rc)
        rc = make_inputs(r, &rec, &s, err);
    if (!rc)
        rc = rule_backward(r, &rec, &s, err);
    if (!rc)
        rc = mt_branch_enter(&branch, true, &in.x, err);
    if (!rc)
        rc = mt_linear_backward(m, &in, err);
    return rc ? rc : mt_branch_enter_backward(&branch, err);
}

/* The recurrence: three products of a state with a vector; plain: two. */
static double macs_per_token(const struct mt_hf_config *c, const struct mt_part *p, size_t seq_len)
{
    struct dims d = dims_of(p->spec);
    (void)seq_len;
    return (double)c->hidden * (double)(d.in + d.o) + (double)(d.conv * d.taps) +
           (d.plain ? 2 : 3) * (double)d.o * (double)d.k;
}

enum { PRODUCTS = 1u << MT_DELTA_IN | 1u << MT_DELTA_OUT };

const struct mt_part_kind mt_part_delta = {
    .name = "delta",
    .adapted = PRODUCTS,
    .products = PRODUCTS,
    .port = {MT_PORTS_OF_HIDDEN_STATE},
    .segment = {[IN] = "rows", [OUT] = "out"},
    .attends = true,
    MT_PART_FUNCTIONS,
};

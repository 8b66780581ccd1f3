/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of a layer whose experts are beside an MLP (Gemma 4), each with norms of its own:
 *
 *   y = (x + after(norm1(MLP(before(x))) + norm2(sum)))       times the layer's number, if it has one
 *
 * x is the router's input, which it hands on, and the sum that of the experts' outputs in FP32. Rounded, the sum is kept
 * for backward: only experts could make it again.
 */
#include "base/mem.h"
#include "model/mlp.h"
#include "model/moe.h"

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    const struct mt_layer_norms *norms = &p->spec->norms;
    int64_t hidden = mt_layout_builder_config(b)->hidden;
    mt_layout_add_norm(b, p, MT_MLP_NORM, hidden, norms->mlp.before, &p->spec->norm);
    mt_mlp_lay_out(b, p, 0);
    mt_layout_add_norm(b, p, MT_MLP_NORM_AFTER, hidden, norms->mlp.after, &p->spec->norm);
    mt_layout_add_norm(b, p, MT_BESIDE_NORM_MLP, hidden, norms->mlp_beside, &p->spec->norm);
    mt_layout_add_norm(b, p, MT_BESIDE_NORM_SUM, hidden, norms->experts.after, &p->spec->norm);
    mt_layout_add_scalar(b, p, MT_MLP_SCALAR);
}

struct record {
    void *gate_up; /* [n, mt_mlp_width()] */
    float *rstd;   /* [n] of the norm before the MLP */
    void *out;     /* [n, hidden] the MLP's output */
};

static void lay_out_record(struct record *r, const struct mt_part_shape *s, struct mt_part_record *at)
{
    struct mt_widths w = mt_widths(s->cfg, s->spec);
    size_t n = s->max_tokens, size = mt_dtype_size(s->dtype);
    r->gate_up = mt_record_take(at, 0, n * mt_mlp_width(s->spec) * size);
    r->rstd = mt_record_take(at, 0, n * 4);
    r->out = mt_record_take(at, 0, n * w.c * size);
}

MT_PART_RECORD()

struct scratch {
    void *act;     /* [n, ffn] the gated product, and its gradient */
    void *both;    /* [n, hidden] what the last norm takes */
    float *rstd[3]; /* [n] of norm1, of norm2, of the last */
};

static size_t lay_out_scratch(struct scratch *s, const struct mt_model_params *p, const struct mt_layer_spec *spec,
                              void *base)
{
    size_t at = 0, n = p->max_tokens, size = mt_dtype_size(p->dtype);
    s->act = mt_take(base, &at, n * (size_t)spec->ffn * size);
    s->both = mt_take(base, &at, n * (size_t)p->layout->cfg.hidden * size);
    for (int i = 0; i < 3; i++)
        s->rstd[i] = mt_take(base, &at, n * sizeof(float));
    return at;
}

static size_t scratch_bytes(const struct mt_model_params *p, const struct mt_layer_spec *spec, mt_device *dev)
{
    struct scratch s;
    (void)dev;
    return lay_out_scratch(&s, p, spec, NULL);
}

static size_t workspace_bytes(const struct mt_model_params *p, const struct mt_layer_spec *s, mt_device *dev)
{
    struct mt_widths w = mt_widths(&p->layout->cfg, s);
    struct mt_rmsnorm_bwd norm = {.n = p->max_tokens, .c = w.c};
    struct mt_bias_bwd bias = {.n = p->max_tokens, .c = MT_MAX(mt_mlp_width(s), w.c)};
    return MT_MAX(mt_op_rmsnorm_bwd_workspace(dev, &norm), mt_op_bias_bwd_workspace(dev, &bias));
}

/* A run, with what its operations use. */
struct beside {
    struct mt_part_run run; /* with the router's x */
    struct record rec;
    struct scratch s;
    void *sum; /* [n, hidden] own rows of the rounded sum */
};

static struct beside beside_of(const struct mt_part_run *r)
{
    size_t elem = mt_dtype_size(r->m->dt);
    struct beside b = {.run = *r, .rec = record_of(r), .sum = mt_moe_own_rows(r, MT_ROLE_ROUNDED, elem)};
    b.run.x = mt_moe_own_rows(r, MT_ROLE_RESIDUAL, elem);
    lay_out_scratch(&b.s, &r->m->p, r->part->spec, r->scratch);
    return b;
}

static struct mt_branch branch_of(const struct beside *b)
{
    return (struct mt_branch){.run = &b->run, .before = MT_MLP_NORM, .rstd = b->rec.rstd};
}

static struct mt_mlp mlp_of(const struct beside *b)
{
    return (struct mt_mlp){.run = &b->run, .gate_up = b->rec.gate_up, .act = b->s.act, .dh = b->run.m->dh};
}

enum { NORM_MLP, NORM_SUM, NORM_BOTH };

static struct mt_norm norm_of(const struct beside *b, int which)
{
    static const int role[] = {MT_BESIDE_NORM_MLP, MT_BESIDE_NORM_SUM, MT_MLP_NORM_AFTER};
    const void *x[] = {b->rec.out, b->sum, b->s.both};
    return (struct mt_norm){.spec = &b->run.part->spec->norm, .n = b->run.in->n_tokens, .x = x[which], .w = b->run.w,
                            .p = b->run.part->param[role[which]], .rstd = b->s.rstd[which]};
}

static int norm(const struct beside *b, int which, void *y, struct mt_err *err)
{
    struct mt_norm n = norm_of(b, which);
    return mt_norm(b->run.m, &n, y, false, err);
}

static int norm_backward(const struct beside *b, int which, const void *dy, void *dx, struct mt_err *err)
{
    struct mt_norm n = norm_of(b, which);
    return mt_norm_backward(b->run.m, &n, &(struct mt_norm_grad){dy, NULL, dx, b->run.g}, err);
}

static int add(const struct beside *b, const void *x, const void *y, void *out, struct mt_err *err)
{
    const mt_model *m = b->run.m;
    struct mt_add a = {.n = b->run.in->n_tokens * m->wd.c, .dtype = m->dt, .a = x, .b = y, .out = out};
    return mt_op_add(m->dev, &a, err);
}

/* What the last norm takes, and of that m->h. */
static int join(const struct beside *b, struct mt_err *err)
{
    mt_model *m = b->run.m;
    int rc = norm(b, NORM_MLP, m->h, err);
    if (!rc)
        rc = norm(b, NORM_SUM, b->s.both, err);
    if (!rc)
        rc = add(b, m->h, b->s.both, b->s.both, err);
    return rc ? rc : norm(b, NORM_BOTH, m->h, err);
}

static int prepare(const struct mt_part_run *r, struct mt_err *err)
{
    struct beside b = beside_of(r);
    struct mt_branch branch = branch_of(&b);
    struct mt_mlp mlp = mlp_of(&b);
    int rc = mt_mlp_open(&mlp, &branch, false, err);
    return rc ? rc : mt_mlp_project(&mlp, NULL, b.rec.out, err);
}

static int finish(const struct mt_part_run *r, void *y, struct mt_err *err)
{
    const mt_model *m = r->m;
    struct beside b = beside_of(r);
    struct mt_cast round = {r->in->n_tokens * m->wd.c, MT_F32, m->dt,
                            mt_moe_own_rows(r, MT_ROLE_SUM, sizeof(float)), b.sum};
    int rc = mt_op_cast(m->dev, &round, err);
    if (!rc)
        rc = join(&b, err);
    if (!rc)
        rc = add(&b, b.run.x, m->h, y, err);
    return rc ? rc : mt_layer_scale(r, y, err);
}

static int backward(const struct mt_part_run *r, struct mt_err *err)
{
    mt_model *m = r->m;
    struct beside b = beside_of(r);
    struct mt_branch branch = branch_of(&b);
    struct mt_mlp mlp = mlp_of(&b);
    int rc = mt_layer_scale(r, r->dx, err);
    if (!rc)
        rc = join(&b, err);
    if (!rc)
        rc = norm_backward(&b, NORM_BOTH, r->dx, m->dh, err);
    if (!rc)
        rc = norm_backward(&b, NORM_SUM, m->dh, mt_moe_own_rows(r, MT_ROLE_DY, mt_dtype_size(m->dt)), err);
    if (!rc)
        rc = norm_backward(&b, NORM_MLP, m->dh, m->dh, err);
    if (!rc)
        rc = mt_mlp_backward(&mlp, &branch, m->dh, err);
    return rc ? rc : mt_branch_enter_backward(&branch, err);
}

static double macs_per_token(const struct mt_hf_config *c, const struct mt_part *p, size_t seq_len)
{
    return mt_part_mlp.macs_per_token(c, p, seq_len);
}

const struct mt_part_kind mt_part_beside = {
    .name = "beside",
    .adapted = 1u << MT_MLP_GATE_UP | 1u << MT_MLP_DOWN,
    .products = 1u << MT_MLP_GATE_UP | 1u << MT_MLP_DOWN,
    .port = {{MT_ROLE_WEIGHTS, MT_READ, MT_READ},
             {MT_ROLE_SUM, MT_READ, MT_NO_ACCESS},
             {MT_ROLE_RESIDUAL, MT_READ, MT_READ},
             {MT_ROLE_ROUNDED, MT_FILL, MT_READ, mt_rows_bytes},
             {MT_ROLE_Y, MT_WRITE, MT_NO_ACCESS, mt_hidden_bytes},
             {MT_ROLE_DX, MT_NO_ACCESS, MT_UPDATE, mt_hidden_bytes},
             {MT_ROLE_DY, MT_NO_ACCESS, MT_FILL},
             {MT_ROLE_GRAD, MT_NO_ACCESS, MT_SUM}},
    MT_PART_FUNCTIONS,
};

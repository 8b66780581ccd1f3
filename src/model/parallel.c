/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A layer whose attention and MLP read the same normalised input (Cohere; Wang and Komatsuzaki 2021):
 *
 *   h = before(x);  y = x + attention(h) + MLP(h)
 *
 * One part, with the parameters and the record of both: h has one gradient, the sum of two, and one backward of the
 * norm. Backward goes through the MLP first and keeps that gradient of h while it goes through attention.
 */
#include "base/mem.h"
#include "model/attention.h"
#include "model/mlp.h"

/* Added to the roles of an MLP, of which the norm is attention's. */
enum { MLP_ROLES = MT_PARALLEL_GATE_UP - MT_MLP_GATE_UP };
enum { MLP = 2 }; /* its segment of the record, after attention's */

static void *gate_up_of(const struct mt_part_shape *s, struct mt_part_record *at)
{
    return mt_record_take(at, MLP, s->max_tokens * mt_mlp_width(s->spec) * mt_dtype_size(s->dtype));
}

static void record_bytes(const struct mt_part_shape *s, struct mt_part_record *at)
{
    mt_part_attention.record_bytes(s, at);
    gate_up_of(s, at);
}

struct scratch {
    void *dh;   /* [n, hidden] the MLP's gradient of h: for backward */
    void *rest; /* attention's scratch, or [n, ffn] the MLP's activation */
};

static size_t lay_out_scratch(struct scratch *s, const struct mt_model_params *p, void *base)
{
    size_t at = 0, n = p->backward ? p->max_tokens : 0;
    s->dh = mt_take(base, &at, n * (size_t)p->layout->cfg.hidden * mt_dtype_size(p->dtype));
    s->rest = mt_take(base, &at, 0);
    return at;
}

static size_t scratch_bytes(const struct mt_model_params *p, const struct mt_layer_spec *spec, mt_device *dev)
{
    struct scratch s;
    size_t act = p->max_tokens * (size_t)spec->ffn * mt_dtype_size(p->dtype);
    return lay_out_scratch(&s, p, NULL) + MT_MAX(mt_part_attention.scratch_bytes(p, spec, dev), act);
}

static size_t workspace_bytes(const struct mt_model_params *p, const struct mt_layer_spec *s, mt_device *dev)
{
    return MT_MAX(mt_part_attention.workspace_bytes(p, s, dev), mt_part_mlp.workspace_bytes(p, s, dev));
}

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    mt_part_attention.lay_out(b, p);
    mt_mlp_lay_out(b, p, MLP_ROLES);
}

/* A run, as attention and the MLP see it. */
struct both {
    struct mt_part_run attention;
    struct mt_mlp mlp;
};

static struct both both_of(const struct mt_part_run *r)
{
    struct scratch s;
    struct mt_part_record at = r->record;
    struct both b = {.attention = *r};
    lay_out_scratch(&s, &r->m->p, r->scratch);
    b.attention.scratch = s.rest;
    b.mlp = (struct mt_mlp){.run = r, .roles = MLP_ROLES, .gate_up = gate_up_of(&r->shape, &at), .act = s.rest,
                            .dh = s.dh};
    return b;
}

static int prepare(const struct mt_part_run *r, struct mt_err *err)
{
    struct both b = both_of(r);
    struct mt_branch branch = mt_attention_branch(&b.attention);
    int rc = mt_part_attention.prepare(&b.attention, err);
    return rc || r->kept >> MLP & 1 ? rc : mt_mlp_open(&b.mlp, &branch, true, err);
}

static int finish(const struct mt_part_run *r, void *y, struct mt_err *err)
{
    struct both b = both_of(r);
    int rc = mt_part_attention.finish(&b.attention, y, err);
    return rc ? rc : mt_mlp_project(&b.mlp, y, y, err);
}

static int backward(const struct mt_part_run *r, struct mt_err *err)
{
    mt_model *m = r->m;
    struct both b = both_of(r);
    struct mt_branch branch = mt_attention_branch(&b.attention);
    struct mt_add sum = {.n = r->in->n_tokens * m->wd.c, .dtype = m->dt, .a = m->dh, .b = b.mlp.dh, .out = m->dh};
    int rc = mt_mlp_backward(&b.mlp, &branch, r->dx, err);
    if (!rc)
        rc = mt_attention_backward(&b.attention, err);
    if (!rc)
        rc = mt_op_add(m->dev, &sum, err);
    return rc ? rc : mt_branch_enter_backward(&branch, err);
}

static double macs_per_token(const struct mt_hf_config *c, const struct mt_part *p, size_t seq_len)
{
    return mt_part_attention.macs_per_token(c, p, seq_len) + mt_part_mlp.macs_per_token(c, p, seq_len);
}

#define PRODUCTS (1u << MT_ATTENTION_QKV | 1u << MT_ATTENTION_OUT | 1u << MT_PARALLEL_GATE_UP | 1u << MT_PARALLEL_DOWN)

const struct mt_part_kind mt_part_parallel = {
    .name = "parallel",
    .adapted = PRODUCTS,
    .products = PRODUCTS,
    .port = {MT_PORTS_OF_HIDDEN_STATE},
    .segment = {"qkv", "out", [MLP] = "mlp"},
    .attends = true,
    MT_PART_FUNCTIONS,
};

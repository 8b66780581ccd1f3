/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of a layer with a norm after its mixture of experts (Trinity): y = x + norm(sum). x is the router's input,
 * which it hands on; the sum, that of experts and shared expert in FP32, is kept rounded for backward: only experts
 * could make it again.
 */
#include "base/mem.h"
#include "model/layout_builder.h"
#include "model/linear.h"
#include "model/moe.h"
#include "model/part.h"
#include "model/state.h"

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    int64_t hidden = mt_layout_builder_config(b)->hidden;
    mt_layout_add_norm(b, p, MT_NORMED_NORM, hidden, p->spec->norms.mlp.after, &p->spec->norm);
}

static size_t scratch_bytes(const struct mt_model_params *p, const struct mt_layer_spec *spec, mt_device *dev)
{
    (void)spec;
    (void)dev;
    return mt_align_up(p->max_tokens * sizeof(float), MT_RECORD_ALIGN); /* 1 / sqrt of the norm */
}

static size_t workspace_bytes(const struct mt_model_params *p, const struct mt_layer_spec *s, mt_device *dev)
{
    return mt_norm_workspace(p, &s->norm, dev);
}

static struct mt_norm norm_of(const struct mt_part_run *r)
{
    return (struct mt_norm){.spec = &r->part->spec->norm, .eps = r->part->spec->after_eps, .n = r->in->n_tokens,
                            .x = mt_moe_own_rows(r, MT_ROLE_ROUNDED, mt_dtype_size(r->m->dt)), .w = r->w,
                            .p = r->part->param[MT_NORMED_NORM], .rstd = r->scratch};
}

static int finish(const struct mt_part_run *r, void *y, struct mt_err *err)
{
    mt_model *m = r->m;
    struct mt_norm norm = norm_of(r);
    size_t n = r->in->n_tokens * m->wd.c, elem = mt_dtype_size(m->dt);
    struct mt_add add = {.n = n, .dtype = m->dt, .a = mt_moe_own_rows(r, MT_ROLE_RESIDUAL, elem), .b = m->h, .out = y};
    int rc = mt_moe_round_sum(r, err);
    if (!rc)
        rc = mt_norm(m, &norm, m->h, false, err);
    return rc ? rc : mt_op_add(m->dev, &add, err);
}

/* The sum's gradient, for experts and router; r->dx stays, as that of x. */
static int backward(const struct mt_part_run *r, struct mt_err *err)
{
    mt_model *m = r->m;
    struct mt_norm norm = norm_of(r);
    struct mt_norm_grad d = {r->dx, NULL, mt_moe_own_rows(r, MT_ROLE_DY, mt_dtype_size(m->dt)), r->g};
    int rc = mt_norm(m, &norm, m->h, false, err); /* for its statistics */
    return rc ? rc : mt_norm_backward(m, &norm, &d, err);
}

const struct mt_part_kind mt_part_normed = {
    .name = "normed",
    .port = {MT_PORTS_OF_MIXTURE_END},
    .lay_out = lay_out,
    .scratch_bytes = scratch_bytes,
    .workspace_bytes = workspace_bytes,
    .finish = finish,
    .backward = backward,
};

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of a layer whose experts are in a space of fewer dimensions (Nemotron 3 Super, modeling_nemotron_h.py):
 *
 *   y = r + sum Wup
 *
 * r is the router's input with the shared expert's output, which the router hands on, and the sum that of the experts'
 * outputs in FP32. Rounded, the sum is kept for backward: only experts could make it again.
 */
#include "model/branch.h"
#include "model/layout_builder.h"
#include "model/moe.h"

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    const struct mt_hf_config *c = mt_layout_builder_config(b);
    mt_layout_add_tensor(b, p, MT_LATENT_UP, c->hidden, c->moe.latent, "mlp.fc2_latent_proj.weight");
}

static int finish(const struct mt_part_run *r, void *y, struct mt_err *err)
{
    mt_model *m = r->m;
    size_t n = r->in->n_tokens, latent = (size_t)m->layout->cfg.moe.latent, elem = mt_dtype_size(m->dt);
    const struct mt_param none = {0};
    int rc = mt_moe_round_sum(r, err);
    return rc ? rc : mt_linear(m, n, latent, m->wd.c, mt_moe_own_rows(r, MT_ROLE_ROUNDED, elem), r->w,
                               r->part->param[MT_LATENT_UP], none, mt_moe_own_rows(r, MT_ROLE_RESIDUAL, elem), y, err);
}

/* The sum's gradient, for the experts; r->dx stays, as that of r. */
static int backward(const struct mt_part_run *r, struct mt_err *err)
{
    mt_model *m = r->m;
    size_t elem = mt_dtype_size(m->dt);
    struct mt_linear_bwd up = mt_linear_bwd_of(r, (size_t)m->layout->cfg.moe.latent, m->wd.c, MT_LATENT_UP);
    up.x = mt_moe_own_rows(r, MT_ROLE_ROUNDED, elem);
    up.dy = r->dx;
    up.dx = mt_moe_own_rows(r, MT_ROLE_DY, elem);
    return mt_linear_backward(m, &up, err);
}

static double macs_per_token(const struct mt_hf_config *c, const struct mt_part *p, size_t seq_len)
{
    (void)p;
    (void)seq_len;
    return (double)c->hidden * (double)c->moe.latent;
}

const struct mt_part_kind mt_part_latent = {
    .name = "latent",
    .adapted = 1u << MT_LATENT_UP,
    .products = 1u << MT_LATENT_UP,
    .port = {MT_PORTS_OF_MIXTURE_END},
    .lay_out = lay_out,
    .finish = finish,
    .backward = backward,
    .macs_per_token = macs_per_token,
};

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ends of layers that are mixtures of experts: what becomes of the sum of the experts' outputs, in FP32. Where x, the
 * router's input, is not in that sum, the router hands it on; the sum, rounded, is then kept for backward, since only
 * experts could make it again.
 */
#include "model/layout_builder.h"
#include "model/mlp.h"
#include "model/moe.h"
#include "model/rule.h"

static struct mt_view residual(struct mt_recipe *r)
{
    r->value[0].role = MT_ROLE_RESIDUAL;
    return mt_recipe_x(r);
}

static struct mt_view rounded_sum(struct mt_recipe *r)
{
    size_t width = mt_moe_row(r->cfg);
    struct mt_view sum = mt_recipe_rows(r, "sum", width, MT_ROLE_SUM, MT_ROLE_NONE);
    struct mt_view rounded = mt_recipe_rows(r, "rounded", width, MT_ROLE_ROUNDED, MT_ROLE_DY);
    r->value[sum.value].f32 = true;
    struct mt_node *n = mt_node_of(r, &mt_rule_cast);
    n->in[0] = sum;
    n->out[0] = rounded;
    return rounded;
}

/* Backward: how it uses x and its gradient. */
#define PORTS(of_x, of_dx)                                                                                             \
    {MT_ROLE_WEIGHTS, MT_READ, MT_READ}, {MT_ROLE_SUM, MT_READ, MT_NO_ACCESS}, {MT_ROLE_RESIDUAL, MT_READ, of_x},      \
        {MT_ROLE_ROUNDED, MT_FILL, MT_READ, mt_rows_bytes},                                                            \
        {MT_ROLE_Y, MT_WRITE, MT_NO_ACCESS, mt_hidden_bytes}, {MT_ROLE_DX, MT_NO_ACCESS, of_dx, mt_hidden_bytes},      \
        {MT_ROLE_DY, MT_NO_ACCESS, MT_FILL}, {MT_ROLE_GRAD, MT_NO_ACCESS, MT_SUM}

/* --- combine: y = sum, which x is in. No parameters ---------------------------------------------- */

static size_t first_elem(const struct mt_part_run *r)
{
    return mt_model_first_row(r->m, r->of->mb) * r->m->c;
}

static int finish(const struct mt_part_run *r, void *y, struct mt_err *err)
{
    const mt_model *m = r->m;
    size_t n = r->in->n_tokens * m->c;
    const float *sum = mt_value(r, MT_ROLE_SUM);
    return mt_op_cast(m->dev, &(struct mt_cast){n, MT_F32, m->dt, sum + first_elem(r), y}, err);
}

/* Copies the sum's gradient for the experts. It is also that of the layer's input, so r->dx keeps it. */
static int backward(const struct mt_part_run *r, struct mt_err *err)
{
    const mt_model *m = r->m;
    size_t n = r->in->n_tokens * m->c;
    void *dy = mt_elem(m, mt_value(r, MT_ROLE_DY), first_elem(r));
    return mt_op_cast(m->dev, &(struct mt_cast){n, m->dt, m->dt, r->dx, dy}, err);
}

const struct mt_part_kind mt_part_combine = {
    .name = "combine",
    .port = {{MT_ROLE_SUM, MT_READ, MT_NO_ACCESS},
             {MT_ROLE_Y, MT_WRITE, MT_NO_ACCESS, mt_hidden_bytes},
             {MT_ROLE_DX, MT_NO_ACCESS, MT_READ, mt_hidden_bytes},
             {MT_ROLE_DY, MT_NO_ACCESS, MT_FILL}},
    .finish = finish,
    .backward = backward,
};

/* --- latent: y = x + sum Wup, of experts in a space of fewer dimensions (Nemotron 3 Super, modeling_nemotron_h.py). x
 * has the shared expert's output in it ------------------------------------------------------------ */

static void lay_out_latent(struct mt_layout_builder *b, struct mt_part *p)
{
    const struct mt_hf_config *c = mt_layout_builder_config(b);
    mt_layout_add_tensor(b, p, MT_LATENT_UP, c->hidden, c->moe.latent, "mlp.fc2_latent_proj.weight");
}

static struct mt_view latent_recipe(struct mt_recipe *r)
{
    struct mt_view x = residual(r), sum = rounded_sum(r);
    return mt_linear_add_of(r, sum, MT_LATENT_UP, -1, x);
}

const struct mt_part_kind mt_part_latent = {
    .name = "latent",
    .port = {PORTS(MT_NO_ACCESS, MT_READ)},
    .lay_out = lay_out_latent,
    MT_PART_OF(latent_recipe),
};

/* --- normed: y = x + norm(sum), that of experts and shared expert (Trinity) ----------------------- */

static void lay_out_normed(struct mt_layout_builder *b, struct mt_part *p)
{
    int64_t hidden = mt_layout_builder_config(b)->hidden;
    mt_layout_add_norm(b, p, MT_NORMED_NORM, hidden, p->spec->norms.mlp.after, &p->spec->norm);
}

static struct mt_view normed_recipe(struct mt_recipe *r)
{
    struct mt_view x = residual(r), sum = rounded_sum(r);
    return mt_sum_of(r, x, mt_norm_of(r, "normed", sum, MT_NORMED_NORM, r->spec->after_eps, MT_UNKEPT), 1);
}

const struct mt_part_kind mt_part_normed = {
    .name = "normed",
    .port = {PORTS(MT_NO_ACCESS, MT_READ)},
    .lay_out = lay_out_normed,
    MT_PART_OF(normed_recipe),
};

/* --- beside: y = (x + after(norm1(MLP(before(x))) + norm2(sum))), times the layer's number, if it has one: experts beside
 * an MLP, each with norms of its own (Gemma 4) ----------------------------------------------------- */

static void lay_out_beside(struct mt_layout_builder *b, struct mt_part *p)
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

static struct mt_view beside_recipe(struct mt_recipe *r)
{
    const struct mt_layer_spec *s = r->spec;
    struct mt_view x = residual(r);
    struct mt_view h = mt_norm_of(r, "h", x, MT_MLP_NORM, 0, 0);
    struct mt_view gate_up =
        mt_linear_of(r, "gate_up", h, MT_MLP_GATE_UP, s->mlp_bias ? MT_MLP_GATE_UP_BIAS : -1, mt_mlp_width(s), 0);
    struct mt_view out = mt_linear_of(r, "out", mt_activation_of(r, gate_up, -1), MT_MLP_DOWN,
                                      s->mlp_bias ? MT_MLP_DOWN_BIAS : -1, x.dim, 0);
    struct mt_view sum = rounded_sum(r);
    struct mt_view norm1 = mt_norm_of(r, "norm of the MLP", out, MT_BESIDE_NORM_MLP, 0, MT_UNKEPT);
    struct mt_view norm2 = mt_norm_of(r, "norm of the sum", sum, MT_BESIDE_NORM_SUM, 0, MT_UNKEPT);
    struct mt_view both = mt_norm_of(r, "norm of both", mt_sum_of(r, norm1, norm2, 1), MT_MLP_NORM_AFTER, 0, MT_UNKEPT);
    struct mt_view y = mt_sum_of(r, x, both, 1);
    return s->scalar_name ? mt_scaled_of(r, y) : y;
}

const struct mt_part_kind mt_part_beside = {
    .name = "beside",
    .port = {PORTS(MT_READ, MT_UPDATE)},
    .lay_out = lay_out_beside,
    MT_PART_OF(beside_recipe),
};

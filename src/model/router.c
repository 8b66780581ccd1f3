/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The router of a mixture of experts, pre-norm, with the expert that all tokens share:
 *
 *   n = norm(x);  ids, w = route(n Wr + br);  s = x + gate(n) * shared(n)
 *
 * n, ids and w are for the experts, which add their outputs to s (hf/moe.h has the whole block).
 */
#include "model/part.h"

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    const struct mt_hf_config *c = mt_layout_builder_config(b);
    const struct mt_moe *m = &c->moe;
    const struct mt_param_tensor select[] = {{"mlp.gate.e_score_correction_bias", m->n_experts, .constant = true}},
                                 shared[] = {{"mlp.shared_expert.gate_proj.weight", m->shared_width},
                                             {"mlp.shared_expert.up_proj.weight", m->shared_width}};
    mt_layout_add_tensor(b, p, MT_ROUTER_NORM, c->hidden, 0, "post_attention_layernorm.weight");
    mt_layout_add_tensor(b, p, MT_ROUTER_WEIGHT, m->n_experts, c->hidden, "mlp.gate.weight");
    if (m->router_bias)
        mt_layout_add_tensor(b, p, MT_ROUTER_BIAS, m->n_experts, 0, "mlp.gate.bias");
    if (m->select_bias)
        mt_layout_add_param(b, p, MT_ROUTER_SELECT_BIAS, 0, 1, select);
    if (!m->shared_width)
        return;
    mt_layout_add_param(b, p, MT_ROUTER_SHARED_GATE_UP, c->hidden, 2, shared);
    mt_layout_add_tensor(b, p, MT_ROUTER_SHARED_DOWN, c->hidden, m->shared_width, "mlp.shared_expert.down_proj.weight");
    if (m->shared_gate)
        mt_layout_add_tensor(b, p, MT_ROUTER_SHARED_GATE, 1, c->hidden, "mlp.shared_expert_gate.weight");
}

static double macs_per_token(const struct mt_hf_config *c, const struct mt_part *p, size_t seq_len)
{
    const struct mt_moe *m = &c->moe;
    (void)p;
    (void)seq_len;
    return (double)c->hidden * (double)(m->n_experts + 3 * m->shared_width + m->shared_gate);
}

const struct mt_part_kind mt_part_router = {
    .name = "router",
    .lay_out = lay_out,
    .macs_per_token = macs_per_token,
};

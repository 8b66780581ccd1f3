/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A group of a mixture's experts. Each is a gated MLP, run once a step over the rows of all micro-batches that were
 * sent to it; its output, times the row's weight, is added to the sum of the layer.
 *
 *   expert(n) = (act(n Wgate + b) * (n Wup + b)) Wdown + b
 */
#include "model/part.h"

static void lay_out(struct mt_layout_builder *b, struct mt_part *p)
{
    const struct mt_hf_config *c = mt_layout_builder_config(b);
    const struct mt_moe *m = &c->moe;
    const struct mt_param_tensor gate_up[] = {{"mlp.experts.*.gate_proj.weight", m->width},
                                              {"mlp.experts.*.up_proj.weight", m->width}},
                                 gate_up_bias[] = {{"mlp.experts.*.gate_proj.bias", m->width},
                                                   {"mlp.experts.*.up_proj.bias", m->width}},
                                 down[] = {{"mlp.experts.*.down_proj.weight", c->hidden}},
                                 down_bias[] = {{"mlp.experts.*.down_proj.bias", c->hidden}};
    for (int i = 0; i < p->n_experts; i++) {
        mt_layout_add_expert_param(b, p, i, MT_EXPERT_GATE_UP, c->hidden, 2, gate_up);
        if (m->expert_bias)
            mt_layout_add_expert_param(b, p, i, MT_EXPERT_GATE_UP_BIAS, 0, 2, gate_up_bias);
        mt_layout_add_expert_param(b, p, i, MT_EXPERT_DOWN, m->width, 1, down);
        if (m->expert_bias)
            mt_layout_add_expert_param(b, p, i, MT_EXPERT_DOWN_BIAS, 0, 1, down_bias);
    }
}

/* Of a token that is sent to top_k of all experts, the share of this group. */
static double macs_per_token(const struct mt_hf_config *c, const struct mt_part *p, size_t seq_len)
{
    const struct mt_moe *m = &c->moe;
    (void)seq_len;
    return 3 * (double)c->hidden * (double)m->width * (double)m->top_k * p->n_experts / (double)m->n_experts;
}

const struct mt_part_kind mt_part_experts = {
    .name = "experts",
    .per_step = true,
    .per_group = true,
    .lay_out = lay_out,
    .macs_per_token = macs_per_token,
};

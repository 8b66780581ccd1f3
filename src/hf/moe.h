/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/**
 * A mixture of experts as config.json and its family describe it. All mixtures are the same block with other values:
 *
 *   n = norm(x);  s = score(n Wr + br)                    [E]
 *   ids = top_k of s + select_bias in the best groups;    w = s of ids, renormalised, times scale
 *   y = x + shared(n) + sum over e in ids, ascending, of w_e * expert_e(n)
 *
 * With an MLP beside the experts, a is that sum without x: y = x + norm(norm(MLP(norm(x))) + norm(a)).
 */

enum mt_moe_score {
    MT_MOE_SOFTMAX,       /* over all experts, in FP32 */
    MT_MOE_SIGMOID,       /* of each logit, in FP32 */
    MT_MOE_CHOSEN_SOFTMAX /* experts are chosen by logit; softmax over the chosen ones */
};

/** What a key of config.json that is true or false means, and its absence. */
enum mt_moe_by_key { MT_MOE_NO_KEY, MT_MOE_IF_ON, MT_MOE_UNLESS_OFF };

/** How the weights of the chosen experts are renormalised. */
enum mt_moe_renorm {
    MT_MOE_NO_RENORM,
    MT_MOE_RENORM_SUM,  /* divided by sum + eps */
    MT_MOE_RENORM_MOST, /* divided by max(sum, eps) */
};

/** The score of a group of experts: the sum of its two best, or its best. */
enum mt_moe_group_score { MT_MOE_GROUP_TOP2_SUM, MT_MOE_GROUP_MAX };

enum { MT_MOE_MAX_EXPERTS = 1024 };

struct mt_moe {
    int64_t n_experts, top_k;         /* 0: a dense model */
    int64_t width;                    /* of an expert */
    bool ungated;                     /* experts and the shared one have no gate: act(n Wup) Wdown */
    int64_t latent;                   /* of what experts take and give, by two products; 0: the hidden size */
    int64_t shared_width;             /* of the shared expert; 0: none */
    bool shared_gate;                 /* the shared expert is scaled by sigmoid(n . gate) */
    bool router_bias, expert_bias;
    bool select_bias;                 /* a bias on scores for choosing experts only; FP32, never trained */
    bool router_f32;                  /* logits are not rounded to the compute dtype */
    enum mt_moe_score score;
    int64_t n_group, topk_group;      /* experts are chosen from the best topk_group of n_group groups */
    enum mt_moe_group_score group_score;
    enum mt_moe_renorm renorm;
    double renorm_eps;
    double scale;                     /* factor of the weights, applied last */
    bool beside;                      /* experts are beside a dense MLP, each with norms of its own (part beside) */
    bool normed;                      /* y = x + norm(sum), shared expert and all (part normed) */
    bool router_norm;                 /* logits are of a norm of x by a weight of the router's, over sqrt(hidden) */
    bool expert_scale;                /* a weight is multiplied by a number of its expert */
    bool scale_is_residual;           /* scale has mt_layer_spec.residual within it; without shared_gate */
    bool weights_rounded;             /* weights are rounded to the compute dtype */
    bool clamped;                     /* (min(max(up, -limit), limit) + 1) * g * sigmoid(alpha g), g = min(gate, limit),
                                         instead of the activation of dense layers */
    double alpha, limit;
};

/** Rows of an expert's first matrix, or of the shared one's, of that width: those of gate and up. */
static inline int64_t mt_moe_inner(const struct mt_moe *m, int64_t width)
{
    return (m->ungated ? 1 : 2) * width;
}

/** Is it the layer's end that adds x, after a norm or a product, instead of the sum, which begins at 0? */
static inline bool mt_moe_adds_last(const struct mt_moe *m)
{
    return m->beside || m->normed || m->latent;
}

/** Which decoder layers are mixtures of experts, and which keys say so. */
enum mt_moe_layers {
    MT_MOE_EVERY_LAYER,
    MT_MOE_SPARSE_STEP, /* decoder_sparse_step, mlp_only_layers */
    MT_MOE_AFTER_FIRST, /* all but the first first_k_dense_replace layers */
    MT_MOE_LAYER_TYPES, /* mlp_layer_types; if absent, all but the first layer */
    MT_MOE_TYPES_OR_FIRST, /* mlp_layer_types; if absent, all but the first first_k_dense_replace layers */
    MT_MOE_INTERVAL,    /* moe_layer_start_index, moe_layer_end_index, moe_layer_interval */
    MT_MOE_BY_KIND,     /* those whose kind is one (mt_layer_kind) */
};

/** The source of the shared expert's width. */
enum mt_moe_shared {
    MT_MOE_NO_SHARED,
    MT_MOE_SHARED_WIDTH, /* shared_expert_intermediate_size, or mt_moe_family.shared_key */
    MT_MOE_SHARED_COUNT, /* an expert's width times n_shared_experts, num_shared_experts or moe_num_shared_experts */
    MT_MOE_SHARED_FFN,   /* that of the MLP in dense layers: intermediate_size, or mt_family.ffn_key */
};

/** The mixtures of experts of a family. */
struct mt_moe_family {
    struct mt_moe values;      /* those of the class; numbers are defaults of the keys */
    const char *key;           /* only if this key is true; NULL: always */
    enum mt_moe_layers layers;
    int64_t first_dense;       /* default of first_k_dense_replace, or of: */
    const char *dense_key;     /* NULL: that */
    enum mt_moe_shared shared; /* values.shared_width: default */
    int64_t shared_count;      /* MT_MOE_SHARED_COUNT: default */
    const char *shared_key;    /* MT_MOE_SHARED_WIDTH: another key; NULL: that */
    bool width_is_ffn;         /* intermediate_size is the width of an expert */
    const char *width_key;     /* another key of that width; NULL: moe_intermediate_size */
    bool none_is_dense;        /* a number of experts of 0 is a dense model */
    bool groups;               /* n_group and topk_group are read; defaults: values, or 1 */
    const char *group_method;  /* only if topk_method is this, which may also be greedy; NULL: always */
    enum mt_moe_by_key renorm_by_key; /* norm_topk_prob decides whether values.renorm applies */
    const char *eps_key;       /* key of values.renorm_eps; NULL: none */
    const char *scale_key;     /* key of values.scale; NULL: none */
    const char *end;           /* the part that adds the experts' outputs; NULL: combine, with values.latent latent */
    const char *latent_key;    /* key of values.latent, which may be null; NULL: none */
};

struct mt_hf_config;
struct mt_keys;
struct mt_layer_spec;

/**
 * Reads cfg->moe as cfg->family says, after the other keys, and sparse[i]: whether layer i is a mixture; with
 * MT_MOE_BY_KIND sparse[] is given, and experts that no layer has are none. s: of the layers, for what other keys say.
 * Does nothing for a dense family.
 */
void mt_moe_read(struct mt_keys *k, struct mt_hf_config *cfg, const struct mt_layer_spec *s,
                 bool *sparse);

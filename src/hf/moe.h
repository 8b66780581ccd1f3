/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_HF_MOE_H
#define MT_HF_MOE_H

#include <stdbool.h>
#include <stdint.h>

/**
 * A mixture of experts as config.json and its family describe it. All mixtures are values of one block:
 *
 *   n = norm(x);  s = score(n Wr + br)                    [E]
 *   the top_k of s (+ select_bias, groups left out)      -> ids; w = s of those, renormalised, times scale
 *   y = x + shared(n) + sum over the chosen e, ascending, of w_e * expert_e(n)
 */

enum mt_moe_score {
    MT_MOE_SOFTMAX,       /* over all experts, in FP32 */
    MT_MOE_SIGMOID,       /* of each, in FP32 */
    MT_MOE_CHOSEN_SOFTMAX /* the logits choose; softmax over those that are chosen */
};

/** How the weights of the chosen are divided by their sum. */
enum mt_moe_renorm {
    MT_MOE_NO_RENORM,
    MT_MOE_RENORM_SUM,  /* by sum + eps */
    MT_MOE_RENORM_MOST, /* by max(sum, eps) */
};

/** What a group of experts is chosen by. */
enum mt_moe_group_score { MT_MOE_GROUP_TOP2_SUM, MT_MOE_GROUP_MAX };

enum { MT_MOE_MAX_EXPERTS = 1024 };

struct mt_moe {
    int64_t n_experts, top_k;         /* 0: a dense model */
    int64_t width;                    /* of an expert */
    int64_t shared_width;             /* of the shared expert; 0: none */
    bool shared_gate;                 /* it is scaled by sigmoid(n . gate) */
    bool router_bias, expert_bias;
    bool select_bias;                 /* added to scores for the choice alone; FP32, never trained */
    bool router_f32;                  /* logits are not rounded to the compute dtype */
    enum mt_moe_score score;
    int64_t n_group, topk_group;      /* the experts of topk_group groups of n_group are left to choose from */
    enum mt_moe_group_score group_score;
    enum mt_moe_renorm renorm;
    double renorm_eps;
    double scale;                     /* of the weights, last */
    bool weights_rounded;             /* to the compute dtype */
    bool clamped;                     /* (min(max(up, -limit), limit) + 1) * g * sigmoid(alpha g), g = min(gate, limit);
                                         else the activation of the dense layers */
    double alpha, limit;
};

/** Which decoder layers are mixtures, and by which keys. */
enum mt_moe_layers {
    MT_MOE_EVERY_LAYER,
    MT_MOE_SPARSE_STEP, /* decoder_sparse_step, mlp_only_layers */
    MT_MOE_AFTER_FIRST, /* all but the first first_k_dense_replace */
    MT_MOE_LAYER_TYPES, /* mlp_layer_types; absent: all but the first */
    MT_MOE_INTERVAL,    /* moe_layer_start_index, moe_layer_end_index, moe_layer_interval */
};

/** What the width of the shared expert is read from. */
enum mt_moe_shared {
    MT_MOE_NO_SHARED,
    MT_MOE_SHARED_WIDTH, /* shared_expert_intermediate_size */
    MT_MOE_SHARED_COUNT, /* so many experts' width: n_shared_experts, num_shared_experts or moe_num_shared_experts */
    MT_MOE_SHARED_FFN,   /* intermediate_size */
};

/** A family's mixtures. */
struct mt_moe_family {
    struct mt_moe values;      /* what the class has; numbers are defaults of the keys */
    enum mt_moe_layers layers;
    int64_t first_dense;       /* MT_MOE_AFTER_FIRST: default of first_k_dense_replace */
    enum mt_moe_shared shared; /* values.shared_width: default */
    int64_t shared_count;      /* MT_MOE_SHARED_COUNT: default */
    bool width_is_ffn;         /* intermediate_size is the width of an expert */
    bool groups;               /* n_group and topk_group are read, 1 where absent */
    bool renorm_by_key;        /* norm_topk_prob decides whether values.renorm applies, */
    bool renorm_by_default;    /* where it is there */
    const char *eps_key;       /* of values.renorm_eps; NULL: none */
    const char *scale_key;     /* of values.scale; NULL: none */
};

struct mt_hf_config;
struct mt_keys;

/** Reads cfg->moe and cfg->sparse by cfg->family, whose other keys have been read; nothing where it is dense. */
void mt_moe_read(struct mt_keys *k, struct mt_hf_config *cfg);

#endif

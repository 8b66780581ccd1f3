/* SPDX-License-Identifier: Apache-2.0 */
/* Families with the gated delta rule in most layers. Sources: the configuration and modeling files of transformers. */
#include "hf/families.h"

#include "base/mem.h"

#define DELTA(two)                                                                                                     \
    &(const struct mt_delta_family){                                                                                   \
        .values = {.k_heads = 16, .v_heads = 32, .k_dim = 128, .v_dim = 128, .taps = 4, .joined = two},                \
        .full_every = 4,                                                                                               \
        .parts = {"delta", "mlp"},                                                                                     \
        .sparse_parts = {"delta", "router", "lists", "experts", "combine"},                                            \
    }

static const struct mt_tensor_on_disk tensors[] = {
    {"linear_attn.conv1d.weight", "linear_attn.conv1d.weight", .is_conv = true},
    {NULL},
};

static const struct mt_family families[] = {
    { /* Qwen3.5, 3.6 and 3.8 */
        .architecture = "Qwen3_5ForCausalLM",
        .model_type = "qwen3_5_text",
        .n_kv_heads = 4,
        .head_dim = 256,
        .norm = {.plus_one = true},
        .mrope = true,
        .max_pos = 32768,
        .partial_rotary = 0.25,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .qk_norm = MT_QK_NORM_HEADS,
        .gate = true,
        .delta = DELTA(false),
        .parts = {"attention", "mlp"},
        .on_disk = tensors,
    },
    {
        .architecture = "Qwen3_5MoeForCausalLM",
        .model_type = "qwen3_5_moe_text",
        .n_kv_heads = 2,
        .head_dim = 256,
        .norm = {.plus_one = true},
        .mrope = true,
        .max_pos = 32768,
        .partial_rotary = 0.25,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .qk_norm = MT_QK_NORM_HEADS,
        .gate = true,
        .delta = DELTA(false),
        .parts = {"attention", "mlp"},
        .sparse_parts = {"attention", "router", "lists", "experts", "combine"},
        .on_disk = tensors,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 256, .top_k = 8, .width = 512, .shared_width = 512, .shared_gate = true,
                       .renorm = MT_MOE_RENORM_SUM, .scale = 1, .weights_rounded = true},
            .shared = MT_MOE_SHARED_WIDTH,
        },
    },
    {
        .architecture = "Qwen3NextForCausalLM",
        .model_type = "qwen3_next",
        .n_kv_heads = 2,
        .head_dim = 256,
        .norm = {.plus_one = true},
        .max_pos = 32768,
        .partial_rotary = 0.25,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .qk_norm = MT_QK_NORM_HEADS,
        .gate = true,
        .delta = DELTA(true),
        .parts = {"attention", "mlp"},
        .sparse_parts = {"attention", "router", "lists", "experts", "combine"},
        .on_disk = tensors,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 512, .top_k = 10, .width = 512, .shared_width = 512, .shared_gate = true,
                       .renorm = MT_MOE_RENORM_SUM, .scale = 1, .weights_rounded = true},
            .layers = MT_MOE_SPARSE_STEP,
            .shared = MT_MOE_SHARED_WIDTH,
            .renorm_by_key = true,
            .renorm_by_default = true,
        },
    },
};

const struct mt_families mt_delta_families = {families, MT_ARRAY_LEN(families)};

/* SPDX-License-Identifier: Apache-2.0 */
/* Families with the gated delta rule in most layers. Sources: the configuration and modeling files of transformers. */
#include "hf/families.h"

#include "base/mem.h"

#define COUNT(name, key, def, most, ...) {key, offsetof(struct mt_layer_spec, delta.name), def, most, __VA_ARGS__}
#define COUNTS(two)                                                                                                    \
    {                                                                                                                  \
        COUNT(k_heads, "linear_num_key_heads", 16, 1 << 12, .divides = "linear_num_value_heads"),                      \
        COUNT(v_heads, "linear_num_value_heads", 32, 1 << 12, 0),                                                      \
        COUNT(k_dim, "linear_key_head_dim", 128, 1024, 8),                                                             \
        COUNT(v_dim, "linear_value_head_dim", 128, 1024, 8),                                                           \
        COUNT(taps, "linear_conv_kernel_dim", 4, 8, 0),                                                                \
        COUNT(joined, NULL, two, 0, 0),                                                                                \
    }
static const struct mt_family_count counts[] = COUNTS(0), joined_counts[] = COUNTS(1);

#define DELTA(rows)                                                                                                    \
    &(const struct mt_mixer_family){                                                                                   \
        .type = "linear_attention",                                                                                    \
        .interval_key = "full_attention_interval",                                                                     \
        .interval = 4,                                                                                                 \
        .counts = rows,                                                                                                \
        .n_counts = MT_ARRAY_LEN(rows),                                                                                \
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
        .mixer = DELTA(counts),
        .parts = {"attention", "mlp"},
        .on_disk = tensors,
        .uncomputed = "mtp.",
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
        .mixer = DELTA(counts),
        .parts = {"attention", "mlp"},
        .sparse_parts = {"attention", "router", "lists", "experts", "combine"},
        .on_disk = tensors,
        .uncomputed = "mtp.",
        .experts_as_stored = true,
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
        .mixer = DELTA(joined_counts),
        .parts = {"attention", "mlp"},
        .sparse_parts = {"attention", "router", "lists", "experts", "combine"},
        .on_disk = tensors,
        .uncomputed = "mtp.",
        .experts_as_stored = true,
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

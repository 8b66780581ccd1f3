/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "hf/family.h"

/** The rows of the table of families, by kind: dense ones (families_dense.c), and mixtures of experts
 * (families_mixtures.c), which may have dense layers, too; and those of a linear recurrence, of both
 * kinds (families_delta.c). */
struct mt_families {
    const struct mt_family *row;
    size_t n;
};
/** Norms around both branches (Gemma), and those of experts beside an MLP. */
extern const struct mt_layer_norms mt_sandwich_norms;
/** The same before and after an MLP or a mixture, under other names (Trinity). */
extern const struct mt_layer_norms mt_mlp_norms;
/** The factors of Granite, and its experts. */
extern const struct mt_family_number mt_granite_numbers[];
extern const struct mt_fused_tensor mt_granite_experts[];

/** Biases of queries, keys and values and of the output, when the block has them; and of the MLP, too. */
#define MT_BIASES(when) .qkv_bias = (when), .o_bias = (when)
#define MT_ALL_BIASES(when) MT_BIASES(when), .mlp_bias = (when)
/** How DeepSeek V3 and its cousins weigh experts, and the keys that say so. */
#define MT_DEEPSEEK_SCORES                                                                                             \
    .select_bias = true, .router_f32 = true, .score = MT_MOE_SIGMOID, .renorm = MT_MOE_RENORM_SUM, .renorm_eps = 1e-20
#define MT_DEEPSEEK_KEYS .groups = true, .renorm_by_key = MT_MOE_UNLESS_OFF, .scale_key = "routed_scaling_factor"
/** As many shared experts as a key says, or one. */
#define MT_ONE_SHARED .shared = MT_MOE_SHARED_COUNT, .shared_count = 1
/** DeepSeek V3's experts and latent attention, which cousins have in other sizes. */
#define MT_DEEPSEEK_V3                                                                                                 \
    .values = {.n_experts = 256, .top_k = 8, .width = 2048, MT_DEEPSEEK_SCORES, .n_group = 8, .topk_group = 4,         \
               .scale = 2.5},                                                                                          \
    .first_dense = 3, MT_ONE_SHARED, MT_DEEPSEEK_KEYS
#define MT_LATENT(...) .latent = &(const struct mt_latent_family){__VA_ARGS__}, .parts = {"mla", "mlp"}
#define MT_MIXER(kind_rows, count_rows)                                                                                \
    .kinds = kind_rows, .n_kinds = MT_ARRAY_LEN(kind_rows), .counts = count_rows, .n_counts = MT_ARRAY_LEN(count_rows)
/** What all of Gemma's rows have in common, */
#define MT_GEMMA                                                                                                       \
    .n_kv_heads = 4, .head_dim = 256, .norms = &mt_sandwich_norms, MT_BIASES(MT_FEATURE_BY_KEY), .tied = true,         \
    .embed_by_width = true, .activation_key = "hidden_activation", .activation = "gelu_pytorch_tanh",                  \
    .refused_flags = {"use_bidirectional_attention"}
/** and those of Gemma 4. The rotary parameters must be in the file. */
#define MT_GEMMA4                                                                                                      \
    MT_GEMMA, .windows = MT_WINDOW_ALL_BUT, .full_every = 6, .last_is_full = true, .norm = {.round_once = true},       \
    .rope_theta = 1e6, .rope_by_window = true, .window_theta = 10000, .needs_rope_scaling = true,                      \
    .layer.qk_norm = MT_QK_NORM_HEADS, .layer.v_norm = true, .layer.score_scale = 1, .layer.scalar_name = "layer_scalar",                      \
    .numbers = (const struct mt_family_number[]){{"final_logit_softcapping", MT_VALUE_LOGIT_CAP, 0}, {NULL}},          \
    .full_heads = &(const struct mt_full_heads){"global_head_dim", "attention_k_eq_v", "num_global_key_value_heads",   \
                                                512}
#define MT_NO_LAYER_INPUTS                                                                                             \
    "other than 0 is not supported: embeddings of each layer (Gemma 4 E2B and E4B); train 12B, 26B-A4B or 31B"
#define MT_NO_SHARED_KEYS                                                                                              \
    "other than 0 is not supported: keys and values of one layer in others (Gemma 4 E2B and E4B)"

extern const struct mt_families mt_dense_families, mt_mixture_families, mt_delta_families;

/* SPDX-License-Identifier: Apache-2.0 */
#include "hf/family.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"

#define SPARSE_PARTS {"attention", "router", "lists", "experts", "combine"}
#define LATENT_SPARSE_PARTS {"mla", "router", "lists", "experts", "combine"}

static const struct mt_tensor_on_disk mixtral_names[] = {
    {"mlp.gate.weight", "block_sparse_moe.gate.weight", .module = "mlp.gate"},
    {"mlp.experts.*.gate_proj.weight", "block_sparse_moe.experts.*.w1.weight"},
    {"mlp.experts.*.up_proj.weight", "block_sparse_moe.experts.*.w3.weight"},
    {"mlp.experts.*.down_proj.weight", "block_sparse_moe.experts.*.w2.weight"},
    {NULL},
};

static const struct mt_tensor_on_disk gpt_oss_tensors[] = {
    {"mlp.gate.weight", "mlp.router.weight"},
    {"mlp.gate.bias", "mlp.router.bias"},
    {NULL},
};

static const struct mt_fused_tensor gpt_oss_experts[] = {
    {"mlp.experts.gate_up_proj", {"mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"}, true, true},
    {"mlp.experts.gate_up_proj_bias", {"mlp.experts.*.gate_proj.bias", "mlp.experts.*.up_proj.bias"}, false, true},
    {"mlp.experts.down_proj", {"mlp.experts.*.down_proj.weight"}, true, false},
    {"mlp.experts.down_proj_bias", {"mlp.experts.*.down_proj.bias"}, false, false},
    {NULL},
};

/* Families whose files have the experts one by one are given these parameters in transformers. */
static const struct mt_fused_tensor joined_experts[] = {
    {"mlp.experts.gate_up_proj", {"mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"}, false, false},
    {"mlp.experts.down_proj", {"mlp.experts.*.down_proj.weight"}, false, false},
    {0},
};

#define SELECT_BIAS "mlp.gate.e_score_correction_bias"
/* The three matrices of the shared expert: in files, and in transformers. */
#define SHARED(name, disk, as)                                                                                         \
    {"mlp.shared_expert." name ".weight", "mlp." disk "." name ".weight", .module = "mlp." as "." name}
#define SHARED_AS(disk, as) SHARED("gate_proj", disk, as), SHARED("up_proj", disk, as), SHARED("down_proj", disk, as)

/* GLM-4.5, dots1, Solar, DeepSeek */
static const struct mt_tensor_on_disk shared_experts_tensors[] = {
    {SELECT_BIAS, SELECT_BIAS, .is_f32 = true},
    SHARED_AS("shared_experts", "shared_experts"),
    {NULL},
};

static const struct mt_tensor_on_disk minimax_tensors[] = {
    {"mlp.gate.weight", "block_sparse_moe.gate.weight", .module = "mlp.gate"},
    {SELECT_BIAS, "block_sparse_moe.e_score_correction_bias", .is_f32 = true},
    {"mlp.experts.*.gate_proj.weight", "block_sparse_moe.experts.*.w1.weight"},
    {"mlp.experts.*.up_proj.weight", "block_sparse_moe.experts.*.w3.weight"},
    {"mlp.experts.*.down_proj.weight", "block_sparse_moe.experts.*.w2.weight"},
    {NULL},
};

static const struct mt_tensor_on_disk hy_v3_tensors[] = {
    {"mlp.gate.weight", "mlp.router.gate.weight", .module = "mlp.gate"},
    {SELECT_BIAS, "mlp.expert_bias", .is_f32 = true},
    SHARED_AS("shared_mlp", "shared_experts"),
    {NULL},
};

static const struct mt_tensor_on_disk ernie_tensors[] = {
    {"mlp.gate.weight", "mlp.gate.weight", .is_f32 = true},
    {SELECT_BIAS, "mlp.moe_statics.e_score_correction_bias", .is_row = true, .is_f32 = true, .module = "mlp.gate.moe_statics"},
    SHARED_AS("shared_experts", "shared_experts"),
    {NULL},
};

static const struct mt_tensor_on_disk hunyuan_tensors[] = {
    {"mlp.gate.weight", "mlp.gate.wg.weight", .is_f32 = true},
    {"self_attn.q_norm.weight", "self_attn.query_layernorm.weight"},
    {"self_attn.k_norm.weight", "self_attn.key_layernorm.weight"},
    SHARED_AS("shared_mlp", "shared_mlp"),
    {NULL},
};

/* Gemma 2 and 3 */
static const struct mt_layer_norms sandwich_norms = {
    .attention = {"input_layernorm.weight", "post_attention_layernorm.weight"},
    .mlp = {"pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"},
};

/* OLMo 2 and 3, EXAONE 4 */
static const struct mt_layer_norms norms_after = {
    .attention = {NULL, "post_attention_layernorm.weight"},
    .mlp = {NULL, "post_feedforward_layernorm.weight"},
};

static const struct mt_layer_norms glm4_norms = {
    .attention = {"input_layernorm.weight", "post_self_attn_layernorm.weight"},
    .mlp = {"post_attention_layernorm.weight", "post_mlp_layernorm.weight"},
};

/* Sources: the configuration and modeling files of transformers, by model_type. */
static const struct mt_family families[] = {
    {
        .architecture = "LlamaForCausalLM",
        .model_type = "llama",
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .mlp_bias = MT_FEATURE_BY_KEY,
        .parts = {"attention", "mlp"},
    },
    {
        .architecture = "MistralForCausalLM",
        .model_type = "mistral",
        .n_kv_heads = 8,
        .window = 4096,
        .windows = MT_WINDOW_EVERY_LAYER,
        .parts = {"attention", "mlp"},
    },
    {
        .architecture = "Qwen2ForCausalLM",
        .model_type = "qwen2",
        .n_kv_heads = 32,
        .windows = MT_WINDOW_UPPER_LAYERS,
        .qkv_bias = MT_FEATURE_ALWAYS,
        .parts = {"attention", "mlp"},
    },
    {
        .architecture = "Qwen3ForCausalLM",
        .model_type = "qwen3",
        .n_kv_heads = 32,
        .head_dim = 128,
        .windows = MT_WINDOW_UPPER_LAYERS,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .qk_norm = MT_QK_NORM_HEADS,
        .parts = {"attention", "mlp"},
    },
    {
        .architecture = "Qwen3VLTextModel", /* within Qwen3VLForConditionalGeneration */
        .model_type = "qwen3_vl_text",
        .n_kv_heads = 32,
        .head_dim = 128,
        .rope_theta = 500000,
        .mrope = true,
        .max_pos = 128000,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .qk_norm = MT_QK_NORM_HEADS,
        .parts = {"attention", "mlp"},
    },
    {
        .architecture = "Qwen3MoeForCausalLM",
        .model_type = "qwen3_moe",
        .n_kv_heads = 4,
        .window = 4096,
        .windows = MT_WINDOW_BY_FLAG,
        .max_pos = 32768,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .qk_norm = MT_QK_NORM_HEADS,
        .parts = {"attention", "mlp"},
        .sparse_parts = SPARSE_PARTS,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 128, .top_k = 8, .width = 768, .renorm = MT_MOE_RENORM_SUM, .scale = 1,
                       .weights_rounded = true},
            .layers = MT_MOE_SPARSE_STEP,
            .renorm_by_key = true,
        },
    },
    {
        .architecture = "MixtralForCausalLM",
        .model_type = "mixtral",
        .n_kv_heads = 8,
        .windows = MT_WINDOW_EVERY_LAYER,
        .norm.eps = 1e-5,
        .rope_theta = 1e6,
        .max_pos = 131072,
        .parts = {"attention", "mlp"},
        .sparse_parts = SPARSE_PARTS,
        .on_disk = mixtral_names,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 8, .top_k = 2, .renorm = MT_MOE_RENORM_SUM, .scale = 1},
            .width_is_ffn = true,
        },
    },
    {
        .architecture = "Qwen2MoeForCausalLM",
        .model_type = "qwen2_moe",
        .n_kv_heads = 16,
        .window = 4096,
        .windows = MT_WINDOW_EVEN_LOWER_LAYERS,
        .max_pos = 32768,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .bias_key = "qkv_bias",
        .bias_by_default = true,
        .parts = {"attention", "mlp"},
        .sparse_parts = SPARSE_PARTS,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 60, .top_k = 4, .width = 1408, .shared_width = 5632, .shared_gate = true,
                       .renorm = MT_MOE_RENORM_SUM, .scale = 1, .weights_rounded = true},
            .layers = MT_MOE_SPARSE_STEP,
            .shared = MT_MOE_SHARED_WIDTH,
            .renorm_by_key = true,
        },
        .experts_unread = true,
    },
    {
        .architecture = "OlmoeForCausalLM",
        .model_type = "olmoe",
        .norm.eps = 1e-5,
        .max_pos = 4096,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .qk_norm = MT_QK_NORM_PROJECTION,
        .parts = {"attention", "mlp"},
        .sparse_parts = SPARSE_PARTS,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 64, .top_k = 8, .renorm = MT_MOE_RENORM_SUM, .scale = 1, .weights_rounded = true},
            .width_is_ffn = true,
            .renorm_by_key = true,
        },
    },
    {
        .architecture = "GptOssForCausalLM",
        .model_type = "gpt_oss",
        .n_kv_heads = 8,
        .head_dim = 64,
        .window = 128,
        .windows = MT_WINDOW_EVEN_LAYERS,
        .norm.eps = 1e-5,
        .rope_theta = 150000,
        .needs_rope_scaling = true,
        .max_pos = 131072,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .bias_by_default = true,
        .sinks = true,
        .norm.round_once = true,
        .parts = {"attention", "mlp"},
        .sparse_parts = SPARSE_PARTS,
        .on_disk = gpt_oss_tensors,
        .fused = gpt_oss_experts,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 128, .top_k = 4, .router_bias = true, .expert_bias = true,
                       .score = MT_MOE_CHOSEN_SOFTMAX, .scale = 1, .weights_rounded = true, .clamped = true,
                       .alpha = 1.702, .limit = 7},
            .width_is_ffn = true,
        },
    },
    {
        .architecture = "Glm4MoeForCausalLM",
        .model_type = "glm4_moe",
        .n_kv_heads = 8,
        .norm.eps = 1e-5,
        .max_pos = 131072,
        .partial_rotary = 0.5,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .qk_norm = MT_QK_NORM_HEADS,
        .qk_norm_key = "use_qk_norm",
        .parts = {"attention", "mlp"},
        .sparse_parts = SPARSE_PARTS,
        .on_disk = shared_experts_tensors,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 128, .top_k = 8, .width = 1408, .select_bias = true, .router_f32 = true,
                       .score = MT_MOE_SIGMOID, .renorm = MT_MOE_RENORM_SUM, .renorm_eps = 1e-20, .scale = 1},
            .layers = MT_MOE_AFTER_FIRST,
            .first_dense = 1,
            .shared = MT_MOE_SHARED_COUNT,
            .shared_count = 1,
            .groups = true,
            .renorm_by_key = true,
            .renorm_by_default = true,
            .scale_key = "routed_scaling_factor",
        },
    },
    {
        .architecture = "MiniMaxM2ForCausalLM",
        .model_type = "minimax_m2",
        .n_kv_heads = 8,
        .head_dim = 128,
        .norm.eps = 1e-6,
        .rope_theta = 5e6,
        .max_pos = 196608,
        .partial_rotary = 1,
        .code_is_known = true,
        .qk_norm = MT_QK_NORM_PROJECTION,
        .parts = {"attention", "mlp"},
        .sparse_parts = SPARSE_PARTS,
        .on_disk = minimax_tensors,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 256, .top_k = 8, .select_bias = true, .score = MT_MOE_SIGMOID,
                       .renorm = MT_MOE_RENORM_SUM, .scale = 1},
            .width_is_ffn = true,
        },
    },
    {
        .architecture = "Dots1ForCausalLM",
        .model_type = "dots1",
        .n_kv_heads = 32,
        .window = 4096,
        .windows = MT_WINDOW_FROM_LAYER,
        .code_is_known = true,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .qk_norm = MT_QK_NORM_HEADS,
        .parts = {"attention", "mlp"},
        .sparse_parts = SPARSE_PARTS,
        .on_disk = shared_experts_tensors,
        .moe = &(const struct mt_moe_family){
            .values = {.width = 1408, .select_bias = true, .router_f32 = true, .score = MT_MOE_SIGMOID,
                       .renorm = MT_MOE_RENORM_SUM, .renorm_eps = 1e-20, .scale = 1},
            .layers = MT_MOE_AFTER_FIRST,
            .shared = MT_MOE_SHARED_COUNT,
            .groups = true,
            .renorm_by_key = true,
            .scale_key = "routed_scaling_factor",
        },
    },
    {
        .architecture = "SolarOpenForCausalLM",
        .model_type = "solar_open",
        .n_kv_heads = 8,
        .head_dim = 128,
        .norm.eps = 1e-5,
        .rope_theta = 1e6,
        .max_pos = 131072,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .parts = {"attention", "mlp"},
        .sparse_parts = SPARSE_PARTS,
        .on_disk = shared_experts_tensors,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 128, .top_k = 8, .width = 1280, .select_bias = true, .router_f32 = true,
                       .score = MT_MOE_SIGMOID, .renorm = MT_MOE_RENORM_SUM, .renorm_eps = 1e-20, .scale = 1},
            .shared = MT_MOE_SHARED_COUNT,
            .shared_count = 1,
            .groups = true,
            .renorm_by_key = true,
            .renorm_by_default = true,
            .scale_key = "routed_scaling_factor",
        },
    },
    {
        .architecture = "HYV3ForCausalLM",
        .model_type = "hy_v3",
        .n_kv_heads = 8,
        .head_dim = 128,
        .norm.eps = 1e-5,
        .rope_theta = 11158840,
        .max_pos = 131072,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .refused_flag = "mlp_bias",
        .qk_norm = MT_QK_NORM_HEADS,
        .parts = {"attention", "mlp"},
        .sparse_parts = SPARSE_PARTS,
        .on_disk = hy_v3_tensors,
        .experts_unread = true,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 192, .top_k = 8, .width = 1536, .select_bias = true, .router_f32 = true,
                       .score = MT_MOE_SIGMOID, .renorm = MT_MOE_RENORM_SUM, .renorm_eps = 1e-20, .scale = 2.826},
            .layers = MT_MOE_LAYER_TYPES,
            .shared = MT_MOE_SHARED_COUNT,
            .shared_count = 1,
            .scale_key = "router_scaling_factor",
        },
    },
    {
        .architecture = "Ernie4_5_MoeForCausalLM",
        .model_type = "ernie4_5_moe",
        .n_kv_heads = 4,
        .norm.eps = 1e-5,
        .rope_theta = 500000,
        .max_pos = 131072,
        .tied = true,
        .code_is_known = true,
        .refused_flag = "use_bias",
        .rope_pairs = true,
        .parts = {"attention", "mlp"},
        .sparse_parts = SPARSE_PARTS,
        .on_disk = ernie_tensors,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 64, .top_k = 6, .width = 1536, .select_bias = true, .router_f32 = true,
                       .score = MT_MOE_SOFTMAX, .renorm = MT_MOE_RENORM_MOST, .renorm_eps = 1e-12, .scale = 1,
                       .weights_rounded = true},
            .layers = MT_MOE_INTERVAL,
            .shared = MT_MOE_SHARED_COUNT,
            .shared_count = 2,
            .eps_key = "moe_norm_min",
        },
    },
    {
        .architecture = "HunYuanMoEV1ForCausalLM",
        .model_type = "hunyuan_v1_moe",
        .norm.eps = 1e-5,
        .rope_alpha = true,
        .code_is_known = true,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .qk_norm = MT_QK_NORM_AFTER_ROPE,
        .parts = {"attention", "mlp"},
        .sparse_parts = SPARSE_PARTS,
        .on_disk = hunyuan_tensors,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 1, .top_k = 1, .router_f32 = true, .renorm = MT_MOE_RENORM_SUM, .scale = 1},
            .shared = MT_MOE_SHARED_FFN,
            .width_is_ffn = true,
        },
    },
    { /* Kimi K2 and Moonlight, too */
        .architecture = "DeepseekV3ForCausalLM",
        .model_type = "deepseek_v3",
        .max_pos = 4096,
        .code_is_known = true,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .latent = &(const struct mt_latent_family){1536, 512, 128, 64, 128},
        .parts = {"mla", "mlp"},
        .sparse_parts = LATENT_SPARSE_PARTS,
        .on_disk = shared_experts_tensors,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 256, .top_k = 8, .width = 2048, .select_bias = true, .router_f32 = true,
                       .score = MT_MOE_SIGMOID, .n_group = 8, .topk_group = 4, .renorm = MT_MOE_RENORM_SUM,
                       .renorm_eps = 1e-20, .scale = 2.5},
            .layers = MT_MOE_AFTER_FIRST,
            .first_dense = 3,
            .shared = MT_MOE_SHARED_COUNT,
            .shared_count = 1,
            .groups = true,
            .renorm_by_key = true,
            .renorm_by_default = true,
            .scale_key = "routed_scaling_factor",
        },
    },
    {
        .architecture = "DeepseekV2ForCausalLM",
        .model_type = "deepseek_v2",
        .code_is_known = true,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .refused_flag = "norm_topk_prob", /* which the class does not read */
        .latent = &(const struct mt_latent_family){1536, 512, 128, 64, 128},
        .parts = {"mla", "mlp"},
        .sparse_parts = LATENT_SPARSE_PARTS,
        .on_disk = shared_experts_tensors,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 64, .router_f32 = true, .group_score = MT_MOE_GROUP_MAX, .scale = 1},
            .layers = MT_MOE_AFTER_FIRST,
            .shared = MT_MOE_SHARED_COUNT,
            .shared_count = 2,
            .groups = true,
            .group_method = "group_limited_greedy",
            .scale_key = "routed_scaling_factor",
        },
    },
    { /* GLM-4.7-Flash */
        .architecture = "Glm4MoeLiteForCausalLM",
        .model_type = "glm4_moe_lite",
        .norm.eps = 1e-5,
        .max_pos = 202752,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .latent = &(const struct mt_latent_family){768, 512, 192, 64, 256},
        .parts = {"mla", "mlp"},
        .sparse_parts = LATENT_SPARSE_PARTS,
        .on_disk = shared_experts_tensors,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 64, .top_k = 4, .width = 1536, .select_bias = true, .router_f32 = true,
                       .score = MT_MOE_SIGMOID, .renorm = MT_MOE_RENORM_SUM, .renorm_eps = 1e-20, .scale = 1.8},
            .layers = MT_MOE_LAYER_TYPES,
            .shared = MT_MOE_SHARED_COUNT,
            .shared_count = 1,
            .groups = true,
            .renorm_by_key = true,
            .renorm_by_default = true,
            .scale_key = "routed_scaling_factor",
        },
    },
    {
        .architecture = "Gemma3ForCausalLM",
        .model_type = "gemma3_text",
        .n_kv_heads = 4,
        .head_dim = 256,
        .window = 4096,
        .windows = MT_WINDOW_ALL_BUT,
        .full_every = 6,
        .norm = {.plus_one = true},
        .norms = &sandwich_norms,
        .rope_theta = 1e6,
        .rope_by_window = true,
        .window_theta = 10000,
        .max_pos = 131072,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .qk_norm = MT_QK_NORM_HEADS,
        .tied = true,
        .embed_by_width = true,
        .numbers = (const struct mt_family_number[]){{"query_pre_attn_scalar", MT_VALUE_QUERY_SCALAR, 256},
                                                     {"final_logit_softcapping", MT_VALUE_LOGIT_CAP, 0},
                                                     {NULL}},
        .activation_key = "hidden_activation",
        .activation = "gelu_pytorch_tanh",
        .refused_flag = "use_bidirectional_attention",
        .parts = {"attention", "mlp"},
    },
    {
        .architecture = "Gemma2ForCausalLM",
        .model_type = "gemma2",
        .n_kv_heads = 4,
        .head_dim = 256,
        .window = 4096,
        .windows = MT_WINDOW_EVEN_LAYERS,
        .norm = {.plus_one = true},
        .norms = &sandwich_norms,
        .max_pos = 8192,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .tied = true,
        .embed_by_width = true,
        .numbers = (const struct mt_family_number[]){{"query_pre_attn_scalar", MT_VALUE_QUERY_SCALAR, 256},
                                                     {"attn_logit_softcapping", MT_VALUE_SCORE_CAP, 50},
                                                     {"final_logit_softcapping", MT_VALUE_LOGIT_CAP, 30},
                                                     {NULL}},
        .activation_key = "hidden_activation",
        .activation = "gelu_pytorch_tanh",
        .refused_flag = "use_bidirectional_attention",
        .parts = {"attention", "mlp"},
    },
    {
        .architecture = "Olmo2ForCausalLM",
        .model_type = "olmo2",
        .norm = {.eps = 1e-5, .round_once = true},
        .norms = &norms_after,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .qk_norm = MT_QK_NORM_PROJECTION,
        .parts = {"attention", "mlp"},
    },
    {
        .architecture = "Olmo3ForCausalLM",
        .model_type = "olmo3",
        .window = 4096,
        .windows = MT_WINDOW_ALL_BUT,
        .full_every = 4,
        .norm = {.eps = 1e-5, .round_once = true},
        .norms = &norms_after,
        .rope_theta = 500000,
        .rope_by_window = true,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .qk_norm = MT_QK_NORM_PROJECTION,
        .parts = {"attention", "mlp"},
    },
    {
        .architecture = "GraniteForCausalLM",
        .model_type = "granite",
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .mlp_bias = MT_FEATURE_BY_KEY,
        .numbers = (const struct mt_family_number[]){{"embedding_multiplier", MT_VALUE_EMBED_SCALE, 1},
                                                     {"residual_multiplier", MT_VALUE_RESIDUAL, 1},
                                                     {"attention_multiplier", MT_VALUE_SCORE_SCALE, 1},
                                                     {"logits_scaling", MT_VALUE_LOGIT_DIVISOR, 1},
                                                     {NULL}},
        .parts = {"attention", "mlp"},
    },
    {
        .architecture = "Phi3ForCausalLM",
        .model_type = "phi3",
        .windows = MT_WINDOW_EVERY_LAYER,
        .norm.eps = 1e-5,
        .max_pos = 4096,
        .partial_rotary = 1,
        .qkv_name = "self_attn.qkv_proj.weight",
        .gate_up_name = "mlp.gate_up_proj.weight",
        .code_is_known = true,
        .parts = {"attention", "mlp"},
    },
    {
        .architecture = "Exaone4ForCausalLM",
        .model_type = "exaone4",
        .n_kv_heads = 32,
        .window = 4096,
        .windows = MT_WINDOW_ALL_BUT,
        .full_every = 4,
        .norm.eps = 1e-5,
        .norms = &norms_after,
        .ropes = MT_ROPE_OF_WINDOWS,
        .qk_norm = MT_QK_NORM_HEADS,
        .parts = {"attention", "mlp"},
    },
    {
        .architecture = "SeedOssForCausalLM",
        .model_type = "seed_oss",
        .n_kv_heads = 8,
        .head_dim = 128,
        .max_pos = 524288,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .bias_by_default = true,
        .o_bias = MT_FEATURE_BY_KEY,
        .o_bias_key = "attention_out_bias",
        .mlp_bias = MT_FEATURE_BY_KEY,
        .ignores_dropout = true,
        .parts = {"attention", "mlp"},
    },
    {
        .architecture = "HunYuanDenseV1ForCausalLM",
        .model_type = "hunyuan_v1_dense",
        .norm.eps = 1e-5,
        .rope_alpha = true,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .qk_norm = MT_QK_NORM_AFTER_ROPE,
        .parts = {"attention", "mlp"},
        .on_disk = hunyuan_tensors,
    },
    {
        .architecture = "Ernie4_5ForCausalLM",
        .model_type = "ernie4_5",
        .n_kv_heads = 2,
        .head_dim = 128,
        .norm.eps = 1e-5,
        .rope_theta = 500000,
        .max_pos = 131072,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .mlp_bias = MT_FEATURE_BY_KEY,
        .bias_key = "use_bias",
        .mlp_bias_key = "use_bias",
        .tied = true,
        .code_is_known = true,
        .rope_pairs = true,
        .parts = {"attention", "mlp"},
    },
    {
        .architecture = "SmolLM3ForCausalLM",
        .model_type = "smollm3",
        .n_kv_heads = 4,
        .windows = MT_WINDOW_BY_FLAG,
        .ropes = MT_ROPE_BY_LIST,
        .rope_theta = 2e6,
        .max_pos = 32768,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .o_bias = MT_FEATURE_BY_KEY,
        .mlp_bias = MT_FEATURE_BY_KEY,
        .tied = true,
        .parts = {"attention", "mlp"},
    },
    {
        .architecture = "CwmForCausalLM",
        .model_type = "cwm",
        .n_kv_heads = 8,
        .head_dim = 128,
        .window = 8192,
        .windows = MT_WINDOW_ALL_AFTER,
        .full_every = 4,
        .norm.eps = 1e-5,
        .needs_rope_scaling = true,
        .rope_theta = 1e6,
        .max_pos = 131072,
        .mlp_bias = MT_FEATURE_BY_KEY,
        .parts = {"attention", "mlp"},
    },
    {
        .architecture = "MinistralForCausalLM",
        .model_type = "ministral",
        .n_kv_heads = 8,
        .window = 4096,
        .windows = MT_WINDOW_ANY_LAYERS,
        .max_pos = 131072,
        .parts = {"attention", "mlp"},
    },
    {
        .architecture = "GlmForCausalLM",
        .model_type = "glm",
        .n_kv_heads = 2,
        .head_dim = 128,
        .norm.eps = 1.5625e-7,
        .max_pos = 131072,
        .partial_rotary = 0.5,
        .rope_pairs = true,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .bias_by_default = true,
        .gate_up_name = "mlp.gate_up_proj.weight",
        .parts = {"attention", "mlp"},
    },
    {
        .architecture = "Glm4ForCausalLM",
        .model_type = "glm4",
        .n_kv_heads = 2,
        .head_dim = 128,
        .norm.eps = 1.5625e-7,
        .norms = &glm4_norms,
        .max_pos = 131072,
        .partial_rotary = 0.5,
        .rope_pairs = true,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .bias_by_default = true,
        .gate_up_name = "mlp.gate_up_proj.weight",
        .parts = {"attention", "mlp"},
    },
};

const struct mt_text_names mt_text_names[MT_N_TEXT_NAMES] = {
    [MT_TEXT_FLAT] = {"model.", "lm_head.", "model."},
    [MT_TEXT_WITHIN] = {"model.language_model.", "lm_head.", "model.language_model."},
    [MT_TEXT_BEFORE] = {"language_model.model.", "language_model.lm_head.", "model.language_model."},
};

static const struct mt_nested_family nested[] = {
    {"Qwen3VLForConditionalGeneration", "qwen3_vl", {{"qwen3_vl_text", "qwen3_vl_text"}}, false, MT_TEXT_WITHIN},
    {"Mistral3ForConditionalGeneration", "mistral3", {{"mistral", "mistral"}}, true, MT_TEXT_BEFORE},
    {"Gemma3ForConditionalGeneration", "gemma3", {{"gemma3_text", "gemma3_text"}}, true, MT_TEXT_BEFORE},
};

const struct mt_nested_family *mt_family_find_nested(const char *architecture, const char *model_type)
{
    for (size_t i = 0; i < MT_ARRAY_LEN(nested); i++)
        if (architecture ? !strcmp(architecture, nested[i].architecture)
                         : model_type && !strcmp(model_type, nested[i].model_type))
            return &nested[i];
    return NULL;
}

const struct mt_family *mt_family_find(const char *architecture, const char *model_type)
{
    for (size_t i = 0; i < MT_ARRAY_LEN(families); i++) {
        const struct mt_family *f = &families[i];
        if (architecture ? !strcmp(architecture, f->architecture) : model_type && !strcmp(model_type, f->model_type))
            return f;
    }
    return NULL;
}

const struct mt_family *mt_family_at(size_t i)
{
    return i < MT_ARRAY_LEN(families) ? &families[i] : NULL;
}

const struct mt_tensor_on_disk *mt_family_on_disk(const struct mt_family *f, const char *usual)
{
    for (const struct mt_tensor_on_disk *d = f->on_disk; d && d->usual; d++)
        if (!strcmp(d->usual, usual))
            return d;
    return NULL;
}

const char *mt_family_usual(const struct mt_family *f, const char *disk)
{
    for (const struct mt_tensor_on_disk *d = f->on_disk; d && d->usual; d++)
        if (!strcmp(d->name, disk))
            return d->usual;
    return disk;
}

void mt_family_module(char *module, size_t len, const struct mt_family *f, const char *tensor)
{
    static const char layers[] = "layers.";
    const char *dot = strrchr(tensor, '.'), *at = strstr(tensor, layers);
    size_t n = MT_MIN(dot ? (size_t)(dot - tensor) : 0, len - 1);
    memcpy(module, tensor, n);
    module[n] = '\0';
    const struct mt_text_names *before = &mt_text_names[MT_TEXT_BEFORE];
    size_t k = strlen(before->in_files);
    if (!strncmp(tensor, before->in_files, k))
        snprintf(module, len, "%s%.*s", before->modules, (int)(n - k), tensor + k);
    if (!at)
        return;
    const char *name = strchr(at + strlen(layers), '.');
    for (const struct mt_tensor_on_disk *d = f->on_disk; name && d && d->usual; d++)
        if (d->module && !strcmp(d->name, name + 1))
            snprintf(module, len, "%.*s%s", (int)(name + 1 - tensor), tensor, d->module);
}

void mt_family_tensor(char *name, size_t len, const struct mt_family *f, const char *tensor)
{
    const char *dot = strrchr(tensor, '.');
    mt_family_module(name, len, f, tensor);
    size_t n = strlen(name);
    snprintf(name + n, len - n, "%s", dot ? dot : tensor);
}

static const struct mt_fused_tensor *find_fused(const struct mt_fused_tensor *list, const char *usual, int *part)
{
    for (const struct mt_fused_tensor *t = list; t && t->name; t++)
        for (*part = 0; *part < 2 && t->usual[*part]; ++*part)
            if (!strcmp(t->usual[*part], usual))
                return t;
    return NULL;
}

const struct mt_fused_tensor *mt_family_fused(const struct mt_family *f, const char *usual, int *part)
{
    return find_fused(f->fused, usual, part);
}

const struct mt_fused_tensor *mt_family_joined(const struct mt_family *f, const char *usual, int *part)
{
    return find_fused(f->fused ? f->fused : joined_experts, usual, part);
}

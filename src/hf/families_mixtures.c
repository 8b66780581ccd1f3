/* SPDX-License-Identifier: Apache-2.0 */
/* Mixtures of experts. Sources: the configuration and modeling files of transformers, by model_type. */
#include "hf/families.h"

#include "base/mem.h"

/* The router and the three matrices of an expert as Mixtral names them. */
#define MIXTRAL_NAMES                                                                                                  \
    {"mlp.gate.weight", "block_sparse_moe.gate.weight", .module = "mlp.gate"},                                         \
        {"mlp.experts.*.gate_proj.weight", "block_sparse_moe.experts.*.w1.weight"},                                    \
        {"mlp.experts.*.up_proj.weight", "block_sparse_moe.experts.*.w3.weight"},                                      \
        {"mlp.experts.*.down_proj.weight", "block_sparse_moe.experts.*.w2.weight"}
static const struct mt_tensor_on_disk mixtral_names[] = {MIXTRAL_NAMES, {NULL}};

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
    MIXTRAL_NAMES,
    {SELECT_BIAS, "block_sparse_moe.e_score_correction_bias", .is_f32 = true},
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

static const struct mt_tensor_on_disk gemma4_tensors[] = {
    {"mlp.gate.weight", "router.proj.weight"},
    {NULL},
};
static const struct mt_fused_tensor gemma4_experts[] = {
    {"experts.gate_up_proj", {"mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"}, false, false},
    {"experts.down_proj", {"mlp.experts.*.down_proj.weight"}, false, false},
    {0},
};

static const struct mt_tensor_on_disk granite_tensors[] = {
    {"mlp.gate.weight", "block_sparse_moe.router.layer.weight", .module = "block_sparse_moe.router"},
    {NULL},
};
const struct mt_fused_tensor mt_granite_experts[] = {
    {"block_sparse_moe.input_linear.weight", {"mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"},
     .parameter = "block_sparse_moe.experts.gate_up_proj"},
    {"block_sparse_moe.output_linear.weight", {"mlp.experts.*.down_proj.weight"},
     .parameter = "block_sparse_moe.experts.down_proj"},
    {0},
};

static const struct mt_tensor_on_disk exaone_tensors[] = {
    {SELECT_BIAS, "mlp.e_score_correction_bias", .is_f32 = true, .module = "mlp.gate"},
    SHARED_AS("shared_experts", "shared_experts"),
    {NULL},
};

static const struct mt_tensor_on_disk mimo_tensors[] = {
    {"mlp.gate.weight", "mlp.gate.weight", .is_f32 = true},
    {SELECT_BIAS, SELECT_BIAS, .is_f32 = true},
    {"self_attn.sinks", "self_attn.attention_sink_bias", .module = "self_attn"},
    {NULL},
};

static const struct mt_tensor_on_disk afmoe_tensors[] = {
    {"mlp.gate.weight", "mlp.router.gate.weight"},
    {SELECT_BIAS, "mlp.expert_bias", .is_f32 = true},
    SHARED_AS("shared_experts", "shared_experts"),
    {NULL},
};

static const struct mt_fused_tensor mistral4_experts[] = {
    {"mlp.experts.gate_up_proj", {"mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"}},
    {"mlp.experts.down_proj", {"mlp.experts.*.down_proj.weight"}},
    {0},
};

static const struct mt_family families[] = {
    {
        "Qwen3MoeForCausalLM", "qwen3_moe",
        .n_kv_heads = 4,
        .window = 4096,
        .windows = MT_WINDOW_BY_FLAG,
        .max_pos = 32768,
        MT_BIASES(MT_FEATURE_BY_KEY),
        .layer.qk_norm = MT_QK_NORM_HEADS,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 128, .top_k = 8, .width = 768, .renorm = MT_MOE_RENORM_SUM, .scale = 1,
                       .weights_rounded = true},
            .layers = MT_MOE_SPARSE_STEP,
            .renorm_by_key = MT_MOE_IF_ON,
        },
    },
    {
        "MixtralForCausalLM", "mixtral",
        .n_kv_heads = 8,
        .windows = MT_WINDOW_EVERY_LAYER,
        .norm.eps = 1e-5,
        .rope_theta = 1e6,
        .max_pos = 131072,
        .on_disk = mixtral_names,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 8, .top_k = 2, .renorm = MT_MOE_RENORM_SUM, .scale = 1},
            .width_is_ffn = true,
        },
    },
    {
        "Qwen2MoeForCausalLM", "qwen2_moe",
        .n_kv_heads = 16,
        .window = 4096,
        .windows = MT_WINDOW_EVEN_LOWER_LAYERS,
        .max_pos = 32768,
        .qkv_bias = MT_FEATURE_UNLESS_OFF,
        .bias_key = "qkv_bias",
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 60, .top_k = 4, .width = 1408, .shared_width = 5632, .shared_gate = true,
                       .renorm = MT_MOE_RENORM_SUM, .scale = 1, .weights_rounded = true},
            .layers = MT_MOE_SPARSE_STEP,
            .shared = MT_MOE_SHARED_WIDTH,
            .renorm_by_key = MT_MOE_IF_ON,
        },
        .experts_unread = true,
    },
    {
        "OlmoeForCausalLM", "olmoe",
        .norm.eps = 1e-5,
        .max_pos = 4096,
        MT_BIASES(MT_FEATURE_BY_KEY),
        .layer.qk_norm = MT_QK_NORM_PROJECTION,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 64, .top_k = 8, .renorm = MT_MOE_RENORM_SUM, .scale = 1, .weights_rounded = true},
            .width_is_ffn = true,
            .renorm_by_key = MT_MOE_IF_ON,
        },
    },
    { /* Granite 3 */
        "GraniteMoeForCausalLM", "granitemoe",
        MT_BIASES(MT_FEATURE_BY_KEY),
        .numbers = mt_granite_numbers,
        .on_disk = granite_tensors,
        .fused = mt_granite_experts,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 8, .top_k = 2, .score = MT_MOE_CHOSEN_SOFTMAX, .scale = 1,
                       .scale_is_residual = true, .weights_rounded = true},
            .width_is_ffn = true,
        },
    },
    {
        "GptOssForCausalLM", "gpt_oss",
        .n_kv_heads = 8,
        .head_dim = 64,
        .window = 128,
        .windows = MT_WINDOW_EVEN_LAYERS,
        .norm.eps = 1e-5,
        .rope_theta = 150000,
        .needs_rope_scaling = true,
        .max_pos = 131072,
        MT_BIASES(MT_FEATURE_UNLESS_OFF),
        .layer.sinks = true,
        .norm.round_once = true,
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
        "Glm4MoeForCausalLM", "glm4_moe",
        .by_muon = true,
        .n_kv_heads = 8,
        .norm.eps = 1e-5,
        .max_pos = 131072,
        .partial_rotary = 0.5,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .layer.qk_norm = MT_QK_NORM_HEADS,
        .qk_norm_key = "use_qk_norm",
        .on_disk = shared_experts_tensors,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 128, .top_k = 8, .width = 1408, MT_DEEPSEEK_SCORES, .scale = 1},
            .layers = MT_MOE_AFTER_FIRST,
            .first_dense = 1,
            MT_ONE_SHARED,
            MT_DEEPSEEK_KEYS,
        },
    },
    {
        "MiniMaxM2ForCausalLM", "minimax_m2",
        .n_kv_heads = 8,
        .head_dim = 128,
        .norm.eps = 1e-6,
        .rope_theta = 5e6,
        .max_pos = 196608,
        .partial_rotary = 1,
        .code_is_known = true,
        .layer.qk_norm = MT_QK_NORM_PROJECTION,
        .on_disk = minimax_tensors,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 256, .top_k = 8, .select_bias = true, .score = MT_MOE_SIGMOID,
                       .renorm = MT_MOE_RENORM_SUM, .scale = 1},
            .width_is_ffn = true,
        },
    },
    {
        "Dots1ForCausalLM", "dots1",
        .n_kv_heads = 32,
        .window = 4096,
        .windows = MT_WINDOW_FROM_LAYER,
        .code_is_known = true,
        MT_BIASES(MT_FEATURE_BY_KEY),
        .layer.qk_norm = MT_QK_NORM_HEADS,
        .on_disk = shared_experts_tensors,
        .moe = &(const struct mt_moe_family){
            .values = {.width = 1408, .select_bias = true, .router_f32 = true, .score = MT_MOE_SIGMOID,
                       .renorm = MT_MOE_RENORM_SUM, .renorm_eps = 1e-20, .scale = 1},
            .layers = MT_MOE_AFTER_FIRST,
            .shared = MT_MOE_SHARED_COUNT,
            .groups = true,
            .renorm_by_key = MT_MOE_IF_ON,
            .scale_key = "routed_scaling_factor",
        },
    },
    {
        "SolarOpenForCausalLM", "solar_open",
        .n_kv_heads = 8,
        .head_dim = 128,
        .norm.eps = 1e-5,
        .rope_theta = 1e6,
        .max_pos = 131072,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .on_disk = shared_experts_tensors,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 128, .top_k = 8, .width = 1280, MT_DEEPSEEK_SCORES, .scale = 1},
            MT_ONE_SHARED,
            MT_DEEPSEEK_KEYS,
        },
    },
    {
        "HYV3ForCausalLM", "hy_v3",
        .n_kv_heads = 8,
        .head_dim = 128,
        .norm.eps = 1e-5,
        .rope_theta = 11158840,
        .max_pos = 131072,
        MT_BIASES(MT_FEATURE_BY_KEY),
        .refused_flags = {"mlp_bias"},
        .layer.qk_norm = MT_QK_NORM_HEADS,
        .on_disk = hy_v3_tensors,
        .experts_unread = true,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 192, .top_k = 8, .width = 1536, MT_DEEPSEEK_SCORES, .scale = 2.826},
            .layers = MT_MOE_LAYER_TYPES,
            MT_ONE_SHARED,
            .scale_key = "router_scaling_factor",
        },
    },
    {
        "Ernie4_5_MoeForCausalLM", "ernie4_5_moe",
        .n_kv_heads = 4,
        .norm.eps = 1e-5,
        .rope_theta = 500000,
        .max_pos = 131072,
        .tied = true,
        .code_is_known = true,
        .refused_flags = {"use_bias"},
        .rope_pairs = true,
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
        "HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe",
        .norm.eps = 1e-5,
        .rope_alpha = true,
        .code_is_known = true,
        MT_BIASES(MT_FEATURE_BY_KEY),
        .layer.qk_norm = MT_QK_NORM_AFTER_ROPE,
        .on_disk = hunyuan_tensors,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 1, .top_k = 1, .router_f32 = true, .renorm = MT_MOE_RENORM_SUM, .scale = 1},
            .shared = MT_MOE_SHARED_FFN,
            .width_is_ffn = true,
        },
    },
    { /* Kimi K2 and Moonlight, too */
        "DeepseekV3ForCausalLM", "deepseek_v3",
        .max_pos = 4096,
        .code_is_known = true,
        MT_BIASES(MT_FEATURE_BY_KEY),
        MT_LATENT(1536, 512, 128, 64, 128),
        .on_disk = shared_experts_tensors,
        .moe = &(const struct mt_moe_family){
            MT_DEEPSEEK_V3,
            .layers = MT_MOE_AFTER_FIRST,
        },
    },
    {
        "DeepseekV2ForCausalLM", "deepseek_v2",
        .code_is_known = true,
        MT_BIASES(MT_FEATURE_BY_KEY),
        .refused_flags = {"norm_topk_prob"}, /* which the class does not read */
        MT_LATENT(1536, 512, 128, 64, 128),
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
        "Glm4MoeLiteForCausalLM", "glm4_moe_lite",
        .norm.eps = 1e-5,
        .max_pos = 202752,
        MT_BIASES(MT_FEATURE_BY_KEY),
        MT_LATENT(768, 512, 192, 64, 256),
        .on_disk = shared_experts_tensors,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 64, .top_k = 4, .width = 1536, MT_DEEPSEEK_SCORES, .scale = 1.8},
            .layers = MT_MOE_LAYER_TYPES,
            MT_ONE_SHARED,
            MT_DEEPSEEK_KEYS,
        },
    },
    { /* with an indexer, which chooses keys of longer documents and has no gradient */
        "DeepseekV32ForCausalLM", "deepseek_v32",
        .max_pos = 163840,
        .code_is_known = true,
        MT_BIASES(MT_FEATURE_BY_KEY),
        MT_LATENT(1536, 512, 128, 64, 128),
        .on_disk = shared_experts_tensors,
        .uncomputed_within = ".indexer.",
        .longest_key = "index_topk",
        .longest = 2048,
        .moe = &(const struct mt_moe_family){
            MT_DEEPSEEK_V3,
            .layers = MT_MOE_TYPES_OR_FIRST,
        },
    },
    { /* GLM-5, the same */
        "GlmMoeDsaForCausalLM", "glm_moe_dsa",
        .norm.eps = 1e-5,
        .max_pos = 202752,
        .code_is_known = true,
        MT_BIASES(MT_FEATURE_BY_KEY),
        MT_LATENT(2048, 512, 192, 64, 256),
        .on_disk = shared_experts_tensors,
        .uncomputed_within = ".indexer.",
        .longest_key = "index_topk",
        .longest = 2048,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 256, .top_k = 8, .width = 2048, MT_DEEPSEEK_SCORES, .scale = 2.5},
            .layers = MT_MOE_TYPES_OR_FIRST,
            .first_dense = 3,
            MT_ONE_SHARED,
            MT_DEEPSEEK_KEYS,
        },
    },
    { /* Mistral Small 4 */
        "Mistral4ForCausalLM", "mistral4",
        .q_growth = true,
        .needs_rope_scaling = true,
        .max_pos = 1048576,
        MT_BIASES(MT_FEATURE_BY_KEY),
        MT_LATENT(1024, 256, 64, 64, 128, .part_of_head = true),
        .on_disk = shared_experts_tensors,
        .fused = mistral4_experts,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 128, .top_k = 4, .width = 2048, .renorm = MT_MOE_RENORM_SUM, .renorm_eps = 1e-20,
                       .scale = 1, .weights_rounded = true},
            .layers = MT_MOE_AFTER_FIRST,
            MT_ONE_SHARED,
            MT_DEEPSEEK_KEYS,
        },
    },
    { /* twice as many keys, and sinks, in layers with a window; values narrower than keys */
        "MiMoV2FlashForCausalLM", "mimo_v2_flash",
        .n_kv_heads = 4,
        .head_dim = 192,
        .v_head_dim = 128,
        .window = 129,
        .window_before_key = "sliding_window_size",
        .windows = MT_WINDOW_ALL_BUT_FIRST,
        .full_every = 6,
        .window_kv_times = 2,
        .norm.eps = 1e-5,
        .rope_theta = 5e6,
        .rope_by_window = true,
        .window_theta = 10000,
        .partial_rotary = 0.334,
        .max_pos = 131072,
        .code_is_known = true,
        .qkv_bias = MT_FEATURE_BY_KEY,
        .layer.sinks = true,
        .sinks_of_windows = true,
        .numbers = (const struct mt_family_number[]){{"attention_value_scale", MT_VALUE_OUTPUT_FACTOR, 0.707}, {NULL}},
        .on_disk = mimo_tensors,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 256, .top_k = 8, .width = 2048, MT_DEEPSEEK_SCORES, .scale = 1},
            .layers = MT_MOE_LAYER_TYPES,
            MT_DEEPSEEK_KEYS,
        },
    },
    { /* K-EXAONE */
        "ExaoneMoeForCausalLM", "exaone_moe",
        .n_kv_heads = 32,
        .window = 4096,
        .windows = MT_WINDOW_ALL_BUT,
        .full_every = 4,
        .norm.eps = 1e-5,
        .ropes = MT_ROPE_OF_WINDOWS,
        .code_is_known = true,
        .layer.qk_norm = MT_QK_NORM_HEADS,
        .on_disk = exaone_tensors,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 64, .top_k = 8, .width = 1024, MT_DEEPSEEK_SCORES, .scale = 2.5},
            .layers = MT_MOE_TYPES_OR_FIRST,
            .first_dense = 1,
            MT_ONE_SHARED,
            MT_DEEPSEEK_KEYS,
        },
    },
    { /* Trinity */
        "AfmoeForCausalLM", "afmoe",
        .by_muon = true,
        .head_dim = 128,
        .window = 1024,
        .windows = MT_WINDOW_ALL_BUT,
        .full_every = 4,
        .full_every_key = "global_attn_every_n_layers",
        .norm = {.eps = 1e-5, .round_once = true},
        .norms = &mt_mlp_norms,
        .ropes = MT_ROPE_OF_WINDOWS_ALONE,
        .max_pos = 16384,
        .code_is_known = true,
        .refused_flags = {"attention_bias"},
        .layer.qk_norm = MT_QK_NORM_HEADS,
        .layer.gate = true,
        .layer.gate_name = "self_attn.gate_proj.weight",
        .peft_refuses = "self_attn.gate_proj.weight", /* it takes that for an expert's */
        .embed_by_width = true,
        .embed_by_width_key = "mup_enabled",
        .on_disk = afmoe_tensors,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 64, .top_k = 6, .width = 1408, .select_bias = true, .normed = true,
                       .score = MT_MOE_SIGMOID, .renorm = MT_MOE_RENORM_SUM, .renorm_eps = 1e-20, .scale = 1},
            .layers = MT_MOE_AFTER_FIRST,
            .first_dense = 1,
            .dense_key = "num_dense_layers",
            .shared = MT_MOE_SHARED_COUNT,
            .shared_count = 2,
            .scale_key = "route_scale",
            .end = "normed",
        },
    },
    { /* Gemma 4, with and without experts */
        "Gemma4ForCausalLM", "gemma4_text",
        MT_GEMMA4,
        .window = 512,
        .max_pos = 131072,
        .zeros = (const struct mt_family_zero[]){{"hidden_size_per_layer_input", 256, MT_NO_LAYER_INPUTS},
                                                 {"num_kv_shared_layers", 0, MT_NO_SHARED_KEYS}, {NULL}},
        .on_disk = gemma4_tensors,
        .fused = gemma4_experts,
        .moe = &(const struct mt_moe_family){
            .key = "enable_moe_block",
            .end = "beside",
            .values = {.beside = true, .router_norm = true, .expert_scale = true, .renorm = MT_MOE_RENORM_SUM,
                       .scale = 1},
        },
    },
};

const struct mt_families mt_mixture_families = {families, MT_ARRAY_LEN(families)};

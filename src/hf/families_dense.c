/* SPDX-License-Identifier: Apache-2.0 */
/* Sources: the configuration and modeling files of transformers, by model_type. */
#include "hf/families.h"

#include "base/mem.h"

/* Hunyuan */
static const struct mt_tensor_on_disk norms_after_rope_tensors[] = {
    {"self_attn.q_norm.weight", "self_attn.query_layernorm.weight"},
    {"self_attn.k_norm.weight", "self_attn.key_layernorm.weight"},
    {NULL},
};

/* Gemma */
const struct mt_layer_norms mt_sandwich_norms = {
    .attention = {"input_layernorm.weight", "post_attention_layernorm.weight"},
    .mlp = {"pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"},
    .experts = {"pre_feedforward_layernorm_2.weight", "post_feedforward_layernorm_2.weight"},
    .mlp_beside = "post_feedforward_layernorm_1.weight",
};

const struct mt_layer_norms mt_mlp_norms = {
    .attention = {"input_layernorm.weight", "post_attention_layernorm.weight"},
    .mlp = {"pre_mlp_layernorm.weight", "post_mlp_layernorm.weight"},
};

const struct mt_family_number mt_granite_numbers[] = {{"embedding_multiplier", MT_VALUE_EMBED_SCALE, 1},
                                                      {"residual_multiplier", MT_VALUE_RESIDUAL, 1},
                                                      {"attention_multiplier", MT_VALUE_SCORE_SCALE, 1},
                                                      {"logits_scaling", MT_VALUE_LOGIT_DIVISOR, 1},
                                                      {NULL}};

/* OLMo 2 and 3, EXAONE 4 */
static const struct mt_layer_norms norms_after = {
    .attention = {NULL, "post_attention_layernorm.weight"},
    .mlp = {NULL, "post_feedforward_layernorm.weight"},
};

static const struct mt_layer_norms glm4_norms = {
    .attention = {"input_layernorm.weight", "post_self_attn_layernorm.weight"},
    .mlp = {"post_attention_layernorm.weight", "post_mlp_layernorm.weight"},
};
#define GLM                                                                                                            \
    .n_kv_heads = 2, .head_dim = 128, .norm.eps = 1.5625e-7, .max_pos = 131072, .partial_rotary = 0.5,                 \
    .rope_pairs = true, .qkv_bias = MT_FEATURE_UNLESS_OFF, .layer.gate_up_name = "mlp.gate_up_proj.weight"

static const struct mt_tensor_on_disk starcoder2_tensors[] = {
    {"mlp.up_proj.weight", "mlp.c_fc.weight"},
    {"mlp.up_proj.bias", "mlp.c_fc.bias"},
    {"mlp.down_proj.weight", "mlp.c_proj.weight"},
    {"mlp.down_proj.bias", "mlp.c_proj.bias"},
    {NULL},
};

/* Both branches of a Cohere layer read the output of its one norm. */
static const struct mt_layer_norms norms_of_both = {.attention = {"input_layernorm.weight", NULL}};
static const struct mt_family_number cohere_numbers[] = {{"logit_scale", MT_VALUE_LOGIT_SCALE, 0.0625}, {NULL}};
#define COHERE                                                                                                         \
    .norm = {.eps = 1e-5, .centred = true}, .norm_eps_key = "layer_norm_eps", .norms = &norms_of_both,                 \
    .max_pos = 8192, MT_BIASES(MT_FEATURE_BY_KEY), .tied = true, .numbers = cohere_numbers, .rope_pairs = true,        \
    .parts = {"parallel"}

static const struct mt_layer_norms apertus_norms = {
    .attention = {"attention_layernorm.weight", NULL},
    .mlp = {"feedforward_layernorm.weight", NULL},
};
static const struct mt_tensor_on_disk apertus_tensors[] = {
    {"mlp.act_fn.beta", "mlp.act_fn.beta", .is_scalar = true},
    {"mlp.act_fn.eps", "mlp.act_fn.eps", .is_scalar = true},
    {NULL},
};

static const struct mt_family families[] = {
    {
        "LlamaForCausalLM", "llama",
        MT_ALL_BIASES(MT_FEATURE_BY_KEY),
    },
    {
        "MistralForCausalLM", "mistral",
        .n_kv_heads = 8,
        .window = 4096,
        .windows = MT_WINDOW_EVERY_LAYER,
    },
    {
        "Qwen2ForCausalLM", "qwen2",
        .n_kv_heads = 32,
        .windows = MT_WINDOW_UPPER_LAYERS,
        .qkv_bias = MT_FEATURE_ALWAYS,
    },
    {
        "Qwen3ForCausalLM", "qwen3",
        .n_kv_heads = 32,
        .head_dim = 128,
        .windows = MT_WINDOW_UPPER_LAYERS,
        MT_BIASES(MT_FEATURE_BY_KEY),
        .layer.qk_norm = MT_QK_NORM_HEADS,
    },
    {
        "Qwen3VLTextModel", "qwen3_vl_text", /* within Qwen3VLForConditionalGeneration */
        .n_kv_heads = 32,
        .head_dim = 128,
        .rope_theta = 500000,
        .mrope = true,
        .max_pos = 128000,
        MT_BIASES(MT_FEATURE_BY_KEY),
        .layer.qk_norm = MT_QK_NORM_HEADS,
    },
    {
        "Gemma3ForCausalLM", "gemma3_text",
        MT_GEMMA,
        .n_heads = 8,
        .vocab = 262208,
        .window = 4096,
        .windows = MT_WINDOW_ALL_BUT,
        .full_every = 6,
        .norm = {.plus_one = true},
        .rope_theta = 1e6,
        .rope_by_window = true,
        .window_theta = 10000,
        .max_pos = 131072,
        .layer.qk_norm = MT_QK_NORM_HEADS,
        .numbers = (const struct mt_family_number[]){{"query_pre_attn_scalar", MT_VALUE_QUERY_SCALAR, 256},
                                                     {"final_logit_softcapping", MT_VALUE_LOGIT_CAP, 0},
                                                     {NULL}},
    },
    { /* Gemma 4 12B */
        "Gemma4UnifiedForCausalLM", "gemma4_unified_text",
        MT_GEMMA4,
        .window = 1024,
        .max_pos = 262144,
        .zeros = (const struct mt_family_zero[]){{"num_kv_shared_layers", 0, MT_NO_SHARED_KEYS}, {NULL}},
    },
    {
        "Gemma2ForCausalLM", "gemma2",
        MT_GEMMA,
        .window = 4096,
        .windows = MT_WINDOW_EVEN_LAYERS,
        .norm = {.plus_one = true},
        .max_pos = 8192,
        .numbers = (const struct mt_family_number[]){{"query_pre_attn_scalar", MT_VALUE_QUERY_SCALAR, 256},
                                                     {"attn_logit_softcapping", MT_VALUE_SCORE_CAP, 50},
                                                     {"final_logit_softcapping", MT_VALUE_LOGIT_CAP, 30},
                                                     {NULL}},
    },
    {
        "Olmo2ForCausalLM", "olmo2",
        .norm = {.eps = 1e-5, .round_once = true},
        .norms = &norms_after,
        MT_BIASES(MT_FEATURE_BY_KEY),
        .layer.qk_norm = MT_QK_NORM_PROJECTION,
    },
    {
        "Olmo3ForCausalLM", "olmo3",
        .window = 4096,
        .windows = MT_WINDOW_ALL_BUT,
        .full_every = 4,
        .norm = {.eps = 1e-5, .round_once = true},
        .norms = &norms_after,
        .rope_theta = 500000,
        .rope_by_window = true,
        .window_theta = 500000, /* whatever rope_theta is, which counts for the other layers */
        MT_BIASES(MT_FEATURE_BY_KEY),
        .layer.qk_norm = MT_QK_NORM_PROJECTION,
    },
    {
        "GraniteForCausalLM", "granite",
        MT_ALL_BIASES(MT_FEATURE_BY_KEY),
        .numbers = mt_granite_numbers,
    },
    {
        "Phi3ForCausalLM", "phi3",
        .windows = MT_WINDOW_EVERY_LAYER,
        .norm.eps = 1e-5,
        .max_pos = 4096,
        .partial_rotary = 1,
        .layer.qkv_name = "self_attn.qkv_proj.weight",
        .layer.gate_up_name = "mlp.gate_up_proj.weight",
        .code_is_known = true,
    },
    {
        "Exaone4ForCausalLM", "exaone4",
        .n_kv_heads = 32,
        .window = 4096,
        .windows = MT_WINDOW_ALL_BUT,
        .full_every = 4,
        .norm.eps = 1e-5,
        .norms = &norms_after,
        .ropes = MT_ROPE_OF_WINDOWS,
        .layer.qk_norm = MT_QK_NORM_HEADS,
    },
    {
        "SeedOssForCausalLM", "seed_oss",
        .n_kv_heads = 8,
        .head_dim = 128,
        .max_pos = 524288,
        .qkv_bias = MT_FEATURE_UNLESS_OFF,
        .o_bias = MT_FEATURE_BY_KEY,
        .o_bias_key = "attention_out_bias",
        .mlp_bias = MT_FEATURE_BY_KEY,
        .ignores_dropout = true,
    },
    {
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense",
        .norm.eps = 1e-5,
        .rope_alpha = true,
        MT_BIASES(MT_FEATURE_BY_KEY),
        .layer.qk_norm = MT_QK_NORM_AFTER_ROPE,
        .on_disk = norms_after_rope_tensors,
    },
    {
        "Ernie4_5ForCausalLM", "ernie4_5",
        .n_kv_heads = 2,
        .head_dim = 128,
        .norm.eps = 1e-5,
        .rope_theta = 500000,
        .max_pos = 131072,
        MT_ALL_BIASES(MT_FEATURE_BY_KEY),
        .bias_key = "use_bias",
        .mlp_bias_key = "use_bias",
        .tied = true,
        .code_is_known = true,
        .rope_pairs = true,
    },
    {
        "SmolLM3ForCausalLM", "smollm3",
        .n_kv_heads = 4,
        .windows = MT_WINDOW_BY_FLAG,
        .refused_flags = {"use_sliding_window"}, /* then layers that do not rotate have windows */
        .ropes = MT_ROPE_BY_LIST,
        .rope_theta = 2e6,
        .max_pos = 32768,
        MT_ALL_BIASES(MT_FEATURE_BY_KEY),
        .tied = true,
    },
    {
        "CwmForCausalLM", "cwm",
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
    },
    {
        "MinistralForCausalLM", "ministral",
        .n_kv_heads = 8,
        .window = 4096,
        .windows = MT_WINDOW_ANY_LAYERS,
        .max_pos = 131072,
    },
    { /* Ministral 3, Devstral 2, Mistral Medium 3.5 */
        "Ministral3ForCausalLM", "ministral3",
        .n_kv_heads = 8,
        .head_dim = 128,
        .windows = MT_WINDOW_EVERY_LAYER,
        .norm.eps = 1e-5,
        .q_growth = true,
        .needs_rope_scaling = true,
        .max_pos = 262144,
    },
    { /* Llama's layers, under a name of its own */
        "InternLM3ForCausalLM", "internlm3",
        .n_kv_heads = 2,
        .head_dim = 128,
        .norm.eps = 1e-5,
        .max_pos = 32768,
        MT_ALL_BIASES(MT_FEATURE_BY_KEY),
        .bias_key = "qkv_bias",
        .o_bias_key = "bias",
        .mlp_bias_key = "bias",
        .code_is_known = true,
    },
    { /* the same */
        "IQuestCoderForCausalLM", "iquestcoder",
        .n_kv_heads = 8,
        .head_dim = 128,
        .norm.eps = 1e-5,
        .max_pos = 131072,
        MT_ALL_BIASES(MT_FEATURE_BY_KEY),
        .refused_flags = {"use_sliding_window"},
        .code_is_known = true,
    },
    {
        "YoutuForCausalLM", "youtu",
        .max_pos = 131072,
        MT_BIASES(MT_FEATURE_BY_KEY),
        MT_LATENT(1536, 512, 128, 64, 128),
        .tied = true,
        .code_is_known = true,
    },
    { /* AFM */
        "ArceeForCausalLM", "arcee",
        .norm.eps = 1e-5,
        .max_pos = 4096,
        MT_ALL_BIASES(MT_FEATURE_BY_KEY),
        .layer.ungated = true,
        .activation = "relu2",
    },
    { /* Nemotron-4, Minitron */
        "NemotronForCausalLM", "nemotron",
        .norm = {.eps = 1e-5, .centred = true, .biased = true, .plus_one = true},
        .norm_eps_key = "norm_eps",
        .max_pos = 4096,
        .partial_rotary = 0.5,
        MT_ALL_BIASES(MT_FEATURE_BY_KEY),
        .layer.ungated = true,
        .activation = "relu2",
    },
    {
        "Starcoder2ForCausalLM", "starcoder2",
        .n_kv_heads = 2,
        .windows = MT_WINDOW_EVERY_LAYER,
        .norm = {.eps = 1e-5, .centred = true, .biased = true},
        .norm_eps_key = "norm_epsilon",
        .max_pos = 4096,
        MT_ALL_BIASES(MT_FEATURE_UNLESS_OFF),
        .bias_key = "use_bias",
        .mlp_bias_key = "use_bias",
        .layer.ungated = true,
        .activation = "gelu_pytorch_tanh",
        .tied = true,
        .ignores_dropout = true,
        .on_disk = starcoder2_tensors,
    },
    {
        "ApertusForCausalLM", "apertus",
        .norm.eps = 1e-5,
        .norms = &apertus_norms,
        .needs_rope_scaling = true,
        .rope_theta = 12e6,
        .max_pos = 65536,
        MT_BIASES(MT_FEATURE_BY_KEY),
        .layer.qk_norm = MT_QK_NORM_HEADS,
        .layer.ungated = true,
        .activation = "xielu",
        .on_disk = apertus_tensors,
    },
    { /* the text of Muse Glimmer */
        "MuseGlimmerTextModel", "muse_glimmer_text",
        .n_kv_heads = 2,
        .head_dim = 128,
        .window = 2048,
        .windows = MT_WINDOW_ALL_BUT_BACKWARD,
        .full_every = 4,
        .norm = {.eps = 1e-5, .plus_one = true},
        .after_eps_key = "post_norm_eps",
        .after_eps = 1e-8,
        .last_norm_plain = true,
        .norms = &mt_sandwich_norms,
        .ropes = MT_ROPE_BY_THETAS,
        .max_pos = 131072,
        .refused_flags = {"attention_bias"},
        .layer.qk_norm = MT_QK_NORM_BARE,
        .layer.gate = true,
        .layer.gate_name = "self_attn.gate_proj.weight",
        .numbers = (const struct mt_family_number[]){{"qk_scale_factor", MT_VALUE_QUERY_FACTOR, 3.87},
                                                     {"output_multiplier", MT_VALUE_LOGIT_SCALE, 0.19611613513818404},
                                                     {"final_logit_softcapping", MT_VALUE_LOGIT_CAP, 20},
                                                     {NULL}},
        .activation_key = "hidden_activation",
        .first_parts = {"embed_norm", "attention", "mlp"},
    },
    { /* Command R */
        "CohereForCausalLM", "cohere",
        COHERE,
        .rope_theta = 500000,
        .refused_flags = {"use_qk_norm"},
    },
    { /* Command R7B, Command A */
        "Cohere2ForCausalLM", "cohere2",
        COHERE,
        .window = 4096,
        .windows = MT_WINDOW_ALL_BUT,
        .full_every = 4,
        .ropes = MT_ROPE_OF_WINDOWS_ALONE,
    },
    {
        "GlmForCausalLM", "glm",
        GLM,
    },
    {
        "Glm4ForCausalLM", "glm4",
        GLM,
        .norms = &glm4_norms,
    },
};

const struct mt_families mt_dense_families = {families, MT_ARRAY_LEN(families)};

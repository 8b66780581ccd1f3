/* SPDX-License-Identifier: Apache-2.0 */
/* Families with a linear recurrence in most layers: the gated delta rule, or Mamba 2. Sources: the configuration and
 * modeling files of transformers. */
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

static const struct mt_layer_kind kinds[] = {
    {"linear_attention", .parts = {"delta", "mlp"}},
    {"full_attention"},
};

#define DELTA(rows)                                                                                                    \
    &(const struct mt_mixer_family){                                                                                   \
        MT_MIXER(kinds, rows),                                                                                         \
        .interval_key = "full_attention_interval",                                                                     \
        .interval = 4,                                                                                                 \
    }

static const struct mt_tensor_on_disk tensors[] = {
    {"linear_attn.conv1d.weight", "linear_attn.conv1d.weight", .is_conv = true},
    {NULL},
};

/* Mamba 2: its tensors, in a module of that name. */
#define MAMBA(module)                                                                                                  \
    {"linear_attn.in_proj.weight", module ".in_proj.weight"}, {"linear_attn.dt_bias", module ".dt_bias"},              \
        {"linear_attn.conv1d.weight", module ".conv1d.weight", .is_conv = true},                                       \
        {"linear_attn.conv1d.bias", module ".conv1d.bias"}, {"linear_attn.A_log", module ".A_log"},                    \
        {"linear_attn.D", module ".D"}, {"linear_attn.norm.weight", module ".norm.weight"},                            \
        {"linear_attn.out_proj.weight", module ".out_proj.weight"}

static const struct mt_tensor_on_disk granite_tensors[] = {
    MAMBA("mamba"),
    {"mlp.down_proj.weight", "shared_mlp.output_linear.weight"},
    {"mlp.shared_expert.down_proj.weight", "shared_mlp.output_linear.weight"},
    {"mlp.gate.weight", "block_sparse_moe.router.layer.weight", .module = "block_sparse_moe.router"},
    {NULL},
};
static const struct mt_family_count granite_counts[] = {
    COUNT(k_heads, "mamba_n_groups", 1, 1 << 12, .divides = "mamba_n_heads"),
    COUNT(v_heads, "mamba_n_heads", 128, 1 << 12, 0),
    COUNT(k_dim, "mamba_d_state", 256, 1024, 8),
    COUNT(v_dim, "mamba_d_head", 0, 1024, 8),
    COUNT(taps, "mamba_d_conv", 4, 8, 0),
};
static const struct mt_layer_kind granite_kinds[] = {
    {"linear_attention", "mamba", .parts = {"delta", "mlp"}},
    {"full_attention", "attention"},
};

static const struct mt_tensor_on_disk nemotron_tensors[] = {
    MAMBA("mixer"),
    {"model.embed_tokens.weight", "model.embeddings.weight"},
    {"model.norm.weight", "model.norm_f.weight"},
    {"self_attn.q_proj.weight", "mixer.q_proj.weight"},
    {"self_attn.k_proj.weight", "mixer.k_proj.weight"},
    {"self_attn.v_proj.weight", "mixer.v_proj.weight"},
    {"self_attn.o_proj.weight", "mixer.o_proj.weight"},
    {"mlp.up_proj.weight", "mixer.up_proj.weight"},
    {"mlp.down_proj.weight", "mixer.down_proj.weight"},
    {"mlp.gate.weight", "mixer.gate.weight"},
    {"mlp.gate.e_score_correction_bias", "mixer.gate.e_score_correction_bias", .is_f32 = true},
    {"mlp.fc1_latent_proj.weight", "mixer.fc1_latent_proj.weight"},
    {"mlp.fc2_latent_proj.weight", "mixer.fc2_latent_proj.weight"},
    {"mlp.experts.*.up_proj.weight", "mixer.experts.*.up_proj.weight"},
    {"mlp.experts.*.down_proj.weight", "mixer.experts.*.down_proj.weight"},
    {"mlp.shared_expert.up_proj.weight", "mixer.shared_experts.up_proj.weight"},
    {"mlp.shared_expert.down_proj.weight", "mixer.shared_experts.down_proj.weight"},
    {NULL},
};
static const struct mt_fused_tensor nemotron_experts[] = {
    {"mixer.experts.up_proj", {"mlp.experts.*.up_proj.weight"}},
    {"mixer.experts.down_proj", {"mlp.experts.*.down_proj.weight"}},
    {0},
};
static const struct mt_family_count nemotron_counts[] = {
    COUNT(k_heads, "n_groups", 8, 1 << 12, .divides = "mamba_num_heads"),
    COUNT(v_heads, "mamba_num_heads", 128, 1 << 12, 0),
    COUNT(k_dim, "ssm_state_size", 128, 1024, 8),
    COUNT(v_dim, "mamba_head_dim", 64, 1024, 8),
    COUNT(taps, "conv_kernel", 4, 8, 0),
};
/* A layer is one branch. */
static const struct mt_layer_kind nemotron_kinds[] = {
    {"linear_attention", "mamba", 'M', .parts = {"delta"}},
    {"full_attention", "attention", '*', .parts = {"attention"}},
    {"mlp", NULL, '-', .parts = {"mlp"}},
    {"moe", NULL, 'E', .parts = {"mlp"}, .is_mixture = true},
};
static const struct mt_layer_norms nemotron_norms = {.attention = {"norm.weight", NULL}, .mlp = {"norm.weight", NULL}};

/* Qwen3-Next and its heirs */
#define QWEN3_NEXT                                                                                                     \
    .head_dim = 256, .norm = {.plus_one = true}, .max_pos = 32768, .partial_rotary = 0.25,                             \
    MT_BIASES(MT_FEATURE_BY_KEY), .layer.qk_norm = MT_QK_NORM_HEADS, .layer.gate = true, .on_disk = tensors, .uncomputed = "mtp."

static const struct mt_family families[] = {
    { /* Qwen3.5, 3.6 and 3.8 */
        "Qwen3_5ForCausalLM", "qwen3_5_text",
        QWEN3_NEXT,
        .n_kv_heads = 4,
        .mrope = true,
        .mixer = DELTA(counts),
    },
    {
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text",
        QWEN3_NEXT,
        .n_kv_heads = 2,
        .mrope = true,
        .mixer = DELTA(counts),
        .experts_as_stored = true,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 256, .top_k = 8, .width = 512, .shared_width = 512, .shared_gate = true,
                       .renorm = MT_MOE_RENORM_SUM, .scale = 1, .weights_rounded = true},
            .shared = MT_MOE_SHARED_WIDTH,
        },
    },
    {
        "Qwen3NextForCausalLM", "qwen3_next",
        QWEN3_NEXT,
        .n_kv_heads = 2,
        .mixer = DELTA(joined_counts),
        .experts_as_stored = true,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 512, .top_k = 10, .width = 512, .shared_width = 512, .shared_gate = true,
                       .renorm = MT_MOE_RENORM_SUM, .scale = 1, .weights_rounded = true},
            .layers = MT_MOE_SPARSE_STEP,
            .shared = MT_MOE_SHARED_WIDTH,
            .renorm_by_key = MT_MOE_UNLESS_OFF,
        },
    },
    { /* Granite 4, with and without Mamba 2 (Micro) and experts */
        "GraniteMoeHybridForCausalLM", "granitemoehybrid",
        .ropes = MT_ROPE_BY_TYPE,
        MT_BIASES(MT_FEATURE_BY_KEY),
        .numbers = mt_granite_numbers,
        .ffn_key = "shared_intermediate_size",
        .layer.gate_up_name = "shared_mlp.input_linear.weight",
        .on_disk = granite_tensors,
        .mixer = &(const struct mt_mixer_family){
            MT_MIXER(granite_kinds, granite_counts),
            .plain = &(const struct mt_plain_family){
                .expand_key = "mamba_expand",
                .conv_bias_key = "mamba_conv_bias",
                .flags = {"mamba_proj_bias"},
                .limits_key = "time_step_limit",
            },
        },
        .fused = mt_granite_experts,
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 8, .top_k = 2, .score = MT_MOE_CHOSEN_SOFTMAX, .scale = 1,
                       .scale_is_residual = true, .weights_rounded = true},
            .width_key = "intermediate_size",
            .none_is_dense = true,
            .shared = MT_MOE_SHARED_FFN,
        },
    },
    { /* Nemotron-H, Nano 2, and with experts Nemotron 3 */
        "NemotronHForCausalLM", "nemotron_h",
        .n_kv_heads = 8,
        .head_dim = 128,
        .norm = {.eps = 1e-5, .round_once = true},
        .norm_eps_key = "layer_norm_epsilon",
        .norms = &nemotron_norms,
        .ropes = MT_ROPE_NEVER,
        .max_pos = 4096,
        .code_is_known = true,
        .refused_flags = {"mlp_bias", "tie_word_embeddings"},
        .activation_key = "mlp_hidden_act",
        .activation = "relu2",
        .layer.ungated = true,
        .names = MT_TEXT_BACKBONE,
        .on_disk = nemotron_tensors,
        .joined = nemotron_experts,
        .experts_unread = true,
        .peft_refuses = "linear_attn.out_proj.weight",
        .uncomputed = "mtp.",
        .mixer = &(const struct mt_mixer_family){
            MT_MIXER(nemotron_kinds, nemotron_counts),
            .plain = &(const struct mt_plain_family){
                .conv_bias_key = "use_conv_bias",
                .flags = {"mamba_proj_bias", "use_bias"},
                .least_key = "time_step_min",
                .least = 0.001,
                .activation_key = "mamba_hidden_act",
            },
        },
        .moe = &(const struct mt_moe_family){
            .values = {.n_experts = 8, .top_k = 2, .width = 7688, .shared_width = 7688, .ungated = true,
                       MT_DEEPSEEK_SCORES, .scale = 1},
            .layers = MT_MOE_BY_KIND,
            .shared = MT_MOE_SHARED_WIDTH,
            .shared_key = "moe_shared_expert_intermediate_size",
            MT_DEEPSEEK_KEYS,
            .latent_key = "moe_latent_size",
        },
    },
};

const struct mt_families mt_delta_families = {families, MT_ARRAY_LEN(families)};

/* SPDX-License-Identifier: Apache-2.0 */
#include "hf/family.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"

#define SPARSE_PARTS {"attention", "router", "lists", "experts", "combine"}

static const struct mt_tensor_on_disk mixtral_names[] = {
    {"mlp.gate.weight", "block_sparse_moe.gate.weight"},
    {"mlp.experts.*.gate_proj.weight", "block_sparse_moe.experts.*.w1.weight"},
    {"mlp.experts.*.up_proj.weight", "block_sparse_moe.experts.*.w3.weight"},
    {"mlp.experts.*.down_proj.weight", "block_sparse_moe.experts.*.w2.weight"},
    {NULL},
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
        .rms_eps = 1e-5,
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
    },
    {
        .architecture = "OlmoeForCausalLM",
        .model_type = "olmoe",
        .rms_eps = 1e-5,
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
};

const struct mt_family *mt_family_find(const char *architecture, const char *model_type)
{
    for (size_t i = 0; i < MT_ARRAY_LEN(families); i++) {
        const struct mt_family *f = &families[i];
        if (architecture ? !strcmp(architecture, f->architecture) : model_type && !strcmp(model_type, f->model_type))
            return f;
    }
    return NULL;
}

void mt_family_list(char *buf, size_t len)
{
    size_t at = 0;
    for (size_t i = 0; i < MT_ARRAY_LEN(families) && at < len; i++)
        at += (size_t)snprintf(buf + at, len - at, "%s%s", i ? ", " : "", families[i].architecture);
}

const struct mt_tensor_on_disk *mt_family_on_disk(const struct mt_family *f, const char *usual)
{
    for (const struct mt_tensor_on_disk *d = f->on_disk; d && d->usual; d++)
        if (!strcmp(d->usual, usual))
            return d;
    return NULL;
}

const struct mt_fused_tensor *mt_family_fused(const struct mt_family *f, const char *usual, int *part)
{
    for (const struct mt_fused_tensor *t = f->fused; t && t->name; t++)
        for (*part = 0; *part < 2 && t->usual[*part]; ++*part)
            if (!strcmp(t->usual[*part], usual))
                return t;
    return NULL;
}

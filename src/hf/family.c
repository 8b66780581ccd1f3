/* SPDX-License-Identifier: Apache-2.0 */
#include "hf/family.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"

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
        .qk_norm = true,
        .parts = {"attention", "mlp"},
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

const char *mt_family_tensor_name(const struct mt_family *f, const char *usual)
{
    for (const struct mt_tensor_rename *r = f->renames; r && r->usual; r++)
        if (!strcmp(r->usual, usual))
            return r->on_disk;
    return usual;
}

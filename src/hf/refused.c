/* SPDX-License-Identifier: Apache-2.0 */
/* Families that are not supported. What they have is as in their classes in transformers, where there is one. */
#include "hf/refused.h"

#include <string.h>

#include "base/mem.h"

#define NO_CLASS "has no class in transformers, so that nothing says what it computes"
#define QWEN35 "train Qwen3.5 or Qwen3.6"
#define GLM5 "train GLM-5 or GLM-4.7-Flash"

static const struct {
    const char *architecture, *model_type; /* how these begin */
    const char *reason;
} refused[] = {
    {"DeepseekV4", "deepseek_v4", "has compressed attention, experts chosen by hashes and hyper-connections; train DeepSeek V3.1 or V3.2"},
    {"Glm5Next", "glm5_next", "has hyper-connections and linear attention with a gate for forgetting; " GLM5},
    {"Qwen4Exp", "qwen4_exp", "has embeddings of n-grams and of each layer, and gated residuals; " QWEN35},
    {"HYV4", "hy_v4", "has hyper-connections and embeddings of n-grams; train Hunyuan A13B or HY3"},
    {"Inkling", "inkling", "has logits by relative position, short convolutions and learned residuals; train Trinity or Qwen3.5"},
    {"MistralLarge4", "mistral_large4", "shares keys and values between layers, and has an indexer; train Mistral Small 4 or Medium 3.5"},
    {"MistralLarge3", "mistral_large3", "is published without a config.json of transformers; train Mistral Small 4 or Medium 3.5"},
    {"MuseSpark", "muse_spark", "has gated residuals and experts with other norms; train Muse Glimmer"},
    {"KimiK3", "kimi_k3", NO_CLASS "; train Kimi K2 or K2.5"},
    {"BailingMoe", "bailing_moe", NO_CLASS "; train GLM-4.5-Air or Qwen3"},
    {"BailingHybrid", "bailing_hybrid", "has linear attention whose decay is by channel; " QWEN35},
    {"KimiLinear", "kimi_linear", "has linear attention whose decay is by channel; train Moonlight or Qwen3.5"},
    {"MiniMaxM3", "minimax_m3", "has block-sparse attention; train MiniMax-M2"},
    {"Gemma3n", "gemma3n", "has AltUp, Laurel and embeddings of each layer; train Gemma 3 or Gemma 4 12B"},
    {"Jamba", "jamba", "has Mamba layers of the first kind; " QWEN35},
    {"Dots3", "dots3", "has an indexer and inputs of audio; train dots.llm1"},
    {"Longcat", "longcat", "has two attentions a layer and experts that do nothing; train DeepSeek V3 or GLM-4.5"},
    {"BitNet", "bitnet", "has ternary weights; train Llama 3 or Qwen3"},
    {"Llama4", "llama4", "has attention in chunks, and experts whose input is scaled; train Llama 3.3 or Qwen3-30B-A3B"},
    {"FalconH1", "falcon_h1", "has Mamba 2 beside attention in each layer, and factors of both; train Granite 4.0 H or Nemotron 3"},
    {"Lfm2", "lfm2", "has gated short convolutions instead of attention in most layers; " QWEN35},
    {"Lfm3", "lfm3", "has gated short convolutions instead of attention in most layers; " QWEN35},
    {"OlmoHybrid", "olmo_hybrid", "has the delta rule under other names and norms than Qwen3.5; train OLMo 3 or Qwen3.5"},
    {"AXK1", "axk1", "has a norm after its experts that dense layers have without using it; train DeepSeek V3"},
    {"Cohere2Moe", "cohere2_moe", "has experts in a parallel block; train Command A (Cohere2)"},
};

const char *mt_refused_reason(const char *architecture, const char *model_type)
{
    for (size_t i = 0; i < MT_ARRAY_LEN(refused); i++) {
        const char *begins = architecture ? refused[i].architecture : refused[i].model_type;
        const char *name = architecture ? architecture : model_type;
        if (name && !strncmp(name, begins, strlen(begins)))
            return refused[i].reason;
    }
    return NULL;
}

const char *mt_refused_at(size_t i, const char **reason)
{
    *reason = i < MT_ARRAY_LEN(refused) ? refused[i].reason : NULL;
    return i < MT_ARRAY_LEN(refused) ? refused[i].architecture : NULL;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "hf/family.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "hf/families.h"

/* Families whose files have the experts one by one are given these parameters in transformers. */
static const struct mt_fused_tensor joined_experts[] = {
    {"mlp.experts.gate_up_proj", {"mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"}, false, false},
    {"mlp.experts.down_proj", {"mlp.experts.*.down_proj.weight"}, false, false},
    {0},
};

const struct mt_text_names mt_text_names[MT_N_TEXT_NAMES] = {
    [MT_TEXT_FLAT] = {"model.", "lm_head.", "model."},
    [MT_TEXT_WITHIN] = {"model.language_model.", "lm_head.", "model.language_model."},
    [MT_TEXT_BEFORE] = {"language_model.model.", "language_model.lm_head.", "model.language_model."},
    [MT_TEXT_BACKBONE] = {"backbone.", "lm_head.", "model."},
};

static const struct mt_nested_family nested[] = {
    {"Qwen3VLForConditionalGeneration", "qwen3_vl", {{"qwen3_vl_text", "qwen3_vl_text"}}, false, MT_TEXT_WITHIN, false,
     {"model.visual"}},
    {"Qwen3_5ForConditionalGeneration", "qwen3_5", {{"qwen3_5_text", "qwen3_5_text"}}, false, MT_TEXT_WITHIN, false,
     {"model.visual"}},
    {"Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", {{"qwen3_5_moe_text", "qwen3_5_moe_text"}}, false,
     MT_TEXT_WITHIN, false, {"model.visual"}},
    {"Mistral3ForConditionalGeneration", "mistral3",
     {{"mistral", "mistral"}, {"ministral3", "ministral3"}, {"mistral4", "mistral4"}}, true, MT_TEXT_BEFORE, false,
     {"model.vision_tower", "model.multi_modal_projector"}},
    {"Gemma3ForConditionalGeneration", "gemma3", {{"gemma3_text", "gemma3_text"}}, true, MT_TEXT_BEFORE, false,
     {"model.vision_tower", "model.multi_modal_projector"}},
    {"Gemma4ForConditionalGeneration", "gemma4", {{"gemma4_text", "gemma4_text"}}, true, MT_TEXT_WITHIN, true,
     {"model.vision_tower", "model.embed_vision", "model.audio_tower", "model.embed_audio"}},
    {"Gemma4UnifiedForConditionalGeneration", "gemma4_unified", {{"gemma4_unified_text", "gemma4_unified_text"}}, true,
     MT_TEXT_WITHIN, true, {"model.embed_vision", "model.embed_audio"}},
    {"MuseGlimmerForConditionalGeneration", "muse_glimmer", {{"muse_glimmer_text", "muse_glimmer_text"}}, false, MT_TEXT_WITHIN,
     true, {"model.vision_tower", "model.vision_adapter", "model.vision_projection"}},
    {"Kimi_K25ForConditionalGeneration", "kimi_k25", {{"deepseek_v3", "deepseek_v3"}, {"kimi_k2", "deepseek_v3"}}, true,
     MT_TEXT_BEFORE, false, {"model.vision_tower", "model.mm_projector"}, "KimiK25ForConditionalGeneration"},
};

const struct mt_nested_family *mt_family_find_nested(const char *architecture, const char *model_type)
{
    for (size_t i = 0; i < MT_ARRAY_LEN(nested); i++)
        if (architecture ? !strcmp(architecture, nested[i].architecture) ||
                               (nested[i].released && !strcmp(architecture, nested[i].released))
                         : model_type && !strcmp(model_type, nested[i].model_type))
            return &nested[i];
    return NULL;
}

const struct mt_family *mt_family_find(const char *architecture, const char *model_type)
{
    const struct mt_family *f;
    for (size_t i = 0; (f = mt_family_at(i)); i++)
        if (architecture ? !strcmp(architecture, f->architecture) : model_type && !strcmp(model_type, f->model_type))
            return f;
    return NULL;
}

const struct mt_family *mt_family_at(size_t i)
{
    static const struct mt_families *const kinds[] = {&mt_dense_families, &mt_mixture_families, &mt_delta_families};
    for (size_t k = 0; k < MT_ARRAY_LEN(kinds); i -= kinds[k++]->n)
        if (i < kinds[k]->n)
            return &kinds[k]->row[i];
    return NULL;
}

const struct mt_tensor_on_disk *mt_family_on_disk(const struct mt_family *f, const char *usual)
{
    for (const struct mt_tensor_on_disk *d = f->on_disk; d && d->usual; d++)
        if (!strcmp(d->usual, usual))
            return d;
    return NULL;
}

void mt_family_module(char *module, size_t len, const struct mt_family *f, const char *tensor)
{
    static const char layers[] = "layers.";
    const char *dot = strrchr(tensor, '.'), *at = strstr(tensor, layers), *prefix = "", *rest = tensor;
    for (size_t i = 0; i < MT_N_TEXT_NAMES; i++) {
        const struct mt_text_names *t = &mt_text_names[i];
        if (strcmp(t->in_files, t->modules) && !strncmp(tensor, t->in_files, strlen(t->in_files))) {
            prefix = t->modules;
            rest = tensor + strlen(t->in_files);
        }
    }
    snprintf(module, len, "%s%.*s", prefix, dot && dot > rest ? (int)(dot - rest) : 0, rest);
    const char *name = at ? strchr(at + strlen(layers), '.') : NULL;
    for (const struct mt_tensor_on_disk *d = f->on_disk; name && d && d->usual; d++)
        if (d->module && !strcmp(d->name, name + 1))
            snprintf(module, len, "%s%.*s%s", prefix, (int)(name + 1 - rest), rest, d->module);
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
    return find_fused(f->fused ? f->fused : f->joined ? f->joined : joined_experts, usual, part);
}

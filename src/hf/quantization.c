/* SPDX-License-Identifier: Apache-2.0 */
#include "hf/quantization.h"

#include <string.h>

#include "base/json.h"
#include "base/regex.h"

static void refuse(struct mt_keys *r, const char *method, const char *what)
{
    if (!r->rc)
        r->rc = mt_fail(r->err, MT_ERR_INPUT, -EINVAL,
                        "%s: quantization_config (%.40s): %.60s is not supported; mxfp4, fp8 in blocks of 128x128 or with one "
                        "scale a tensor, compressed-tensors' int4 in groups of 32 and bitsandbytes' nf4 are, and so is "
                        "the bf16 model",
                        r->name, method, what);
}

static bool is_true(const cJSON *o, const char *key)
{
    return cJSON_IsTrue(mt_json_get(o, key));
}

static const char *text_of(const cJSON *o, const char *key, const char *absent)
{
    const cJSON *v = mt_json_get(o, key);
    return cJSON_IsString(v) ? v->valuestring : absent;
}

static void read_bitsandbytes(struct mt_keys *r, struct mt_hf_config *c, const cJSON *q)
{
    c->packed = MT_PACKED_NF4;
    if (!is_true(q, "load_in_4bit") && !is_true(q, "_load_in_4bit"))
        refuse(r, "bitsandbytes", "int8");
    else if (strcmp(text_of(q, "bnb_4bit_quant_type", "fp4"), "nf4"))
        refuse(r, "bitsandbytes", text_of(q, "bnb_4bit_quant_type", "fp4"));
    else if (strcmp(text_of(q, "bnb_4bit_quant_storage", "uint8"), "uint8"))
        refuse(r, "bitsandbytes", "a bnb_4bit_quant_storage other than uint8");
}

/* E4M3 as DeepSeek's files and as MiniMax' and torch name it. */
static bool is_e4m3(const char *fmt)
{
    return !strcmp(fmt, "e4m3") || !strcmp(fmt, "float8_e4m3fn");
}

static void read_fp8(struct mt_keys *r, struct mt_hf_config *c, const cJSON *q)
{
    const cJSON *block = mt_json_get(q, "weight_block_size");
    bool blocks = cJSON_IsArray(block) && cJSON_GetArraySize(block) == 2;
    c->packed = !block || cJSON_IsNull(block) ? MT_PACKED_FP8T : MT_PACKED_FP8;
    for (const cJSON *v = blocks ? block->child : NULL; v; v = v->next)
        blocks &= cJSON_IsNumber(v) && v->valuedouble == MT_FP8_BLOCK;
    if (c->packed == MT_PACKED_FP8 && !blocks)
        refuse(r, "fp8", "a weight_block_size other than 128x128");
    else if (!is_e4m3(text_of(q, "fmt", "e4m3")))
        refuse(r, "fp8", text_of(q, "fmt", ""));
}

/* A name, or "re:" and a regular expression of Python's that names begin with (compressed-tensors: re.match). */
static bool is_excepted(struct mt_keys *r, const cJSON *ignore, const char *module)
{
    bool any = false;
    for (const cJSON *v = cJSON_IsArray(ignore) ? ignore->child : NULL; v; v = v->next) {
        const char *name = cJSON_IsString(v) ? v->valuestring : "";
        char why[MT_REGEX_WHY];
        bool yes = false;
        if (strncmp(name, "re:", 3))
            yes = !strcmp(name, module);
        else if (mt_regex_begins(&yes, name + 3, module, why))
            refuse(r, "compressed-tensors", name);
        any |= yes;
    }
    return any;
}

/* Which parts of layers are plain; a name stands for each. */
static unsigned plain_parts(struct mt_keys *r, const cJSON *ignore)
{
    static const struct {
        const char *module;
        unsigned part;
    } of[] = {{"model.layers.1.self_attn.o_proj", MT_PLAIN_ATTENTION},
              {"model.layers.1.mlp.gate_proj", MT_PLAIN_MLP},
              {"model.layers.1.mlp.shared_experts.gate_proj", MT_PLAIN_SHARED},
              {"model.layers.1.mlp.experts.0.gate_proj", MT_PLAIN_EXPERTS}};
    unsigned parts = 0;
    for (size_t i = 0; i < sizeof(of) / sizeof(of[0]); i++)
        parts |= is_excepted(r, ignore, of[i].module) ? of[i].part : 0;
    return parts;
}

static bool is_number(const cJSON *o, const char *key, double want)
{
    const cJSON *v = mt_json_get(o, key);
    return cJSON_IsNumber(v) && v->valuedouble == want;
}

/* https://github.com/vllm-project/compressed-tensors, as Kimi-K2-Thinking has it. */
static void read_compressed(struct mt_keys *r, struct mt_hf_config *c, const cJSON *q)
{
    const char *method = "compressed-tensors", *format = text_of(q, "format", "no format");
    const cJSON *groups = mt_json_get(q, "config_groups"), *group = groups ? groups->child : NULL;
    const cJSON *w = group ? mt_json_get(group, "weights") : NULL, *order = w ? mt_json_get(w, "actorder") : NULL;
    const cJSON *in = group ? mt_json_get(group, "input_activations") : NULL;
    c->packed = MT_PACKED_INT4;
    c->plain_parts = plain_parts(r, mt_json_get(q, "ignore"));
    if (strcmp(format, "pack-quantized"))
        refuse(r, method, format);
    else if (!w || group->next)
        refuse(r, method, "a number of config_groups other than one");
    else if (!is_number(w, "num_bits", 4) || strcmp(text_of(w, "type", "int"), "int"))
        refuse(r, method, "a type other than int of 4 bits");
    else if (!is_number(w, "group_size", MT_INT4_BLOCK) || !is_true(w, "symmetric"))
        refuse(r, method, "anything but symmetric groups of 32");
    else if (order && !cJSON_IsNull(order) && !cJSON_IsFalse(order))
        refuse(r, method, "actorder");
    else if (in && !cJSON_IsNull(in))
        refuse(r, method, "input_activations");
}

void mt_quantization_read(struct mt_keys *r, struct mt_hf_config *c)
{
    const cJSON *q = mt_keys_find(r, "quantization_config");
    const char *method = q ? text_of(q, "quant_method", "no quant_method") : NULL;
    if (!q)
        return;
    if (!strcmp(method, "bitsandbytes"))
        read_bitsandbytes(r, c, q);
    else if (!strcmp(method, "fp8"))
        read_fp8(r, c, q);
    else if (!strcmp(method, "compressed-tensors"))
        read_compressed(r, c, q);
    else if (!strcmp(method, "mxfp4"))
        c->packed = MT_PACKED_MXFP4;
    else
        refuse(r, method, method);
}

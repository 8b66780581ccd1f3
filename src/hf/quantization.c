/* SPDX-License-Identifier: Apache-2.0 */
#include "hf/quantization.h"

#include <fnmatch.h>
#include <string.h>
#include <strings.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/regex.h"

static void refuse(struct mt_keys *r, const char *method, const char *what)
{
    if (!r->rc)
        r->rc = mt_fail(r->err, MT_ERR_INPUT, -EINVAL,
                        "%s: quantization_config (%.40s): %.60s is not supported; mxfp4, nvfp4, fp8 in blocks of "
                        "128x128, 64x64, 32x32, 1x128, 1x64 or 1x32, with one scale a row or one a tensor, "
                        "int4 in groups of 32, 64, 128 or rows (compressed-tensors, gptq, awq gemm) and bitsandbytes' nf4 "
                        "are, and so is the bf16 model",
                        r->name, method, what);
}

static bool is_true(const cJSON *o, const char *key)
{
    return cJSON_IsTrue(mt_json_get(o, key));
}

static void read_bitsandbytes(struct mt_keys *r, struct mt_hf_config *c, const cJSON *q)
{
    c->packed = MT_PACKED_NF4;
    if (!is_true(q, "load_in_4bit") && !is_true(q, "_load_in_4bit"))
        refuse(r, "bitsandbytes", "int8");
    else if (strcmp(mt_json_string(q, "bnb_4bit_quant_type", "fp4"), "nf4"))
        refuse(r, "bitsandbytes", mt_json_string(q, "bnb_4bit_quant_type", "fp4"));
    else if (strcmp(mt_json_string(q, "bnb_4bit_quant_storage", "uint8"), "uint8"))
        refuse(r, "bitsandbytes", "a bnb_4bit_quant_storage other than uint8");
}

/* E4M3 as DeepSeek's files and as MiniMax' and torch name it. */
static bool is_e4m3(const char *fmt)
{
    return !strcmp(fmt, "e4m3") || !strcmp(fmt, "float8_e4m3fn");
}

static enum mt_packed fp8_in_blocks(const cJSON *block)
{
    const cJSON *rows = cJSON_IsArray(block) && cJSON_GetArraySize(block) == 2 ? block->child : NULL;
    bool are = rows && cJSON_IsNumber(rows) && cJSON_IsNumber(rows->next) && rows->next->valuedouble > 0;
    return are ? mt_packed_fp8_of(rows->valuedouble, rows->next->valuedouble) : MT_PACKED_NONE;
}

static void read_fp8(struct mt_keys *r, struct mt_hf_config *c, const cJSON *q)
{
    const cJSON *block = mt_json_get(q, "weight_block_size");
    bool one = !block || cJSON_IsNull(block);
    c->packed = one ? MT_PACKED_FP8T : fp8_in_blocks(block);
    /* may say that there are scales of activations; parts of rows are described as by compressed-tensors */
    c->described_anew = one || mt_packed_formats[c->packed].rows == 1;
    if (!c->packed)
        refuse(r, "fp8", "this weight_block_size");
    else if (!is_e4m3(mt_json_string(q, "fmt", "e4m3")))
        refuse(r, "fp8", mt_json_string(q, "fmt", ""));
}

/* A name, or one with wildcards (ModelOpt), or "re:" and a regular expression of Python's that names begin with
 * (compressed-tensors: re.match), or a part of one (`parts`: AWQ). */
static bool is_excepted(struct mt_keys *r, const cJSON *ignore, bool parts, const char *module)
{
    bool any = false;
    for (const cJSON *v = cJSON_IsArray(ignore) ? ignore->child : NULL; v; v = v->next) {
        const char *name = cJSON_IsString(v) ? v->valuestring : "";
        char why[MT_REGEX_WHY];
        bool yes = false;
        if (parts)
            yes = *name && strstr(module, name);
        else if (strncmp(name, "re:", 3))
            yes = !fnmatch(name, module, 0);
        else if (mt_regex_begins(&yes, name + 3, module, why))
            refuse(r, "compressed-tensors", name);
        any |= yes;
    }
    return any;
}

/* Which parts of layers are plain; a name stands for each. */
static unsigned plain_parts(struct mt_keys *r, const cJSON *ignore, bool by_parts)
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
        parts |= is_excepted(r, ignore, by_parts, of[i].module) ? of[i].part : 0;
    return parts;
}

/* Does actorder put columns into another order, which files list? "weight" is of calibration alone. */
static bool has_order(const cJSON *order)
{
    const char *text = cJSON_IsString(order) ? order->valuestring : NULL;
    return order && !cJSON_IsNull(order) && !cJSON_IsFalse(order) &&
           (!text || (strcmp(text, "weight") && strcmp(text, "static")));
}

/* https://github.com/vllm-project/compressed-tensors: int4 as Kimi-K2-Thinking has it, FP8, NVFP4. What activations are
 * rounded to is not used. */
static void read_compressed(struct mt_keys *r, struct mt_hf_config *c, const cJSON *q)
{
    const char *method = "compressed-tensors", *format = mt_json_string(q, "format", "no format");
    const cJSON *groups = mt_json_get(q, "config_groups"), *group = groups ? groups->child : NULL;
    const cJSON *w = group ? mt_json_get(group, "weights") : NULL, *order = w ? mt_json_get(w, "actorder") : NULL;
    const cJSON *in = group ? mt_json_get(group, "input_activations") : NULL, *block = w ? mt_json_get(w, "block_structure") : NULL;
    const char *strategy = w ? mt_json_string(w, "strategy", "") : "", *type = w ? mt_json_string(w, "type", "int") : "";
    bool int4 = !strcmp(format, "pack-quantized"), mx = !strcmp(format, "mxfp4-pack-quantized");
    bool fp4 = mx || !strcmp(format, "nvfp4-pack-quantized");
    double elems = w ? mt_json_number(w, "group_size", 0) : 0;
    c->packed = !strcmp(strategy, "block")                     ? fp8_in_blocks(block)
                : !strcmp(strategy, "group") && elems > 0      ? mt_packed_fp8_of(1, elems)
                : !strcmp(strategy, "channel")                 ? MT_PACKED_FP8R
                : !strcmp(strategy, "tensor")                  ? MT_PACKED_FP8T
                                                               : MT_PACKED_NONE;
    if (int4)
        c->packed = !strcmp(strategy, "channel") ? MT_PACKED_INT4R
                    : elems > 0                  ? mt_packed_int4_of(elems)
                                                 : MT_PACKED_NONE;
    else if (fp4)
        c->packed = mx ? MT_PACKED_MXFP4 : MT_PACKED_NVFP4;
    c->packed_scale = w && is_true(w, "symmetric") ? MT_SCALE_BF16 : MT_SCALE_BF16_ZEROS;
    c->described_anew = !int4;
    c->plain_parts = plain_parts(r, mt_json_get(q, "ignore"), false);
    if (!int4 && !fp4 && strcmp(format, "float-quantized") && strcmp(format, "mxfp8-quantized"))
        refuse(r, method, format);
    else if (!w || group->next)
        refuse(r, method, "a number of config_groups other than one");
    else if (mt_json_number(w, "num_bits", 0) != (int4 || fp4 ? 4 : 8) || strcmp(type, int4 ? "int" : "float"))
        refuse(r, method, "a type other than int of 4 bits, or float of 4 or 8");
    else if ((!int4 && !is_true(w, "symmetric")) || (mx && elems != MT_MXFP4_BLOCK))
        refuse(r, method, "anything but symmetric groups of 32");
    else if (int4 && !c->packed)
        refuse(r, method, "int4 in groups of other sizes");
    else if (fp4 && !mx && elems != MT_NVFP4_BLOCK)
        refuse(r, method, "anything but groups of 16 for nvfp4");
    else if (!c->packed)
        refuse(r, method, *strategy ? strategy : "no strategy");
    else if (has_order(order))
        refuse(r, method, "actorder");
    else if (int4 && in && !cJSON_IsNull(in))
        refuse(r, method, "input_activations");
}

/* https://github.com/NVIDIA/Model-Optimizer */
static void read_modelopt(struct mt_keys *r, struct mt_hf_config *c, const cJSON *q)
{
    static const struct {
        const char *algorithm;
        enum mt_packed packed;
    } of[] = {{"NVFP4", MT_PACKED_NVFP4}, {"FP8", MT_PACKED_FP8T}, {"FP8_PB_WO", MT_PACKED_FP8},
              {"FP8_PER_CHANNEL_PER_TOKEN", MT_PACKED_FP8R}, {"MXFP8", MT_PACKED_FP8_1X32}};
    const char *algorithm = mt_json_string(q, "quant_algo", "no quant_algo");
    for (size_t i = 0; i < MT_ARRAY_LEN(of); i++)
        c->packed = strcmp(algorithm, of[i].algorithm) ? c->packed : of[i].packed;
    c->described_anew = true;
    c->plain_parts = plain_parts(r, mt_json_get(q, "ignore"), false) |
                     plain_parts(r, mt_json_get(q, "exclude_modules"), false);
    if (!c->packed)
        refuse(r, "modelopt", algorithm);
}

/* https://github.com/ModelCloud/GPTQModel, which also writes what AutoGPTQ and AutoAWQ did. */
static void read_gptq_or_awq(struct mt_keys *r, struct mt_hf_config *c, const cJSON *q, const char *method)
{
    bool awq = !strcmp(method, "awq");
    const char *usual = awq ? "gemm" : "gptq", *key = awq ? "version" : "checkpoint_format";
    const char *form = mt_json_string(q, key, mt_json_string(q, "format", usual));
    double group = mt_json_number(q, "group_size", 128);
    c->packed = mt_packed_int4_of(group == -1 ? 0 : MT_MAX(group, 1.0));
    c->packed_scale = MT_SCALE_F16_ZEROS;
    c->zeros_less_one = !awq && !strcasecmp(form, usual);
    c->described_anew = true;
    c->plain_parts = plain_parts(r, mt_json_get(q, "modules_to_not_convert"), true);
    if (mt_json_number(q, "bits", 0) != 4)
        refuse(r, method, "another number of bits than 4");
    else if (strcasecmp(form, usual) && (awq || strcmp(form, "gptq_v2")))
        refuse(r, method, form);
    else if (!c->packed)
        refuse(r, method, "a group_size other than 32, 64, 128 or -1");
    else if (is_true(q, "lm_head"))
        refuse(r, method, "a packed lm_head");
}

void mt_quantization_read(struct mt_keys *r, struct mt_hf_config *c)
{
    const cJSON *q = mt_keys_find(r, "quantization_config");
    const char *method = q ? mt_json_string(q, "quant_method", "no quant_method") : NULL;
    if (!q)
        return;
    if (!strcmp(method, "bitsandbytes"))
        read_bitsandbytes(r, c, q);
    else if (!strcmp(method, "fp8"))
        read_fp8(r, c, q);
    else if (!strcmp(method, "compressed-tensors"))
        read_compressed(r, c, q);
    else if (!strcmp(method, "modelopt"))
        read_modelopt(r, c, q);
    else if (!strcmp(method, "gptq") || !strcmp(method, "awq"))
        read_gptq_or_awq(r, c, q, method);
    else if (!strcmp(method, "mxfp4"))
        c->packed = MT_PACKED_MXFP4;
    else
        refuse(r, method, method);
}

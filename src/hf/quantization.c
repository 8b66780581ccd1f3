/* SPDX-License-Identifier: Apache-2.0 */
#include "hf/quantization.h"

#include <stdio.h>
#include <string.h>

#include "base/json.h"

static void refuse(struct mt_keys *r, const char *method, const char *what)
{
    if (!r->rc)
        r->rc = mt_fail(r->err, MT_ERR_INPUT, -EINVAL,
                        "%s: quantization_config (%.40s): %.60s is not supported; mxfp4, fp8 in blocks of 128x128 and "
                        "bitsandbytes' nf4 are, and so is the bf16 model",
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
    c->packed = MT_PACKED_FP8;
    for (const cJSON *v = blocks ? block->child : NULL; v; v = v->next)
        blocks &= cJSON_IsNumber(v) && v->valuedouble == MT_FP8_BLOCK;
    if (!cJSON_IsArray(block))
        refuse(r, "fp8", "a scale for a whole tensor (no weight_block_size)");
    else if (!blocks)
        refuse(r, "fp8", "a weight_block_size other than 128x128");
    else if (!is_e4m3(text_of(q, "fmt", "e4m3")))
        refuse(r, "fp8", text_of(q, "fmt", ""));
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
    else if (!strcmp(method, "mxfp4"))
        c->packed = MT_PACKED_MXFP4;
    else
        refuse(r, method, method);
}

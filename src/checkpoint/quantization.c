/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/quantization.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "model/packing.h"

/* If experts are packed: all other modules, as in the model's release, and layers with plain experts. */
static cJSON *plain_experts(cJSON *list, const struct mt_layout *l)
{
    static const char *const others[] = {"model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                         "lm_head"};
    int last = -1;
    for (size_t i = 0; i < MT_ARRAY_LEN(others); i++)
        mt_json_append(list, cJSON_CreateString(others[i]));
    for (size_t i = 0; i < l->n_tensors; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        char name[MT_TENSOR_NAME];
        int layer = l->units[t->unit].layer;
        if (layer == last || t->kind == MT_RANGE_PACKED || !mt_packing_takes(l, t, MT_PACKED_MXFP4))
            continue;
        snprintf(name, sizeof(name), "model.layers.%d.mlp.experts", layer);
        mt_json_append(list, cJSON_CreateString(name));
        last = layer;
    }
    return list;
}

/* Is it described as compressed-tensors does? */
static bool is_compressed(const struct mt_layout *l, enum mt_packed f)
{
    return mt_packed_kind(f) == MT_PACKED_INT4 || f == MT_PACKED_NVFP4 || mt_packed_formats[f].rows == 1 ||
           (f == MT_PACKED_MXFP4 && !l->cfg.family->fused);
}

/* Plain matrices, which must be listed, since readers would take them for packed ones. */
static cJSON *plain_modules(const struct mt_layout *l, enum mt_packed f, bool modelopt)
{
    cJSON *list = cJSON_CreateArray();
    if (f == MT_PACKED_MXFP4 && l->cfg.family->fused)
        return plain_experts(list, l);
    mt_json_append(list, cJSON_CreateString("lm_head"));
    for (int i = 0; l->cfg.nested && l->cfg.nested->others[i]; i++) {
        char all[128]; /* of a module: there names mean no more than themselves */
        snprintf(all, sizeof(all), modelopt ? "%s*" : is_compressed(l, f) ? "re:%s.*" : "%s", l->cfg.nested->others[i]);
        mt_json_append(list, cJSON_CreateString(all));
    }
    for (size_t i = 0; i < l->n_tensors; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        char name[sizeof(t->name)];
        if (l->units[t->unit].kind != MT_UNIT_LAYER || t->n_dims != 2 || t->kind == MT_RANGE_PACKED || t->adapter)
            continue;
        snprintf(name, sizeof(name), "%s", t->name);
        char *end = strstr(name, ".weight");
        if (end)
            *end = 0;
        mt_json_append(list, cJSON_CreateString(name));
    }
    return list;
}

static void describe_nf4(cJSON *o, const struct mt_tensor *t)
{
    mt_json_put(o, "load_in_4bit=%d, load_in_8bit=%d, bnb_4bit_quant_type=%s, bnb_4bit_use_double_quant=%d, "
                "bnb_4bit_compute_dtype=%s, bnb_4bit_quant_storage=%s", true, false, "nf4",
                t->scale == MT_SCALE_NESTED, "bfloat16", "uint8");
}

static void describe_fp8(cJSON *o, enum mt_packed f)
{
    const int rows = (int)mt_packed_formats[f].rows, block[] = {rows, (int)mt_packed_formats[f].block};
    mt_json_put(o, "fmt=%s, activation_scheme=%s", "e4m3", "dynamic");
    mt_json_add(o, "weight_block_size", rows ? cJSON_CreateIntArray(block, 2) : cJSON_CreateNull());
}

/* Of compressed-tensors: weights alone, without what it says of activations. */
static void describe_compressed(cJSON *o, const struct mt_tensor *t)
{
    enum mt_packed f = t->packed;
    static const char *const formats[MT_N_PACKED] = {
        [MT_PACKED_INT4] = "pack-quantized", [MT_PACKED_MXFP4] = "mxfp4-pack-quantized",
        [MT_PACKED_NVFP4] = "nvfp4-pack-quantized"};
    size_t elems = mt_packed_formats[f].block;
    bool fp8 = mt_packed_formats[f].bytes, mx = t->scale == MT_SCALE_E8M0 && elems;
    const char *form = formats[mt_packed_kind(f)] ?: mx ? "mxfp8-quantized" : "float-quantized";
    cJSON *group = cJSON_AddObjectToObject(cJSON_AddObjectToObject(o, "config_groups"), "group_0");
    cJSON *w = cJSON_AddObjectToObject(group, "weights");
    mt_json_add(group, "targets", cJSON_CreateStringArray((const char *const[]){"Linear"}, 1));
    mt_json_put(w, "num_bits=%f, type=%s, symmetric=%d, strategy=%s", fp8 ? 8.0 : 4.0,
                mt_packed_kind(f) == MT_PACKED_INT4 ? "int" : "float", !mt_scale_has_zeros(t->scale),
                f == MT_PACKED_NVFP4 ? "tensor_group" : elems ? "group" : "channel");
    if (elems)
        cJSON_AddNumberToObject(w, "group_size", (double)elems);
    if (mx)
        cJSON_AddStringToObject(w, "scale_dtype", "torch.uint8");
    mt_json_put(o, "format=%s, quantization_status=%s", form, "compressed");
}

int mt_quantization_text(char **out, const struct mt_layout *l, struct mt_err *err)
{
    const struct mt_tensor *packed = NULL;
    bool all = true;
    for (size_t i = 0; i < l->n_tensors; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        packed = t->kind == MT_RANGE_PACKED ? t : packed;
        all &= t->kind == MT_RANGE_PACKED || !mt_packing_takes(l, t, l->cfg.packed);
    }
    *out = NULL;
    if (packed && all && l->cfg.packed == packed->packed && !l->cfg.described_anew)
        return 0;
    if (!packed) {
        *out = strdup("");
        return *out ? 0 : mt_fail_nomem(err, "quantization_config", 1);
    }
    mt_json_begin();
    MT_JSON_FREED cJSON *o = cJSON_CreateObject();
    enum mt_packed f = packed->packed;
    bool modelopt = packed->scale == MT_SCALE_E4M3, compressed = is_compressed(l, f);
    cJSON_AddStringToObject(o, "quant_method", modelopt              ? "modelopt"
                                               : compressed          ? "compressed-tensors"
                                               : f == MT_PACKED_NF4   ? "bitsandbytes"
                                               : f == MT_PACKED_MXFP4 ? "mxfp4" : "fp8");
    if (f == MT_PACKED_NF4)
        describe_nf4(o, packed);
    else if (modelopt)
        cJSON_AddStringToObject(o, "quant_algo", "NVFP4");
    else if (compressed)
        describe_compressed(o, packed);
    else if (f != MT_PACKED_MXFP4)
        describe_fp8(o, f);
    mt_json_add(o, f == MT_PACKED_NF4 ? "llm_int8_skip_modules" : modelopt || compressed ? "ignore" : "modules_to_not_convert",
                plain_modules(l, f, modelopt));
    *out = mt_json_print(o, false);
    return *out && mt_json_complete() ? 0 : mt_fail_nomem(err, "quantization_config", 0);
}

/* The first character after the JSON value at p. */
static const char *end_of_value(const char *p)
{
    int depth = 0;
    bool text = false;
    for (; *p; p++) {
        if (text && *p == '\\' && p[1])
            p++;
        else if (*p == '"')
            text = !text;
        else if (!text && (*p == '{' || *p == '['))
            depth++;
        else if (!text && (((*p == '}' || *p == ']') && depth-- == 0) || (*p == ',' && !depth)))
            return p;
    }
    return p;
}

/* Of a key of the outermost object: from there to after its value; if it goes, with its comma. */
static void find_pair(const char *config, const char *key, bool goes, const char **from, const char **to)
{
    *from = key;
    *to = end_of_value(strchr(key, ':') + 1);
    if (goes && **to == ',')
        *to += 1 + strspn(*to + 1, " \t\r\n");
    else
        while (goes && *from > config && strchr(" \t\r\n,", (*from)[-1]))
            --*from;
}

char *mt_quantization_edit(const char *config, const char *value)
{
    const char *key = strstr(config, "\"quantization_config\""), *from = strrchr(config, '}'), *to = from, *before = "";
    char *out;
    if (!value || (!key && !*value) || !from)
        return strdup(config);
    if (key) {
        find_pair(config, key, !*value, &from, &to);
    } else {
        while (from > config && strchr(" \t\r\n", from[-1]))
            from--;
        to = from;
        before = from > config && from[-1] != '{' ? ",\n  " : "\n  ";
    }
    const char *name = *value ? "\"quantization_config\": " : "";
    return asprintf(&out, "%.*s%s%s%s%s", (int)(from - config), config, before, name, value, to) < 0 ? NULL : out;
}

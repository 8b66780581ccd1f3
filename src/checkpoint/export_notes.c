/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/export_notes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "checkpoint/seal.h"
#include "hf/hf_config.h"
#include "weights/peft.h"

/* The least of vLLM's choices that is enough. */
static int vllm_rank(double rank)
{
    static const int choices[] = {32, 64, 128, 256, 320, 512};
    size_t i = 0;
    while (i + 1 < MT_ARRAY_LEN(choices) && choices[i] < rank)
        i++;
    return choices[i];
}

/* vLLM reads r and lora_alpha, no patterns, and refuses some adapters (vllm/lora/peft_helper.py, config/lora.py). */
void mt_export_warn_of_vllm(const char *config)
{
    enum { DEFAULT_RANK = 16 };
    MT_JSON_FREED cJSON *o = cJSON_Parse(config);
    const cJSON *rank = mt_json_get(o, "r"), *saved = mt_json_get(o, "modules_to_save");
    size_t n;
    const char *first = mt_peft_other_scale(o, &n);
    bool refused = cJSON_GetArraySize(saved) || cJSON_IsTrue(mt_json_get(o, "use_dora"));
    if (first)
        mt_warn("vLLM reads no rank_pattern and alpha_pattern: modules of %zu of their patterns (%s) would have another scale "
                "there; export --fold-scales or --merge for it", n, first);
    if (refused)
        mt_warn("vLLM refuses these adapters: %s%s%s; export --merge for it", cJSON_IsTrue(mt_json_get(o, "use_dora")) ? "DoRA" : "",
                cJSON_GetArraySize(saved) && cJSON_IsTrue(mt_json_get(o, "use_dora")) ? ", and " : "",
                cJSON_GetArraySize(saved) ? "modules that were trained whole (modules_to_save)" : "");
    if (!refused && cJSON_IsNumber(rank) && rank->valuedouble > DEFAULT_RANK)
        mt_warn("vLLM refuses adapters of rank %.0f unless it is started with --max-lora-rank %d (of 8, 16, 32, 64, 128, 256, 320, 512; "
                "%d if it is not set)", rank->valuedouble, vllm_rank(rank->valuedouble), DEFAULT_RANK);
}

/* Adapters have learned to correct the base that they were trained on, with what packing has changed. */
void mt_export_warn_of_packing(const struct mt_export *e, const struct mt_train_state *s)
{
    char format[32];
    const cJSON *t;
    mt_train_state_value(s, "model", "base_dtype", format, sizeof(format));
    cJSON_ArrayForEach(t, s->frozen) /* or the model's files were packed */
    {
        const cJSON *form = mt_json_get(t, "form");
        for (enum mt_packed f = MT_PACKED_NONE + 1; cJSON_IsString(form) && f < MT_N_PACKABLE; f++)
            if (!strcmp(form->valuestring, mt_packed_names[f]))
                snprintf(format, sizeof(format), "%s", mt_packed_names[f]);
    }
    for (enum mt_packed f = MT_PACKED_NONE + 1; f < MT_N_PACKABLE; f++)
        if (!strcmp(format, mt_packed_names[f]))
            mt_warn("%s was trained on a base packed as %s and is merged into %s, which is not: results differ a little from the "
                    "run's. For the run's own: megatrain export %s PACKED --quantize %s, then --merge --model PACKED, whose "
                    "weights are decoded", e->from, format, e->base, e->base, format);
}

/* The dtype of a model's files. */
static void dtype_of_files(const char *model, const char *dir, char *buf, size_t len)
{
    char file[4200], *found = NULL;
    MT_JSON_FREED cJSON *o = NULL;
    *buf = 0;
    if (!dir && mt_hf_find_model(&found, model, NULL))
        return;
    mt_path_printf(file, sizeof(file), "%s/config.json", dir ? dir : found);
    if (!mt_json_read_file(&o, file, MT_ERR_INPUT, NULL)) {
        const cJSON *dtype = mt_json_get(o, "torch_dtype");
        dtype = dtype ? dtype : mt_json_get(o, "dtype");
        snprintf(buf, len, "%s", cJSON_IsString(dtype) ? dtype->valuestring : "");
    }
    free(found);
}

void mt_export_warn_of_weights(const char *from)
{
    char dtype[32];
    MT_SEALED_FREED struct mt_sealed sealed = {.json = NULL};
    int rc = mt_seal_read(from, &sealed, NULL);
    dtype_of_files(NULL, from, dtype, sizeof(dtype));
    if (!rc && !sealed.full && !strcmp(dtype, "bfloat16"))
        mt_warn("%s has weights alone, in bf16, so that is what the export has in f32: FP32 masters are in checkpoints that were saved with "
                "checkpoint.save = full", from);
}

void mt_export_tell_dtype(const struct mt_export *e, const struct mt_train_state *s, bool f32)
{
    char path[4096], dtype[32];
    mt_train_state_value(s, "model", "path", path, sizeof(path));
    dtype_of_files(path, e->base, dtype, sizeof(dtype));
    bool bf16 = !*dtype || !strcmp(dtype, "bfloat16");
    if (f32 && bf16 && s->blocks.overlay)
        mt_warn("what was trained before the last block began, or the last merge, is in bf16, as the model's files are, so that is what the export "
                "has of it in f32: a run on files in f32 keeps all bits (megatrain export %s NEW --dtype f32, then model.path = NEW)", path);
    else if (!f32 && !bf16)
        mt_info("the model's files are %s, and the export is in bf16: --dtype f32 keeps all bits", dtype);
}

/* bf16 has 8 bits of a weight: small updates are rounded away. */
void mt_export_tell_rounding(const struct mt_merge *m)
{
    double kept, error;
    if (m && mt_rounded_share(mt_merge_rounding(m), &kept, &error))
        mt_info("of what the adapters add, %.1f%% is left in bf16, with an error of %.1f%% of its norm%s", 100 * kept,
                100 * error, error > 0.1 ? ": it is finer than the last bits of the weights. Its errors are random and mostly cancel in "
                "products (megatrain eval says what the model has lost); --dtype f32 keeps all of it" : "");
}

/* transformers' FP8 has no partial blocks at the edges of a matrix. */
void mt_export_warn_of_blocks(const struct mt_layout *l)
{
    for (size_t i = 0; i < l->n_tensors; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        if (t->packed != MT_PACKED_FP8 || !(t->shape[0] % MT_FP8_BLOCK || t->shape[1] % MT_FP8_BLOCK))
            continue;
        mt_warn("\"%s\" is [%lld, %lld]: transformers can read FP8 only in multiples of %d; megatrain can read this, too",
                t->name, (long long)t->shape[0], (long long)t->shape[1], MT_FP8_BLOCK);
        return;
    }
}

/* transformers 5 joins the experts of a layer to parameters, which bitsandbytes does not pack. */
void mt_export_warn_of_experts(const struct mt_layout *l)
{
    bool any = false;
    for (size_t i = 0; i < l->n_tensors; i++)
        any |= l->tensors[i].packed && l->tensors[i].expert >= 0;
    if (any)
        mt_warn("experts in NF4 are read by megatrain alone: transformers has those of a layer as one parameter, and reads them "
                "packed only in FP8 (--quantize fp8)");
}

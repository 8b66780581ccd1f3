/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/peft.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/regex.h"

#define PREFIX "base_model.model."
#define SUFFIX_A "." MT_LORA_A ".weight"
#define SUFFIX_B "." MT_LORA_B ".weight"
#define INSTEAD "; what PEFT's merge_and_unload() makes of such adapters is a model, and is read"

bool mt_peft_is_folder(const char *dir)
{
    return mt_path_exists(MT_PATH("%s/" MT_PEFT_CONFIG, dir));
}

static int read_config(cJSON **out, const char *dir, struct mt_err *err)
{
    const char *path = MT_PATH("%s/" MT_PEFT_CONFIG, dir), *latest = MT_PATH("%s/latest", dir);
    if (!mt_path_exists(path) && mt_path_exists(latest))
        return mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s is the folder of a run: name one of its checkpoints, such as %s", dir, latest);
    if (!mt_path_exists(path))
        return mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s is not an adapter's folder: it has no " MT_PEFT_CONFIG, dir);
    int rc = mt_json_read_file(out, path, MT_ERR_INPUT, err);
    if (!rc && !cJSON_IsObject(*out)) {
        cJSON_Delete(*out);
        *out = NULL;
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s must be a JSON object", path);
    }
    return rc;
}

static bool is_off(const cJSON *v)
{
    return !v || cJSON_IsNull(v) || cJSON_IsFalse(v) || (cJSON_IsNumber(v) && v->valuedouble == 0) ||
           ((cJSON_IsArray(v) || cJSON_IsObject(v)) && !v->child);
}

static bool is_text(const cJSON *v, const char *text)
{
    return cJSON_IsString(v) && !strcmp(v->valuestring, text);
}

/* Is it read here, or does it say only how the adapters were made and which modules have one, as the tensors do? */
static bool is_known(const char *key)
{
    static const char *const known[] = {
        "peft_type", "r", "lora_alpha", "lora_dropout", "use_dora", "use_rslora", "alpha_pattern", "rank_pattern",
        "modules_to_save", "base_model_name_or_path", "init_lora_weights", "bias", "task_type", "auto_mapping",
        "peft_version", "revision", "inference_mode", "target_modules", "exclude_modules", "target_parameters",
        "layers_to_transform", "layers_pattern", "megatron_core", "loftq_config", "eva_config", "corda_config",
        "lora_ga_config", "runtime_config", "qalora_group_size", "ensure_weight_tying"};
    for (size_t i = 0; i < MT_ARRAY_LEN(known); i++)
        if (!strcmp(known[i], key))
            return true;
    return false;
}

/* Else they would count as if they were not there. */
static int check_numbers(const cJSON *o, const char *dir, struct mt_err *err)
{
    static const char *const keys[] = {"r", "lora_alpha", "rank_pattern", "alpha_pattern"};
    for (size_t i = 0; i < MT_ARRAY_LEN(keys); i++) {
        const cJSON *v = mt_json_get(o, keys[i]);
        bool of_patterns = cJSON_IsObject(v) && i >= 2;
        bool good = !v || of_patterns || (i < 2 ? cJSON_IsNumber(v) : is_off(v));
        for (const cJSON *p = of_patterns ? v->child : NULL; p; p = p->next)
            good = good && cJSON_IsNumber(p);
        if (!good)
            return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s/" MT_PEFT_CONFIG ": %s must be %s", dir, keys[i],
                           i < 2 ? "a number" : "an object of numbers");
    }
    return 0;
}

/* Any other key must be off: it may change the computation (fan_in_fan_out, lora_bias, and those of later versions). */
static int check_keys(const cJSON *o, const char *dir, struct mt_err *err)
{
    const cJSON *init = mt_json_get(o, "init_lora_weights"), *bias = mt_json_get(o, "bias");
    if (!is_text(mt_json_get(o, "peft_type"), "LORA"))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s/" MT_PEFT_CONFIG ": peft_type must be LORA" INSTEAD, dir);
    for (const cJSON *key = o->child; key; key = key->next)
        if (!is_known(key->string) && !is_off(key))
            return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s/" MT_PEFT_CONFIG ": %.80s is not supported" INSTEAD,
                           dir, key->string);
    if (bias && !is_text(bias, "none"))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s/" MT_PEFT_CONFIG ": bias must be \"none\"" INSTEAD, dir);
    /* pissa, olora, loftq, eva and the like also change the base: the adapter does not fit the model's own weights */
    if (init && !cJSON_IsBool(init) && !cJSON_IsNull(init) && !is_text(init, "gaussian") && !is_text(init, "orthogonal"))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s/" MT_PEFT_CONFIG ": init_lora_weights = \"%.40s\" is not supported"
                       INSTEAD, dir, cJSON_IsString(init) ? init->valuestring : "?");
    return check_numbers(o, dir, err);
}

/* As PEFT matches a pattern's key: re.match(r"(.*\.)?(KEY)$", module). */
static int pattern_matches(const char *key, const char *module, bool *yes, const char *dir, struct mt_err *err)
{
    char *full = NULL, why[MT_REGEX_WHY];
    if (asprintf(&full, "(?:.*\\.)?(?:%s)$", key) < 0)
        return mt_fail_nomem(err, key, strlen(key));
    int rc = mt_regex_begins(yes, full, module, why);
    free(full);
    if (!rc || rc == -ENOMEM)
        return rc ? mt_fail_nomem(err, key, strlen(key)) : 0;
    return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s/" MT_PEFT_CONFIG ": the pattern \"%.100s\" cannot be %s: %s", dir, key,
                   rc == -EINVAL ? "read" : "matched", why);
}

/* Of a module or parameter: the value of the key, or that of the first of its patterns that matches. */
static int value_of(double *value, const cJSON *o, const char *key, const char *pattern_key, const char *module,
                    const char *dir, struct mt_err *err)
{
    const cJSON *patterns = mt_json_get(o, pattern_key);
    char parameter[256];
    *value = mt_json_number(o, key, 8);
    for (const cJSON *p = patterns ? patterns->child : NULL; p; p = p->next) {
        bool yes = false;
        int rc = pattern_matches(p->string, module, &yes, dir, err);
        if (rc)
            return rc;
        if (!yes) { /* modules that are listed by the name of their parameter */
            snprintf(parameter, sizeof(parameter), "%.240s.weight", module);
            rc = pattern_matches(p->string, parameter, &yes, dir, err);
        }
        if (rc)
            return rc;
        if (yes && cJSON_IsNumber(p)) {
            *value = p->valuedouble;
            return 0;
        }
    }
    return 0;
}

static bool cut_last(char *name)
{
    char *dot = strrchr(name, '.');
    if (dot)
        *dot = 0;
    return dot;
}

/* Is the module, or one that it is in, listed in modules_to_save? */
static bool is_saved_module(const cJSON *o, const char *module)
{
    const cJSON *list = mt_json_get(o, "modules_to_save");
    char name[256];
    snprintf(name, sizeof(name), "%s", module);
    do {
        for (const cJSON *m = list ? list->child : NULL; m; m = m->next)
            if (cJSON_IsString(m) && (!strcmp(name, m->valuestring) || mt_ends_with(name, m->valuestring)))
                return true;
    } while (cut_last(name));
    return false;
}

/* Parameters of all experts, from the one that PEFT wraps last: it wraps those in target_parameters in their order in
 * the module, each around the one before. */
static const char *const wholes[] = {".down_proj", ".gate_up_proj", ".up_proj"};

/* The parameter of all experts whose adapter PEFT calls MODULE, which ends in ".experts" and a ".base_layer" for each
 * that it wraps around it. */
static bool find_parameter(char *module, size_t len, const cJSON *o)
{
    const cJSON *list = mt_json_get(o, "target_parameters");
    char *end = strstr(module, ".base_layer");
    size_t inner = end ? strlen(end) / strlen(".base_layer") : 0, at = end ? (size_t)(end - module) : strlen(module);
    for (size_t i = 0; i < MT_ARRAY_LEN(wholes); i++) {
        bool listed = false;
        snprintf(module + at, len - at, "%s", wholes[i]);
        for (const cJSON *p = list ? list->child : NULL; p; p = p->next)
            listed |= cJSON_IsString(p) && (!strcmp(module, p->valuestring) ||
                                            (mt_ends_with(module, p->valuestring) &&
                                             module[strlen(module) - strlen(p->valuestring) - 1] == '.'));
        if (listed && inner-- == 0)
            return true;
    }
    return false;
}

/* With ensure_weight_tying PEFT lists one of the two names of a tied table, and saves it under both. */
static const char *tied_name(const cJSON *o, const char *module)
{
    static const char table[] = "model.embed_tokens", head[] = "lm_head";
    if (!cJSON_IsTrue(mt_json_get(o, "ensure_weight_tying")))
        return NULL;
    return !strcmp(module, table) ? head : !strcmp(module, head) ? table : NULL;
}

static int add_tensor(struct mt_adapter_spec *s, const struct mt_st_tensor *t, const cJSON *o, const char *dir,
                      struct mt_err *err)
{
    char module[256];
    const char *name = t->name + strlen(PREFIX), *dot;
    double alpha, rank;
    if (strncmp(t->name, PREFIX, strlen(PREFIX)) || !(dot = strrchr(name, '.')) || strlen(name) >= sizeof(module) ||
        strstr(name, "lora_embedding_"))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s/" MT_PEFT_WEIGHTS ": tensor \"%s\" is not supported" INSTEAD,
                       dir, t->name);
    bool a = mt_ends_with(name, SUFFIX_A), b = mt_ends_with(name, SUFFIX_B);
    if (s->dora && mt_ends_with(name, "." MT_LORA_MAGNITUDE))
        return 0;
    snprintf(module, sizeof(module), "%.*s", (int)(a || b ? strlen(name) - strlen(SUFFIX_A) : (size_t)(dot - name)), name);
    if (b || mt_ends_with(name, ".base_layer.weight")) /* with an adapter of the head, PEFT also stores the model's own
                                                          matrix: mt_peft_compare_copies() */
        return 0;
    bool whole = mt_ends_with(module, ".experts") || mt_ends_with(module, ".experts.base_layer");
    if (whole && !a && is_saved_module(o, module))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s/" MT_PEFT_CONFIG ": modules_to_save has \"%s\": routed experts that are "
                       "trained whole beside adapters are not supported", dir, module);
    if (whole && !find_parameter(module, sizeof(module), o))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s/" MT_PEFT_WEIGHTS ": \"%s\" is an adapter for all experts of neither "
                       "gate_up_proj nor down_proj in target_parameters", dir, t->name);
    const char *other = a ? NULL : tied_name(o, module);
    if (!a && !is_saved_module(o, module) && !(other && is_saved_module(o, other)))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s/" MT_PEFT_WEIGHTS ": tensor \"%s\" is neither an adapter's nor in "
                       "modules_to_save", dir, t->name);
    if (!a) /* once: it may have a weight and a bias */
        return mt_adapter_list_has(&s->train_also, module) || mt_adapter_list_add(&s->train_also, module, 0)
                   ? 0
                   : mt_fail_nomem(err, dir, sizeof(module));
    int rc = value_of(&alpha, o, "lora_alpha", "alpha_pattern", module, dir, err)
          ?: value_of(&rank, o, "r", "rank_pattern", module, dir, err);
    if (!rc && (t->n_dims != 2 || t->shape[0] < 1))
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s/" MT_PEFT_WEIGHTS ": tensor \"%s\" must be a matrix", dir, t->name);
    if (!rc && !(mt_adapter_list_add(&s->targets, module, 0) && mt_adapter_list_add(&s->alphas, module, alpha) &&
                 mt_adapter_list_add(&s->ranks, module, whole ? rank : (double)t->shape[0])))
        rc = mt_fail_nomem(err, dir, sizeof(module));
    return rc;
}

int mt_peft_open_weights(struct mt_st_model *st, const char *dir, struct mt_err *err)
{
    const char *path = MT_PATH("%s/" MT_PEFT_WEIGHTS, dir);
    if (!mt_path_exists(path))
        return mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s has no " MT_PEFT_WEIGHTS "%s", dir,
                       mt_path_exists(MT_PATH("%s/adapter_model.bin", dir))
                           ? ", but an adapter_model.bin, which is not read: PEFT's save_pretrained() writes safetensors" : "");
    return mt_st_open_file(st, path, err);
}

int mt_peft_read_spec(struct mt_adapter_spec *out, const char *dir, struct mt_err *err)
{
    struct mt_adapter_spec s = {.on = true, .lr_ratio_b = 1};
    MT_CLOSED_BY(mt_st_close) struct mt_st_model st = {0};
    MT_JSON_FREED cJSON *o = NULL;
    int rc = read_config(&o, dir, err)
          ?: check_keys(o, dir, err)
          ?: mt_peft_open_weights(&st, dir, err);
    if (!rc) {
        s.rank = (int64_t)mt_json_number(o, "r", 8);
        s.alpha = mt_json_number(o, "lora_alpha", 8);
        s.dropout = mt_json_number(o, "lora_dropout", 0);
        s.dora = cJSON_IsTrue(mt_json_get(o, "use_dora"));
        s.rslora = cJSON_IsTrue(mt_json_get(o, "use_rslora"));
        for (size_t i = 0; i < st.n_tensors && !rc; i++)
            rc = add_tensor(&s, &st.tensors[i], o, dir, err);
    }
    if (rc)
        mt_adapter_spec_finish(&s);
    else
        *out = s;
    return rc;
}

int mt_peft_uses_dora(bool *yes, const char *dir, struct mt_err *err)
{
    MT_JSON_FREED cJSON *o = NULL;
    int rc = read_config(&o, dir, err);
    *yes = !rc && cJSON_IsTrue(mt_json_get(o, "use_dora"));
    return rc;
}

int mt_peft_base_model(char **out, const char *dir, struct mt_err *err)
{
    MT_JSON_FREED cJSON *o = NULL;
    int rc = read_config(&o, dir, err);
    const cJSON *base = rc ? NULL : mt_json_get(o, "base_model_name_or_path");
    if (!rc && (!cJSON_IsString(base) || !*base->valuestring))
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s/" MT_PEFT_CONFIG " does not name the model: give --model", dir);
    if (!rc && !(*out = strdup(base->valuestring)))
        rc = mt_fail_nomem(err, dir, strlen(base->valuestring));
    return rc;
}

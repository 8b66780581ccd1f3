/* SPDX-License-Identifier: Apache-2.0 */
/* Writes PEFT's adapter_config.json of a layout's adapters. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "model/stored.h"
#include "weights/peft.h"

static size_t module_length(const char *tensor)
{
    const char *dot = strrchr(tensor, '.');
    return dot ? (size_t)(dot - tensor) : 0;
}

/* The last part of a module's name: "q_proj". */
static const char *last_name(const char *module)
{
    const char *dot = strrchr(module, '.');
    return dot ? dot + 1 : module;
}

/* A module with adapters, or a parameter of one: of all experts together, or listed as such (is_wrapped). */
struct target {
    char module[MT_TENSOR_NAME];
    const struct mt_adapter_target *t;
    bool whole;
};

static struct target *list_targets(const struct mt_layout *l, size_t *n)
{
    struct target *all = mt_calloc(l->n_adapters * MT_ADAPTER_MAX_TARGETS, sizeof(*all));
    *n = 0;
    for (size_t i = 0; all && i < l->n_adapters; i++)
        for (size_t k = 0; k < l->adapters[i].n_targets; k++) {
            const struct mt_adapter *ad = &l->adapters[i];
            const struct mt_tensor *of = &l->tensors[ad->target[k].tensor];
            if (ad->whole && of->expert > 0)
                continue;
            struct target *t = &all[(*n)++];
            t->t = &ad->target[k];
            t->whole = ad->whole;
            if (ad->whole)
                mt_stored_joined_name(t->module, l, of, ad->whole);
            else
                mt_stored_module(t->module, l, of);
        }
    return all;
}

/* Are all matrices of that last name targets? PEFT takes a last name to mean every matrix of that name, also those
 * beside the decoder, which the layout does not have. */
static bool short_name_will_do(const struct mt_layout *l, const struct target *all, size_t n, const char *last)
{
    size_t ours = 0, theirs = 0;
    if (l->cfg.nested)
        return false;
    for (size_t i = 0; i < n; i++)
        ours += !strcmp(last_name(all[i].module), last);
    for (size_t i = 0; i < l->n_tensors; i++) {
        char module[MT_TENSOR_NAME];
        const struct mt_tensor *t = &l->tensors[i];
        if (t->adapter || t->n_dims != 2)
            continue;
        snprintf(module, sizeof(module), "%.*s", (int)module_length(t->name), t->name);
        theirs += !strcmp(last_name(module), last);
    }
    return ours == theirs;
}

static double rank_of(const struct mt_adapter_target *t)
{
    return (double)t->rank;
}

static double alpha_of_target(const struct mt_adapter_target *t)
{
    return t->alpha;
}

/* Does a target before i have the same last name? */
static bool seen(const struct target *all, size_t i)
{
    for (size_t k = 0; k < i; k++)
        if (!strcmp(last_name(all[k].module), last_name(all[i].module)))
            return true;
    return false;
}

static bool is_expert(const struct mt_layout *l, const struct target *t)
{
    return l->tensors[t->t->tensor].expert >= 0 && !t->whole;
}

static bool is_wrapped(const struct mt_layout *l, const struct target *t)
{
    char module[MT_TENSOR_NAME];
    mt_stored_module(module, l, &l->tensors[t->t->tensor]);
    return t->whole || (!is_expert(l, t) && mt_peft_wraps_parameter(l, module));
}

/* What follows the module's name in that of the parameter. */
static const char *parameter_suffix(const struct mt_layout *l, const struct target *t)
{
    return is_wrapped(l, t) && !t->whole ? ".weight" : "";
}

/* Values other than the usual one: by last name if all targets of that name agree, else by whole name. */
static cJSON *pattern(const struct mt_layout *l, const struct target *all, size_t n,
                      double (*value)(const struct mt_adapter_target *), double usual)
{
    cJSON *o = cJSON_CreateObject();
    char key[MT_TENSOR_NAME];
    for (size_t i = 0; i < n; i++) {
        const char *last = last_name(all[i].module);
        bool agree = true;
        if (value(all[i].t) == usual)
            continue;
        for (size_t k = 0; k < n; k++)
            agree &= strcmp(last_name(all[k].module), last) || value(all[k].t) == value(all[i].t);
        snprintf(key, sizeof(key), "%.110s%s", agree ? last : all[i].module, parameter_suffix(l, &all[i]));
        if (!mt_json_get(o, key))
            cJSON_AddNumberToObject(o, key, value(all[i].t));
    }
    return o;
}

/* Lists experts by their last name, which in PEFT means those of all experts. */
static void add_experts(cJSON *list, const struct mt_layout *l, const struct target *all, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const char *last = last_name(all[i].module);
        bool listed = !is_expert(l, &all[i]);
        for (const cJSON *m = list ? list->child : NULL; m && !listed; m = m->next)
            listed = cJSON_IsString(m) && !strcmp(m->valuestring, last);
        if (!listed)
            mt_json_append(list, cJSON_CreateString(last));
    }
}

static cJSON *target_modules(const struct mt_layout *l, const struct target *all, size_t n)
{
    cJSON *list = cJSON_CreateArray();
    bool all_short = true;
    for (size_t i = 0; i < n; i++) {
        bool module = !is_wrapped(l, &all[i]) && !is_expert(l, &all[i]);
        all_short = all_short && (!module || seen(all, i) || short_name_will_do(l, all, n, last_name(all[i].module)));
    }
    for (size_t i = 0; i < n; i++)
        if (!is_wrapped(l, &all[i]) && !is_expert(l, &all[i]) && (!all_short || !seen(all, i)))
            mt_json_append(list, cJSON_CreateString(all_short ? last_name(all[i].module) : all[i].module));
    add_experts(list, l, all, n);
    return list;
}

/* Whole names; NULL: there are none. */
static cJSON *target_parameters(const struct mt_layout *l, const struct target *all, size_t n)
{
    cJSON *list = cJSON_CreateArray();
    char name[MT_STORED_NAME];
    for (size_t i = 0; i < n; i++) {
        snprintf(name, sizeof(name), "%s%s", all[i].module, parameter_suffix(l, &all[i]));
        if (is_wrapped(l, &all[i]))
            mt_json_append(list, cJSON_CreateString(name));
    }
    if (cJSON_GetArraySize(list))
        return list;
    cJSON_Delete(list);
    return NULL;
}

/* Whole names: PEFT takes any module whose name ends in a listed one, so "norm" would mean all norms. */
static cJSON *modules_to_save(const struct mt_layout *l)
{
    cJSON *list = cJSON_CreateArray();
    bool table = false;
    for (size_t i = 0; i < l->n_tensors; i++) {
        const struct mt_tensor *t = &l->tensors[i];
        char module[MT_TENSOR_NAME];
        bool listed = false;
        if (!t->trainable || t->adapter)
            continue;
        mt_family_module(module, sizeof(module), l->cfg.family, t->name);
        for (const cJSON *m = list ? list->child : NULL; m; m = m->next)
            listed |= cJSON_IsString(m) && !strcmp(m->valuestring, module);
        if (!listed)
            mt_json_append(list, cJSON_CreateString(module));
        table |= l->tied && i == 0;
    }
    if (table)
        mt_json_append(list, cJSON_CreateString("lm_head"));
    if (cJSON_GetArraySize(list))
        return list;
    cJSON_Delete(list);
    return cJSON_CreateNull();
}

char *mt_peft_config_text(const struct mt_layout *l, const char *base)
{
    size_t n;
    MT_FREED struct target *all = list_targets(l, &n);
    if (!all)
        return NULL;
    mt_json_begin();
    cJSON *o = cJSON_CreateObject(), *parameters = target_parameters(l, all, n);
    mt_json_add(o, "alpha_pattern", pattern(l, all, n, alpha_of_target, l->adapter_default.alpha));
    mt_json_put(o, "base_model_name_or_path=%s, bias=%s", base, "none");
    if (l->tied && l->tensors[0].trainable) /* else PEFT would go on with two tables */
        cJSON_AddBoolToObject(o, "ensure_weight_tying", true);
    mt_json_put(o, "fan_in_fan_out=%d, inference_mode=%d, init_lora_weights=%d, lora_alpha=%f, lora_dropout=%f",
                false, true, true, l->adapter_default.alpha,
                parameters || !l->n_adapters ? 0 : l->adapters[0].dropout);
    mt_json_add(o, "modules_to_save", modules_to_save(l));
    mt_json_put(o, "peft_type=%s, r=%f", "LORA", (double)l->adapter_default.rank);
    mt_json_add(o, "rank_pattern", pattern(l, all, n, rank_of, (double)l->adapter_default.rank));
    mt_json_add(o, "target_modules", target_modules(l, all, n));
    if (parameters)
        mt_json_add(o, "target_parameters", parameters);
    mt_json_put(o, "task_type=%s, use_dora=%d, use_rslora=%d", "CAUSAL_LM", l->adapter_default.dora,
                l->adapter_default.rslora);
    char *text = mt_json_complete() ? mt_json_print(o, true) : NULL;
    cJSON_Delete(o);
    return text;
}

/* The number of a pattern of the same name, or of all modules. */
static double value_for(const cJSON *config, const char *patterns, const char *all, const char *name)
{
    const cJSON *v = mt_json_get(mt_json_get(config, patterns), name);
    v = v ? v : mt_json_get(config, all);
    return cJSON_IsNumber(v) ? v->valuedouble : 0;
}

const char *mt_peft_other_scale(const cJSON *config, size_t *n)
{
    static const char *const patterns[] = {"rank_pattern", "alpha_pattern"};
    bool root = cJSON_IsTrue(mt_json_get(config, "use_rslora"));
    double rank = value_for(config, "", "r", ""), alpha = value_for(config, "", "lora_alpha", "");
    const char *first = NULL;
    *n = 0;
    double scale = alpha / (root ? sqrt(rank) : rank);
    for (size_t i = 0; i < MT_ARRAY_LEN(patterns); i++) {
        const cJSON *p;
        cJSON_ArrayForEach(p, mt_json_get(config, patterns[i]))
        {
            if (i == 1 && mt_json_get(mt_json_get(config, patterns[0]), p->string))
                continue;
            double r = value_for(config, patterns[0], "r", p->string), a = value_for(config, patterns[1], "lora_alpha", p->string);
            if (fabs(a / (root ? sqrt(r) : r) / scale - 1) < 1e-6)
                continue;
            first = first ? first : p->string;
            ++*n;
        }
    }
    return first;
}

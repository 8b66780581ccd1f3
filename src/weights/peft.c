/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/peft.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/regex.h"
#include "model/ranges.h"
#include "model/stored.h"
#include "weights/sources.h"

#define PREFIX "base_model.model."
#define SUFFIX_A "." MT_LORA_A ".weight"
#define SUFFIX_B "." MT_LORA_B ".weight"
enum { PIECE = 1 << 16 }; /* elements */

bool mt_peft_is_folder(const char *dir)
{
    char path[4200];
    mt_path_printf(path, sizeof(path), "%s/" MT_PEFT_CONFIG, dir);
    return mt_path_exists(path);
}

/* --- reading the configuration ------------------------------------------------------------------------ */

static int read_config(cJSON **out, const char *dir, struct mt_err *err)
{
    char path[4200];
    mt_path_printf(path, sizeof(path), "%s/" MT_PEFT_CONFIG, dir);
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

/* Any other key must be off: it may change the computation (fan_in_fan_out, lora_bias, and those of later versions). */
static int check_keys(const cJSON *o, const char *dir, struct mt_err *err)
{
    const cJSON *init = mt_json_get(o, "init_lora_weights"), *bias = mt_json_get(o, "bias");
    if (!is_text(mt_json_get(o, "peft_type"), "LORA"))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s/" MT_PEFT_CONFIG ": peft_type must be LORA", dir);
    for (const cJSON *key = o->child; key; key = key->next)
        if (!is_known(key->string) && !is_off(key))
            return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s/" MT_PEFT_CONFIG ": %.80s is not supported", dir, key->string);
    if (bias && !is_text(bias, "none"))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s/" MT_PEFT_CONFIG ": bias must be \"none\"", dir);
    /* pissa, olora, loftq, eva and the like also change the base: the adapter does not fit the model's own weights */
    if (init && !cJSON_IsBool(init) && !cJSON_IsNull(init) && !is_text(init, "gaussian") && !is_text(init, "orthogonal"))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s/" MT_PEFT_CONFIG ": init_lora_weights = \"%.40s\" is not supported",
                       dir, cJSON_IsString(init) ? init->valuestring : "?");
    return 0;
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
    const cJSON *patterns = mt_json_get(o, pattern_key), *usual = mt_json_get(o, key);
    char parameter[256];
    *value = cJSON_IsNumber(usual) ? usual->valuedouble : 8;
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

static bool ends(const char *name, const char *suffix)
{
    size_t n = strlen(name), k = strlen(suffix);
    return n > k && !strcmp(name + n - k, suffix);
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
            if (cJSON_IsString(m) && (!strcmp(name, m->valuestring) || ends(name, m->valuestring)))
                return true;
    } while (cut_last(name));
    return false;
}

/* Parameters of all experts, from the one that PEFT wraps last: it wraps those in target_parameters in their order in
 * the module, each around the one before. */
static const char *const wholes[] = {".down_proj", ".gate_up_proj"};

bool mt_peft_whole_module(char module[MT_TENSOR_NAME], const struct mt_adapter_spec *s, const char *parameter)
{
    const char *dot = strrchr(parameter, '.');
    size_t at = dot ? (size_t)(dot - parameter) : 0, n = at;
    snprintf(module, MT_TENSOR_NAME, "%.*s", (int)at, parameter);
    for (size_t i = 0; i < MT_ARRAY_LEN(wholes) && strstr(module, ".experts") && n + 20 < MT_TENSOR_NAME; i++) {
        char other[MT_STORED_NAME];
        bool has = false;
        snprintf(other, sizeof(other), "%.*s%s", (int)at, parameter, wholes[i]);
        for (size_t k = 0; k < s->targets.n && !has; k++)
            has = !strcmp(s->targets.items[k].name, other);
        if (!strcmp(wholes[i], dot))
            return has;
        if (has)
            n += (size_t)snprintf(module + n, MT_TENSOR_NAME - n, ".base_layer");
    }
    return false;
}

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
                                            (ends(module, p->valuestring) &&
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
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s/" MT_PEFT_WEIGHTS ": tensor \"%s\" is not supported", dir, t->name);
    bool a = ends(name, SUFFIX_A), b = ends(name, SUFFIX_B);
    if (s->dora && ends(name, "." MT_LORA_MAGNITUDE))
        return 0;
    snprintf(module, sizeof(module), "%.*s", (int)(a || b ? strlen(name) - strlen(SUFFIX_A) : (size_t)(dot - name)), name);
    if (b || ends(name, ".base_layer.weight")) /* with an adapter of the head, PEFT also stores the model's own matrix:
                                                  mt_peft_compare_copies() */
        return 0;
    bool whole = ends(module, ".experts") || ends(module, ".experts.base_layer");
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
    int rc = value_of(&alpha, o, "lora_alpha", "alpha_pattern", module, dir, err);
    if (!rc)
        rc = value_of(&rank, o, "r", "rank_pattern", module, dir, err);
    if (!rc && (t->n_dims != 2 || t->shape[0] < 1))
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s/" MT_PEFT_WEIGHTS ": tensor \"%s\" must be a matrix", dir, t->name);
    if (!rc && !(mt_adapter_list_add(&s->targets, module, 0) && mt_adapter_list_add(&s->alphas, module, alpha) &&
                 mt_adapter_list_add(&s->ranks, module, whole ? rank : (double)t->shape[0])))
        rc = mt_fail_nomem(err, dir, sizeof(module));
    return rc;
}

static int open_weights(struct mt_st_model *st, const char *dir, struct mt_err *err)
{
    char path[4200];
    mt_path_printf(path, sizeof(path), "%s/" MT_PEFT_WEIGHTS, dir);
    if (!mt_path_exists(path))
        return mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s has no " MT_PEFT_WEIGHTS, dir);
    return mt_st_open_file(st, path, err);
}

int mt_peft_read_spec(struct mt_adapter_spec *out, const char *dir, struct mt_err *err)
{
    struct mt_adapter_spec s = {.on = true, .lr_ratio_b = 1};
    struct mt_st_model st;
    cJSON *o = NULL;
    int rc = read_config(&o, dir, err);
    if (!rc)
        rc = check_keys(o, dir, err);
    if (!rc)
        rc = open_weights(&st, dir, err);
    if (!rc) {
        const cJSON *r = mt_json_get(o, "r"), *alpha = mt_json_get(o, "lora_alpha");
        s.rank = cJSON_IsNumber(r) ? (int64_t)r->valuedouble : 8;
        s.alpha = cJSON_IsNumber(alpha) ? alpha->valuedouble : 8;
        const cJSON *dropout = mt_json_get(o, "lora_dropout");
        s.dropout = cJSON_IsNumber(dropout) ? dropout->valuedouble : 0;
        s.dora = cJSON_IsTrue(mt_json_get(o, "use_dora"));
        s.rslora = cJSON_IsTrue(mt_json_get(o, "use_rslora"));
        for (size_t i = 0; i < st.n_tensors && !rc; i++)
            rc = add_tensor(&s, &st.tensors[i], o, dir, err);
        mt_st_close(&st);
    }
    cJSON_Delete(o);
    if (rc)
        mt_adapter_spec_finish(&s);
    else
        *out = s;
    return rc;
}

int mt_peft_uses_dora(bool *yes, const char *dir, struct mt_err *err)
{
    cJSON *o = NULL;
    int rc = read_config(&o, dir, err);
    *yes = !rc && cJSON_IsTrue(mt_json_get(o, "use_dora"));
    cJSON_Delete(o);
    return rc;
}

int mt_peft_base_model(char **out, const char *dir, struct mt_err *err)
{
    cJSON *o = NULL;
    int rc = read_config(&o, dir, err);
    const cJSON *base = rc ? NULL : mt_json_get(o, "base_model_name_or_path");
    if (!rc && (!cJSON_IsString(base) || !*base->valuestring))
        rc = mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s/" MT_PEFT_CONFIG " does not name the model: give --model", dir);
    if (!rc && !(*out = strdup(base->valuestring)))
        rc = mt_fail_nomem(err, dir, strlen(base->valuestring));
    cJSON_Delete(o);
    return rc;
}

/* --- weights -------------------------------------------------------------------------------------------- */

/* The file's tensor that is t or, of adapters, holds it. */
static int find_tensor(const struct mt_st_tensor **out, const struct mt_st_model *st, const struct mt_layout *l,
                       const struct mt_tensor *t, struct mt_err *err)
{
    char name[MT_PEFT_NAME];
    const struct mt_stored *s = &l->stored[t->place.stored];
    const int64_t *shape = t->adapter ? s->shape : t->shape;
    if (t->adapter)
        snprintf(name, sizeof(name), "%s", s->name);
    else
        mt_peft_whole_name(name, l->cfg.family, t->name);
    const struct mt_st_tensor *src = *out = mt_st_find(st, name);
    if (!src || src->n_dims != t->n_dims || src->shape[0] != shape[0] || (t->n_dims > 1 && src->shape[1] != shape[1]))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: tensor \"%s\" is missing or has another shape than [%lld, %lld]",
                       st->files[0].path, name, (long long)shape[0], (long long)shape[1]);
    return 0;
}

static int load_tensor(struct mt_stored_reader *r, const struct mt_tensor *t, mt_plane_set *planes, float *buf,
                       struct mt_err *err)
{
    const struct mt_st_model *st = r->st;
    const struct mt_st_tensor *src;
    int rc = find_tensor(&src, st, r->l, t, err);
    for (size_t at = 0; at < t->n && !rc; at += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, t->n - at);
        rc = t->adapter ? mt_stored_read_f32(r, t, at, n, buf, err) : mt_st_read_f32(st, src, at, n, buf, err);
        for (size_t i = 0; i < n && !rc; i++)
            if ((mt_f32_bits(buf[i]) & 0x7fffffffu) >= 0x7f7f8000u)
                rc = mt_fail(err, MT_ERR_INPUT, -ERANGE, "%s: tensor \"%s\" holds %g at element %zu: weights must be "
                             "finite and below 3.39e38", st->files[0].path, src->name, (double)buf[i], at + i);
        if (!rc)
            rc = mt_tensor_write_masters(planes, t, at, n, buf, err);
    }
    return rc;
}

#define TABLE PREFIX "model.embed_tokens.weight"
#define HEAD PREFIX "lm_head.weight"

int mt_peft_check_tied(const struct mt_st_model *st, struct mt_err *err)
{
    const struct mt_st_tensor *t[] = {mt_st_find(st, TABLE), mt_st_find(st, HEAD)};
    if (!t[0] || !t[1])
        return 0;
    float *buf = mt_calloc((size_t)2 * PIECE, sizeof(float));
    bool same = t[0]->n_elems == t[1]->n_elems;
    int rc = buf ? 0 : mt_fail_nomem(err, t[0]->name, 2 * PIECE * sizeof(float));
    for (size_t at = 0; at < t[0]->n_elems && same && !rc; at += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, t[0]->n_elems - at);
        for (int i = 0; i < 2 && !rc; i++)
            rc = mt_st_read_f32(st, t[i], at, n, buf + i * PIECE, err);
        same = rc || !memcmp(buf, buf + PIECE, n * sizeof(float));
    }
    free(buf);
    if (rc || same)
        return rc;
    return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: embed_tokens and lm_head, which this model shares, are two tables that differ: "
                   "PEFT trained a copy of each (without ensure_weight_tying), and one would be lost; train with "
                   "ensure_weight_tying, or on the model with tie_word_embeddings = false", st->files[0].path);
}

int mt_peft_load(const struct mt_layout *l, mt_plane_set *planes, const char *dir, struct mt_err *err)
{
    struct mt_st_model st;
    float *buf = mt_calloc(PIECE, sizeof(float));
    int rc = buf ? open_weights(&st, dir, err) : mt_fail_nomem(err, "an adapter", PIECE * sizeof(float));
    if (!rc) {
        struct mt_stored_reader r;
        mt_stored_reader_init(&r, l, &st, NULL);
        rc = l->tied ? mt_peft_check_tied(&st, err) : 0;
        for (size_t i = 0; i < l->n_tensors && !rc; i++) /* by the files' tensors: one is read for many of ours */
            if (l->tensors[l->pieces[i]].trainable)
                rc = load_tensor(&r, &l->tensors[l->pieces[i]], planes, buf, err);
        mt_stored_reader_finish(&r);
        mt_st_close(&st);
    }
    free(buf);
    return rc ? rc : mt_planes_settle(planes, err);
}

/* PEFT's copy of the matrix that t's module had when its adapter was saved; NULL: there is none. */
static const struct mt_st_tensor *find_copy(const struct mt_st_model *st, const struct mt_layout *l,
                                            const struct mt_tensor *t)
{
    static const char weight[] = ".weight", copy[] = ".base_layer.weight";
    char name[MT_PEFT_NAME + sizeof(copy)];
    mt_peft_whole_name(name, l->cfg.family, t->name);
    size_t n = strlen(name);
    const struct mt_st_tensor *found = NULL;
    if (!t->adapter && t->n_dims == 2 && ends(name, weight)) {
        snprintf(name + n - strlen(weight), sizeof(copy), "%s", copy);
        found = mt_st_find(st, name);
    }
    return found || !l->tied || t != l->tensors ? found : mt_st_find(st, PREFIX "lm_head.base_layer.weight");
}

/* *apart: the largest difference of two tensors of the same size. */
static int compare(double *apart, const struct mt_st_model *sa, const struct mt_st_tensor *a,
                   const struct mt_st_model *sb, const struct mt_st_tensor *b, struct mt_err *err)
{
    float *buf = mt_calloc((size_t)2 * PIECE, sizeof(float));
    int rc = buf ? 0 : mt_fail_nomem(err, a->name, 2 * PIECE * sizeof(float));
    *apart = 0;
    for (size_t at = 0; at < a->n_elems && !rc; at += PIECE) {
        size_t n = MT_MIN((size_t)PIECE, a->n_elems - at);
        rc = mt_st_read_f32(sa, a, at, n, buf, err);
        if (!rc)
            rc = mt_st_read_f32(sb, b, at, n, buf + PIECE, err);
        for (size_t i = 0; i < n && !rc; i++) {
            double d = fabs((double)buf[i] - (double)buf[PIECE + i]);
            *apart = d <= *apart ? *apart : d; /* NaN counts, too */
        }
    }
    free(buf);
    return rc;
}

int mt_peft_compare_copies(const struct mt_layout *l, const char *dir, const char *model_dir, struct mt_err *err)
{
    struct mt_st_model st;
    struct mt_sources base = {.of = NULL};
    int rc = open_weights(&st, dir, err);
    if (rc)
        return rc;
    for (size_t i = 0; i < l->n_tensors && !rc; i++) {
        const struct mt_st_tensor *copy = find_copy(&st, l, &l->tensors[i]);
        double apart = 0;
        if (!copy)
            continue;
        if (!base.of)
            rc = mt_sources_open(&base, l, model_dir, err);
        const struct mt_packed_source *src = rc ? NULL : &base.of[i];
        if (!src || !src->codes || src->format != MT_PACKED_NONE || src->codes->n_elems != copy->n_elems)
            continue; /* a packed one is not what PEFT stores */
        rc = compare(&apart, &st, copy, &base.st, src->codes, err);
        if (!rc && apart != 0)
            mt_warn("%s: \"%s\", the model's own matrix when the adapter was saved, is up to %.2g from %s in %s: PEFT would "
                    "load the adapter's copy over the model's, here the model's is used; see to it that the model is the "
                    "one that the adapter was trained on, in its dtype", st.files[0].path, copy->name, apart, src->codes->name,
                    model_dir);
    }
    if (base.of)
        mt_sources_close(&base);
    mt_st_close(&st);
    return rc;
}

int mt_peft_check(const struct mt_layout *l, const char *dir, struct mt_err *err)
{
    struct mt_st_model st;
    const struct mt_st_tensor *src;
    int rc = open_weights(&st, dir, err);
    if (rc)
        return rc;
    for (size_t i = 0; i < l->n_tensors && !rc; i++)
        if (l->tensors[i].trainable)
            rc = find_tensor(&src, &st, l, &l->tensors[i], err);
    if (!rc && l->tied)
        rc = mt_peft_check_tied(&st, err);
    mt_st_close(&st);
    return rc;
}

/* --- writing the configuration ------------------------------------------------------------------------- */

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

/* Are all matrices of that last name targets? PEFT takes a last name to mean every matrix of that name. */
static bool short_name_will_do(const struct mt_layout *l, const struct target *all, size_t n, const char *last)
{
    size_t ours = 0, theirs = 0;
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
            listed = is_text(m, last);
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
            listed |= is_text(m, module);
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
    struct target *all = list_targets(l, &n);
    if (!all)
        return NULL;
    mt_json_begin();
    cJSON *o = cJSON_CreateObject(), *parameters = target_parameters(l, all, n);
    mt_json_add(o, "alpha_pattern", pattern(l, all, n, alpha_of_target, l->adapter_default.alpha));
    cJSON_AddStringToObject(o, "base_model_name_or_path", base);
    cJSON_AddStringToObject(o, "bias", "none");
    if (l->tied && l->tensors[0].trainable) /* else PEFT would go on with two tables */
        cJSON_AddBoolToObject(o, "ensure_weight_tying", true);
    cJSON_AddBoolToObject(o, "fan_in_fan_out", false);
    cJSON_AddBoolToObject(o, "inference_mode", true);
    cJSON_AddBoolToObject(o, "init_lora_weights", true);
    cJSON_AddNumberToObject(o, "lora_alpha", l->adapter_default.alpha);
    cJSON_AddNumberToObject(o, "lora_dropout", parameters || !l->n_adapters ? 0 : l->adapters[0].dropout);
    mt_json_add(o, "modules_to_save", modules_to_save(l));
    cJSON_AddStringToObject(o, "peft_type", "LORA");
    cJSON_AddNumberToObject(o, "r", (double)l->adapter_default.rank);
    mt_json_add(o, "rank_pattern", pattern(l, all, n, rank_of, (double)l->adapter_default.rank));
    mt_json_add(o, "target_modules", target_modules(l, all, n));
    if (parameters)
        mt_json_add(o, "target_parameters", parameters);
    cJSON_AddStringToObject(o, "task_type", "CAUSAL_LM");
    cJSON_AddBoolToObject(o, "use_dora", l->adapter_default.dora);
    cJSON_AddBoolToObject(o, "use_rslora", l->adapter_default.rslora);
    char *text = mt_json_complete() ? mt_json_print(o, true) : NULL;
    cJSON_Delete(o);
    free(all);
    return text;
}

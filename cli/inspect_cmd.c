/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/visible.h"
#include "checkpoint/merge.h"
#include "cli.h"
#include "hf/hf_config.h"
#include "hf/safetensors.h"
#include "model/layer_text.h"
#include "model/part.h"
#include "weights/peft.h"
#include "report.h"

enum { INSPECT_TOKENS = 4096 }; /* of a document, for FLOP of attention */

static cJSON *tensor_json(const struct mt_st_tensor *t)
{
    cJSON *o = cJSON_CreateObject(), *shape = cJSON_AddArrayToObject(o, "shape");
    mt_json_put(o, "name=%s, dtype=%s", t->name, mt_st_dtype_name(t->dtype));
    for (int i = 0; i < t->n_dims; i++)
        mt_json_append(shape, cJSON_CreateNumber((double)t->shape[i]));
    return o;
}

/* "128 experts of width 1536, 8 for each token; 235093634560 parameters, 21.6B of them active" */
static void print_mixture(const struct mt_layout *l)
{
    const struct mt_moe *moe = &l->cfg.moe;
    char active[48];
    printf("%lld experts of width %lld, %lld for each token; %llu parameters%s\n", (long long)moe->n_experts,
           (long long)moe->width, (long long)moe->top_k, (unsigned long long)l->n_params,
           cli_active_params(active, sizeof(active), l));
}

/* The last part of a module's name: "q_proj". */
static const char *kind_of(const struct mt_adapter_spec *s, size_t i)
{
    const char *dot = strrchr(s->targets.items[i].name, '.');
    return dot ? dot + 1 : s->targets.items[i].name;
}

/* "  q_proj: 32 modules, rank 16, alpha 32", once for each kind; targets, ranks and alphas are one list. */
static void print_kind(const struct mt_adapter_spec *s, size_t first)
{
    double rank[2] = {1e9, 0}, alpha[2] = {1e9, 0};
    size_t n = 0;
    for (size_t i = 0; i < s->targets.n; i++) {
        double r = s->ranks.items[i].value, a = s->alphas.items[i].value;
        if (strcmp(kind_of(s, i), kind_of(s, first)))
            continue;
        if (i < first)
            return;
        rank[0] = MT_MIN(rank[0], r);
        rank[1] = MT_MAX(rank[1], r);
        alpha[0] = MT_MIN(alpha[0], a);
        alpha[1] = MT_MAX(alpha[1], a);
        n++;
    }
    char name[256];
    mt_visible(name, sizeof(name), kind_of(s, first));
    printf("  %s: %zu module%s, rank %g", name, n, n == 1 ? "" : "s", rank[0]);
    if (rank[1] > rank[0])
        printf(" to %g", rank[1]);
    printf(", alpha %g", alpha[0]);
    printf(alpha[1] > alpha[0] ? " to %g\n" : "\n", alpha[1]);
}

static void print_adapter(const struct mt_adapter_spec *s, const char *base)
{
    char name[1024];
    mt_visible(name, sizeof(name), base);
    printf("%s%s of %s: rank %lld, alpha %g", s->dora ? "DoRA" : "LoRA", s->rslora ? " (rsLoRA's scale)" : "",
           *base ? name : "a model that is not named", (long long)s->rank, s->alpha);
    printf(s->dropout > 0 ? ", dropout %g\n" : "\n", s->dropout);
    for (size_t i = 0; i < s->targets.n; i++)
        print_kind(s, i);
    for (size_t i = 0; i < s->train_also.n; i++) {
        mt_visible(name, sizeof(name), s->train_also.items[i].name);
        printf("  %s: trained whole\n", name);
    }
}

static cJSON *adapter_json(const struct mt_adapter_spec *s, const char *base)
{
    cJSON *o = cJSON_CreateObject(), *list;
    mt_json_put(o, "kind=%s, base_model=%s, rank=%f, alpha=%f, rslora=%d, dropout=%f", s->dora ? "dora" : "lora",
                base, (double)s->rank, s->alpha, s->rslora, s->dropout);
    list = cJSON_AddArrayToObject(o, "targets");
    for (size_t i = 0; i < s->targets.n; i++)
        mt_json_append(list, mt_json_put(NULL, "module=%s, rank=%f, alpha=%f", s->targets.items[i].name,
                                         s->ranks.items[i].value, s->alphas.items[i].value));
    list = cJSON_AddArrayToObject(o, "train_also");
    for (size_t i = 0; i < s->train_also.n; i++)
        mt_json_append(list, cJSON_CreateString(s->train_also.items[i].name));
    return o;
}

/* What is inspected beside tensors; all NULL: nothing is known. */
struct about {
    const struct mt_layout *layout;           /* of a folder whose config.json is supported */
    const struct mt_adapter_spec *adapter;
    const char *base;                         /* the model that the adapter names, or "" */
};

static void print_tensors(const struct mt_st_model *m, const struct about *about, bool json)
{
    const struct mt_layout *l = about->layout;
    const struct mt_hf_config *cfg = l ? &l->cfg : NULL;
    const struct mt_layer_spec *s = l ? mt_layer_of(cfg, 0) : NULL;
    double params = 0;
    bool packed = false; /* then elements of tensors are no parameters */
    cJSON *root = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(root, "tensors");
    for (size_t i = 0; i < m->n_tensors; i++) {
        params += (double)m->tensors[i].n_elems;
        packed |= m->tensors[i].dtype == MT_ST_U8 || m->tensors[i].dtype == MT_ST_F8_E4M3;
        mt_json_append(list, tensor_json(&m->tensors[i]));
    }
    params = packed && l ? (double)l->n_params : params;
    cJSON_AddNumberToObject(root, "parameters", params);
    if (cfg)
        cJSON_AddStringToObject(root, "architecture", cfg->family->architecture);
    if (cfg && cfg->moe.n_experts)
        cJSON_AddNumberToObject(root, "active_parameters", (double)l->n_active);
    if (about->adapter)
        mt_json_add(root, "adapter", adapter_json(about->adapter, about->base));
    if (json) {
        cli_print_object(root, true);
        return;
    }
    cJSON_Delete(root);
    if (cfg)
        printf("%s: %lld layers, hidden %lld, ffn %lld, heads %lld of %lld, key heads %lld, "
               "vocabulary %lld%s\n",
               cfg->family->architecture, (long long)cfg->n_layers, (long long)cfg->hidden,
               (long long)s->ffn, (long long)s->n_heads, (long long)s->head_dim, (long long)s->n_kv_heads,
               (long long)cfg->vocab, cfg->tied ? ", tied" : "");
    if (cfg && cfg->moe.n_experts)
        print_mixture(l);
    if (about->adapter)
        print_adapter(about->adapter, about->base);
    for (size_t i = 0; i < m->n_tensors; i++) {
        char name[1024];
        mt_visible(name, sizeof(name), m->tensors[i].name);
        printf("%-8s %s [", mt_st_dtype_name(m->tensors[i].dtype), name);
        for (int k = 0; k < m->tensors[i].n_dims; k++)
            printf("%s%lld", k ? ", " : "", (long long)m->tensors[i].shape[k]);
        printf("]\n");
    }
    printf("%zu tensors, %.0f parameters\n", m->n_tensors, params);
}

static int inspect_adapter(const char *dir, bool json, struct mt_err *err)
{
    MT_CLOSED_BY(mt_adapter_spec_finish) struct mt_adapter_spec spec = {0};
    MT_CLOSED_BY(mt_st_close) struct mt_st_model m = {0};
    MT_FREED char *base = NULL, *path = mt_path_join(dir, MT_PEFT_WEIGHTS);
    int rc = path ? mt_peft_read_spec(&spec, dir, err) : mt_fail_nomem(err, dir, 1);
    rc = rc ?: mt_st_open_file(&m, path, err);
    if (rc)
        return rc;
    mt_peft_base_model(&base, dir, NULL); /* where it names none, it is shown without */
    print_tensors(&m, &(struct about){.adapter = &spec, .base = base ? base : ""}, json);
    return 0;
}

static int inspect_model(const char *path, bool json, struct mt_err *err)
{
    MT_FREED struct mt_hf_config *cfg = mt_calloc(1, sizeof(*cfg));
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *layout = NULL;
    MT_CLOSED_BY(mt_st_close) struct mt_st_model m = {0};
    bool dir = mt_is_dir(path);
    int rc = dir ? mt_st_open_dir(&m, path, err) : mt_st_open_file(&m, path, err);
    if (rc)
        return rc;
    if (dir && cfg && !mt_hf_config_read(cfg, path, NULL))
        mt_layout_create(&layout, cfg, &(struct mt_layout_params){.cut = mt_cut_layer}, NULL);
    print_tensors(&m, &(struct about){.layout = layout}, json);
    return 0;
}

/* Of a folder, a file like config.json, or a published model's name. */
static int read_config(struct mt_hf_config *cfg, const char *model, struct mt_err *err)
{
    MT_FREED char *text = NULL;
    char path[4096];
    size_t len;
    if (mt_is_dir(model))
        return mt_hf_config_read(cfg, model, err);
    mt_path_printf(path, sizeof(path), "%s", model);
    if (!mt_path_exists(path) && !mt_hf_find_stored(path, sizeof(path), model))
        return mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s is no model's folder or config.json, and no stored model's name", model);
    return mt_read_file(path, &text, &len, err) ?: mt_hf_config_parse(cfg, text, len, path, err);
}

static void add_line(void *ctx, const struct mt_layer_line *line)
{
    cJSON *o = cJSON_CreateObject();
    mt_json_append(ctx, o);
    mt_json_put(o, "part=%s, operation=%s, tensors=%s, parameters=%f, elements=%f, bytes=%f, kept=%s, flop=%f",
                line->part->name, line->text, line->tensors, (double)line->params, (double)line->elems,
                (double)line->bytes, line->kept ? line->kept : "", line->flops);
}

/* A number with a prefix, "" for 0: most operations have no parameters, or no products. */
static const char *short_number(char buf[32], const cJSON *o, const char *key)
{
    static const char prefix[] = " kMGT";
    double x = mt_json_get(o, key)->valuedouble;
    int i = 0;
    for (; x >= 999.5 && prefix[i + 1]; i++)
        x /= 1000;
    snprintf(buf, 32, "%.4g%.*s", x, i > 0, &prefix[i]);
    return x > 0 ? buf : "";
}

static void print_lines(const cJSON *lines)
{
    const char *part = "";
    char params[32], bytes[32], flop[32];
    printf("%8s %9s %8s %8s  of a token in bf16; FLOP of its forward pass, in documents of %d tokens\n", "elements", "bytes",
           "FLOP", "weights", INSPECT_TOKENS);
    for (const cJSON *o = lines->child; o; o = o->next) {
        const char *of = mt_json_get(o, "part")->valuestring, *kept = mt_json_get(o, "kept")->valuestring;
        if (strcmp(of, part))
            printf("%s\n", of);
        part = of;
        printf("%8.0f %9s %8s %8s  %s", mt_json_get(o, "elements")->valuedouble, short_number(bytes, o, "bytes"),
               short_number(flop, o, "flop"), short_number(params, o, "parameters"), mt_json_get(o, "operation")->valuestring);
        printf(*kept ? "  keep %s" : "%s", kept);
        printf(*mt_json_get(o, "tensors")->valuestring ? "  <- %s\n" : "%s\n", mt_json_get(o, "tensors")->valuestring);
    }
}

static int inspect_layer(const char *model, int64_t layer, bool json, struct mt_err *err)
{
    MT_FREED struct mt_hf_config *cfg = mt_calloc(1, sizeof(*cfg));
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *l = NULL;
    struct mt_cut cut = mt_cut_layer;
    int rc = cfg ? read_config(cfg, model, err) : mt_fail_nomem(err, model, sizeof(*cfg));
    if (!rc && layer >= cfg->n_layers)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "--layer %lld: the model has layers 0 to %lld", (long long)layer,
                     (long long)cfg->n_layers - 1);
    if (!rc) {
        cut.expert_group = (size_t)cfg->moe.n_experts; /* all in one part */
        cfg->n_layers = layer + 1;
        rc = mt_layout_create(&l, cfg, &(struct mt_layout_params){.cut = cut}, err);
    }
    if (!rc) {
        MT_JSON_FREED cJSON *lines = cJSON_CreateArray();
        mt_layer_lines(l, (int)layer, MT_BF16, INSPECT_TOKENS, add_line, lines);
        MT_FREED char *text = json ? mt_json_print(lines, true) : NULL;
        if (json)
            printf("%s\n", text ? text : "");
        else
            print_lines(lines);
    }
    return rc;
}

/* Do the adapters have their matrices in the model? */
static int check_fit(const char *adapter, const char *model, struct mt_err *err)
{
    MT_CLOSED_BY(mt_st_close) struct mt_st_model base = {0};
    MT_CLOSED_BY(mt_merge_close) struct mt_merge *merge = NULL;
    return mt_st_open_dir(&base, model, err) ?: mt_merge_open(&merge, adapter, &base, model, true, err);
}

int cli_cmd_inspect(struct cli *, const struct cli_args *args, struct mt_err *err)
{
    const char *path = args->n_operands ? args->operands[0] : NULL, *adapter = cli_arg(args, "adapter");
    bool json = cli_arg(args, "json");
    int64_t layer = cli_whole(args, "layer", -1);
    if (!path && !adapter)
        return cli_usage("inspect: a file, a folder or --adapter is missing");
    int rc = path && adapter ? check_fit(adapter, path, err) : 0;
    if (!rc && !adapter && mt_is_dir(path) && mt_peft_is_folder(path))
        adapter = path;
    return rc ?: adapter      ? inspect_adapter(adapter, json, err)
                 : layer >= 0 ? inspect_layer(path, layer, json, err)
                              : inspect_model(path, json, err);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/visible.h"
#include "cli.h"
#include "hf/hf_config.h"
#include "hf/safetensors.h"
#include "model/peft.h"
#include "report.h"

static cJSON *tensor_json(const struct mt_st_tensor *t)
{
    cJSON *o = cJSON_CreateObject(), *shape = cJSON_AddArrayToObject(o, "shape");
    cJSON_AddStringToObject(o, "name", t->name);
    cJSON_AddStringToObject(o, "dtype", mt_st_dtype_name(t->dtype));
    for (int i = 0; i < t->n_dims; i++)
        cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)t->shape[i]));
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

/* `l`: of a folder whose config.json is supported; else NULL. */
static void print_tensors(const struct mt_st_model *m, const struct mt_layout *l, bool json)
{
    const struct mt_hf_config *cfg = l ? &l->cfg : NULL;
    double params = 0;
    bool packed = false; /* then elements of tensors are no parameters */
    cJSON *root = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(root, "tensors");
    for (size_t i = 0; i < m->n_tensors; i++) {
        params += (double)m->tensors[i].n_elems;
        packed |= m->tensors[i].dtype == MT_ST_U8 || m->tensors[i].dtype == MT_ST_F8_E4M3;
        cJSON_AddItemToArray(list, tensor_json(&m->tensors[i]));
    }
    params = packed && l ? (double)l->n_params : params;
    cJSON_AddNumberToObject(root, "parameters", params);
    if (cfg)
        cJSON_AddStringToObject(root, "architecture", cfg->family->architecture);
    if (cfg && cfg->moe.n_experts)
        cJSON_AddNumberToObject(root, "active_parameters", (double)l->n_active);
    if (json) {
        char *text = mt_json_print(root, true);
        printf("%s\n", text ? text : "");
        free(text);
    } else {
        if (cfg)
            printf("%s: %lld layers, hidden %lld, ffn %lld, heads %lld of %lld, key heads %lld, "
                   "vocabulary %lld%s\n",
                   cfg->family->architecture, (long long)cfg->n_layers, (long long)cfg->hidden,
                   (long long)cfg->ffn, (long long)cfg->n_heads, (long long)cfg->head_dim,
                   (long long)cfg->n_kv_heads, (long long)cfg->vocab, cfg->tied ? ", tied" : "");
        if (cfg && cfg->moe.n_experts)
            print_mixture(l);
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
    cJSON_Delete(root);
}

int cli_cmd_inspect(struct cli *cli, const struct cli_args *args)
{
    const char *path = args->operands[0];
    struct mt_hf_config *cfg = mt_calloc(1, sizeof(*cfg));
    struct mt_layout *layout = NULL;
    struct mt_st_model m;
    struct mt_err err;
    bool dir = mt_is_dir(path);
    (void)cli;
    char *adapter = dir && mt_peft_is_folder(path) ? mt_path_join(path, MT_PEFT_WEIGHTS) : NULL;
    int rc = dir && !adapter ? mt_st_open_dir(&m, path, &err) : mt_st_open_file(&m, adapter ? adapter : path, &err);
    if (!rc) {
        if (dir && cfg && !mt_hf_config_read(cfg, path, NULL))
            mt_layout_create(&layout, cfg, &(struct mt_layout_params){.cut = mt_cut_layer}, NULL);
        print_tensors(&m, layout, cli_arg(args, "json") != NULL);
        mt_layout_destroy(&layout);
        mt_st_close(&m);
    }
    free(cfg);
    free(adapter);
    return rc ? cli_fail(&err) : 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "train/cluster_facts.h"

#include <stdio.h>
#include <string.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"
#include "train/cluster_priv.h"

/* A row: what a host says of itself, and what to do if another says something else. */
static const struct {
    const char *name, *what, *mend;
} facts[] = {
    {"version", "its version of megatrain", "install the same on all hosts"},
    {"model", "in its config.json of the model", "each host needs the same files"},
    {"product", "its GPU", "results would differ in bits: hosts need GPUs of one product"},
    {"arithmetic", "what its CPU computes products by", "results would differ in bits: hosts need CPUs with the same instructions and "
                                                        "the same oneDNN, and the same MEGATRAIN_CPU_GEMM"},
};

/* Keys of config.json that say only where it comes from. */
static bool is_of_origin(const char *key)
{
    return !strcmp(key, "_name_or_path") || !strcmp(key, "transformers_version");
}

/* Of this host, as far as inputs and setup are open. */
static int describe(cJSON **out, const struct mt_setup *s, const struct mt_inputs *in, struct mt_err *err)
{
    MT_FREED char *path = in->model_dir ? mt_path_join(in->model_dir, "config.json") : NULL;
    cJSON *model = NULL, *o;
    int rc = path ? mt_json_read_file(&model, path, MT_ERR_INPUT, err) : 0;
    if (rc)
        return rc;
    mt_json_begin();
    o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, facts[0].name, MT_VERSION);
    mt_json_add(o, facts[1].name, model ? model : cJSON_CreateNull());
    if (s->dev) {
        const struct mt_device_limits *l = mt_device_limits(s->dev);
        cJSON_AddStringToObject(o, facts[2].name, l->product);
        cJSON_AddStringToObject(o, facts[3].name, l->arithmetic[s->request.numerics.dtype == MT_BF16]);
    }
    *out = o;
    return o && mt_json_complete() ? 0 : mt_fail_nomem(err, "what the hosts have in common", 1);
}

int mt_cluster_print_facts(char **out, const struct mt_setup *s, struct mt_err *err)
{
    MT_JSON_FREED cJSON *o = NULL;
    int rc = describe(&o, s, s->in, err);
    const struct mt_resumed *r = &s->in->resumed;
    if (!rc && r->from_files)
        mt_json_add(o, "from_files", cJSON_Duplicate(r->from_files, true));
    if (!rc)
        mt_json_put(o, "rounds=%f, step=%f, rows=%f, rows_per_epoch=%f", (double)r->rounds,
                    (double)r->step, (double)r->rows, (double)r->rows_per_epoch);
    *out = rc ? NULL : mt_json_print(o, false);
    return rc ? rc : *out ? 0 : mt_fail_nomem(err, "what the hosts have in common", 1);
}

static uint64_t number(const cJSON *o, const char *name)
{
    const cJSON *v = mt_json_get(o, name);
    return cJSON_IsNumber(v) && v->valuedouble >= 0 ? (uint64_t)v->valuedouble : 0;
}

struct mt_resumed mt_cluster_resumed(const mt_cluster *c)
{
    return (struct mt_resumed){.from_files = mt_json_get(c->facts, "from_files"),
                               .rounds = number(c->facts, "rounds"),
                               .step = number(c->facts, "step"),
                               .rows = number(c->facts, "rows"),
                               .rows_per_epoch = number(c->facts, "rows_per_epoch")};
}

/* Where two values differ, "rope_scaling.factor", and what they are there. */
struct difference {
    char key[256];
    const cJSON *own, *first;
};

static bool differs(struct difference *d, const char *key, const cJSON *own, const cJSON *first)
{
    char path[sizeof(d->key)];
    *d = (struct difference){.own = own, .first = first};
    snprintf(d->key, sizeof(d->key), "%s", key);
    if (!cJSON_IsObject(own) || !cJSON_IsObject(first))
        return !cJSON_Compare(own, first, true);
    for (int pass = 0; pass < 2; pass++) /* keys of either */
        for (const cJSON *v = pass ? own->child : first->child; v; v = v->next) {
            snprintf(path, sizeof(path), "%.120s%s%.120s", key, *key ? "." : "", v->string);
            bool also = *key || !is_of_origin(v->string);
            if (also && differs(d, path, mt_json_get(own, v->string), mt_json_get(first, v->string)))
                return true;
        }
    return false;
}

static void print_value(char *buf, size_t len, const cJSON *v)
{
    char *text = v ? cJSON_PrintUnformatted(v) : NULL;
    snprintf(buf, len, "%.60s", text ? text : "nothing");
    cJSON_free(text);
}

int mt_cluster_compare_facts(const cJSON *first, const struct mt_setup *s, const struct mt_inputs *in,
                             struct mt_err *err)
{
    MT_JSON_FREED cJSON *own = NULL;
    int rc = describe(&own, s, in, err);
    for (size_t i = 0; i < MT_ARRAY_LEN(facts) && !rc; i++) {
        struct difference d;
        char a[64], b[64];
        const cJSON *mine = mt_json_get(own, facts[i].name);
        if (!mine || cJSON_IsNull(mine) || !differs(&d, "", mine, mt_json_get(first, facts[i].name)))
            continue;
        print_value(a, sizeof(a), d.own);
        print_value(b, sizeof(b), d.first);
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s%s%s is %s, host 0's %s: %s", facts[i].what, *d.key ? " " : "", d.key, a, b,
                     facts[i].mend);
    }
    return rc;
}

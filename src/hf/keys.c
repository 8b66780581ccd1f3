/* SPDX-License-Identifier: Apache-2.0 */
#include "hf/keys.h"

#include <math.h>
#include <stdio.h>

#include "base/json.h"

void mt_keys_refuse(struct mt_keys *k, const char *key, const char *why)
{
    if (!k->rc)
        k->rc = mt_fail(k->err, MT_ERR_INPUT, -EINVAL, "%s: \"%s\" %s", k->name, key, why);
}

const cJSON *mt_keys_find(const struct mt_keys *k, const char *key)
{
    const cJSON *v = mt_json_get(k->root, key);
    return cJSON_IsNull(v) ? NULL : v;
}

bool mt_keys_is_null(const struct mt_keys *k, const char *key)
{
    return cJSON_IsNull(mt_json_get(k->root, key));
}

int64_t mt_keys_int(struct mt_keys *k, const char *key, int64_t def, int64_t min, int64_t max)
{
    const cJSON *v = mt_keys_find(k, key);
    if (!v)
        return def;
    if (!cJSON_IsNumber(v) || v->valuedouble != floor(v->valuedouble) ||
        !(v->valuedouble >= (double)min && v->valuedouble <= (double)max)) {
        char why[96];
        snprintf(why, sizeof(why), "must be an integer between %lld and %lld", (long long)min, (long long)max);
        mt_keys_refuse(k, key, why);
        return def;
    }
    return (int64_t)v->valuedouble;
}

int64_t mt_keys_need_int(struct mt_keys *k, const char *key, int64_t max)
{
    if (!mt_keys_find(k, key))
        mt_keys_refuse(k, key, "is missing");
    return mt_keys_int(k, key, 1, 1, max);
}

double mt_keys_number(struct mt_keys *k, const char *key, double def)
{
    const cJSON *v = mt_keys_find(k, key);
    if (!v)
        return def;
    if (!cJSON_IsNumber(v) || !(v->valuedouble >= 0) || !isfinite(v->valuedouble)) {
        mt_keys_refuse(k, key, "must be a number, 0 or more");
        return def;
    }
    return v->valuedouble;
}

bool mt_keys_bool(struct mt_keys *k, const char *key, bool def)
{
    const cJSON *v = mt_keys_find(k, key);
    if (!v)
        return def && !mt_keys_is_null(k, key); /* Python's None counts as False */
    if (!cJSON_IsBool(v)) {
        mt_keys_refuse(k, key, "must be true or false");
        return def;
    }
    return cJSON_IsTrue(v);
}

const cJSON *mt_keys_of_layers(struct mt_keys *k, const char *key, int64_t n_layers)
{
    const cJSON *list = mt_keys_find(k, key);
    if (!list || (cJSON_IsArray(list) && cJSON_GetArraySize(list) == n_layers))
        return list ? list->child : NULL;
    mt_keys_refuse(k, key, "does not name every layer");
    return NULL;
}

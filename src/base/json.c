/* SPDX-License-Identifier: Apache-2.0 */
#include "base/json.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/mem.h"
#include "base/strbuf.h"

static _Thread_local bool short_of_memory;

static void *watched_malloc(size_t n)
{
    void *p = malloc(n);
    short_of_memory |= !p;
    return p;
}

/* Runs before main(), so before any thread starts. */
__attribute__((constructor)) static void watch_allocations(void)
{
    cJSON_InitHooks(&(cJSON_Hooks){.malloc_fn = watched_malloc, .free_fn = free});
}

void mt_json_begin(void)
{
    short_of_memory = false;
}

void mt_json_lost(void)
{
    short_of_memory = true;
}

bool mt_json_complete(void)
{
    return !short_of_memory;
}

bool mt_json_add(cJSON *object, const char *key, cJSON *item)
{
    bool added = cJSON_AddItemToObject(object, key, item);
    if (!added)
        cJSON_Delete(item);
    return added;
}

bool mt_json_append(cJSON *list, cJSON *item)
{
    bool added = cJSON_AddItemToArray(list, item);
    if (!added)
        cJSON_Delete(item);
    return added;
}

int mt_json_parse(cJSON **out, const char *text, size_t len, const char *name,
                  enum mt_err_kind kind, struct mt_err *err)
{
    const char *end = text;
    bool before = short_of_memory;
    short_of_memory = false;
    cJSON *v = cJSON_ParseWithLengthOpts(text, len, &end, 0);
    bool no_memory = short_of_memory;
    short_of_memory |= before;
    if (v) {
        while (end < text + len && (*end == ' ' || *end == '\n' || *end == '\r' || *end == '\t'))
            end++;
        if (end == text + len) {
            *out = v;
            return 0;
        }
        cJSON_Delete(v);
    }
    if (no_memory)
        return mt_fail_nomem(err, name, len);
    if (!end || end < text || end > text + len)
        end = text;
    size_t line = 1, col = 1;
    for (const char *p = text; p < end; p++) {
        col = *p == '\n' ? 1 : col + 1;
        line += *p == '\n';
    }
    return mt_fail(err, kind, -EINVAL, "%s:%zu:%zu: not valid JSON", name, line, col);
}

int mt_json_read_file(cJSON **out, const char *path, enum mt_err_kind kind, struct mt_err *err)
{
    MT_FREED char *text = NULL;
    size_t len = 0;
    int rc = mt_read_file(path, &text, &len, err);
    if (rc) {
        if (err && rc != -ENOMEM)
            err->kind = kind;
        return rc;
    }
    return mt_json_parse(out, text, len, path, kind, err);
}

int mt_json_read_lines(cJSON **out, const char *path, struct mt_err *err)
{
    MT_FREED char *text = NULL;
    size_t len = 0;
    int rc = mt_read_file(path, &text, &len, err);
    if (rc)
        return rc;
    MT_JSON_FREED cJSON *list = cJSON_CreateArray();
    bool ok = list;
    for (char *save = NULL, *line = strtok_r(text, "\n", &save); line && ok; line = strtok_r(NULL, "\n", &save)) {
        short_of_memory = false;
        cJSON *o = cJSON_Parse(line);
        ok = mt_json_append(list, o ? o : cJSON_CreateNull()) && !short_of_memory;
    }
    if (!ok)
        return mt_fail_nomem(err, path, len);
    *out = MT_GIVE(list);
    return 0;
}

cJSON *mt_json_put(cJSON *object, const char *members, ...)
{
    char key[64];
    va_list ap;
    object = object ? object : cJSON_CreateObject();
    va_start(ap, members);
    for (const char *m = members, *is; (is = strstr(m, "=%")); m = is + 3 + strspn(is + 3, ", ")) {
        snprintf(key, sizeof(key), "%.*s", (int)(is - m), m);
        if (is[2] == 's')
            cJSON_AddStringToObject(object, key, va_arg(ap, const char *));
        else if (is[2] == 'd')
            cJSON_AddBoolToObject(object, key, va_arg(ap, int));
        else
            cJSON_AddNumberToObject(object, key, va_arg(ap, double));
    }
    va_end(ap);
    return object;
}

cJSON *mt_json_get(const cJSON *object, const char *key)
{
    return cJSON_GetObjectItemCaseSensitive(object, key);
}

double mt_json_number(const cJSON *object, const char *key, double otherwise)
{
    const cJSON *v = mt_json_get(object, key);
    return cJSON_IsNumber(v) ? v->valuedouble : otherwise;
}

const char *mt_json_string(const cJSON *object, const char *key, const char *otherwise)
{
    const cJSON *v = mt_json_get(object, key);
    return cJSON_IsString(v) ? v->valuestring : otherwise;
}

struct keyed {
    const cJSON *v;
    size_t at;
};

static int by_key(const void *a, const void *b)
{
    const struct keyed *x = a, *y = b;
    int order = strcmp(x->v->string, y->v->string);
    return order ? order : (x->at > y->at) - (x->at < y->at);
}

static int compare_key(const void *key, const void *v)
{
    return strcmp(key, (*(const cJSON *const *)v)->string);
}

/* Leaves x->sorted NULL if memory is short. */
static void sort_members(struct mt_json_index *x)
{
    size_t n = 0, at = 0;
    for (const cJSON *v = x->object->child; v; v = v->next)
        n++;
    MT_FREED struct keyed *k = mt_calloc(n, sizeof(*k));
    x->sorted = k ? mt_calloc(n, sizeof(*x->sorted)) : NULL;
    for (const cJSON *v = x->sorted ? x->object->child : NULL; v; v = v->next, at++)
        k[at] = (struct keyed){v, at};
    if (x->sorted)
        qsort(k, n, sizeof(*k), by_key);
    x->n = 0;
    for (size_t i = 0; x->sorted && i < n; i++)
        if (!x->n || strcmp(x->sorted[x->n - 1]->string, k[i].v->string))
            x->sorted[x->n++] = k[i].v;
}

static const cJSON *find_member(struct mt_json_index *x, const char *key)
{
    if (!x->sorted && cJSON_IsObject(x->object) && x->object->child)
        sort_members(x);
    if (!x->sorted)
        return mt_json_get(x->object, key);
    const cJSON **found = bsearch(key, x->sorted, x->n, sizeof(*x->sorted), compare_key);
    return found ? *found : NULL;
}

const cJSON *mt_json_index_get(struct mt_json_index *x, const char *key)
{
    const cJSON *next = x->last ? x->last->next : NULL;
    if (!next || strcmp(next->string, key))
        next = find_member(x, key);
    x->last = next ? next : x->last;
    return next;
}

void mt_json_index_finish(struct mt_json_index *x)
{
    free(x->sorted);
    *x = (struct mt_json_index){.object = NULL};
}

int mt_json_items(const cJSON ***items, size_t *n, const cJSON *array, struct mt_err *err)
{
    size_t count = (size_t)cJSON_GetArraySize(array), at = 0;
    int rc = MT_NEW(items, count, "a list", err);
    for (const cJSON *v = rc ? NULL : array->child; v; v = v->next)
        (*items)[at++] = v;
    *n = rc ? 0 : count;
    return rc;
}

/* Replaces numbers by raw text that reads back exactly. */
static bool make_exact(cJSON *v)
{
    bool ok = true;
    for (cJSON *c = v->child; c && ok; c = c->next)
        ok = make_exact(c);
    if (!ok || !cJSON_IsNumber(v) || !isfinite(v->valuedouble))
        return ok;
    MT_STR_FREED struct mt_str text = {0};
    mt_str_number(&text, v->valuedouble);
    v->valuestring = text.failed ? NULL : cJSON_malloc(text.len + 1);
    if (v->valuestring)
        memcpy(v->valuestring, text.p, text.len + 1);
    v->type = cJSON_Raw;
    return v->valuestring;
}

char *mt_json_print(const cJSON *v, bool pretty)
{
    MT_JSON_FREED cJSON *copy = cJSON_Duplicate(v, 1);
    char *text = NULL;
    if (copy && make_exact(copy))
        text = pretty ? cJSON_Print(copy) : cJSON_PrintUnformatted(copy);
    return text;
}

int mt_json_edit(char **text, const char *name, void (*edit)(cJSON *object, const void *arg), const void *arg,
                 enum mt_err_kind kind, struct mt_err *err)
{
    MT_JSON_FREED cJSON *o = NULL;
    int rc = mt_json_parse(&o, *text, strlen(*text), name, kind, err);
    if (rc)
        return rc;
    mt_json_begin();
    edit(o, arg);
    MT_FREED char *out = mt_json_print(o, true);
    if (!out || !mt_json_complete())
        return mt_fail_nomem(err, name, strlen(*text));
    free(*text);
    *text = MT_GIVE(out);
    return 0;
}

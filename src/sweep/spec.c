/* SPDX-License-Identifier: Apache-2.0 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/fs.h"
#include "base/mem.h"
#include "base/units.h"
#include "config/ini.h"
#include "config/schema.h"
#include "sweep/sweep.h"

enum { MAX_JOBS = 4096, HASH_VERSION = 1 };

/* Lists of keys and their values are JSON objects: {"train.micro_batch": "4"}. */
struct spec {
    struct mt_sweep *s;
    cJSON *base, *axes, *variants; /* variants: a list for each [job NAME] */
    size_t cap_jobs;
};

/* Sets or replaces a value; false: out of memory. */
static bool set(cJSON *list, const char *key, const char *value)
{
    cJSON *known = cJSON_GetObjectItemCaseSensitive(list, key);
    return known ? cJSON_SetValuestring(known, value) != NULL : cJSON_AddStringToObject(list, key, value) != NULL;
}

static int usage(struct mt_err *err, const char *file, int line, const char *what, const char *value)
{
    return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s:%d: %s: \"%s\"", file, line, what, value);
}

/* Adds a configuration key to `l`; a relative path becomes absolute. */
static int add_key(cJSON *l, const char *file, int line, const char *section,
                   const char *name, const char *value, struct mt_err *err)
{
    const struct mt_key *key = mt_key_find(section, name);
    char full[160];
    snprintf(full, sizeof(full), "%s.%s", section, name);
    if (!key) {
        const char *guess = mt_key_suggest(section, name);
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s:%d: unknown key \"%s\"%s%s%s", file, line, full,
                       guess ? " (did you mean \"" : "", guess ? guess : "", guess ? "\"?)" : "");
    }
    /* jobs are written to another folder: paths have to be absolute */
    MT_FREED char *whole = realpath(file, NULL), *resolved = mt_key_resolve(key, whole ? whole : file, value);
    bool ok = resolved && set(l, full, resolved);
    return ok ? 0 : mt_fail_nomem(err, "a sweep", strlen(value));
}

static int add_dotted(cJSON *l, const char *file, int line, const char *key,
                      const char *value, struct mt_err *err)
{
    char section[64];
    const char *dot = strchr(key, '.');
    if (!dot || (size_t)(dot - key) >= sizeof(section))
        return usage(err, file, line, "neither a setting of sweeps nor SECTION.KEY (configs/sweeps has examples)", key);
    snprintf(section, sizeof(section), "%.*s", (int)(dot - key), key);
    return add_key(l, file, line, section, dot + 1, value, err);
}

static int sweep_setting(struct spec *p, const char *file, int line, const char *key, const char *value,
                         bool *known, struct mt_err *err)
{
    struct mt_sweep *s = p->s;
    const struct {
        const char *key;
        int *field, least;
    } counts[] = {{"warmup_steps", &s->warmup_steps, 0}, {"steps", &s->steps, 1},
                  {"repeat", &s->repeat, 1}, {"max_repeat", &s->max_repeat, 1}};
    *known = true;
    for (size_t i = 0; i < MT_ARRAY_LEN(counts); i++)
        if (!strcmp(key, counts[i].key)) {
            int64_t n;
            if (!mt_parse_count(value, &n) || n < counts[i].least || n > INT32_MAX)
                return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s:%d: %s must be a whole number of %d or more, not \"%s\"",
                               file, line, key, counts[i].least, value);
            *counts[i].field = (int)n;
            return 0;
        }
    const struct {
        const char *key, *names, *usage;
        int *field;
    } words[] = {{"mode", "grid|zip", "mode must be grid or zip", &s->zip},
                 {"on_oom", "record|abort", "on_oom must be record or abort", &s->abort_on_oom},
                 {"share_base", "auto|on|off", "share_base must be auto, on or off", &s->share_base}};
    for (size_t i = 0; i < MT_ARRAY_LEN(words); i++)
        if (!strcmp(key, words[i].key)) {
            *words[i].field = mt_choice_find(words[i].names, value);
            return *words[i].field >= 0 ? 0 : usage(err, file, line, words[i].usage, value);
        }
    if (!strcmp(key, "cooldown"))
        return mt_parse_duration(value, &s->cooldown) ? 0 : usage(err, file, line, "cooldown must be a duration such as 10s", value);
    if (!strcmp(key, "spread")) {
        s->spread = atof(value) / 100;
        return strchr(value, '%') && s->spread > 0 ? 0 : usage(err, file, line, "spread must be a share such as 3%", value);
    }
    *known = false;
    return 0;
}

/* The list of a variant, which may be new; NULL: out of memory. */
static cJSON *variant(struct spec *p, const char *name)
{
    cJSON *known = cJSON_GetObjectItemCaseSensitive(p->variants, name);
    return known ? known : cJSON_AddObjectToObject(p->variants, name);
}

/* The parser calls back for keys only, so jobs without keys are found here. */
static int list_variants(struct spec *p, const char *path, struct mt_err *err)
{
    MT_FREED char *text = NULL;
    char *save = NULL;
    size_t len = 0;
    int rc = mt_read_file(path, &text, &len, err);
    if (rc && rc != -ENOMEM && err)
        err->kind = MT_ERR_USAGE;
    for (char *line = rc ? NULL : strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char name[64];
        if (sscanf(line, " [job %63[^]]]", name) == 1 && !variant(p, name))
            rc = mt_fail_nomem(err, "a sweep", len);
    }
    return rc;
}

static int on_key(void *ctx, const char *file, int line, const char *section, const char *key,
                  const char *value, struct mt_err *err)
{
    struct spec *p = ctx;
    bool known = false;
    if (!strcmp(section, "global"))
        return add_dotted(p->base, file, line, key, value, err);
    if (!strcmp(section, "sweep")) {
        int rc = sweep_setting(p, file, line, key, value, &known, err);
        return rc || known ? rc : add_dotted(p->axes, file, line, key, value, err);
    }
    if (strncmp(section, "job ", 4))
        return add_key(p->base, file, line, section, key, value, err);
    cJSON *v = variant(p, section + 4);
    return v ? add_dotted(v, file, line, key, value, err) : mt_fail_nomem(err, "a sweep", 1);
}

/* The k-th item of a comma list, trimmed, into buf. */
static void item(char *buf, size_t len, const char *list, size_t k)
{
    while (k--)
        list = strchr(list, ',') + 1;
    list += strspn(list, " \t\n\v\f\r");
    int n = (int)strcspn(list, ",");
    while (n > 0 && isspace((unsigned char)list[n - 1]))
        n--;
    snprintf(buf, len, "%.*s", n, list);
}

static size_t count_items(const char *list)
{
    size_t n = 1;
    for (; (list = strchr(list, ',')); list++)
        n++;
    return n;
}

/* Configuration text of a list of dotted keys, section by section. */
static bool write_ini(struct mt_str *out, const cJSON *l)
{
    for (size_t k = 0; k < mt_n_keys(); k++) {
        const char *section = mt_key_at(k)->section;
        size_t len = strlen(section);
        bool any = false;
        if (k && !strcmp(section, mt_key_at(k - 1)->section))
            continue;
        for (const cJSON *o = l->child; o; o = o->next) {
            if (strncmp(o->string, section, len) || o->string[len] != '.')
                continue;
            if (!any)
                mt_str_printf(out, "[%s]\n", section);
            any = true;
            const char *v = o->valuestring;
            bool quote = strstr(v, " ;") || *v == ';' || *v == '#';
            mt_str_printf(out, quote ? "%s = \"%s\"\n" : "%s = %s\n", o->string + len + 1, v);
        }
    }
    return !out->failed;
}

static int add_job(struct spec *p, const cJSON *v, const size_t *at, struct mt_err *err)
{
    struct mt_sweep *s = p->s;
    MT_JSON_FREED cJSON *all = cJSON_Duplicate(p->base, true);
    MT_STR_FREED struct mt_str ini = {0};
    char value[512], steps[32];
    if (s->n_jobs >= MAX_JOBS)
        return mt_fail(err, MT_ERR_USAGE, -E2BIG, "the sweep has more than %d jobs: list fewer values, or pair them by mode = zip", MAX_JOBS);
    if (!mt_grow(&s->jobs, &p->cap_jobs, s->n_jobs + 1, sizeof(*s->jobs)))
        return mt_fail_nomem(err, "a sweep", s->n_jobs * sizeof(*s->jobs));
    struct mt_sweep_job *j = &s->jobs[s->n_jobs++];
    *j = (struct mt_sweep_job){.axes = cJSON_CreateObject()};
    bool ok = all && j->axes;
    if (v)
        snprintf(j->name, sizeof(j->name), "%s", v->string);
    for (const cJSON *o = v ? v->child : NULL; ok && o; o = o->next)
        ok = set(all, o->string, o->valuestring);
    for (const cJSON *o = p->axes->child; ok && o; o = o->next) {
        item(value, sizeof(value), o->valuestring, *at++);
        ok = set(all, o->string, value) && set(j->axes, o->string, value);
    }
    /* just these steps, without evaluation, checkpoints or anything else that takes time */
    snprintf(steps, sizeof(steps), "%d", s->warmup_steps + s->steps);
    const char *fixed[][2] = {{"train.steps", steps},  {"train.epochs", ""},      {"train.tokens", ""},
                              {"eval.every", "0"},     {"eval.at_start", "off"},  {"data.eval", ""},      {"eval.sets", ""},
                              {"eval.early_stop_patience", "0"}, {"eval.best_by", "loss"}, {"checkpoint.every", "0"}, {"log.every", "1"},      {"log.jsonl", "on"}};
    for (size_t i = 0; ok && i < MT_ARRAY_LEN(fixed); i++)
        ok = set(all, fixed[i][0], fixed[i][1]);
    if (!ok || !write_ini(&ini, all))
        return mt_fail_nomem(err, "a sweep", 1);
    XXH64_hash_t h = XXH3_64bits_withSeed(ini.p, ini.len, HASH_VERSION + (uint64_t)s->warmup_steps * 1000);
    snprintf(j->hash, sizeof(j->hash), "%016llx", (unsigned long long)h);
    j->ini = MT_GIVE(ini.p);
    return 0;
}

/* Adds a job for each point of a variant: axes crossed (grid) or paired (zip). */
static int spread_out(struct spec *p, const cJSON *v, struct mt_err *err)
{
    MT_FREED size_t *n = NULL, *at = NULL;
    const cJSON *first = p->axes->child;
    size_t n_axes = (size_t)cJSON_GetArraySize(p->axes), k = 0;
    int rc = MT_NEW(&n, n_axes, "a sweep", err) ?: MT_NEW(&at, n_axes, "a sweep", err);
    for (const cJSON *o = first; o && !rc; o = o->next, k++) {
        n[k] = count_items(o->valuestring);
        if (p->s->zip && n[k] != n[0])
            rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "mode = zip: %s has %zu values and %s has %zu", o->string, n[k],
                         first->string, n[0]);
    }
    for (bool more = true; !rc && more;) {
        rc = add_job(p, v, at, err);
        more = false;
        for (size_t i = n_axes; i-- > 0;) { /* the last axis varies fastest */
            bool carry = ++at[i] == n[i];
            more |= !carry;
            if (carry)
                at[i] = 0;
            if (!p->s->zip && !carry)
                break;
        }
    }
    return rc;
}

int mt_sweep_read(struct mt_sweep *out, const char *path, struct mt_err *err)
{
    MT_CLOSED_BY(mt_sweep_finish) struct mt_sweep s = {.warmup_steps = 2, .steps = 5, .repeat = 1, .spread = 0.03};
    MT_JSON_FREED cJSON *base = cJSON_CreateObject(), *axes = cJSON_CreateObject(), *variants = cJSON_CreateObject();
    struct spec p = {.s = &s, .base = base, .axes = axes, .variants = variants};
    int rc = base && axes && variants ? list_variants(&p, path, err) : mt_fail_nomem(err, "a sweep", 1);
    rc = rc ?: mt_ini_parse_file(path, on_key, &p, err);
    if (!s.max_repeat)
        s.max_repeat = s.repeat;
    if (!rc && !variants->child)
        rc = spread_out(&p, NULL, err);
    for (const cJSON *v = rc ? NULL : variants->child; v && !rc; v = v->next)
        rc = spread_out(&p, v, err);
    if (!rc)
        *out = MT_GIVE(s);
    return rc;
}

void mt_sweep_finish(struct mt_sweep *s)
{
    for (size_t i = 0; i < s->n_jobs; i++) {
        cJSON_Delete(s->jobs[i].axes);
        free(s->jobs[i].ini);
    }
    free(s->jobs);
    *s = (struct mt_sweep){0};
}

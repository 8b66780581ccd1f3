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

struct variant {
    char name[64];
    struct mt_sweep_list set;
};

struct spec {
    struct mt_sweep *s;
    struct mt_sweep_list base, axes;
    struct variant *variants;
    size_t n_variants, cap_variants;
    size_t cap_jobs;
};

static void finish_list(struct mt_sweep_list *l)
{
    for (size_t i = 0; i < l->n; i++) {
        free(l->p[i].key);
        free(l->p[i].value);
    }
    free(l->p);
    *l = (struct mt_sweep_list){0};
}

/* Sets or replaces a value; false: out of memory. */
static bool set(struct mt_sweep_list *l, const char *key, const char *value)
{
    char *copy = strdup(value);
    for (size_t i = 0; copy && i < l->n; i++)
        if (!strcmp(l->p[i].key, key)) {
            free(l->p[i].value);
            l->p[i].value = copy;
            return true;
        }
    if (!copy || !mt_grow(&l->p, &l->cap, l->n + 1, sizeof(*l->p))) {
        free(copy);
        return false;
    }
    l->p[l->n] = (struct mt_sweep_pair){strdup(key), copy};
    return l->p[l->n++].key != NULL;
}

static bool copy_list(struct mt_sweep_list *dst, const struct mt_sweep_list *src)
{
    bool ok = true;
    for (size_t i = 0; ok && i < src->n; i++)
        ok = set(dst, src->p[i].key, src->p[i].value);
    return ok;
}

static int usage(struct mt_err *err, const char *file, int line, const char *what, const char *value)
{
    return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s:%d: %s: \"%s\"", file, line, what, value);
}

/* Adds a configuration key to `l`; a relative path becomes absolute. */
static int add_key(struct mt_sweep_list *l, const char *file, int line, const char *section,
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

static int add_dotted(struct mt_sweep_list *l, const char *file, int line, const char *key,
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

static struct variant *find_variant(struct spec *p, const char *name)
{
    for (size_t i = 0; i < p->n_variants; i++)
        if (!strcmp(p->variants[i].name, name))
            return &p->variants[i];
    if (!mt_grow(&p->variants, &p->cap_variants, p->n_variants + 1, sizeof(*p->variants)))
        return NULL;
    struct variant *v = &p->variants[p->n_variants++];
    *v = (struct variant){{0}};
    snprintf(v->name, sizeof(v->name), "%s", name);
    return v;
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
        if (sscanf(line, " [job %63[^]]]", name) == 1 && !find_variant(p, name))
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
        return add_dotted(&p->base, file, line, key, value, err);
    if (!strcmp(section, "sweep")) {
        int rc = sweep_setting(p, file, line, key, value, &known, err);
        return rc || known ? rc : add_dotted(&p->axes, file, line, key, value, err);
    }
    if (strncmp(section, "job ", 4))
        return add_key(&p->base, file, line, section, key, value, err);
    struct variant *v = find_variant(p, section + 4);
    if (!v)
        return mt_fail_nomem(err, "a sweep", 1);
    return add_dotted(&v->set, file, line, key, value, err);
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
static bool write_ini(struct mt_str *out, const struct mt_sweep_list *l)
{
    for (size_t k = 0; k < mt_n_keys(); k++) {
        const char *section = mt_key_at(k)->section;
        size_t len = strlen(section);
        bool any = false;
        for (size_t i = 0; i < l->n && (!k || strcmp(section, mt_key_at(k - 1)->section)); i++) {
            if (strncmp(l->p[i].key, section, len) || l->p[i].key[len] != '.')
                continue;
            if (!any)
                mt_str_printf(out, "[%s]\n", section);
            any = true;
            const char *v = l->p[i].value;
            bool quote = strstr(v, " ;") || *v == ';' || *v == '#';
            mt_str_printf(out, quote ? "%s = \"%s\"\n" : "%s = %s\n", l->p[i].key + len + 1, v);
        }
    }
    return !out->failed;
}

static int add_job(struct spec *p, const struct variant *v, const size_t *at, struct mt_err *err)
{
    struct mt_sweep *s = p->s;
    MT_CLOSED_BY(finish_list) struct mt_sweep_list all = {0};
    MT_STR_FREED struct mt_str ini = {0};
    char value[512], steps[32];
    if (s->n_jobs >= MAX_JOBS)
        return mt_fail(err, MT_ERR_USAGE, -E2BIG, "the sweep has more than %d jobs: list fewer values, or pair them by mode = zip", MAX_JOBS);
    if (!mt_grow(&s->jobs, &p->cap_jobs, s->n_jobs + 1, sizeof(*s->jobs)))
        return mt_fail_nomem(err, "a sweep", s->n_jobs * sizeof(*s->jobs));
    struct mt_sweep_job *j = &s->jobs[s->n_jobs++];
    *j = (struct mt_sweep_job){0};
    bool ok = copy_list(&all, &p->base);
    if (v) {
        snprintf(j->name, sizeof(j->name), "%s", v->name);
        ok = ok && copy_list(&all, &v->set);
    }
    for (size_t i = 0; ok && i < p->axes.n; i++) {
        item(value, sizeof(value), p->axes.p[i].value, at[i]);
        ok = set(&all, p->axes.p[i].key, value) && set(&j->axes, p->axes.p[i].key, value);
    }
    /* just these steps, without evaluation, checkpoints or anything else that takes time */
    snprintf(steps, sizeof(steps), "%d", s->warmup_steps + s->steps);
    const char *fixed[][2] = {{"train.steps", steps},  {"train.epochs", ""},      {"train.tokens", ""},
                              {"eval.every", "0"},     {"eval.at_start", "off"},  {"data.eval", ""},      {"eval.sets", ""},
                              {"eval.early_stop_patience", "0"}, {"eval.best_by", "loss"}, {"checkpoint.every", "0"}, {"log.every", "1"},      {"log.jsonl", "on"}};
    for (size_t i = 0; ok && i < MT_ARRAY_LEN(fixed); i++)
        ok = set(&all, fixed[i][0], fixed[i][1]);
    if (!ok || !write_ini(&ini, &all))
        return mt_fail_nomem(err, "a sweep", 1);
    XXH64_hash_t h = XXH3_64bits_withSeed(ini.p, ini.len, HASH_VERSION + (uint64_t)s->warmup_steps * 1000);
    snprintf(j->hash, sizeof(j->hash), "%016llx", (unsigned long long)h);
    j->ini = MT_GIVE(ini.p);
    return 0;
}

/* Adds a job for each point of a variant: axes crossed (grid) or paired (zip). */
static int spread_out(struct spec *p, const struct variant *v, struct mt_err *err)
{
    MT_FREED size_t *n = NULL, *at = NULL;
    int rc = MT_NEW(&n, p->axes.n, "a sweep", err) ?: MT_NEW(&at, p->axes.n, "a sweep", err);
    for (size_t i = 0; !rc && i < p->axes.n; i++) {
        n[i] = count_items(p->axes.p[i].value);
        if (p->s->zip && n[i] != n[0])
            rc = mt_fail(err, MT_ERR_USAGE, -EINVAL,
                         "mode = zip: %s has %zu values and %s has %zu", p->axes.p[i].key, n[i],
                         p->axes.p[0].key, n[0]);
    }
    for (bool more = true; !rc && more;) {
        rc = add_job(p, v, at, err);
        more = false;
        for (size_t i = p->axes.n; i-- > 0;) { /* the last axis varies fastest */
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
    struct spec p = {.s = &s};
    int rc = list_variants(&p, path, err) ?: mt_ini_parse_file(path, on_key, &p, err);
    if (!s.max_repeat)
        s.max_repeat = s.repeat;
    if (!rc && !p.n_variants)
        rc = spread_out(&p, NULL, err);
    for (size_t i = 0; !rc && i < p.n_variants; i++)
        rc = spread_out(&p, &p.variants[i], err);
    finish_list(&p.base);
    finish_list(&p.axes);
    for (size_t i = 0; i < p.n_variants; i++)
        finish_list(&p.variants[i].set);
    free(p.variants);
    if (!rc)
        *out = MT_GIVE(s);
    return rc;
}

void mt_sweep_finish(struct mt_sweep *s)
{
    for (size_t i = 0; i < s->n_jobs; i++) {
        finish_list(&s->jobs[i].axes);
        free(s->jobs[i].ini);
    }
    free(s->jobs);
    *s = (struct mt_sweep){0};
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "config/config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/mem.h"
#include "config/ini.h"
#include "config/schema.h"

enum { MAX_KEYS = 128 };

struct mt_config_priv {
    char *origin[MAX_KEYS];    /* "run.ini:14", "--set", "default" */
    char *set_file[MAX_KEYS];  /* file that set it, to find a key twice in one */
    int set_line[MAX_KEYS];
};

static size_t index_of(const struct mt_key *key)
{
    return (size_t)(key - mt_keys);
}

static int set_origin(struct mt_config *cfg, const struct mt_key *key, const char *origin,
                      struct mt_err *err)
{
    char *copy = strdup(origin);
    if (!copy)
        return mt_fail_nomem(err, "the configuration", strlen(origin));
    free(cfg->priv->origin[index_of(key)]);
    cfg->priv->origin[index_of(key)] = copy;
    return 0;
}

static int set_key(struct mt_config *cfg, const struct mt_key *key, const char *value,
                   const char *origin, struct mt_err *err)
{
    char why[256] = "";
    if (mt_key_parse(cfg, key, value, why, sizeof(why)))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: %s.%s = \"%.80s\": %s", origin, key->section,
                       key->name, value, why);
    return set_origin(cfg, key, origin, err);
}

static int find_key(const struct mt_key **out, const char *section, const char *name,
                    const char *origin, struct mt_err *err)
{
    const char *guess;
    bool known = false;
    *out = mt_key_find(section, name);
    if (*out)
        return 0;
    for (size_t i = 0; i < mt_n_keys; i++)
        known |= !strcmp(mt_keys[i].section, section);
    guess = known ? mt_key_suggest(section, name) : mt_key_suggest(NULL, section);
    return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: unknown %s \"%s%s%s\"%s%s%s", origin,
                   known ? "key" : "section", section, known ? "." : "", known ? name : "",
                   guess ? " (did you mean \"" : "", guess ? guess : "", guess ? "\"?)" : "");
}

/* A path that a file names is relative to the file; what may be a name and is no such path stays. */
static int resolve_path(const struct mt_key *key, const char *file, const char *value, char **out)
{
    const char *slash = strrchr(file, '/');
    bool maybe = key->type == MT_KEY_NAME_OR_PATH;
    *out = NULL;
    if (!*value || *value == '/' || !slash || !strcmp(value, "auto")) {
        *out = strdup(value);
    } else {
        char *dir = strndup(file, (size_t)(slash - file) + 1);
        *out = dir ? mt_path_join(dir, value) : NULL;
        free(dir);
        if (*out && maybe && !mt_path_exists(*out)) {
            free(*out);
            *out = strdup(value);
        }
    }
    return *out ? 0 : -ENOMEM;
}

static int resolve_list(const struct mt_key *key, const char *file, const char *value, char **out)
{
    struct mt_str s = {0};
    char *copy = strdup(value), *save = NULL;
    for (char *item = copy ? strtok_r(copy, ",", &save) : NULL; item;
         item = strtok_r(NULL, ",", &save)) {
        char *path = NULL;
        while (*item == ' ' || *item == '\t')
            item++;
        if (resolve_path(key, file, item, &path))
            s.failed = true;
        else
            mt_str_printf(&s, "%s%s", s.len ? ", " : "", path);
        free(path);
    }
    free(copy);
    mt_str_append(&s, "", 0);
    *out = s.p;
    return s.failed || !s.p ? -ENOMEM : 0;
}

char *mt_key_resolve(const struct mt_key *key, const char *file, const char *value)
{
    char *out = NULL;
    if (key->type == MT_KEY_PATH || key->type == MT_KEY_NAME_OR_PATH)
        return resolve_path(key, file, value, &out) ? NULL : out;
    if (key->type == MT_KEY_PATHS)
        return resolve_list(key, file, value, &out) ? NULL : out;
    return strdup(value);
}

static int on_key(void *ctx, const char *file, int line, const char *section, const char *name,
                  const char *value, struct mt_err *err)
{
    struct mt_config *cfg = ctx;
    const struct mt_key *key;
    char origin[4200];
    snprintf(origin, sizeof(origin), "%s:%d", file, line);
    int rc = find_key(&key, section, name, origin, err);
    if (rc)
        return rc;
    size_t i = index_of(key);
    if (cfg->priv->set_file[i] && !strcmp(cfg->priv->set_file[i], file))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: key \"%s.%s\" appears twice (first in line %d)",
                       origin, section, name, cfg->priv->set_line[i]);
    free(cfg->priv->set_file[i]);
    cfg->priv->set_file[i] = strdup(file);
    cfg->priv->set_line[i] = line;
    char *resolved = mt_key_resolve(key, file, value);
    if (!resolved || !cfg->priv->set_file[i])
        rc = mt_fail_nomem(err, "the configuration", strlen(value));
    else
        rc = set_key(cfg, key, resolved, origin, err);
    free(resolved);
    return rc;
}

static int apply_set(struct mt_config *cfg, const char *set, struct mt_err *err)
{
    char section[64], name[64];
    const char *dot = strchr(set, '.'), *eq = strchr(set, '=');
    const struct mt_key *key;
    if (!dot || !eq || dot > eq || (size_t)(dot - set) >= sizeof(section) ||
        (size_t)(eq - dot - 1) >= sizeof(name))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "--set %s: must be SECTION.KEY=VALUE", set);
    snprintf(section, sizeof(section), "%.*s", (int)(dot - set), set);
    snprintf(name, sizeof(name), "%.*s", (int)(eq - dot - 1), dot + 1);
    int rc = find_key(&key, section, name, "--set", err);
    return rc ? rc : set_key(cfg, key, eq + 1, "--set", err);
}

static int need_one(const char *path, const char *names, int n, struct mt_err *err)
{
    if (n == 1)
        return 0;
    return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: set exactly one of %s (%s)", path, names,
                   n ? "more than one is set" : "none is set");
}

static int check_keys(const struct mt_config *c, const char *path, struct mt_err *err)
{
    int rc = 0;
    int64_t tps = c->train.tokens_per_step, len = c->numerics.seq_len;
    if (!c->model.path[0])
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: model.path is not set", path);
    if (!c->data.train.n)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: data.train is not set", path);
    rc = need_one(path, "train.steps, train.epochs and train.tokens",
                  (c->train.steps > 0) + (c->train.epochs > 0) + (c->train.tokens > 0), err);
    if (!rc)
        rc = need_one(path, "train.tokens_per_step and train.batch_size",
                      (tps > 0) + (c->train.batch_size > 0), err);
    if (!rc && tps % len)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL,
                     "%s: train.tokens_per_step = %lld must be a multiple of data.seq_len = "
                     "%lld: the nearest are %lld and %lld",
                     path, (long long)tps, (long long)len, (long long)(tps / len * len),
                     (long long)(tps / len * len + len));
    if (!rc && c->numerics.logits_chunk > 0 && c->numerics.logits_chunk % 64)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: memory.logits_chunk must be a multiple of 64",
                     path);
    bool disk = c->placement.states == MT_STATES_DISK || c->placement.activations == MT_ACT_DISK;
    if (!rc && disk && !c->memory.nvme_paths.n)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL,
                     "%s: memory.%s = disk needs memory.nvme_paths: folders on the drives to use", path,
                     c->placement.states == MT_STATES_DISK ? "states" : "activations");
    return rc;
}

static int set_defaults(struct mt_config *cfg, struct mt_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < mt_n_keys && !rc; i++)
        rc = set_key(cfg, &mt_keys[i], mt_keys[i].def, "default", err);
    return rc;
}

int mt_config_load(struct mt_config **out, const char *path, const char *const *sets, int n_sets,
                   struct mt_err *err)
{
    struct mt_config *cfg = mt_calloc(1, sizeof(*cfg));
    if (!cfg || !(cfg->priv = mt_calloc(1, sizeof(*cfg->priv)))) {
        free(cfg);
        return mt_fail_nomem(err, "the configuration", sizeof(*cfg));
    }
    int rc = set_defaults(cfg, err);
    if (!rc && path)
        rc = mt_ini_parse_file(path, on_key, cfg, err);
    for (int i = 0; i < n_sets && !rc; i++)
        rc = apply_set(cfg, sets[i], err);
    if (!rc && path)
        rc = check_keys(cfg, path, err);
    if (rc) {
        mt_config_destroy(&cfg);
        return rc;
    }
    *out = cfg;
    return 0;
}

void mt_config_destroy(struct mt_config **config)
{
    struct mt_config *cfg = *config;
    if (!cfg)
        return;
    for (size_t i = 0; i < mt_n_keys; i++) {
        mt_key_free(cfg, &mt_keys[i]);
        free(cfg->priv->origin[i]);
        free(cfg->priv->set_file[i]);
    }
    free(cfg->priv);
    free(cfg);
    *config = NULL;
}

void mt_config_print(const struct mt_config *cfg, bool origins, struct mt_str *out)
{
    const char *section = "";
    for (size_t i = 0; i < mt_n_keys; i++) {
        if (strcmp(section, mt_keys[i].section)) {
            section = mt_keys[i].section;
            mt_str_printf(out, "%s[%s]\n", i ? "\n" : "", section);
        }
        mt_str_printf(out, "%s = ", mt_keys[i].name);
        mt_key_print(cfg, &mt_keys[i], out);
        mt_str_printf(out, origins ? " ; %s\n" : "\n", cfg->priv->origin[i]);
    }
}

int mt_config_override(struct mt_config *cfg, const char *key, const char *value, const char *why,
                       struct mt_err *err)
{
    char section[64];
    const char *dot = strchr(key, '.');
    const struct mt_key *k = NULL;
    if (dot && (size_t)(dot - key) < sizeof(section)) {
        snprintf(section, sizeof(section), "%.*s", (int)(dot - key), key);
        k = mt_key_find(section, dot + 1);
    }
    return k ? set_key(cfg, k, value, why, err)
             : mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "no key is called %s", key);
}

static bool may_change(const struct mt_key *key)
{
    static const char *const free_sections[] = {"memory", "device", "log", "eval", "checkpoint"};
    for (size_t i = 0; i < MT_ARRAY_LEN(free_sections); i++)
        if (!strcmp(key->section, free_sections[i]))
            /* these two decide the order of sums */
            return strcmp(key->name, "logits_chunk") &&
                   (strcmp(key->name, "schedule") || strcmp(key->section, "memory"));
    return !strcmp(key->section, "data") && !strcmp(key->name, "cache_dir");
}

static bool may_grow(const struct mt_key *key)
{
    return !strcmp(key->section, "train") &&
           (!strcmp(key->name, "steps") || !strcmp(key->name, "epochs") ||
            !strcmp(key->name, "tokens"));
}

int mt_config_diff(const struct mt_config *cfg, const char *earlier_ini, struct mt_str *diff,
                   struct mt_str *grown, struct mt_err *err)
{
    struct mt_config *old = NULL;
    int rc = mt_config_load(&old, NULL, NULL, 0, err);
    if (!rc)
        rc = mt_ini_parse(earlier_ini, strlen(earlier_ini), "earlier configuration", on_key, old, err);
    for (size_t i = 0; i < mt_n_keys && !rc; i++) {
        struct mt_str a = {0}, b = {0};
        mt_key_print(old, &mt_keys[i], &a);
        mt_key_print(cfg, &mt_keys[i], &b);
        const char *x = a.p ? a.p : "", *y = b.p ? b.p : "";
        if (strcmp(x, y) && !may_change(&mt_keys[i])) {
            bool grows = may_grow(&mt_keys[i]) && strtod(y, NULL) > strtod(x, NULL);
            mt_str_printf(grows ? grown : diff, "  %s.%s: %s -> %s\n", mt_keys[i].section,
                          mt_keys[i].name, x, y);
        }
        mt_str_finish(&a);
        mt_str_finish(&b);
    }
    mt_config_destroy(&old);
    return rc;
}

void mt_config_describe(struct mt_str *out, bool markdown)
{
    const char *section = "";
    for (size_t i = 0; i < mt_n_keys; i++) {
        const struct mt_key *k = &mt_keys[i];
        bool first = strcmp(section, k->section) != 0;
        section = k->section;
        if (markdown) {
            if (first)
                mt_str_printf(out, "%s### [%s]\n\n| key | default | meaning |\n|---|---|---|\n",
                              i ? "\n" : "", section);
            mt_str_printf(out, "| `%s` | `%s` | %s", k->name, k->def, k->help);
            for (const char *c = k->choices; c; c = NULL)
                mt_str_printf(out, " One of `%s`.", c);
            mt_str_printf(out, " |\n");
        } else {
            mt_str_printf(out, "%s%s.%s = %s\n    %s\n", first && i ? "\n" : "", k->section, k->name,
                          k->def, k->help);
            if (k->choices)
                mt_str_printf(out, "    One of: %s\n", k->choices);
        }
    }
}

void mt_config_write_template(struct mt_str *out, const char *model_path)
{
    const char *section = "";
    for (size_t i = 0; i < mt_n_keys; i++) {
        const struct mt_key *k = &mt_keys[i];
        const char *value = k->def;
        if (strcmp(section, k->section))
            mt_str_printf(out, "%s[%s]\n", i ? "\n" : "", section = k->section);
        if (!strcmp(section, "model") && !strcmp(k->name, "path"))
            value = model_path;
        else if (!strcmp(section, "train") && !strcmp(k->name, "epochs"))
            value = "1";
        else if (!strcmp(section, "train") && !strcmp(k->name, "tokens_per_step"))
            value = "64Ki";
        else if (!strcmp(section, "data") && !strcmp(k->name, "train"))
            value = "data/train.jsonl";
        mt_str_printf(out, "# %s\n%s = %s\n", k->help, k->name, value);
    }
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "config/config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "base/units.h"
#include "config/ini.h"
#include "config/schema.h"
#include "config/synonyms.h"
#include "optim/optimizer.h"

enum { MAX_KEYS = 256 };

struct mt_config_priv {
    char *origin[MAX_KEYS];    /* "run.ini:14", "--set", "default" */
    char *set_file[MAX_KEYS];  /* the file that set it, to find a key given twice in one file */
    int set_line[MAX_KEYS];
};

static int set_origin(struct mt_config *cfg, const struct mt_key *key, const char *origin,
                      struct mt_err *err)
{
    char *copy = strdup(origin);
    if (!copy)
        return mt_fail_nomem(err, "the configuration", strlen(origin));
    free(cfg->priv->origin[mt_key_index(key)]);
    cfg->priv->origin[mt_key_index(key)] = copy;
    return 0;
}

static int set_key(struct mt_config *cfg, const struct mt_key *key, const char *value,
                   const char *origin, struct mt_err *err)
{
    char why[256] = "";
    int rc = mt_key_parse(cfg, key, value, why, sizeof(why));
    if (rc == -ENOMEM)
        return mt_fail_nomem(err, "the configuration", strlen(value));
    if (rc)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: %s.%s = \"%.80s\": %s%s", origin, key->section, key->name, value, why,
                       strstr(value, " #") ? "; a comment after a value begins with ;" : "");
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
    for (size_t i = 0; i < mt_n_keys(); i++)
        known |= !strcmp(mt_key_at(i)->section, section);
    guess = known ? mt_key_suggest(section, name) : mt_key_suggest(NULL, section);
    char buf[256];
    const char *synonym = mt_key_synonym(name, buf, sizeof(buf));
    if (synonym)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: unknown key \"%s.%s\"%s", origin, section, name, synonym);
    return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: unknown %s \"%s%s%s\"%s%s%s", origin,
                   known ? "key" : "section", section, known ? "." : "", known ? name : "",
                   guess ? " (did you mean \"" : "", guess ? guess : "", guess ? "\"?)" : "");
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
    size_t i = mt_key_index(key);
    if (cfg->priv->set_file[i] && !strcmp(cfg->priv->set_file[i], file))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: key \"%s.%s\" appears twice (first in line %d)",
                       origin, section, name, cfg->priv->set_line[i]);
    free(cfg->priv->set_file[i]);
    cfg->priv->set_file[i] = strdup(file);
    cfg->priv->set_line[i] = line;
    MT_FREED char *resolved = mt_key_resolve(key, file, value);
    return resolved && cfg->priv->set_file[i] ? set_key(cfg, key, resolved, origin, err)
                                              : mt_fail_nomem(err, "the configuration", strlen(value));
}

static int apply_set(struct mt_config *cfg, const char *set, struct mt_err *err)
{
    char section[64], name[64];
    const char *dot = strchr(set, '.'), *eq = strchr(set, '=');
    const struct mt_key *key;
    if (!dot || !eq || dot > eq || (size_t)(dot - set) >= sizeof(section) ||
        (size_t)(eq - dot - 1) >= sizeof(name)) {
        char there[256];
        snprintf(name, sizeof(name), "%.*s", (int)strcspn(set, "="), set);
        const char *synonym = mt_key_synonym(name, there, sizeof(there));
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "--set %s: must be SECTION.KEY=VALUE%s", set, synonym ? synonym : "");
    }
    snprintf(section, sizeof(section), "%.*s", (int)(dot - set), set);
    snprintf(name, sizeof(name), "%.*s", (int)(eq - dot - 1), dot + 1);
    return find_key(&key, section, name, "--set", err) ?: set_key(cfg, key, eq + 1, "--set", err);
}

/* n: how many of the keys, "a.b, a.c and a.d", are above 0. */
static int need_one(const struct mt_config *c, const char *path, const char *names, int n, struct mt_err *err)
{
    if (n == 1)
        return 0;
    char zero[512] = "";
    for (size_t i = 0; i < mt_n_keys() && !n; i++) { /* one that is set, and sets nothing */
        const struct mt_key *k = mt_key_at(i);
        char name[128];
        snprintf(name, sizeof(name), "%s.%s", k->section, k->name);
        const char *at = strstr(names, name), *origin = c->priv->origin[i];
        if (at && strchr(", ", at[strlen(name)]) && strcmp(origin, "default"))
            snprintf(zero, sizeof(zero), ": %s is 0 or empty in %.300s", name, origin);
    }
    return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: set exactly one of %s (%s%s)", path, names,
                   n ? "more than one is set" : "none is set", zero);
}

/* Why the run cannot train a block at a time; NULL: it can. */
static const char *against_blocks(const struct mt_config *c)
{
    if (c->adapter.kind != MT_ADAPTER_NONE)
        return "adapters (adapter.kind) are trained all at once: remove one of the two";
    if (c->model.init == MT_INIT_RANDOM)
        return "random weights (model.init) have no files to read a frozen block from: train all of the model first";
    if (c->model.base_dtype)
        return "model.base_dtype would pack each block again after it was trained, which loses what it learned: pack the model "
               "once (megatrain export --quantize), and remove the key";
    if (c->checkpoint.frozen == MT_FROZEN_COPY)
        return "checkpoint.frozen = copy would write the whole model at each save: set it to name (export writes whole models)";
    return NULL;
}

/* Why adapters cannot be merged while they are trained; NULL: they can. */
static const char *against_merging(const struct mt_config *c)
{
    if (c->adapter.kind != MT_ADAPTER_LORA)
        return "only adapters of adapter.kind = lora are merged while they are trained";
    if (c->model.init == MT_INIT_RANDOM)
        return "random weights (model.init) have no files to put merged ones over: train all of the model first";
    if (c->model.base_dtype)
        return "model.base_dtype would pack merged weights again, which loses what was added: remove one of the two";
    if (c->adapter.merge_aware)
        return "adapter.merge_aware trains weights that are merged at each load: remove one of the two";
    return NULL;
}

/* Why layers cannot share weights; NULL: they can. */
static const char *against_sharing(const struct mt_config *c)
{
    if (c->model.init != MT_INIT_RANDOM)
        return "the model's layers have weights of their own: set model.init = random to train from scratch, or remove the key";
    if (c->adapter.kind != MT_ADAPTER_NONE)
        return "adapters (adapter.kind) are of a model that is trained already: remove one of the two";
    if (c->model.base_dtype)
        return "model.base_dtype packs what is frozen of a model that is trained already: remove one of the two";
    if (c->train.delink_at && c->checkpoint.save != MT_SAVE_FULL)
        return "train.delink_at goes on from a checkpoint with the training state: set checkpoint.save = full";
    return NULL;
}

bool mt_config_may_train_blocks(const struct mt_config *c)
{
    return !against_blocks(c);
}

/* What a run cannot do without. */
static int check_needs(const struct mt_config *c, const char *path, enum mt_config_use use, struct mt_err *err)
{
    int rc = 0;
    if (!c->model.path[0])
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: model.path is not set", path);
    bool has_data = c->data.train.n || c->data.eval[0] || c->policy.rollouts[0]; /* a file to evaluate on is enough */
    if (use == MT_TO_TRAIN && !has_data)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: data.train is not set", path);
    if (use == MT_TO_TRAIN)
        rc = need_one(c, path, "train.steps, train.epochs and train.tokens",
                      (c->train.steps > 0) + (c->train.epochs > 0) + (c->train.tokens > 0), err);
    if (!rc && use != MT_TO_GENERATE)
        rc = need_one(c, path, "train.tokens_per_step and train.batch_size",
                      (c->train.tokens_per_step > 0) + (c->train.batch_size > 0), err);
    return rc;
}

static int check_keys(const struct mt_config *c, const char *path, struct mt_err *err)
{
    int rc = 0;
    if (c->numerics.logits_chunk > 0 && c->numerics.logits_chunk % 64)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: memory.logits_chunk must be a multiple of 64",
                     path);
    if (!rc && c->numerics.logits_piece > 0 && c->numerics.logits_piece % 64)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: memory.logits_piece must be a multiple of 64", path);
    if (!rc && (c->numerics.groups & (c->numerics.groups - 1)))
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: train.groups = %lld is no power of two", path,
                     (long long)c->numerics.groups);
    if (!rc && c->placement.update == MT_UPDATE_BACKWARD && !mt_clips_by_block(&c->numerics))
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL,
                     "%s: memory.update = backward needs train.clip = unit or train.grad_clip = 0: the norm of the whole "
                     "gradient is known only when backward has ended", path);
    const char *against = strcmp(c->train.blocks, "off") ? against_blocks(c) : NULL;
    if (!rc && against)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: train.blocks = %s: %s", path, c->train.blocks, against);
    const char *merging = c->adapter.merge_every ? against_merging(c) : NULL;
    if (!rc && merging)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: adapter.merge_every = %lld: %s", path, (long long)c->adapter.merge_every,
                     merging);
    const char *sharing = c->model.share_layers > 1 ? against_sharing(c) : NULL;
    if (!rc && sharing)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: model.share_layers = %lld: %s", path,
                     (long long)c->model.share_layers, sharing);
    bool disk = c->placement.states == MT_STATES_DISK || c->placement.activations == MT_ACT_DISK;
    if (!rc && disk && !c->memory.nvme_paths.n)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL,
                     "%s: memory.%s = disk needs memory.nvme_paths: folders on the drives to use", path,
                     c->placement.states == MT_STATES_DISK ? "states" : "activations");
    return rc;
}

static int set_defaults(struct mt_config *cfg, struct mt_err *err)
{
    int rc = mt_n_keys() <= MAX_KEYS ? 0 : mt_fail(err, MT_ERR_RUNTIME, -ENOSPC, "there are %zu keys: raise MAX_KEYS in %s",
                                                   mt_n_keys(), __FILE__);
    for (size_t i = 0; i < mt_n_keys() && !rc; i++)
        rc = set_key(cfg, mt_key_at(i), mt_key_at(i)->def, "default", err);
    return rc;
}

/* 1 or 0, or -ENOMEM. */
static int is_auto(const struct mt_config *cfg, const struct mt_key *key)
{
    MT_STR_FREED struct mt_str text = {0};
    mt_key_print(cfg, key, &text);
    return text.failed ? -ENOMEM : text.p && !strcmp(text.p, "auto");
}

/* The value; for auto of an optimizer's own key, what that is. */
static void print_settled(const struct mt_config *cfg, const struct mt_key *key, struct mt_str *out)
{
    double def;
    int rc = key->offset == MT_KEY_NO_OFFSET ? is_auto(cfg, key) : 0;
    out->failed |= rc < 0;
    if (rc > 0 && mt_optimizer_default(cfg->optimizer.type, key->name, &def))
        mt_str_number(out, def);
    else
        mt_key_print(cfg, key, out);
}

/* 1 or 0, or -ENOMEM; of_a and of_b: empty, what they are. */
static int has_same_value(const struct mt_config *a, const struct mt_config *b, const struct mt_key *key,
                           struct mt_str *of_a, struct mt_str *of_b)
{
    print_settled(a, key, of_a);
    print_settled(b, key, of_b);
    mt_str_append(of_a, "", 0); /* NULL only if memory is short */
    mt_str_append(of_b, "", 0);
    return of_a->failed || of_b->failed ? -ENOMEM : !strcmp(of_a->p, of_b->p);
}

/* The first key of [adapter] whose value is not the default, which a configuration with all keys has; NULL: none. */
static const char *adapter_key_set(const struct mt_config *c)
{
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *usual = NULL;
    const char *name = NULL;
    int rc = mt_config_load(&usual, NULL, NULL, 0, NULL);
    for (size_t i = 0; i < mt_n_keys() && !name && !rc; i++) {
        const struct mt_key *key = mt_key_at(i);
        MT_STR_FREED struct mt_str x = {0}, y = {0};
        if (!strcmp(key->section, "adapter") && strcmp(key->name, "kind") && !has_same_value(c, usual, key, &x, &y))
            name = key->name;
    }
    return name;
}

/* Keys that would do nothing where others are as they are: they were meant to. */
static int check_effects(const struct mt_config *c, const char *path, struct mt_err *err)
{
    const char *key = c->adapter.kind == MT_ADAPTER_NONE ? adapter_key_set(c) : NULL;
    if (key)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: adapter.%s is set, but adapter.kind = none trains the model itself: set "
                       "adapter.kind to lora or dora, or remove the key", path, key);
    if (c->train.delink_at && c->model.share_layers == 1)
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: train.delink_at is set, but model.share_layers = 1 gives each layer its own "
                       "weights from the start: remove the key", path);
    if (c->eval.sets.n && !c->data.eval[0])
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: eval.sets are evaluated beside data.eval: set that, too", path);
    if (c->eval.early_stop_patience && (!c->data.eval[0] || !c->eval.every))
        return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: eval.early_stop_patience is set, but %s: set %s, or remove the key",
                       path, c->data.eval[0] ? "eval.every = 0 evaluates only at the end" : "there are no evaluation data",
                       c->data.eval[0] ? "eval.every" : "data.eval");
    return 0;
}

int mt_config_load_for(struct mt_config **out, const char *path, const char *const *sets, int n_sets,
                       enum mt_config_use use, struct mt_err *err)
{
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *cfg = NULL;
    int rc = MT_NEW(&cfg, 1, "the configuration", err)
          ?: MT_NEW(&cfg->priv, 1, "the configuration", err)
          ?: set_defaults(cfg, err);
    if (!rc && path)
        rc = mt_ini_parse_file(path, on_key, cfg, err);
    for (int i = 0; i < n_sets && !rc; i++)
        rc = apply_set(cfg, sets[i], err);
    if (!rc && path)
        rc = check_needs(cfg, path, use, err)
          ?: check_keys(cfg, path, err)
          ?: check_effects(cfg, path, err);
    if (!rc)
        *out = MT_GIVE(cfg);
    return rc;
}

int mt_config_load(struct mt_config **out, const char *path, const char *const *sets, int n_sets,
                   struct mt_err *err)
{
    return mt_config_load_for(out, path, sets, n_sets, MT_TO_TRAIN, err);
}

void mt_config_destroy(struct mt_config **config)
{
    struct mt_config *cfg = *config;
    if (!cfg)
        return;
    for (size_t i = 0; i < mt_n_keys() && cfg->priv; i++) {
        mt_key_free(cfg, mt_key_at(i));
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
    for (size_t i = 0; i < mt_n_keys(); i++) {
        if (strcmp(section, mt_key_at(i)->section)) {
            section = mt_key_at(i)->section;
            mt_str_printf(out, "%s[%s]\n", i ? "\n" : "", section);
        }
        mt_str_printf(out, "%s = ", mt_key_at(i)->name);
        mt_key_write(cfg, mt_key_at(i), out);
        mt_str_printf(out, origins ? " ; %s\n" : "\n", cfg->priv->origin[i]);
    }
}

static const struct mt_key *key_named(const char *key)
{
    char section[64];
    const char *dot = strchr(key, '.');
    if (!dot || (size_t)(dot - key) >= sizeof(section))
        return NULL;
    snprintf(section, sizeof(section), "%.*s", (int)(dot - key), key);
    return mt_key_find(section, dot + 1);
}

int mt_config_override(struct mt_config *cfg, const char *key, const char *value, const char *why,
                       struct mt_err *err)
{
    const struct mt_key *k = key_named(key);
    return k ? set_key(cfg, k, value, why, err)
             : mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "there is no key %s", key);
}

bool mt_config_is_default(const struct mt_config *cfg, const char *key)
{
    const struct mt_key *k = key_named(key);
    return k && !strcmp(cfg->priv->origin[mt_key_index(k)], "default");
}

int mt_config_reset(struct mt_config *cfg, const char *key, struct mt_err *err)
{
    const struct mt_key *k = key_named(key);
    return k ? set_key(cfg, k, k->def, "default", err)
             : mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "there is no key %s", key);
}

/* Gives a key the value that it has in `from`. */
static int take_value(struct mt_config *cfg, const struct mt_config *from, const struct mt_key *key, const char *why,
                      struct mt_err *err)
{
    MT_STR_FREED struct mt_str now = {0}, then = {0};
    int same = has_same_value(cfg, from, key, &now, &then);
    return same < 0 ? mt_fail_nomem(err, "the configuration", then.len)
           : same   ? 0
                    : set_key(cfg, key, then.p, why, err);
}

int mt_config_adopt(struct mt_config *cfg, const struct mt_numerics *numerics, const struct mt_placement *placement,
                    const char *why, struct mt_err *err)
{
    struct mt_config decided = *cfg; /* borrows everything else */
    int rc = 0;
    decided.numerics = *numerics;
    decided.placement = *placement;
    for (size_t i = 0; i < mt_n_keys() && !rc; i++)
        if (mt_key_at(i)->role == MT_NUMERICS || mt_key_at(i)->role == MT_PLACEMENT)
            rc = take_value(cfg, &decided, mt_key_at(i), why, err);
    return rc;
}

int mt_config_copy(struct mt_config **out, const struct mt_config *cfg, const char *decided,
                   struct mt_err *err)
{
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *c = NULL;
    int rc = mt_config_load(&c, NULL, NULL, 0, err);
    for (size_t i = 0; i < mt_n_keys() && !rc; i++)
        if (mt_key_at(i)->role != MT_PLACEMENT || strcmp(cfg->priv->origin[i], decided))
            rc = take_value(c, cfg, mt_key_at(i), cfg->priv->origin[i], err);
    if (!rc)
        *out = MT_GIVE(c);
    return rc;
}

struct earlier {
    struct mt_config *cfg;
    bool warn; /* about keys that are ignored */
};

static void ignore_key(const struct earlier *e, const char *section, const char *name, const char *value,
                       const char *why)
{
    if (e->warn)
        mt_warn("ignoring the checkpoint's %s.%s = %s: %s", section, name, value, why);
}

/* A line of a configuration that another version may have written. */
static int on_earlier_key(void *ctx, const char *file, int line, const char *section, const char *name,
                          const char *value, struct mt_err *err)
{
    const struct earlier *e = ctx;
    const struct mt_key *key = mt_key_find(section, name);
    struct mt_err why = {0};
    if (!key) {
        ignore_key(e, section, name, value, "this version has no such key");
        return 0;
    }
    int rc = on_key(e->cfg, file, line, section, name, value, &why);
    bool matters = key->role <= MT_LENGTH;
    if (rc && !matters) {
        ignore_key(e, section, name, value, "this version does not accept the value");
        return 0;
    }
    if (rc && err)
        *err = why;
    return rc;
}

/* Loads the text of an earlier config.effective.ini. */
static int load_earlier(struct mt_config **out, const char *ini, bool warn, struct mt_err *err)
{
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *cfg = NULL;
    int rc = mt_config_load(&cfg, NULL, NULL, 0, err);
    struct earlier e = {cfg, warn};
    rc = rc ?: mt_ini_parse(ini, strlen(ini), "earlier configuration", on_earlier_key, &e, err);
    if (!rc)
        *out = MT_GIVE(cfg);
    return rc;
}

int mt_config_keep(struct mt_config *cfg, const char *earlier_ini, const char *why, struct mt_err *err)
{
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *earlier = NULL;
    int rc = load_earlier(&earlier, earlier_ini, true, err);
    for (size_t i = 0; i < mt_n_keys() && !rc; i++) {
        const struct mt_key *key = mt_key_at(i);
        int keeps = key->role == MT_NUMERICS ? is_auto(cfg, key) : 0;
        if (keeps < 0)
            rc = mt_fail_nomem(err, "the configuration", 0);
        else if (keeps)
            rc = take_value(cfg, earlier, key, why, err);
    }
    return rc;
}

/* Whether the value takes samples away from the training's. */
static bool holds_out(const char *value)
{
    int64_t count;
    double share;
    return *value && (mt_parse_count(value, &count) || mt_parse_percent(value, &share));
}

/* Whether a resume must not have the other value, but for a longer run. */
static bool is_numeric(const struct mt_key *key, const char *then, const char *now)
{
    return key->role == MT_NUMERICS || key->role == MT_LENGTH ||
           (key->role == MT_RELEASED && strcmp(now, key->def) != 0) ||
           (key->role == MT_HELD_OUT && (holds_out(then) || holds_out(now)));
}

int mt_config_diff(const struct mt_config *cfg, const char *earlier_ini, struct mt_str *diff,
                   struct mt_str *grown, struct mt_err *err)
{
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *earlier = NULL;
    struct mt_config settled = *cfg; /* borrows everything else */
    int rc = load_earlier(&earlier, earlier_ini, false, err);
    settled.numerics.compute = mt_settled_compute(&cfg->numerics);
    if (!rc)
        earlier->numerics.compute = mt_settled_compute(&earlier->numerics);
    for (size_t i = 0; i < mt_n_keys() && !rc; i++) {
        const struct mt_key *k = mt_key_at(i);
        MT_STR_FREED struct mt_str then = {0}, now = {0};
        int same = has_same_value(earlier, &settled, k, &then, &now);
        if (same < 0) {
            rc = mt_fail_nomem(err, "the configuration", then.len);
        } else if (!same && is_numeric(k, then.p, now.p)) {
            bool grows = k->role == MT_LENGTH && strtod(now.p, NULL) > strtod(then.p, NULL);
            mt_str_printf(grows ? grown : diff, "  %s.%s: %s -> %s\n", k->section, k->name, then.p, now.p);
        }
    }
    return rc;
}

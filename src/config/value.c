/* SPDX-License-Identifier: Apache-2.0 */
/* Values of keys: text to field and back. */
#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/fs.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "base/units.h"
#include "config/schema.h"
#include "config/synonyms.h"
#include "optim/optimizer.h"

enum { MAX_NAME = 40 }; /* characters, of an item of MT_KEY_NAMED_PATHS: it is part of columns' and measures' names */

static const void *field_of(const struct mt_config *cfg, const struct mt_key *key)
{
    if (key->offset == MT_KEY_NO_OFFSET)
        return &cfg->numerics.optimizer_keys[mt_optimizer_slot_of(key->name)];
    return (const char *)cfg + key->offset;
}

static void *field(struct mt_config *cfg, const struct mt_key *key)
{
    return (char *)cfg + ((const char *)field_of(cfg, key) - (const char *)cfg);
}

/* A text for a key, and room for what is wrong with it. */
struct given {
    const struct mt_key *key;
    const char *text;
    char *why;
    size_t len;
};

/* What keys of a type hold, and how it is read into a field, whose type is that of settings/key.h, and written. */
struct type {
    const char *values; /* in words */
    int (*parse)(const struct given *g, void *field);
    void (*print)(const struct mt_key *key, const void *field, struct mt_str *out);
    enum {
        NUMBER = 1, /* empty only where the default is; "auto" is MT_AUTO */
        OWNED = 2,  /* the field is a string of its own */
        LIST = 4,   /* the field is a list of them */
        PATH = 8,   /* it is or may be a path, or each item is one */
        NAMED = 16, /* each item is NAME:PATH */
    } flags;
};
static const struct type *type_of(const struct mt_key *key);

static int fail(const struct given *g, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static int fail(const struct given *g, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(g->why, g->len, fmt, ap);
    va_end(ap);
    return -EINVAL;
}

static int no_memory(const struct given *g)
{
    fail(g, "out of memory");
    return -ENOMEM;
}

/* A number may be auto if it is by default. */
static bool takes_auto(const struct mt_key *key)
{
    return type_of(key)->flags & NUMBER && !strcmp(key->def, "auto");
}

static bool is_auto(const struct given *g)
{
    return takes_auto(g->key) && !strcmp(g->text, "auto");
}

static int check_range(const struct given *g, double v)
{
    if (g->key->min > g->key->max || (v >= g->key->min && v <= g->key->max))
        return 0;
    return fail(g, "must be between %.15g and %.15g", g->key->min, g->key->max);
}

static int parse_count(const struct given *g, void *field)
{
    int64_t *out = field;
    *out = is_auto(g) ? MT_AUTO : 0;
    if (is_auto(g) || !*g->text)
        return 0;
    if (!mt_parse_count(g->text, out))
        return fail(g, "must be a whole number (k, M, Ki, Mi allowed)");
    return check_range(g, (double)*out);
}

static int parse_whole(const struct given *g, void *field)
{
    int64_t count;
    int rc = parse_count(g, &count);
    if (!rc)
        *(double *)field = (double)count;
    return rc;
}

static int parse_real(const struct given *g, void *field)
{
    double v = is_auto(g) ? MT_AUTO : 0;
    if (!is_auto(g) && *g->text && !mt_parse_real(g->text, &v))
        return fail(g, "must be a number");
    *(double *)field = v;
    return is_auto(g) ? 0 : check_range(g, v);
}

static void print_number(double v, const char *unit, struct mt_str *out)
{
    mt_str_number(out, v);
    mt_str_printf(out, "%s", unit);
}

static void print_real(const struct mt_key *key, const void *field, struct mt_str *out)
{
    double v = *(const double *)field;
    if (takes_auto(key) && v == MT_AUTO)
        mt_str_printf(out, "auto");
    else if (v != 0 || *key->def)
        mt_str_number(out, v);
}

static void print_count(const struct mt_key *key, const void *field, struct mt_str *out)
{
    int64_t v = *(const int64_t *)field;
    if (!v || v == MT_AUTO)
        print_real(key, &(double){(double)v}, out);
    else
        mt_str_printf(out, "%lld", (long long)v);
}

static int parse_amount(const struct given *g, void *field)
{
    struct mt_cfg_amount *out = field;
    double r;
    if (mt_parse_percent(g->text, &r)) {
        *out = (struct mt_cfg_amount){.is_ratio = true, .ratio = r};
        return r >= 0 && r <= 1 ? 0 : fail(g, "must be between 0%% and 100%%");
    }
    out->is_ratio = false;
    if (mt_parse_real(g->text, &r) && r > 0 && r < 1)
        return fail(g, "must be a whole number, or a share such as %g%%", 100 * r);
    return parse_count(g, &out->count);
}

static void print_amount(const struct mt_key *, const void *field, struct mt_str *out)
{
    const struct mt_cfg_amount *a = field;
    if (a->is_ratio)
        print_number(a->ratio * 100, "%", out);
    else
        mt_str_printf(out, "%lld", (long long)a->count);
}

static int parse_size(const struct given *g, void *field)
{
    struct mt_size s = {0};
    if (!strcmp(g->text, "auto"))
        s.is_auto = true;
    else if (mt_parse_percent(g->text, &s.ratio) && s.ratio > 0 && s.ratio <= 1)
        s.is_ratio = true;
    else if (!mt_parse_bytes(g->text, &s.bytes))
        return fail(g, "must be a size with a unit, such as 20GiB, a share such as 90%%, or auto");
    *(struct mt_size *)field = s;
    return 0;
}

static void print_bytes(const struct mt_key *, const void *field, struct mt_str *out)
{
    mt_str_printf(out, "%lluB", (unsigned long long)*(const uint64_t *)field);
}

static void print_size(const struct mt_key *key, const void *field, struct mt_str *out)
{
    const struct mt_size *s = field;
    if (s->is_auto)
        mt_str_printf(out, "auto");
    else if (s->is_ratio)
        print_number(s->ratio * 100, "%", out);
    else
        print_bytes(key, &s->bytes, out);
}

static int parse_bytes(const struct given *g, void *field)
{
    uint64_t bytes;
    if (!mt_parse_bytes(g->text, &bytes))
        return fail(g, "must be a size with a unit, such as 5GB");
    *(uint64_t *)field = bytes;
    return check_range(g, (double)bytes);
}

static int parse_duration(const struct given *g, void *field)
{
    return mt_parse_duration(g->text, field) ? 0 : fail(g, "must be a duration with units, such as 11h30m");
}

static void print_duration(const struct mt_key *, const void *field, struct mt_str *out)
{
    double v = *(const double *)field;
    print_number(v, v != 0 ? "s" : "", out);
}

static int parse_interval(const struct given *g, void *field)
{
    struct mt_cfg_interval v = {0};
    if (!mt_parse_count(g->text, &v.steps) || v.steps < 0)
        v = (struct mt_cfg_interval){.is_time = true};
    if (v.is_time && !mt_parse_duration(g->text, &v.seconds))
        return fail(g, "must be steps, or a duration such as 30m");
    *(struct mt_cfg_interval *)field = v;
    return 0;
}

static void print_interval(const struct mt_key *, const void *field, struct mt_str *out)
{
    const struct mt_cfg_interval *v = field;
    if (v->is_time)
        print_number(v->seconds, "s", out);
    else
        mt_str_printf(out, "%lld", (long long)v->steps);
}

static int parse_bool(const struct given *g, void *field)
{
    int i = mt_choice_find_any_case("false|true|no|yes|off|on|0|1", g->text);
    if (i < 0)
        return fail(g, "must be on or off");
    *(bool *)field = i % 2;
    return 0;
}

static void print_bool(const struct mt_key *, const void *field, struct mt_str *out)
{
    mt_str_printf(out, *(const bool *)field ? "on" : "off");
}

static int parse_choice(const struct given *g, void *field)
{
    int i = mt_choice_find(g->key->choices, g->text);
    const char *here = i < 0 ? mt_value_synonym(g->key->name, g->text) : NULL;
    if (i < 0)
        return fail(g, "must be one of %s%s%s", g->key->choices, here ? "; what others call so is " : "", here ? here : "");
    *(int *)field = i;
    return 0;
}

static void print_choice(const struct mt_key *key, const void *field, struct mt_str *out)
{
    char name[MT_CHOICE_NAME];
    mt_str_printf(out, "%s", mt_choice_name(name, key->choices, *(const int *)field));
}

static int parse_dtype(const struct given *g, void *field)
{
    int unused, rc = parse_choice(g, &unused);
    if (!rc)
        *(enum mt_dtype *)field = !strcmp(g->text, "auto")                 ? MT_DTYPE_AUTO
                                : !strcmp(g->text, mt_dtype_name(MT_F32)) ? MT_F32
                                                                          : MT_BF16;
    return rc;
}

static void print_dtype(const struct mt_key *, const void *field, struct mt_str *out)
{
    enum mt_dtype t = *(const enum mt_dtype *)field;
    mt_str_printf(out, "%s", t == MT_DTYPE_AUTO ? "auto" : mt_dtype_name(t));
}

/* Whether it would be read back as something else without quotes. */
static bool needs_quotes(const char *s)
{
    size_t n = strlen(s);
    if (n && (*s == ';' || *s == '#' || isspace((unsigned char)*s) || isspace((unsigned char)s[n - 1])))
        return true;
    for (; n > 1; n--)
        if ((s[n - 1] == ';' || s[n - 1] == '#') && isspace((unsigned char)s[n - 2]))
            return true;
    return false;
}

/* Refuses text that a line of an INI file cannot hold, wherever it comes from (--set, a variable). */
static int check_text(const struct given *g, const char *s)
{
    if (strpbrk(s, "\r\n") || strstr(s, "${"))
        return fail(g, "must not contain line breaks or \"${\"");
    if (*s == '"' || (needs_quotes(s) && strchr(s, '"')))
        return fail(g, "must not contain a quote at its start, or together with \" ;\", \" #\" or outer spaces");
    return 0;
}

static bool is_of_home(const char *path)
{
    return path[0] == '~' && (!path[1] || path[1] == '/');
}

/* Refuses a path that only a shell would expand. */
static int check_home(const struct given *g, const char *path)
{
    bool home = type_of(g->key)->flags & PATH && is_of_home(path);
    return home ? fail(g, "begins with ~, which only shells know: write ${HOME}%s", path + 1) : 0;
}

static int set_string(const struct given *g, void *field)
{
    char **dst = field, *copy = strdup(g->text);
    if (!copy)
        return no_memory(g);
    free(*dst);
    *dst = copy;
    return 0;
}

static int parse_string(const struct given *g, void *field)
{
    return check_text(g, g->text)
        ?: check_home(g, g->text)
        ?: set_string(g, field);
}

static int parse_word(const struct given *g, void *field)
{
    int unused;
    return parse_choice(g, &unused) ?: set_string(g, field);
}

/* MT_KEY_TEXT. */
static int parse_numbers(const struct given *g, void *field)
{
    if (strlen(g->text) >= MT_OFFLOAD_TEXT)
        return fail(g, "is too long: at most %d characters", MT_OFFLOAD_TEXT - 1);
    snprintf(field, MT_OFFLOAD_TEXT, "%s", strcmp(g->text, "auto") ? g->text : "");
    return 0;
}

static void print_numbers(const struct mt_key *, const void *field, struct mt_str *out)
{
    mt_str_printf(out, "%s", *(const char *)field ? (const char *)field : "auto");
}

bool mt_key_is_path(const struct mt_key *key, const char *value, const char *path)
{
    struct stat st;
    int64_t count;
    double share;
    if (key->type != MT_KEY_NAME_OR_FILE && key->type != MT_KEY_NAME_OR_PATH)
        return type_of(key)->flags & PATH;
    bool exists = !stat(path, &st);
    if (key->type == MT_KEY_NAME_OR_FILE && !strncmp(value, MT_HUB_ADDRESS, strlen(MT_HUB_ADDRESS)))
        return true;
    if (key->type == MT_KEY_NAME_OR_PATH)
        return exists && strcmp(value, key->def) != 0;
    bool name = mt_choice_find(key->choices, value) >= 0 || mt_parse_count(value, &count) ||
                mt_parse_percent(value, &share);
    return exists && !name && S_ISREG(st.st_mode);
}

/*
 * The path that `value` is: absolute, so that the text means the same in any file, or beside `file`, which has it; names
 * and "auto" stay. The caller frees it; NULL: out of memory.
 */
static char *place(const struct mt_key *key, const char *file, const char *value)
{
    bool hub = !strncmp(value, MT_HUB_ADDRESS, strlen(MT_HUB_ADDRESS));
    if (!*value || !strcmp(value, "auto"))
        return strdup(value);
    if (!file)
        return mt_key_is_path(key, value, value) ? mt_path_canonical(value) : strdup(value);
    const char *slash = strrchr(file, '/');
    if (*value == '/' || is_of_home(value) || hub || !slash) /* ~ is refused as it stands */
        return strdup(value);
    MT_FREED char *dir = strndup(file, (size_t)(slash - file) + 1), *path = dir ? mt_path_join(dir, value) : NULL;
    return !path || mt_key_is_path(key, value, path) ? MT_GIVE(path) : strdup(value);
}

static void print_string(const struct mt_key *key, const void *field, struct mt_str *out)
{
    MT_FREED char *s = place(key, NULL, *(char *const *)field);
    out->failed |= !s;
    mt_str_printf(out, "%s", s ? s : "");
}

static void free_list(struct mt_cfg_list *l)
{
    for (int i = 0; i < l->n; i++)
        free(l->items[i]);
    free(l->items);
    *l = (struct mt_cfg_list){0};
}

/* false: out of memory. */
static bool split(struct mt_cfg_list *out, const char *text)
{
    MT_CLOSED_BY(free_list) struct mt_cfg_list l = {0};
    size_t cap = 0;
    while (*text) {
        const char *item = text + strspn(text, " \t\n\v\f\r");
        size_t n = strcspn(item, ",");
        text = item + n + (item[n] == ',');
        while (n && isspace((unsigned char)item[n - 1]))
            n--;
        if (!mt_grow(&l.items, &cap, (size_t)l.n + 1, sizeof(*l.items)) || (n && !(l.items[l.n++] = strndup(item, n))))
            return false;
    }
    *out = MT_GIVE(l);
    return true;
}

/* As it is printed: without empty items and extra spaces, paths as place() has them. NULL: out of memory. */
static char *join(const struct mt_key *key, const char *file, const struct mt_cfg_list *l)
{
    MT_STR_FREED struct mt_str all = {0};
    mt_str_append(&all, "", 0);
    for (int i = 0; i < l->n; i++) {
        size_t name = mt_key_name_of_path(key, l->items[i]);
        MT_FREED char *item = place(key, file, l->items[i] + name);
        all.failed |= !item;
        mt_str_printf(&all, "%s%.*s%s", i ? ", " : "", (int)name, l->items[i], item ? item : "");
    }
    return all.failed ? NULL : MT_GIVE(all.p);
}

char *mt_key_resolve(const struct mt_key *key, const char *file, const char *value)
{
    MT_CLOSED_BY(free_list) struct mt_cfg_list l = {0};
    if (!(type_of(key)->flags & PATH))
        return strdup(value);
    if (!(type_of(key)->flags & LIST))
        return place(key, file, value);
    return split(&l, value) ? join(key, file, &l) : NULL;
}

size_t mt_key_name_of_path(const struct mt_key *key, const char *item)
{
    size_t n = strspn(item, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-");
    return type_of(key)->flags & NAMED && n && item[n] == ':' ? n + 1 : 0;
}

static int check_name(const struct given *g, const struct mt_cfg_list *l, int i)
{
    const char *item = l->items[i];
    size_t n = mt_key_name_of_path(g->key, item);
    if (!n || !item[n])
        return fail(g, "is a list of NAME:FILE, with names of letters, digits, _ and -; \"%s\" is none", item);
    if (n - 1 > MAX_NAME)
        return fail(g, "has a name of %zu characters, \"%.16s...\": at most %d", n - 1, item, MAX_NAME);
    for (int k = 0; k < i; k++)
        if (!strncmp(l->items[k], item, n))
            return fail(g, "names %.*s twice", (int)n - 1, item);
    return 0;
}

static int parse_list(const struct given *g, void *field)
{
    struct mt_cfg_list *l = field;
    int rc = check_text(g, g->text);
    if (rc)
        return rc;
    free_list(l);
    if (!split(l, g->text))
        return no_memory(g);
    for (int i = 0; i < l->n && !rc && type_of(g->key)->flags & NAMED; i++)
        rc = check_name(g, l, i);
    for (int i = 0; i < l->n && !rc; i++)
        rc = check_home(g, l->items[i] + mt_key_name_of_path(g->key, l->items[i]));
    MT_FREED char *all = join(g->key, "", l);
    return rc ?: all ? check_text(g, all) : no_memory(g);
}

static void print_list(const struct mt_key *key, const void *field, struct mt_str *out)
{
    MT_FREED char *all = join(key, NULL, field);
    out->failed |= !all;
    mt_str_printf(out, "%s", all ? all : "");
}

static const struct type types[] = {
    [MT_KEY_STRING] = {"text", parse_string, print_string, OWNED},
    [MT_KEY_TEXT] = {"names with numbers, or auto", parse_numbers, print_numbers, 0},
    [MT_KEY_PATH] = {"a path, relative to the file that names it", parse_string, print_string, OWNED | PATH},
    [MT_KEY_NAME_OR_FILE] = {"a number, a share (2%), or a file", parse_string, print_string, OWNED | PATH},
    [MT_KEY_NAME_OR_PATH] = {"a name, or a path relative to the file that names it", parse_string, print_string, OWNED | PATH},
    [MT_KEY_LIST] = {"a list, by commas", parse_list, print_list, LIST},
    [MT_KEY_PATHS] = {"paths, by commas, relative to the file that names them", parse_list, print_list, LIST | PATH},
    [MT_KEY_NAMED_PATHS] = {"NAME:PATH, by commas", parse_list, print_list, LIST | PATH | NAMED},
    [MT_KEY_CHOICE] = {"a word", parse_choice, print_choice, 0},
    [MT_KEY_WORD] = {"a word", parse_word, print_string, OWNED},
    [MT_KEY_DTYPE] = {"a type", parse_dtype, print_dtype, 0},
    [MT_KEY_BOOL] = {"on or off", parse_bool, print_bool, 0},
    [MT_KEY_COUNT] = {"a whole number (500, 64k, 64Ki)", parse_count, print_count, NUMBER},
    [MT_KEY_REAL] = {"a number (0.1, 2e-5)", parse_real, print_real, NUMBER},
    [MT_KEY_WHOLE] = {"a whole number", parse_whole, print_real, NUMBER},
    [MT_KEY_AMOUNT] = {"a number, or a share (3%)", parse_amount, print_amount, 0},
    [MT_KEY_SIZE] = {"a size (20GiB), a share (90%), or auto", parse_size, print_size, 0},
    [MT_KEY_BYTES] = {"a size with its unit (5GB)", parse_bytes, print_bytes, 0},
    [MT_KEY_DURATION] = {"a duration (30m, 11h30m), or 0", parse_duration, print_duration, 0},
    [MT_KEY_INTERVAL] = {"steps (500), or a duration (30m)", parse_interval, print_interval, 0},
};

static const struct type *type_of(const struct mt_key *key)
{
    return &types[key->type];
}

void mt_key_values(const struct mt_key *key, struct mt_str *out)
{
    mt_str_printf(out, "%s%s", type_of(key)->values, takes_auto(key) ? ", or auto" : "");
}

int mt_key_parse(struct mt_config *cfg, const struct mt_key *key, const char *text, char *buf,
                 size_t len)
{
    const struct given g = {key, text, buf, len};
    if (!*text && *key->def && type_of(key)->flags & NUMBER)
        return fail(&g, "a number is missing; without this line it is %s", key->def);
    if (key->unsupported && *text &&
        (!strcmp(key->unsupported, "*") || mt_choice_find(key->unsupported, text) >= 0))
        return fail(&g, "\"%s\" is not supported%s%s", text, key->instead ? ": " : " yet",
                    key->instead ? key->instead : "");
    return type_of(key)->parse(&g, field(cfg, key));
}

void mt_key_print(const struct mt_config *cfg, const struct mt_key *key, struct mt_str *out)
{
    type_of(key)->print(key, field_of(cfg, key), out);
}

void mt_key_write(const struct mt_config *cfg, const struct mt_key *key, struct mt_str *out)
{
    MT_STR_FREED struct mt_str value = {0};
    mt_key_print(cfg, key, &value);
    out->failed |= value.failed;
    mt_str_printf(out, value.p && needs_quotes(value.p) ? "\"%s\"" : "%s", value.p ? value.p : "");
}

void mt_key_free(struct mt_config *cfg, const struct mt_key *key)
{
    void *f = field(cfg, key);
    if (type_of(key)->flags & LIST) {
        free_list(f);
    } else if (type_of(key)->flags & OWNED) {
        free(*(char **)f);
        *(char **)f = NULL;
    }
}

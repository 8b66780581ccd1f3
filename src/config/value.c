/* SPDX-License-Identifier: Apache-2.0 */
/* Values of keys: text to field and back. */
#include <ctype.h>
#include <errno.h>
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
#define ONLY_SHELLS "begins with ~, which only shells know: write ${HOME}%s"

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

static int fail(char *buf, size_t len, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static int fail(char *buf, size_t len, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(buf, len, fmt, ap);
    va_end(ap);
    return -EINVAL;
}

static int check_range(const struct mt_key *key, double v, char *buf, size_t len)
{
    if (key->min > key->max || (v >= key->min && v <= key->max))
        return 0;
    return fail(buf, len, "must be between %.15g and %.15g", key->min, key->max);
}

static int parse_count(const struct mt_key *key, const char *text, int64_t *out, char *buf, size_t len)
{
    if (!*text) {
        *out = 0;
        return 0;
    }
    if (!mt_parse_count(text, out))
        return fail(buf, len, "must be a whole number (k, M, Ki, Mi allowed)");
    return check_range(key, (double)*out, buf, len);
}

static int parse_real(const struct mt_key *key, const char *text, double *out, char *buf, size_t len)
{
    double v = 0;
    if (*text && !mt_parse_real(text, &v))
        return fail(buf, len, "must be a number");
    *out = v;
    return check_range(key, v, buf, len);
}

static int parse_whole(const struct mt_key *key, const char *text, double *out, char *buf, size_t len)
{
    int64_t count = 0;
    int rc = parse_count(key, text, &count, buf, len);
    if (!rc)
        *out = (double)count;
    return rc;
}

static int no_memory(char *buf, size_t len)
{
    fail(buf, len, "out of memory");
    return -ENOMEM;
}

static int parse_bool(const char *text, bool *out, char *buf, size_t len)
{
    if (mt_choice_find("true|yes|on|1", text) >= 0)
        *out = true;
    else if (mt_choice_find("false|no|off|0", text) >= 0)
        *out = false;
    else
        return fail(buf, len, "must be on or off");
    return 0;
}

static int parse_size(const char *text, struct mt_size *out, char *buf, size_t len)
{
    struct mt_size s = {0};
    if (!strcmp(text, "auto"))
        s.is_auto = true;
    else if (mt_parse_percent(text, &s.ratio) && s.ratio > 0 && s.ratio <= 1)
        s.is_ratio = true;
    else if (!mt_parse_bytes(text, &s.bytes))
        return fail(buf, len, "must be a size with a unit, such as 20GiB, a share such as 90%%, or auto");
    *out = s;
    return 0;
}

static void free_list(struct mt_cfg_list *l)
{
    for (int i = 0; i < l->n; i++)
        free(l->items[i]);
    free(l->items);
    *l = (struct mt_cfg_list){0};
}

static int parse_list(const char *text, struct mt_cfg_list *out, char *buf, size_t len)
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
            return no_memory(buf, len);
    }
    *out = MT_GIVE(l);
    return 0;
}

static int parse_choice(const struct mt_key *key, const char *text, int *out, char *buf, size_t len)
{
    int i = mt_choice_find(key->choices, text);
    if (i >= 0) {
        *out = i;
        return 0;
    }
    const char *here = mt_value_synonym(key->name, text);
    return fail(buf, len, "must be one of %s%s%s", key->choices, here ? "; what others call so is " : "", here ? here : "");
}

static int parse_interval(const char *text, struct mt_cfg_interval *out, char *buf, size_t len)
{
    double v;
    int64_t steps;
    if (mt_parse_count(text, &steps) && steps >= 0) {
        *out = (struct mt_cfg_interval){.steps = steps};
        return 0;
    }
    if (!mt_parse_duration(text, &v))
        return fail(buf, len, "must be steps, or a duration such as 30m");
    *out = (struct mt_cfg_interval){.is_time = true, .seconds = v};
    return 0;
}

static int parse_amount(const struct mt_key *key, const char *text, struct mt_cfg_amount *out,
                        char *buf, size_t len)
{
    double r;
    if (mt_parse_percent(text, &r)) {
        *out = (struct mt_cfg_amount){.is_ratio = true, .ratio = r};
        return r >= 0 && r <= 1 ? 0 : fail(buf, len, "must be between 0%% and 100%%");
    }
    out->is_ratio = false;
    if (mt_parse_real(text, &r) && r > 0 && r < 1)
        return fail(buf, len, "must be a whole number, or a share such as %g%%", 100 * r);
    return parse_count(key, text, &out->count, buf, len);
}

static enum mt_dtype dtype_of(const char *name)
{
    return !strcmp(name, "auto") ? MT_DTYPE_AUTO : !strcmp(name, mt_dtype_name(MT_F32)) ? MT_F32 : MT_BF16;
}

static int set_string(char **dst, const char *text, char *buf, size_t len)
{
    char *copy = strdup(text);
    if (!copy)
        return no_memory(buf, len);
    free(*dst);
    *dst = copy;
    return 0;
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
static int check_text(const char *s, char *buf, size_t len)
{
    if (strpbrk(s, "\r\n") || strstr(s, "${"))
        return fail(buf, len, "must not contain line breaks or \"${\"");
    if (*s == '"' || (needs_quotes(s) && strchr(s, '"')))
        return fail(buf, len, "must not contain a quote at its start, or together with \" ;\", \" #\" or outer spaces");
    return 0;
}

static bool is_of_home(const char *path)
{
    return path[0] == '~' && (!path[1] || path[1] == '/');
}

static bool is_list(const struct mt_key *key)
{
    return key->type == MT_KEY_LIST || key->type == MT_KEY_PATHS || key->type == MT_KEY_NAMED_PATHS;
}

size_t mt_key_name_of_path(const struct mt_key *key, const char *item)
{
    size_t n = strspn(item, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-");
    return key->type == MT_KEY_NAMED_PATHS && n && item[n] == ':' ? n + 1 : 0;
}

/* A path that only a shell would expand, among paths: -EINVAL. */
static int check_home(const struct mt_key *key, const struct mt_cfg_list *l, char *buf, size_t len)
{
    for (int i = 0; i < l->n && key->type != MT_KEY_LIST; i++) {
        const char *path = l->items[i] + mt_key_name_of_path(key, l->items[i]);
        if (is_of_home(path))
            return fail(buf, len, ONLY_SHELLS, path + 1);
    }
    return 0;
}

static int check_names(const struct mt_key *key, const struct mt_cfg_list *l, char *buf, size_t len)
{
    for (int i = 0; i < l->n; i++) {
        size_t n = mt_key_name_of_path(key, l->items[i]);
        if (!n || !l->items[i][n])
            return fail(buf, len, "is a list of NAME:FILE, with names of letters, digits, _ and -; \"%s\" is none", l->items[i]);
        if (n - 1 > MAX_NAME)
            return fail(buf, len, "has a name of %zu characters, \"%.16s...\": at most %d", n - 1, l->items[i], MAX_NAME);
        for (int k = 0; k < i; k++)
            if (!strncmp(l->items[k], l->items[i], n))
                return fail(buf, len, "names %.*s twice", (int)n - 1, l->items[i]);
    }
    return 0;
}

bool mt_key_holds_path(const struct mt_key *key)
{
    return key->type == MT_KEY_PATH || key->type == MT_KEY_NAME_OR_FILE || key->type == MT_KEY_NAME_OR_PATH;
}

bool mt_key_is_path(const struct mt_key *key, const char *value, const char *path)
{
    struct stat st;
    int64_t count;
    double share;
    bool exists = !stat(path, &st);
    if (key->type == MT_KEY_NAME_OR_FILE && !strncmp(value, MT_HUB_ADDRESS, strlen(MT_HUB_ADDRESS)))
        return true;
    if (key->type == MT_KEY_NAME_OR_PATH)
        return exists && strcmp(value, key->def) != 0;
    if (key->type != MT_KEY_NAME_OR_FILE)
        return true;
    bool name = mt_choice_find(key->choices, value) >= 0 || mt_parse_count(value, &count) ||
                mt_parse_percent(value, &share);
    return exists && !name && S_ISREG(st.st_mode);
}

static bool is_text(const struct mt_key *key)
{
    return key->type == MT_KEY_STRING || mt_key_holds_path(key) || is_list(key);
}

/* Lists are printed without empty items and extra spaces; the printed text must be valid, too. */
static int check_list(const struct mt_cfg_list *l, char *buf, size_t len)
{
    MT_STR_FREED struct mt_str all = {0};
    mt_str_append(&all, "", 0);
    for (int i = 0; i < l->n; i++)
        mt_str_printf(&all, "%s%s", i ? ", " : "", l->items[i]);
    return all.failed ? no_memory(buf, len) : check_text(all.p, buf, len);
}

/* A number that may be auto. */
static bool takes_auto(const struct mt_key *key)
{
    return key->type == MT_KEY_COUNT_AUTO || key->type == MT_KEY_REAL_AUTO || key->type == MT_KEY_WHOLE_AUTO;
}

static bool is_number(const struct mt_key *key)
{
    return key->type == MT_KEY_COUNT || key->type == MT_KEY_REAL || takes_auto(key);
}

int mt_key_parse(struct mt_config *cfg, const struct mt_key *key, const char *text, char *buf,
                 size_t len)
{
    void *f = field(cfg, key);
    int unused = 0, rc;
    uint64_t bytes;
    if (!*text && *key->def && is_number(key))
        return fail(buf, len, "a number is missing; without this line it is %s", key->def);
    if (is_text(key) && check_text(text, buf, len))
        return -EINVAL;
    if (mt_key_holds_path(key) && is_of_home(text))
        return fail(buf, len, ONLY_SHELLS, text + 1);
    if (key->unsupported && *text &&
        (!strcmp(key->unsupported, "*") || mt_choice_find(key->unsupported, text) >= 0))
        return fail(buf, len, "\"%s\" is not supported%s%s", text, key->instead ? ": " : " yet",
                    key->instead ? key->instead : "");
    if (takes_auto(key) && !strcmp(text, "auto")) {
        if (key->type == MT_KEY_COUNT_AUTO)
            *(int64_t *)f = MT_AUTO;
        else
            *(double *)f = MT_AUTO;
        return 0;
    }
    switch (key->type) {
    case MT_KEY_TEXT:
        if (strlen(text) >= MT_OFFLOAD_TEXT)
            return fail(buf, len, "is too long: at most %d characters", MT_OFFLOAD_TEXT - 1);
        snprintf(f, MT_OFFLOAD_TEXT, "%s", strcmp(text, "auto") ? text : "");
        return 0;
    case MT_KEY_STRING:
    case MT_KEY_PATH:
    case MT_KEY_NAME_OR_FILE:
    case MT_KEY_NAME_OR_PATH:
        return set_string(f, text, buf, len);
    case MT_KEY_LIST:
    case MT_KEY_PATHS:
    case MT_KEY_NAMED_PATHS:
        mt_key_free(cfg, key);
        rc = parse_list(text, f, buf, len);
        if (!rc && key->type == MT_KEY_NAMED_PATHS)
            rc = check_names(key, f, buf, len);
        rc = rc ?: check_home(key, f, buf, len);
        return rc ?: check_list(f, buf, len);
    case MT_KEY_CHOICE:
        return parse_choice(key, text, f, buf, len);
    case MT_KEY_WORD:
        rc = parse_choice(key, text, &unused, buf, len);
        return rc ?: set_string(f, text, buf, len);
    case MT_KEY_DTYPE:
        rc = parse_choice(key, text, &unused, buf, len);
        if (!rc)
            *(enum mt_dtype *)f = dtype_of(text);
        return rc;
    case MT_KEY_BOOL:
        return parse_bool(text, f, buf, len);
    case MT_KEY_COUNT_AUTO:
    case MT_KEY_COUNT:
        return parse_count(key, text, f, buf, len);
    case MT_KEY_WHOLE_AUTO:
        return parse_whole(key, text, f, buf, len);
    case MT_KEY_REAL_AUTO:
    case MT_KEY_REAL:
        return parse_real(key, text, f, buf, len);
    case MT_KEY_AMOUNT:
        return parse_amount(key, text, f, buf, len);
    case MT_KEY_SIZE:
        return parse_size(text, f, buf, len);
    case MT_KEY_BYTES:
        if (!mt_parse_bytes(text, &bytes))
            return fail(buf, len, "must be a size with a unit, such as 5GB");
        rc = check_range(key, (double)bytes, buf, len);
        if (!rc)
            *(uint64_t *)f = bytes;
        return rc;
    case MT_KEY_DURATION:
        if (!mt_parse_duration(text, f))
            return fail(buf, len, "must be a duration with units, such as 11h30m");
        return 0;
    case MT_KEY_INTERVAL:
    default:
        return parse_interval(text, f, buf, len);
    }
}

static void print_text(const char *s, struct mt_str *out)
{
    mt_str_printf(out, needs_quotes(s) ? "\"%s\"" : "%s", s);
}

/* Paths become absolute, so that the text means the same in any file; "auto" and model names stay. The caller frees it;
 * NULL: out of memory. */
static char *absolute(const char *path)
{
    return *path && strcmp(path, "auto") ? mt_path_canonical(path) : strdup(path);
}

static void print_path(const char *s, struct mt_str *out)
{
    MT_FREED char *path = absolute(s);
    out->failed |= !path;
    print_text(path ? path : "", out);
}

static void print_list(const struct mt_key *key, const struct mt_cfg_list *l, struct mt_str *out)
{
    MT_STR_FREED struct mt_str all = {0};
    mt_str_append(&all, "", 0);
    for (int i = 0; i < l->n; i++) {
        size_t name = mt_key_name_of_path(key, l->items[i]);
        MT_FREED char *item = key->type == MT_KEY_LIST ? strdup(l->items[i]) : absolute(l->items[i] + name);
        all.failed |= !item;
        mt_str_printf(&all, "%s%.*s%s", i ? ", " : "", (int)name, l->items[i], item ? item : "");
    }
    out->failed |= all.failed;
    print_text(all.failed ? "" : all.p, out);
}

static void print_number(double v, const char *unit, struct mt_str *out)
{
    mt_str_number(out, v);
    mt_str_printf(out, "%s", unit);
}

void mt_key_print(const struct mt_config *cfg, const struct mt_key *key, struct mt_str *out)
{
    const void *f = field_of(cfg, key);
    const struct mt_size *size = f;
    const struct mt_cfg_amount *amount = f;
    const struct mt_cfg_interval *interval = f;
    enum mt_dtype dtype;
    char name[MT_CHOICE_NAME];
    switch (key->type) {
    case MT_KEY_STRING:
        print_text(*(char *const *)f, out);
        break;
    case MT_KEY_PATH:
    case MT_KEY_NAME_OR_FILE:
    case MT_KEY_NAME_OR_PATH:
        (mt_key_is_path(key, *(char *const *)f, *(char *const *)f) ? print_path : print_text)(*(char *const *)f, out);
        break;
    case MT_KEY_LIST:
    case MT_KEY_PATHS:
    case MT_KEY_NAMED_PATHS:
        print_list(key, f, out);
        break;
    case MT_KEY_TEXT:
        mt_str_printf(out, "%s", *(const char *)f ? (const char *)f : "auto");
        break;
    case MT_KEY_CHOICE:
        mt_str_printf(out, "%s", mt_choice_name(name, key->choices, *(const int *)f));
        break;
    case MT_KEY_WORD:
        mt_str_printf(out, "%s", *(char *const *)f);
        break;
    case MT_KEY_DTYPE:
        dtype = *(const enum mt_dtype *)f;
        mt_str_printf(out, "%s", dtype == MT_DTYPE_AUTO ? "auto" : mt_dtype_name(dtype));
        break;
    case MT_KEY_BOOL:
        mt_str_printf(out, *(const bool *)f ? "on" : "off");
        break;
    case MT_KEY_COUNT_AUTO:
    case MT_KEY_COUNT:
        if (takes_auto(key) && *(const int64_t *)f == MT_AUTO)
            mt_str_printf(out, "auto");
        else if (*(const int64_t *)f || *key->def)
            mt_str_printf(out, "%lld", (long long)*(const int64_t *)f);
        break;
    case MT_KEY_REAL_AUTO:
    case MT_KEY_WHOLE_AUTO:
    case MT_KEY_REAL:
        if (takes_auto(key) && *(const double *)f == MT_AUTO)
            mt_str_printf(out, "auto");
        else if (*(const double *)f != 0 || *key->def)
            mt_str_number(out, *(const double *)f);
        break;
    case MT_KEY_AMOUNT:
        if (amount->is_ratio)
            print_number(amount->ratio * 100, "%", out);
        else
            mt_str_printf(out, "%lld", (long long)amount->count);
        break;
    case MT_KEY_SIZE:
        if (size->is_auto)
            mt_str_printf(out, "auto");
        else if (size->is_ratio)
            print_number(size->ratio * 100, "%", out);
        else
            mt_str_printf(out, "%lluB", (unsigned long long)size->bytes);
        break;
    case MT_KEY_BYTES:
        mt_str_printf(out, "%lluB", (unsigned long long)*(const uint64_t *)f);
        break;
    case MT_KEY_DURATION:
        print_number(*(const double *)f, *(const double *)f != 0 ? "s" : "", out);
        break;
    case MT_KEY_INTERVAL:
    default:
        if (interval->is_time)
            print_number(interval->seconds, "s", out);
        else
            mt_str_printf(out, "%lld", (long long)interval->steps);
        break;
    }
}

void mt_key_free(struct mt_config *cfg, const struct mt_key *key)
{
    void *f = field(cfg, key);
    if (is_list(key)) {
        free_list(f);
    } else if (is_text(key) || key->type == MT_KEY_WORD) {
        free(*(char **)f);
        *(char **)f = NULL;
    }
}

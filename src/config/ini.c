/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lines are read here rather than by a library: exact line numbers, lines of any length, duplicate
 * sections and keys, variables and includes are left to the caller by the libraries that we know.
 */
#include "config/ini.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/mem.h"
#include "base/strbuf.h"

enum { MAX_DEPTH = 8, MAX_SECTIONS = 64 };

struct parser {
    const char *file;
    int line, depth;
    char section[64];
    char seen[MAX_SECTIONS][64];
    int n_seen;
    mt_ini_fn fn;
    void *ctx;
    struct mt_err *err;
};

static int parse_file(const char *file, int depth, mt_ini_fn fn, void *ctx, struct mt_err *err);

__attribute__((format(printf, 2, 3))) static int complain(struct parser *p, const char *fmt, ...)
{
    char msg[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof(msg), fmt, ap);
    va_end(ap);
    return mt_fail(p->err, MT_ERR_USAGE, -EINVAL, "%s:%d: %s", p->file, p->line, msg);
}

static char *trim(char *s)
{
    s += strspn(s, " \t\n\v\f\r");
    char *end = s + strlen(s);
    while (end > s && isspace((unsigned char)end[-1]))
        end--;
    *end = 0;
    return s;
}

/* Appends the value of NAME or NAME:-default, the text between ${ and }. */
static int add_variable(struct parser *p, struct mt_str *out, const char *name, size_t len)
{
    char var[128];
    const char *def = memmem(name, len, ":-", 2);
    size_t n = def ? (size_t)(def - name) : len;
    if (!n || n >= sizeof(var))
        return complain(p, "a variable without a name");
    snprintf(var, sizeof(var), "%.*s", (int)n, name);
    const char *value = getenv(var);
    if (value)
        mt_str_append(out, value, strlen(value));
    else if (def)
        mt_str_append(out, def + 2, len - n - 2);
    else
        return complain(p, "the environment variable %s is not set (or give a default: ${%s:-value})",
                        var, var);
    return 0;
}

static int expand(struct parser *p, struct mt_str *out, const char *s)
{
    while (*s) {
        const char *end = s[0] == '$' && s[1] == '{' ? strchr(s, '}') : NULL;
        if (s[0] == '$' && s[1] == '{' && !end)
            return complain(p, "\"${\" without \"}\"");
        if (end) {
            int rc = add_variable(p, out, s + 2, (size_t)(end - s - 2));
            if (rc)
                return rc;
            s = end + 1;
        } else {
            mt_str_append(out, s++, 1);
        }
    }
    mt_str_append(out, "", 0);
    return out->failed ? mt_fail_nomem(p->err, p->file, out->len) : 0;
}

/* Removes quotes, or a comment after the value. */
static int clean_value(struct parser *p, char **value)
{
    char *v = trim(*value);
    if (*v == '"') {
        char *end = strchr(v + 1, '"');
        if (!end)
            return complain(p, "a quote that is not closed");
        char *rest = trim(end + 1);
        if (*rest && *rest != ';')
            return complain(p, "text after a closing quote");
        *end = 0;
        *value = v + 1;
        return 0;
    }
    for (char *c = v; *c; c++) {
        bool after = c == v || isspace((unsigned char)c[-1]);
        if (*c == '#' && after)
            return complain(p, "\" #\" in a value: a comment after a value begins with ;, and a value with \" #\" is "
                            "written in quotes: \"%.60s\"", v);
        if (*c == ';' && after) {
            *c = 0;
            break;
        }
    }
    *value = trim(v);
    return 0;
}

static int include(struct parser *p, const char *name)
{
    const char *slash = strrchr(p->file, '/');
    MT_FREED char *dir = slash ? strndup(p->file, (size_t)(slash - p->file) + 1) : strdup("");
    MT_FREED char *path = dir ? mt_path_join(dir, name) : NULL;
    if (!path)
        return mt_fail_nomem(p->err, "include", strlen(name));
    if (p->depth >= MAX_DEPTH)
        return complain(p, "includes nest deeper than %d: does a file include itself?", MAX_DEPTH);
    if (!mt_path_exists(path))
        return complain(p, "include: %s does not exist", path);
    return parse_file(path, p->depth + 1, p->fn, p->ctx, p->err);
}

static int open_section(struct parser *p, char *line)
{
    char *end = strchr(line, ']');
    if (!end || (*trim(end + 1) && *trim(end + 1) != ';'))
        return complain(p, "a section must be [name]");
    *end = 0;
    snprintf(p->section, sizeof(p->section), "%s", trim(line + 1));
    for (int i = 0; i < p->n_seen; i++)
        if (!strcmp(p->seen[i], p->section))
            return complain(p, "duplicate section [%s]", p->section);
    if (p->n_seen < MAX_SECTIONS)
        memcpy(p->seen[p->n_seen++], p->section, sizeof(p->section));
    return 0;
}

static int parse_line(struct parser *p, char *line)
{
    char *s = trim(line), *eq = strchr(s, '=');
    MT_STR_FREED struct mt_str value = {0};
    if (!*s || *s == '#' || *s == ';')
        return 0;
    if (*s == '[')
        return open_section(p, s);
    bool yaml = !strncmp(s, "- ", 2) || strstr(s, ": ") || s[strlen(s) - 1] == ':';
    if (!eq)
        return complain(p, "neither [section] nor key = value: \"%.60s\"%s", s,
                        yaml ? "; it looks like YAML: megatrain config init --model DIR writes a configuration to begin with" : "");
    *eq++ = 0;
    int rc = clean_value(p, &eq) ?: expand(p, &value, eq);
    char *key = trim(s);
    if (!rc && !strcmp(key, "include") && (!p->section[0] || !strcmp(p->section, "global")))
        rc = include(p, value.p ? value.p : "");
    else if (!rc && !p->section[0])
        rc = complain(p, "key \"%.60s\" is in no section: put a [section] line above it", key);
    else if (!rc)
        rc = p->fn(p->ctx, p->file, p->line, p->section, key, value.p ? value.p : "", p->err);
    return rc;
}

static int parse_text(const char *text, size_t len, struct parser *p)
{
    int rc = 0;
    if (memchr(text, 0, len))
        return mt_fail(p->err, MT_ERR_USAGE, -EINVAL, "%s: not a text file", p->file);
    if (len >= 3 && !memcmp(text, "\xef\xbb\xbf", 3)) {
        text += 3;
        len -= 3;
    }
    while (len && !rc) {
        const char *nl = memchr(text, '\n', len);
        size_t n = nl ? (size_t)(nl - text) : len;
        MT_FREED char *line = strndup(text, n);
        p->line++;
        rc = line ? parse_line(p, line) : mt_fail_nomem(p->err, p->file, n);
        n += nl != NULL;
        text += n;
        len -= n;
    }
    return rc;
}

int mt_ini_parse(const char *text, size_t len, const char *file, mt_ini_fn fn, void *ctx,
                 struct mt_err *err)
{
    struct parser p = {.file = file, .fn = fn, .ctx = ctx, .err = err};
    return parse_text(text, len, &p);
}

static int parse_file(const char *file, int depth, mt_ini_fn fn, void *ctx, struct mt_err *err)
{
    struct parser p = {.file = file, .depth = depth, .fn = fn, .ctx = ctx, .err = err};
    MT_FREED char *text = NULL;
    size_t len = 0;
    int rc = mt_read_stream(file, &text, &len, err);
    if (rc && rc != -ENOMEM && err)
        err->kind = MT_ERR_USAGE;
    return rc ?: parse_text(text, len, &p);
}

int mt_ini_parse_file(const char *file, mt_ini_fn fn, void *ctx, struct mt_err *err)
{
    return parse_file(file, 0, fn, ctx, err);
}

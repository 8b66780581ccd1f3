/* SPDX-License-Identifier: Apache-2.0 */
#include "base/units.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

struct unit {
    const char *name;
    double factor;
};

static const struct unit byte_units[] = {
    {"B", 1},         {"kB", 1e3},      {"KB", 1e3},       {"MB", 1e6},
    {"GB", 1e9},      {"TB", 1e12},     {"KiB", 0x1p10},   {"MiB", 0x1p20},
    {"GiB", 0x1p30},  {"TiB", 0x1p40},  {NULL, 0}};
static const struct unit rate_units[] = {
    {"MB/s", 1e6}, {"GB/s", 1e9}, {"MiB/s", 0x1p20}, {"GiB/s", 0x1p30}, {NULL, 0}};
static const struct unit count_units[] = {{"", 1},     {"k", 1e3},    {"M", 1e6},
                                          {"G", 1e9},  {"Ki", 0x1p10}, {"Mi", 0x1p20},
                                          {"Gi", 0x1p30}, {NULL, 0}};
static const struct unit percent_units[] = {{"%", 0.01}, {NULL, 0}};
/* Longer names first, since the first that matches is taken ("ms" before "m"). */
static const struct unit time_units[] = {{"ms", 1e-3}, {"s", 1}, {"m", 60}, {"h", 3600}, {"d", 86400}, {NULL, 0}};

static bool number(const char *text, double *out, const char **end)
{
    char *e;
    if (isspace((unsigned char)*text) || !strncasecmp(text, "0x", 2) || !strncasecmp(text, "-0x", 3))
        return false;
    *out = strtod(text, &e);
    *end = e;
    return e != text && isfinite(*out);
}

static bool with_unit(const char *text, const struct unit *units, double *out)
{
    const char *end;
    double v;
    if (!number(text, &v, &end))
        return false;
    while (*end == ' ')
        end++;
    while (units->name && strcmp(end, units->name))
        units++;
    if (units->name)
        *out = v * units->factor;
    return units->name != NULL;
}

bool mt_parse_real(const char *text, double *out)
{
    const char *end;
    double v;
    bool ok = number(text, &v, &end) && !*end;
    if (ok)
        *out = v;
    return ok;
}

bool mt_parse_count(const char *text, int64_t *out)
{
    double v;
    bool ok = with_unit(text, count_units, &v) && v == floor(v) && fabs(v) <= 0x1p62;
    if (ok)
        *out = (int64_t)v;
    return ok;
}

bool mt_parse_bytes(const char *text, uint64_t *out)
{
    double v;
    bool ok = with_unit(text, byte_units, &v) && v >= 0 && v < 0x1p62;
    if (ok)
        *out = (uint64_t)v;
    return ok;
}

bool mt_parse_rate(const char *text, double *out)
{
    return with_unit(text, rate_units, out);
}

bool mt_parse_percent(const char *text, double *out)
{
    const char *end;
    double v;
    bool ok = with_unit(text, percent_units, &v);
    if (ok && number(text, &v, &end))
        *out = v / 100; /* not v * 0.01, which rounds twice */
    return ok;
}

bool mt_parse_duration(const char *text, double *out)
{
    double sum = 0, v;
    const char *end;
    if (!strcmp(text, "0")) {
        *out = 0;
        return true;
    }
    do {
        const struct unit *u = time_units;
        if (!number(text, &v, &end) || v < 0)
            return false;
        while (u->name && strncmp(end, u->name, strlen(u->name)))
            u++;
        if (!u->name)
            return false;
        sum += v * u->factor;
        text = end + strlen(u->name);
    } while (*text);
    *out = sum;
    return true;
}

const char *mt_choice_name(char buf[MT_CHOICE_NAME], const char *choices, int i)
{
    for (; i; i--)
        choices = strchr(choices, '|') + 1;
    snprintf(buf, MT_CHOICE_NAME, "%.*s", (int)strcspn(choices, "|"), choices);
    return buf;
}

static int find(const char *choices, const char *name, int (*compare)(const char *, const char *, size_t))
{
    size_t n = strlen(name);
    for (int i = 0; choices && *choices; i++) {
        size_t len = strcspn(choices, "|");
        if (len == n && !compare(choices, name, n))
            return i;
        choices += len + (choices[len] == '|');
    }
    return -1;
}

int mt_choice_find(const char *choices, const char *name)
{
    return find(choices, name, strncmp);
}

int mt_choice_find_any_case(const char *choices, const char *name)
{
    return find(choices, name, strncasecmp);
}

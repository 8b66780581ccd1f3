/* SPDX-License-Identifier: Apache-2.0 */
#include "rewards.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/regex.h"

struct text {
    const char *p;
    size_t n;
};

static struct text trimmed(const char *s)
{
    struct text t = {s + strspn(s, " \t\r\n"), 0};
    for (t.n = strlen(t.p); t.n && isspace((unsigned char)t.p[t.n - 1]);)
        t.n--;
    return t;
}

/* The last number of a text, in which thousands may have commas; NaN: there is none. */
static double last_number(const char *s)
{
    double found = NAN;
    while (*s) {
        char digits[64], *end;
        size_t n = 0;
        bool begins = isdigit((unsigned char)*s) || ((*s == '-' || *s == '.') && isdigit((unsigned char)s[1]));
        if (!begins) {
            s++;
            continue;
        }
        for (; n + 1 < sizeof(digits) && (isdigit((unsigned char)*s) || strchr("-.,eE", *s)) && *s; s++) {
            if (*s == ',' && !isdigit((unsigned char)s[1]))
                break;
            if (*s != ',')
                digits[n++] = *s;
        }
        digits[n] = 0;
        double value = strtod(digits, &end);
        s -= strlen(end); /* "3-4" is two numbers */
        found = value;
    }
    return found;
}

static bool has_type(const cJSON *v, const char *type)
{
    return !strcmp(type, "object")    ? cJSON_IsObject(v)
           : !strcmp(type, "array")   ? cJSON_IsArray(v)
           : !strcmp(type, "string")  ? cJSON_IsString(v)
           : !strcmp(type, "number")  ? cJSON_IsNumber(v)
           : !strcmp(type, "integer") ? cJSON_IsNumber(v) && v->valuedouble == floor(v->valuedouble)
           : !strcmp(type, "boolean") ? cJSON_IsBool(v)
                                      : cJSON_IsNull(v);
}

/* Nested as deeply as the schema is, which the user wrote. */
static bool fits(const cJSON *v, const cJSON *schema) /* NOLINT(misc-no-recursion) */
{
    const cJSON *type = mt_json_get(schema, "type"), *choices = mt_json_get(schema, "enum"), *of, *own;
    const cJSON *items = mt_json_get(schema, "items");
    bool any = !choices;
    if (cJSON_IsString(type) && !has_type(v, type->valuestring))
        return false;
    cJSON_ArrayForEach(of, choices) any |= cJSON_Compare(v, of, true);
    cJSON_ArrayForEach(of, mt_json_get(schema, "required")) any &= cJSON_IsString(of) && mt_json_get(v, of->valuestring);
    cJSON_ArrayForEach(of, mt_json_get(schema, "properties"))
    {
        own = mt_json_get(v, of->string);
        any &= !own || fits(own, of);
    }
    if (items && cJSON_IsArray(v))
        cJSON_ArrayForEach(own, v) any &= fits(own, items);
    return any;
}

static int by_regex(double *out, const char *expression, const char *text, const char *place, struct mt_err *err)
{
    char why[MT_REGEX_WHY];
    bool yes = false;
    int rc = mt_regex_begins(&yes, expression, text, why);
    *out = yes;
    return rc == -EINVAL ? mt_fail(err, MT_ERR_INPUT, rc, "%s: \"answer\" is no regular expression: %s", place, why) : 0;
}

int cli_reward(double *out, const char *check, const cJSON *o, const char *place, struct mt_err *err)
{
    static const char *const checks[] = {"exact", "number", "regex", "schema"};
    const char *text = cJSON_GetStringValue(mt_json_get(o, "completion")), *answer;
    const cJSON *of = mt_json_get(o, "answer"), *schema = mt_json_get(o, "schema");
    char number[32];
    bool known = false, by_schema = !strcmp(check, "schema");
    for (size_t i = 0; i < MT_ARRAY_LEN(checks); i++)
        known |= !strcmp(checks[i], check);
    if (!known)
        return -ENOENT;
    snprintf(number, sizeof(number), "%.17g", cJSON_IsNumber(of) ? of->valuedouble : 0);
    answer = cJSON_IsNumber(of) ? number : cJSON_GetStringValue(of);
    if (!text || (by_schema ? !cJSON_IsObject(schema) : !answer))
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s: policy.reward = %s needs \"%s\" of each rollout", place, check,
                       !text ? "completion" : by_schema ? "schema" : "answer");
    if (by_schema) {
        MT_JSON_FREED cJSON *v = cJSON_ParseWithOpts(text, NULL, true); /* and nothing after it */
        *out = v && fits(v, schema);
        return 0;
    }
    if (!strcmp(check, "regex"))
        return by_regex(out, answer, text, place, err);
    struct text a = trimmed(text), b = trimmed(answer);
    *out = !strcmp(check, "number") ? last_number(text) == last_number(answer) : a.n == b.n && !memcmp(a.p, b.p, a.n);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "choices.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

const struct mt_choice *mt_choices_find(const struct mt_choices *t, const struct mt_choice_shape *s)
{
    for (size_t i = 0; i < t->n; i++)
        if (!memcmp(&t->of[i].shape, s, sizeof(*s)))
            return &t->of[i];
    return NULL;
}

bool mt_choices_add(struct mt_choices *t, const struct mt_choice *c)
{
    if (t->n == MT_MAX_CHOICES)
        return false;
    t->of[t->n++] = *c;
    return true;
}

void mt_choices_print(const struct mt_choices *t, struct mt_str *out)
{
    for (size_t i = 0; i < t->n; i++) {
        const struct mt_choice *c = &t->of[i];
        const struct mt_choice_shape *s = &c->shape;
        mt_str_printf(out, "%s%s%s %s %s%s%s %" PRIu64 "x%" PRIu64 "x%" PRIu64 " ", i ? "; " : "",
                      s->trans_a ? "t" : "n", s->trans_b ? "t" : "n", mt_dtype_name((enum mt_dtype)s->dtype),
                      mt_dtype_name((enum mt_dtype)s->d_dtype), s->bias ? " bias" : "", s->adds ? " add" : "", s->m,
                      s->n, s->k);
        for (int k = 0; k < MT_CHOICE_PARTS; k++)
            mt_str_printf(out, "%s%" PRIu32, k ? "/" : "", c->config[k]);
    }
}

static bool read_dtype(uint8_t *out, const char *name)
{
    static const enum mt_dtype known[] = {MT_F32, MT_BF16, MT_E4M3};
    for (size_t i = 0; i < MT_ARRAY_LEN(known); i++)
        if (!strcmp(name, mt_dtype_name(known[i]))) {
            *out = (uint8_t)known[i];
            return true;
        }
    return false;
}

/* Takes a word if it is next. */
static bool take(const char **at, const char *word)
{
    size_t n = strlen(word);
    bool is = !strncmp(*at, word, n);
    *at += is ? n : 0;
    return is;
}

/* *end: behind the entry. */
static bool read_one(struct mt_choice *c, const char *at, const char **end)
{
    struct mt_choice_shape *s = &c->shape;
    char a, b, in[8], out[8];
    int n = 0;
    memset(c, 0, sizeof(*c));
    if (sscanf(at, " %c%c %7[a-z0-9] %7[a-z0-9]%n", &a, &b, in, out, &n) != 4 || (a != 'n' && a != 't') ||
        (b != 'n' && b != 't'))
        return false;
    s->trans_a = a == 't';
    s->trans_b = b == 't';
    at += n;
    s->bias = take(&at, " bias");
    s->adds = take(&at, " add");
    n = 0;
    if (!read_dtype(&s->dtype, in) || !read_dtype(&s->d_dtype, out) ||
        sscanf(at, " %" SCNu64 "x%" SCNu64 "x%" SCNu64 "%n", &s->m, &s->n, &s->k, &n) != 3 || at[n] != ' ')
        return false;
    at += n;
    for (int i = 0; i < MT_CHOICE_PARTS; i++) {
        n = 0;
        if (sscanf(at, i ? "/%" SCNu32 "%n" : " %" SCNu32 "%n", &c->config[i], &n) != 1)
            return false;
        at += n;
    }
    *end = at;
    return true;
}

static const char *skip_blanks(const char *at)
{
    return at + strspn(at, " \n");
}

bool mt_choices_read(struct mt_choices *t, const char *text, bool *changed)
{
    struct mt_choices *all = mt_calloc(1, sizeof(*all));
    const char *at = skip_blanks(text);
    bool ok = all, more = *at;
    while (ok && more) {
        struct mt_choice c;
        ok = read_one(&c, at, &at) && !mt_choices_find(all, &c.shape) && mt_choices_add(all, &c);
        if (ok) {
            at = skip_blanks(at);
            more = *at == ';';
            ok = more || !*at;
            at += more;
        }
    }
    *changed = ok && (all->n != t->n || memcmp(all->of, t->of, t->n * sizeof(*t->of)));
    if (*changed)
        *t = *all;
    free(all);
    return ok;
}

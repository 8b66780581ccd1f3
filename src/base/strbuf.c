/* SPDX-License-Identifier: Apache-2.0 */
#include "base/strbuf.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

void mt_str_append(struct mt_str *s, const char *data, size_t n)
{
    if (s->failed || !mt_grow(&s->p, &s->cap, s->len + n + 1, 1)) {
        s->failed = true;
        return;
    }
    memcpy(s->p + s->len, data, n);
    s->len += n;
    s->p[s->len] = 0;
}

void mt_str_printf(struct mt_str *s, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n < 0 || s->failed || !mt_grow(&s->p, &s->cap, s->len + (size_t)n + 1, 1)) {
        s->failed = true;
        return;
    }
    va_start(ap, fmt);
    vsnprintf(s->p + s->len, (size_t)n + 1, fmt, ap);
    va_end(ap);
    s->len += (size_t)n;
}

void mt_str_number(struct mt_str *s, double v)
{
    char text[40];
    snprintf(text, sizeof(text), "%.0f", fabs(v) < 1e15 ? v : 0.0);
    for (int digits = 1; strtod(text, NULL) != v && digits <= 17; digits++)
        snprintf(text, sizeof(text), "%.*g", digits, v);
    mt_str_append(s, text, strlen(text));
}

void mt_str_fold(struct mt_str *s, const char *indent, const char *text, size_t width)
{
    size_t column = 0;
    while (*text) {
        size_t n = strcspn(text, " ");
        bool fits = column && column + 1 + n <= width;
        mt_str_printf(s, "%s%s%.*s", fits ? " " : column ? "\n" : "", fits ? "" : indent, (int)n, text);
        column = (fits ? column + 1 : strlen(indent)) + n;
        text += n + (text[n] == ' ');
    }
    mt_str_append(s, "\n", 1);
}

void mt_str_finish(struct mt_str *s)
{
    free(s->p);
    *s = (struct mt_str){0};
}

long mt_utf8_error(const char *text)
{
    const unsigned char *s = (const unsigned char *)text;
    for (size_t i = 0; s[i];) {
        int more = s[i] < 0x80                    ? 0
                   : s[i] >= 0xc2 && s[i] < 0xe0 ? 1
                   : (s[i] & 0xf0) == 0xe0       ? 2
                   : s[i] >= 0xf0 && s[i] < 0xf5 ? 3
                                                 : -1;
        /* bounds of the second byte: no overlong forms, no surrogates, nothing past U+10FFFF */
        unsigned char low = s[i] == 0xe0 ? 0xa0 : s[i] == 0xf0 ? 0x90 : 0x80;
        unsigned char high = s[i] == 0xed ? 0x9f : s[i] == 0xf4 ? 0x8f : 0xbf;
        if (more < 0 || (more && (s[i + 1] < low || s[i + 1] > high)))
            return (long)i;
        for (int k = 2; k <= more; k++)
            if ((s[i + (size_t)k] & 0xc0) != 0x80)
                return (long)i;
        i += 1 + (size_t)more;
    }
    return -1;
}

int mt_edit_distance(const char *a, const char *b)
{
    enum { MAX = 64 };
    size_t n = strlen(a), m = strlen(b);
    if (n >= MAX || m >= MAX)
        return MAX;
    int d[3][MAX + 1]; /* rows i-2, i-1, i: restricted Damerau-Levenshtein */
    for (size_t j = 0; j <= m; j++)
        d[1][j] = (int)j;
    for (size_t i = 1; i <= n; i++) {
        d[2][0] = (int)i;
        for (size_t j = 1; j <= m; j++) {
            int sub = d[1][j - 1] + (a[i - 1] != b[j - 1]);
            int best = MT_MIN(sub, MT_MIN(d[1][j], d[2][j - 1]) + 1);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                best = MT_MIN(best, d[0][j - 2] + 1);
            d[2][j] = best;
        }
        memcpy(d[0], d[1], sizeof(d[0]));
        memcpy(d[1], d[2], sizeof(d[1]));
    }
    return d[1][m];
}

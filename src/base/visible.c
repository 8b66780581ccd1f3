/* SPDX-License-Identifier: Apache-2.0 */
#include "base/visible.h"

#include <stdio.h>
#include <string.h>

unsigned mt_steering(const char *text, size_t len, size_t *n)
{
    const unsigned char *c = (const unsigned char *)text;
    unsigned u = c[0];
    *n = 1;
    if (u == '\n' || u == '\t')
        return 0;
    if (u < 32 || u == 127)
        return u;
    if (len > 1 && u == 0xc2 && c[1] < 0xa0) {
        *n = 2;
        return c[1];
    }
    size_t all = u >= 0xf0 ? 4 : u >= 0xe0 ? 3 : u >= 0xc0 ? 2 : 1;
    for (*n = 1; *n < all && *n < len && (c[*n] & 0xc0) == 0x80;)
        ++*n;
    if (*n < 3 || u != 0xe2 || (c[1] != 0x80 && c[1] != 0x81))
        return 0;
    u = 0x2000u | (c[1] & 1u) << 6 | (c[2] & 0x3fu);
    return (u >= 0x202a && u <= 0x202e) || (u >= 0x2066 && u <= 0x2069) ? u : 0;
}

void mt_str_visible(struct mt_str *out, const char *text, size_t len)
{
    for (size_t i = 0, n; i < len; i += n) {
        unsigned u = mt_steering(text + i, len - i, &n);
        if (u)
            mt_str_printf(out, u < 256 ? "\\x%02x" : "\\u%04x", u);
        else
            mt_str_append(out, text + i, n);
    }
}

void mt_visible(char *dst, size_t size, const char *src)
{
    size_t len = strlen(src), at = 0;
    for (size_t i = 0, n; i < len; i += n) {
        char code[8];
        unsigned u = mt_steering(src + i, len - i, &n), c = (unsigned char)src[i];
        if (c >= 0x80 && c < 0xc0) /* not UTF-8; terminals without UTF-8 take some for controls */
            u = c;
        size_t most = u ? (size_t)snprintf(code, sizeof(code), u < 256 ? "\\x%02x" : "\\u%04x", u) : n;
        if (at + most >= size)
            break;
        memcpy(dst + at, u ? code : src + i, most);
        at += most;
    }
    dst[at] = 0;
}

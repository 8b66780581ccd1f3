/* SPDX-License-Identifier: Apache-2.0 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/strbuf.h"
#include "base/visible.h"
#include "cli.h"

enum { MOST_HELD = 8, N_OWN = 2 };

static struct guard {
    int fd;
    const char *own[N_OWN];     /* what passes as it is */
    char held[MOST_HELD];       /* the end of what was written: the begin of one of them, or of a character */
    size_t n_held;
} guards[] = {
    {.fd = STDOUT_FILENO, .own = {"\033[30;42m", "\033[0m"}},
    {.fd = STDERR_FILENO, .own = {"\r", "\033[K"}},
};

/* Bytes at the begin of the text that pass; *part: it ends within them. */
static size_t own_bytes(const struct guard *g, const char *text, size_t len, bool *part)
{
    for (int i = 0; i < N_OWN; i++) {
        size_t n = strlen(g->own[i]);
        if (len >= n && !memcmp(text, g->own[i], n))
            return n;
        *part |= len < n && !memcmp(text, g->own[i], len);
    }
    return 0;
}

/* Whether the text ends within its first character. */
static bool ends_within(const char *text, size_t len)
{
    const unsigned char *c = (const unsigned char *)text;
    size_t all = c[0] >= 0xf0 ? 4 : c[0] >= 0xe0 ? 3 : c[0] >= 0xc0 ? 2 : 1, n = 1;
    while (n < all && n < len && (c[n] & 0xc0) == 0x80)
        n++;
    return n == len && n < all;
}

/* Appends what may be sent of the text; returns how many bytes at its end must wait for more. */
static size_t filter(const struct guard *g, struct mt_str *out, const char *text, size_t len, bool more)
{
    for (size_t i = 0, n; i < len; i += n) {
        bool part = false;
        unsigned char c = (unsigned char)text[i];
        if ((n = own_bytes(g, text + i, len - i, &part))) {
            mt_str_append(out, text + i, n);
            continue;
        }
        if (more && (part || ends_within(text + i, len - i)))
            return len - i;
        unsigned u = mt_steering(text + i, len - i, &n);
        if (!u && c >= 0x80 && c < 0xc0) /* not UTF-8; terminals without UTF-8 take some for controls */
            u = c;
        if (u)
            mt_str_printf(out, u < 256 ? "\\x%02x" : "\\u%04x", u);
        else
            mt_str_append(out, text + i, n);
    }
    return 0;
}

static bool send_all(int fd, const char *p, size_t n)
{
    while (n) {
        ssize_t sent = write(fd, p, n);
        if (sent < 0 && errno != EINTR)
            return false;
        p += sent > 0 ? sent : 0;
        n -= sent > 0 ? (size_t)sent : 0;
    }
    return true;
}

static bool pass(struct guard *g, const char *text, size_t len, bool more)
{
    MT_STR_FREED struct mt_str all = {0}, out = {0};
    mt_str_append(&all, g->held, g->n_held);
    mt_str_append(&all, text, len);
    bool ok = !all.failed;
    g->n_held = ok ? filter(g, &out, all.p, all.len, more) : 0;
    if (g->n_held)
        memcpy(g->held, all.p + all.len - g->n_held, g->n_held);
    ok = ok && !out.failed && send_all(g->fd, out.p, out.len);
    return ok;
}

static ssize_t guard_write(void *cookie, const char *text, size_t len)
{
    return pass(cookie, text, len, true) ? (ssize_t)len : 0;
}

static void send_held(void)
{
    fflush(stdout);
    for (size_t i = 0; i < sizeof(guards) / sizeof(guards[0]); i++)
        if (guards[i].n_held)
            pass(&guards[i], "", 0, false);
}

static void guard(struct guard *g, FILE **stream, int buffering)
{
    FILE *f = isatty(g->fd) ? fopencookie(g, "w", (cookie_io_functions_t){.write = guard_write}) : NULL;
    if (!f)
        return;
    setvbuf(f, NULL, buffering, 0);
    *stream = f;
}

void cli_guard_terminals(void)
{
    guard(&guards[0], &stdout, _IOLBF);
    guard(&guards[1], &stderr, _IONBF);
    atexit(send_held);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "log_lines.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/strbuf.h"

/* Where progress lines are not rewritten: seconds between them, and before the first. COLUMNS: the default width. */
enum { EVERY_S = 10, COLUMNS = 80 };

/* State of standard error; guarded by the log's lock. */
static struct {
    bool json, progress, rewrites;
    bool open;       /* the cursor is in a progress line */
    int64_t reported_ns; /* time of the last progress line, or of its start; 0: nothing in progress */
} out;

static void put_json(cJSON *o)
{
    MT_FREED char *text = mt_json_print(o, false);
    if (text)
        fprintf(stderr, "%s\n", text);
    cJSON_Delete(o);
}

/* A log line as one JSON object: {"time", "level", "message"}. */
static void json_line(enum mt_log_level level, const char *line)
{
    static const char *const names[] = {"error", "warning", "info", "debug", "progress"};
    cJSON *o = mt_json_put(NULL, "time=%f, level=%s, message=%s", (double)time(NULL), names[level], line);
    put_json(o);
}

void cli_json_event(const char *event, cJSON *fields)
{
    cJSON *o = mt_json_put(NULL, "time=%f, level=%s, event=%s", (double)time(NULL), "info", event);
    while (fields && fields->child) {
        cJSON *v = fields->child;
        cJSON_DetachItemViaPointer(fields, v);
        mt_json_add(o, v->string, v);
    }
    cJSON_Delete(fields);
    put_json(o);
}

static void put_line(enum mt_log_level level, const char *line)
{
    if (out.json)
        json_line(level, line);
    else
        fprintf(stderr, "megatrain: %s%s\n", level == MT_LOG_WARN ? "warning: " : "", line);
}

/* Each complete line, including what earlier calls printed of it, is a record. */
static void say_json(const char *text)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct mt_str pending;
    const char *end;
    pthread_mutex_lock(&lock);
    for (; (end = strchr(text, '\n')); text = end + 1) {
        mt_str_append(&pending, text, (size_t)(end - text));
        if (pending.len)
            json_line(MT_LOG_INFO, pending.p);
        mt_str_finish(&pending);
    }
    mt_str_append(&pending, text, strlen(text));
    pthread_mutex_unlock(&lock);
}

void cli_say(const char *fmt, ...)
{
    va_list ap;
    MT_FREED char *text = NULL;
    va_start(ap, fmt);
    if (!out.json)
        vfprintf(stderr, fmt, ap);
    else if (vasprintf(&text, fmt, ap) >= 0)
        say_json(text);
    va_end(ap);
}

void cli_say_error(const char *msg)
{
    if (out.json)
        json_line(MT_LOG_ERROR, msg);
    else
        fprintf(stderr, "megatrain: %s\n", msg);
}

static int width(void)
{
    struct winsize size;
    const char *columns = getenv("COLUMNS");
    if (columns && atoi(columns) > 0)
        return atoi(columns);
    return !ioctl(STDERR_FILENO, TIOCGWINSZ, &size) && size.ws_col ? size.ws_col : COLUMNS;
}

/* Number of bytes of the first n characters, in UTF-8. */
static int prefix(const char *line, int n)
{
    int i = 0;
    for (; line[i] && n > 0; n--)
        do
            i++;
        while ((line[i] & 0xc0) == 0x80);
    return i;
}

static void rewrite(const char *line)
{
    if (out.open || *line)
        fprintf(stderr, "\r%.*s\033[K", prefix(line, width() - 1), line);
    out.open = *line;
}

static void now_and_then(const char *line)
{
    int64_t now = mt_now_ns();
    if (!*line) {
        out.reported_ns = 0;
    } else if (!out.reported_ns) {
        out.reported_ns = now;
    } else if (now - out.reported_ns >= EVERY_S * INT64_C(1000000000)) {
        out.reported_ns = now;
        put_line(MT_LOG_PROGRESS, line);
    }
}

static void on_line(enum mt_log_level level, const char *line)
{
    if (level == MT_LOG_PROGRESS) {
        if (out.progress)
            (out.rewrites ? rewrite : now_and_then)(line);
        return;
    }
    rewrite("");
    put_line(level, line);
}

void cli_log_lines(const struct cli *cli)
{
    const char *term = getenv("TERM");
    out.json = cli->json_log;
    out.progress = !cli->no_progress;
    out.rewrites = !cli->json_log && isatty(STDERR_FILENO) && !(term && !strcmp(term, "dumb"));
    mt_log_set_sink(on_line);
}

void cli_log_hide_progress(void)
{
    out.progress = false;
}

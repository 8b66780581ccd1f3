/* SPDX-License-Identifier: Apache-2.0 */
#include "base/lock.h"
#include "base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

#include "base/visible.h"

static atomic_int max_level = MT_LOG_INFO;
static mt_log_sink sink_fn;
static pthread_mutex_t sink_lock = PTHREAD_MUTEX_INITIALIZER;

void mt_log_set_level(enum mt_log_level level)
{
    atomic_store(&max_level, level);
}

void mt_log_set_sink(mt_log_sink sink)
{
    MT_LOCKED(&sink_lock);
    sink_fn = sink;
}

void mt_log(enum mt_log_level level, const char *fmt, ...)
{
    int shown_as = level == MT_LOG_PROGRESS ? MT_LOG_INFO : (int)level;
    if (shown_as > atomic_load_explicit(&max_level, memory_order_relaxed))
        return;
    char text[2048], line[2048];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    mt_visible(line, sizeof(line), text);
    MT_LOCKED(&sink_lock);
    if (sink_fn)
        sink_fn(level, line);
    else if (level != MT_LOG_PROGRESS)
        fprintf(stderr, "%s\n", line);
}

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

enum mt_log_level { MT_LOG_ERROR, MT_LOG_WARN, MT_LOG_INFO, MT_LOG_DEBUG, MT_LOG_PROGRESS };

/** Receives each finished line, without newline. Called with a lock held: must not log. */
typedef void (*mt_log_sink)(enum mt_log_level level, const char *line);

/**
 * Libraries log here what is worth knowing but not an error; the command line decides how it is shown.
 * Without a sink, lines go to stderr. Thread-safety: any thread.
 */
void mt_log(enum mt_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void mt_log_set_level(enum mt_log_level level);
void mt_log_set_sink(mt_log_sink sink);

#define mt_warn(...) mt_log(MT_LOG_WARN, __VA_ARGS__)
#define mt_info(...) mt_log(MT_LOG_INFO, __VA_ARGS__)
#define mt_debug(...) mt_log(MT_LOG_DEBUG, __VA_ARGS__)
/**
 * Progress, reported often: on a terminal each line replaces the one before. Call mt_progress_end() at the end.
 * Shown at level INFO and above; discarded without a sink.
 */
#define mt_progress(...) mt_log(MT_LOG_PROGRESS, __VA_ARGS__)
#define mt_progress_end() mt_log(MT_LOG_PROGRESS, "%s", "")

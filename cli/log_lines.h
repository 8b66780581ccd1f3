/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLI_LOG_LINES_H
#define CLI_LOG_LINES_H

#include "cli.h"

/**
 * Sends what the libraries log to standard error, as text or JSON. Progress is one line that is rewritten on a
 * terminal; elsewhere a line is printed from time to time, once something takes long.
 */
void cli_log_lines(const struct cli *cli);
/**
 * Text for people on standard error, in pieces that end lines where they like; as JSON, with --log-format
 * json, each line that is not empty is one record. Thread-safety: any thread, whole lines a call where
 * several print.
 */
void cli_say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/** A line that says why the program ends: "megatrain: ...", or a JSON record of level "error". */
void cli_say_error(const char *msg);

/** As --no-progress does. */
void cli_log_hide_progress(void);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/json.h"
#include "cli.h"

/**
 * Sends log lines of the libraries to standard error, as text or JSON. On a terminal, progress is one line that is
 * rewritten; elsewhere a line is printed every few seconds while something takes long.
 */
void cli_log_lines(const struct cli *cli);
/**
 * Prints text for people to standard error; a line may be printed by several calls. With --log-format json, each line
 * that is not empty is a record. Thread-safety: any thread; if several print, each call must print whole lines.
 */
void cli_say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/** Prints why the program ends: "megatrain: ...", or a JSON record of level "error". */
void cli_say_error(const char *msg);

/** Does what --no-progress does. */
void cli_log_hide_progress(void);
/** An event of a run, on standard error: {"time", "level": "info", "event", ...fields}. Takes ownership of `fields`. */
void cli_json_event(const char *event, cJSON *fields);

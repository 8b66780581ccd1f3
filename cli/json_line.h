/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/json.h"
#include "base/log.h"

/** A log line as one JSON object on standard error: {"time", "level", "message"}. */
void cli_json_line(enum mt_log_level level, const char *line);
/** An event of a run: {"time", "level": "info", "event", ...fields}. Takes ownership of `fields`. */
void cli_json_event(const char *event, cJSON *fields);

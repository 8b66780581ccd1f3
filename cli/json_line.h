/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLI_JSON_LINE_H
#define CLI_JSON_LINE_H

#include "base/log.h"

/** A log line as one JSON object on standard error. */
void cli_json_line(enum mt_log_level level, const char *line);

#endif

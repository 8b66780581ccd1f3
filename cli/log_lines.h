/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLI_LOG_LINES_H
#define CLI_LOG_LINES_H

#include "cli.h"

/**
 * Sends what the libraries log to standard error, as text or JSON. Progress is one line that is rewritten on a
 * terminal; elsewhere a line is printed from time to time, once something takes long.
 */
void cli_log_lines(const struct cli *cli);
/** As --no-progress does. */
void cli_log_hide_progress(void);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

#include "base/err.h"

/**
 * A command (log.exec) that is given records on its standard input, a line each. It never holds the run up: what its
 * pipe has no room for is dropped, and a command that ended gets no more; both are warned of.
 */
struct mt_feed;

/** Starts the command by /bin/sh, in a process group of its own: ^C is the run's, which then ends the input. What it
 * prints goes to standard error, through a pipe: it does not hold the run's own streams. If the run dies, the group is
 * ended. */
int mt_feed_open(struct mt_feed **out, const char *command, struct mt_err *err);
/** The line ends in a newline. */
void mt_feed_put(struct mt_feed *f, const char *line, size_t len);
/** Ends the input and waits for the command, for five seconds at most. Then its group is ended: SIGTERM, and soon
 * SIGKILL. */
void mt_feed_close(struct mt_feed **f);

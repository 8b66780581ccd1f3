/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "train/watch.h"

/**
 * What a run says of itself on standard error: on request, and, unless it is quiet, in long phases (loading, saving,
 * evaluating, a slow step).
 */
struct cli_status {
    bool quiet; /* only on request */
    int64_t phase_ns; /* of the phase whose traffic is counted from `read` and `written` on */
    unsigned long long read, written;
};
/** struct mt_watch_events's; ctx: a struct cli_status. */
void cli_tell_status(void *ctx, const struct mt_train_control *c, double seconds, bool asked);

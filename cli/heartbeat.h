/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CLI_HEARTBEAT_H
#define CLI_HEARTBEAT_H

#include <pthread.h>

#include "train/train.h"

/**
 * A thread that reports on standard error during long phases (loading, saving, evaluating, a slow step), and answers
 * requests for the status.
 */
struct cli_heartbeat {
    struct mt_train_control *control;
    bool quiet; /* only answers requests */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool started, quit;
};

void cli_heartbeat_start(struct cli_heartbeat *h, struct mt_train_control *control, bool quiet);
void cli_heartbeat_stop(struct cli_heartbeat *h);

#endif

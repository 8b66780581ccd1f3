/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <pthread.h>

#include "base/lock.h"

/** Waits for requests that end on another thread. */
struct mt_waiter {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    int left; /* requests that have not ended */
};

static inline struct mt_waiter mt_waiter_for(int n_requests)
{
    return (struct mt_waiter){PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, n_requests};
}

/** A request has ended. */
static inline void mt_waiter_end(struct mt_waiter *w)
{
    MT_LOCKED(&w->lock);
    w->left--;
    pthread_cond_signal(&w->ended);
}

static inline void mt_waiter_wait(struct mt_waiter *w)
{
    MT_LOCKED(&w->lock);
    while (w->left)
        pthread_cond_wait(&w->ended, &w->lock);
}

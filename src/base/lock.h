/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <pthread.h>
#include <stdbool.h>

#include "base/mem.h"

/** A statement: takes a mutex, which is given back where the scope ends, after what a `return` computes. */
#define MT_LOCKED(mutex) MT_LOCKED_AS(mutex, __LINE__)
#define MT_LOCKED_AS(mutex, line) MT_LOCKED_BY(mutex, line)
#define MT_LOCKED_BY(mutex, line) \
    MT_CLOSED_BY(mt_unlock_at) __attribute__((unused)) pthread_mutex_t *mt_locked_##line = mt_lock(mutex)

static inline pthread_mutex_t *mt_lock(pthread_mutex_t *mutex)
{
    pthread_mutex_lock(mutex);
    return mutex;
}

static inline void mt_unlock_at(pthread_mutex_t *const *mutex)
{
    pthread_mutex_unlock(*mutex);
}

/** Sets a flag that threads wait for. */
static inline void mt_raise(pthread_mutex_t *mutex, pthread_cond_t *changed, bool *flag)
{
    MT_LOCKED(mutex);
    *flag = true;
    pthread_cond_broadcast(changed);
}

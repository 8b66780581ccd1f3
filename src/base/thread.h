/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_BASE_THREAD_H
#define MT_BASE_THREAD_H

#include <pthread.h>

#include "base/err.h"

/** Starts a thread. name: what it is called, at most 15 characters. Where the system has no room for it, the error says
 * which limits there are, and their values. */
int mt_thread_start(pthread_t *out, const char *name, void *(*run)(void *), void *arg, struct mt_err *err);

#endif

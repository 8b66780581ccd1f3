/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <pthread.h>

#include "base/err.h"

/** Starts a thread named `name`, of at most 15 characters. If the system refuses it, the error lists the limits on
 * threads and their values. */
int mt_thread_start(pthread_t *out, const char *name, void *(*run)(void *), void *arg, struct mt_err *err);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

#include "base/err.h"
#include "hw/homes.h"

/** GB/s (10^9 bytes, read plus written) of a non-temporal copy of 256 MiB; best of several. Threads copy what is at
 * their own homes, as in an update; numa NULL: the system places memory. */
int mt_probe_copy(int n_threads, const int *cpus, const struct mt_numa *numa, double *gbs, struct mt_err *err);
/** The share of their cores that n_threads threads at work get, each given cpus[i] unless cpus is NULL: 1 where nothing
 * else runs. Takes 20 ms of each core's time. */
int mt_probe_cores(int n_threads, const int *cpus, double *share, struct mt_err *err);
/** Whether this process may set up an io_uring. */
bool mt_hw_io_uring_allowed(void);

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_HW_PROBE_H
#define MT_HW_PROBE_H

#include <stdbool.h>

#include "base/err.h"

/** GB/s (10^9 bytes, read plus written) of a non-temporal copy of 256 MiB; best of several. */
int mt_probe_copy(int n_threads, const int *cpus, double *gbs, struct mt_err *err);
/** Whether this process may set up an io_uring. */
bool mt_hw_io_uring_allowed(void);

#endif

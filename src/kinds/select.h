/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"

/**
 * How device.gpus names the devices of a run:
 *
 *   2             so many, from a first index on
 *   all           all there are, from that index on
 *   index:0,2     by index
 *   GPU-5a…,GPU-9c…  by identifier, as `nvidia-smi -L` prints it; a beginning that one device alone
 * has is enough
 */

/** How many devices it names; 0: all. -EINVAL: it is none of these forms, or names fewer than 1 or
 * more than `most`. */
int mt_device_count_named(int *n, const char *gpus, int most, struct mt_err *err);
/** Whether it names devices one by one. */
bool mt_device_list_named(const char *gpus);
/**
 * Their indices, index[most], and how many. A number and indices are not compared with the devices
 * there are; opening them does. Kinds that a run makes as many of as it wants: `all` is 1, and a
 * list is refused.
 */
int mt_device_select(int index[], int *n, int most, const char *kind, const char *gpus, int first,
                     struct mt_err *err);

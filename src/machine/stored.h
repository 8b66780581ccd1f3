/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "machine/machine.h"

/**
 * The stored machines: files from data sheets that are installed with the program (configs/machines). A GPU that has
 * not been measured is planned for with the file that names it.
 */

/**
 * Path of the stored machine `name`, or else `name` itself if it is a file. A file with the name of a stored machine
 * needs a '/' in its path. -ENOENT (MT_ERR_USAGE): neither.
 */
int mt_machine_find(char *buf, size_t len, const char *name, struct mt_err *err);

/**
 * Loads this machine's cached profile; without one, the stored machine whose `gpu` is the device's product, with this
 * host's memory and `threads` cores: then out->fingerprint is empty and all rates are rated. If there is neither, fails
 * as mt_machine_load_cached() does; warns if the cached profile is stale.
 */
int mt_machine_load(struct mt_machine *out, const struct mt_device_limits *device, int threads, struct mt_err *err);

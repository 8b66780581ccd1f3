/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_MACHINE_STORED_H
#define MT_MACHINE_STORED_H

#include "machine/machine.h"

/**
 * The stored machines: files from data sheets that are installed with the program (configs/machines). A GPU that has
 * not been measured is planned for with the file that names it.
 */

/**
 * Path of the stored machine of that name, else `name` itself where it is a file: a file that is called as a stored
 * machine is goes by a path. -ENOENT (MT_ERR_USAGE): neither.
 */
int mt_machine_find(char *buf, size_t len, const char *name, struct mt_err *err);

/**
 * What is known of this machine: the cached profile; without one, the stored machine whose `gpu` names the device's
 * product, with this host's memory and `threads` cores. m->fingerprint is empty then, and all rates are rated. Errors of
 * mt_machine_load_cached() where no stored machine names it; a cached profile of other hardware is warned of.
 */
int mt_machine_load(struct mt_machine *out, const struct mt_device_limits *device, int threads, struct mt_err *err);

#endif

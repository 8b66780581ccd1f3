/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "hw/homes.h"

/** The nodes that are online, in the system's order; without libnuma or on a kernel without NUMA none. */
void mt_numa_read_nodes(struct mt_numa_nodes *out);
/** Whether somebody has set a memory policy for the calling thread. */
bool mt_numa_has_policy(void);
/** Interleaves memory that the calling thread, and threads that it starts, allocate from now on over nodes, or prefers
 * them. Returns whether that is allowed. */
bool mt_numa_set_policy(bool interleave, const int *nodes, int n);

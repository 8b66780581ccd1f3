/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/**
 * Limits that control groups set for this process, in versions 1 and 2: its own group's, and those of each parent, which
 * hold as well. `root` is a prefix of /proc and /sys; "" except in tests. What cannot be read is no limit.
 * (Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/)
 */

/** Processors' worth of time (cpu.max, cpu.cfs_quota_us): the least of all groups, rounded down, at least 1; and no
 * more than cpusets name. INT_MAX: no limit. */
int mt_cgroup_cpus(const char *root);
/** Bytes until the first of the groups is at its limit (memory.max, memory.limit_in_bytes), or where the kernel begins
 * to hold it back (memory.high), cached files not counted. UINT64_MAX: no limit. */
uint64_t mt_cgroup_memory_free(const char *root);
/** The least pids.max: processes and threads, of which *used exist. UINT64_MAX: no limit. */
uint64_t mt_cgroup_pids(const char *root, uint64_t *used);

/** A file that holds one number; UINT64_MAX for "max", "-1", what version 1 has for no limit, or if it is
 * missing. */
uint64_t mt_cgroup_number(const char *root, const char *dir, const char *name);

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_HW_HW_H
#define MT_HW_HW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/** CPUs this process may use: one for each core, in hwloc's order, within the affinity mask; no more than the
 * cgroup's CPU quota. *cpus is the caller's. */
int mt_hw_cores(int **cpus, int *n, struct mt_err *err);

/**
 * From now on memory of the calling thread, and of those that it starts, is spread over all NUMA nodes that the process
 * may use, page by page: where there are `least_nodes` of them and nobody (numactl) has said where memory belongs.
 * The nodes; 0: all is as it was.
 */
int mt_hw_interleave(int least_nodes);

/** Limits of memory, in bytes; UINT64_MAX where there is no such limit. */
struct mt_hw_memory {
    uint64_t total, available;        /* MemTotal, MemAvailable */
    uint64_t cgroup_free;             /* least of limit - usage without cached files, up the hierarchy */
    uint64_t address_space;           /* RLIMIT_AS less what is mapped */
    uint64_t memlock;                 /* RLIMIT_MEMLOCK */
};
/** `root` is put before /proc and /sys; "" except in tests. */
int mt_hw_memory(struct mt_hw_memory *out, const char *root, struct mt_err *err);
/**
 * Resident bytes of this process. They vary by some hundred KiB between processes, so tests of budgets override
 * them with MEGATRAIN_RESIDENT in the environment. 0: not known, as with a sanitizer, whose own memory is most
 * of it.
 */
int mt_hw_resident(uint64_t *bytes, struct mt_err *err);
/** Bytes free for this user on the file system of `path` (or of its nearest parent that exists). */
int mt_hw_disk_free(const char *path, uint64_t *bytes, struct mt_err *err);
/** Whether the two take their space from the same file system. */
bool mt_hw_same_file_system(const char *a, const char *b);

#endif

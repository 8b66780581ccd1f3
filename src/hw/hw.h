/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/** CPUs that this process may use: one for each core, in hwloc's order but from each NUMA node in turn, within the
 * affinity mask; no more than its control groups allow (base/cgroup.h). One, with a warning, where the mask cannot be
 * read. The caller frees *cpus. */
int mt_hw_cores(int **cpus, int *n, struct mt_err *err);
/** The affinity mask, of the first CPU_SETSIZE processors; false: it cannot be read. */
bool mt_hw_affinity(cpu_set_t *out);
/** Processors in the affinity mask; *there: of the machine. */
int mt_hw_allowed(int *there);
/** Of both, where the first is less than half: what is wrong, and how it is mended. */
#define MT_HW_BOUND "may use %d of %d processors: the launcher binds it (mpirun --bind-to none, srun -c N)"
/** Seconds, summed over the processors in the affinity mask, that they have worked since the machine began, for
 * whomever: what the kernel does for interrupts and the network is in no process's time. 0: unknown. */
double mt_hw_busy_seconds(void);

/** Limits of memory, in bytes; UINT64_MAX: no limit. */
struct mt_hw_memory {
    uint64_t total, available;        /* MemTotal, MemAvailable, without that of GPUs which are NUMA nodes */
    uint64_t cgroup_free;             /* mt_cgroup_memory_free() */
    uint64_t address_space;           /* RLIMIT_AS less mapped memory */
    uint64_t memlock;                 /* RLIMIT_MEMLOCK */
};
/** What this process may take of it. */
static inline uint64_t mt_hw_memory_usable(const struct mt_hw_memory *m)
{
    uint64_t most = m->available < m->cgroup_free ? m->available : m->cgroup_free;
    return most < m->address_space ? most : m->address_space;
}
/** `root` is a prefix of /proc and /sys; "" except in tests. */
int mt_hw_memory(struct mt_hw_memory *out, const char *root, struct mt_err *err);
/**
 * Resident bytes of this process. They vary by some hundred KiB between processes, so tests of budgets override
 * them by MEGATRAIN_RESIDENT in the environment. 0: unknown, as under a sanitizer, whose own memory is most of it.
 */
int mt_hw_resident(uint64_t *bytes, struct mt_err *err);
/** Bytes free for this user on the file system of `path` (or of its nearest parent that exists). */
int mt_hw_disk_free(const char *path, uint64_t *bytes, struct mt_err *err);
/** Whether two paths are on the same file system. */
bool mt_hw_same_file_system(const char *a, const char *b);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/pool.h"

/**
 * Homes of memory: the NUMA nodes that have both memory and cores that this process may use. The caller decides which
 * pages are at which home; a pool's threads take first what is at their own (mt_numa_lanes()).
 *
 * A node with memory and no core (memory on CXL, say) is no home: it gets pages when the others are full, as
 * the kernel does it. Cores of a node without memory belong to the nearest home.
 */
enum { MT_NUMA_MAX = 64 };
struct mt_numa {
    int n; /* homes, at least 1; with one the system places memory */
    struct mt_numa_home {
        int node;       /* the system's number */
        cpu_set_t cpus; /* those nearest to it, of those allowed */
    } home[MT_NUMA_MAX];
    /** Allocates the pages of a range, at a home unless it is negative. Returns 0 or a negative errno: too little
     * memory. Any thread, whose memory policy and affinity it may change. Replaced by tests. */
    int (*populate)(const struct mt_numa *numa, int home, char *p, size_t bytes);
};

/** One home, whatever the machine has: the system places memory. */
void mt_numa_none(struct mt_numa *out);
/** The nodes of a machine, as the system describes them; tests make them up. */
struct mt_numa_nodes {
    int n;
    struct mt_numa_node {
        int id;
        bool memory;    /* it has some that this process may use */
        cpu_set_t cpus; /* that this process may use */
        int distance[MT_NUMA_MAX]; /* to each of the nodes, in their order; 0: unknown */
    } node[MT_NUMA_MAX];
};
/** The homes among nodes. */
void mt_numa_from_nodes(struct mt_numa *out, const struct mt_numa_nodes *nodes);
/** The homes of this machine, within the process's cpuset and affinity; one without libnuma. */
void mt_numa_read(struct mt_numa *out);
/**
 * Memory that the calling thread, and threads that it starts, allocate from now on, and that nobody places, is
 * interleaved over the homes. If somebody has set a policy for this process (numactl), all stays as it is, and *numa
 * becomes one home. Returns whether the policy is set: it is not with one home, and where a container forbids it.
 */
bool mt_numa_interleave(struct mt_numa *numa);
/** What a run does by device.numa: "auto" is mt_numa_read() and mt_numa_interleave(), all else mt_numa_none(). Returns
 * whether the policy is set. Must come before memory is allocated and threads are started. */
bool mt_numa_choose(struct mt_numa *out, const char *how);
/** The home to which a CPU belongs; -1: none. */
int mt_numa_home_of(const struct mt_numa *numa, int cpu);
/** Reorders CPUs so that any first few are spread evenly over the homes; the order within a home stays. */
void mt_numa_spread(const struct mt_numa *numa, int *cpus, size_t n);
/** Gives each thread of the pool the lane of its CPU's home. cpus: [threads of the pool], as the pool was created;
 * NULL: the threads are not bound, and the pool keeps one lane. */
void mt_numa_lanes(const struct mt_numa *numa, mt_pool *pool, const int *cpus);

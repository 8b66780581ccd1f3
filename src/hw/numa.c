/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <numa.h>
#include <numaif.h>

#include "base/mem.h"
#include "hw/homes_priv.h"
#include "hw/hw.h"

/* libnuma says so, too, where a container forbids policies; but then the nodes can be read all the same. */
static bool has_nodes(void)
{
    return numa_available() >= 0 || errno == EPERM;
}

/* CPUs of a node that the process may use. */
static cpu_set_t cpus_of(int id, const cpu_set_t *allowed)
{
    cpu_set_t set;
    struct bitmask *cpus = numa_allocate_cpumask();
    CPU_ZERO(&set);
    bool known = !numa_node_to_cpus(id, cpus);
    for (unsigned i = 0; known && i < MT_MIN(cpus->size, (unsigned long)CPU_SETSIZE); i++)
        if (numa_bitmask_isbitset(cpus, i) && CPU_ISSET(i, allowed))
            CPU_SET(i, &set);
    numa_bitmask_free(cpus);
    return set;
}

void mt_numa_read_nodes(struct mt_numa_nodes *out)
{
    cpu_set_t allowed;
    int n = 0;
    out->n = 0;
    if (!has_nodes() || !mt_hw_affinity(&allowed))
        return;
    for (int id = 0; id <= numa_max_node() && n < MT_NUMA_MAX; id++)
        if (numa_bitmask_isbitset(numa_nodes_ptr, (unsigned)id)) /* numa_all_nodes_ptr: within the cpuset */
            out->node[n++] = (struct mt_numa_node){
                .id = id,
                .memory = numa_bitmask_isbitset(numa_all_nodes_ptr, (unsigned)id) && numa_node_size64(id, NULL) > 0,
                .cpus = cpus_of(id, &allowed),
            };
    out->n = n;
    for (int a = 0; a < n; a++)
        for (int b = 0; b < n; b++)
            out->node[a].distance[b] = numa_distance(out->node[a].id, out->node[b].id);
}

bool mt_numa_has_policy(void)
{
    int mode = MPOL_DEFAULT;
    return !get_mempolicy(&mode, NULL, 0, NULL, 0) && mode != MPOL_DEFAULT;
}

bool mt_numa_set_policy(bool interleave, const int *nodes, int n)
{
    enum { IDS = 1024, WORD = 8 * sizeof(unsigned long) };
    unsigned long mask[IDS / WORD] = {0};
    for (int i = 0; i < n; i++)
        if (nodes[i] < IDS)
            mask[nodes[i] / (int)WORD] |= 1UL << nodes[i] % (int)WORD;
    return !set_mempolicy(interleave ? MPOL_INTERLEAVE : MPOL_PREFERRED, mask, IDS + 1);
}

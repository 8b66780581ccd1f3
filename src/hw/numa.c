/* SPDX-License-Identifier: Apache-2.0 */
#include <numa.h>
#include <numaif.h>

#include "hw/hw.h"

/* Not for a kernel without NUMA, nor for a container that forbids these calls: memory stays as it is. */
static bool policy_is_open(void)
{
    int mode = -1;
    return numa_available() >= 0 && !get_mempolicy(&mode, NULL, 0, NULL, 0) && mode == MPOL_DEFAULT;
}

int mt_hw_interleave(int least_nodes)
{
    if (!policy_is_open())
        return 0;
    struct bitmask *nodes = numa_get_mems_allowed();
    int n = (int)numa_bitmask_weight(nodes);
    bool done = n >= least_nodes && !set_mempolicy(MPOL_INTERLEAVE, nodes->maskp, nodes->size + 1);
    numa_bitmask_free(nodes);
    return done ? n : 0;
}

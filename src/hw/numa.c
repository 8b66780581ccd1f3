/* SPDX-License-Identifier: Apache-2.0 */
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/mem.h"
#include "hw/hw.h"

enum { MAX_NODES = 1024, WORD = 8 * sizeof(unsigned long) };

int mt_hw_interleave(int least_nodes)
{
    unsigned long nodes[MAX_NODES / WORD] = {0};
    int mode = MPOL_DEFAULT, n = 0;
    /* these calls fail on a kernel without NUMA and in containers that forbid them: then leave memory as it is */
    if (syscall(SYS_get_mempolicy, &mode, NULL, 0UL, NULL, 0UL) || mode != MPOL_DEFAULT ||
        syscall(SYS_get_mempolicy, NULL, nodes, (unsigned long)MAX_NODES, NULL, (unsigned long)MPOL_F_MEMS_ALLOWED))
        return 0;
    for (size_t i = 0; i < MT_ARRAY_LEN(nodes); i++)
        n += __builtin_popcountl(nodes[i]);
    if (n < least_nodes || syscall(SYS_set_mempolicy, MPOL_INTERLEAVE, nodes, (unsigned long)MAX_NODES))
        return 0;
    return n;
}

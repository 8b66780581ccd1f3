/* SPDX-License-Identifier: Apache-2.0 */
/* Built without libnuma: the kernel places memory. */
#include "hw/homes_priv.h"

void mt_numa_read_nodes(struct mt_numa_nodes *out)
{
    out->n = 0;
}

bool mt_numa_has_policy(void)
{
    return false;
}

bool mt_numa_set_policy(bool, const int *, int)
{
    return false;
}

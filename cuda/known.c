/* SPDX-License-Identifier: Apache-2.0 */
/* Versions of cuDNN whose attention is known to be wrong, by architecture: what a first comparison may miss. */
#include "attention.h"

enum { ANY = 1 << 30 };

static const struct {
    int sm_from, sm_to;   /* compute capabilities, inclusive */
    int from, to;         /* versions; `to` is correct */
    bool backward_alone;
    int n_kv_below;
    const char *why;
} wrong[] = {
    /* TransformerEngine #2186: its backward takes what an earlier call left in the workspace for zeros */
    {90, 90, 1, 91800, true, ANY, "before 9.18 its backward on Hopper reads workspace that it did not write"},
    /* pytorch #193893 */
    {100, 103, 91900, 92100, false, 8, "9.19 and 9.20 are wrong on Blackwell with fewer than 8 heads of keys"},
};

const char *mt_fused_known_wrong(int version, int sm, const struct mt_cuda_call *c)
{
    for (size_t i = 0; i < MT_ARRAY_LEN(wrong); i++)
        if (sm >= wrong[i].sm_from && sm <= wrong[i].sm_to && version >= wrong[i].from && version < wrong[i].to &&
            (c->b || !wrong[i].backward_alone) && c->a->k.n < (size_t)wrong[i].n_kv_below)
            return wrong[i].why;
    return NULL;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* For builds without cuDNN or its front end. */
#include <stdio.h>

#include "fused.h"

bool mt_cuda_fused_built(void)
{
    return false;
}

const struct mt_fused_engine *mt_cuda_fused_engine(char *why, size_t why_len)
{
    snprintf(why, why_len, "this build has no cuDNN");
    return NULL;
}

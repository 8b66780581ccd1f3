/* SPDX-License-Identifier: Apache-2.0 */
/* Without NVTX. */
#include "cuda_priv.h"

void mt_cuda_name_streams(struct mt_cuda_device *d)
{
    (void)d;
}

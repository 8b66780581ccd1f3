/* SPDX-License-Identifier: Apache-2.0 */
/* For builds without NVTX. */
#include "cuda_priv.h"

void mt_cuda_name_streams(struct mt_cuda_device *d)
{
    (void)d;
}

void mt_cuda_range(mt_device *dev, const char *name)
{
    (void)dev;
    (void)name;
}

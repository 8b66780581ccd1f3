/* SPDX-License-Identifier: Apache-2.0 */
#include <nvtx3/nvToolsExtCudaRt.h>

#include "cuda_priv.h"

void mt_cuda_name_streams(struct mt_cuda_device *d)
{
    static const char *const names[] = {"compute", "h2d", "d2h"};
    for (int s = 0; s < MT_N_STREAMS; s++)
        nvtxNameCudaStreamA(d->streams[s], names[s]);
}

void mt_cuda_range(mt_device *, const char *name)
{
    if (name)
        nvtxRangePushA(name);
    else
        nvtxRangePop();
}

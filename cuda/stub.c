/* SPDX-License-Identifier: Apache-2.0 */
/* Replaces device_cuda.c in builds without nvcc. */

#include "cuda_kind.h"

#define HOW                                                                                        \
    "this build has no CUDA device: install the CUDA toolkit (nvcc, cuBLAS), and build again with "  \
    "-Dcuda=enabled"

int mt_cuda_device_create(mt_device **out, const struct mt_device_params *p, struct mt_err *err)
{
    (void)out;
    (void)p;
    return mt_fail(err, MT_ERR_DEVICE, -ENODEV, HOW "; or set device.kind = cpu");
}

void mt_cuda_probe(struct mt_device_info *out, int index)
{
    (void)index;
    *out = (struct mt_device_info){.present = false, .text = HOW};
}

int mt_cuda_count(void)
{
    return 0;
}

void mt_cuda_identify(char *out, size_t len, int index)
{
    (void)index;
    if (len)
        *out = 0;
}

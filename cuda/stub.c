/* SPDX-License-Identifier: Apache-2.0 */
/* Replaces device_cuda.c in builds without nvcc. */

#include <stdio.h>

#include "cuda_kind.h"
#include "hw/gpu.h"

#define HOW "this build has no CUDA device; scripts/build makes one that has, with a CUDA toolkit if none is installed"

int mt_cuda_device_create(mt_device **, const struct mt_device_params *, struct mt_err *err)
{
    return mt_fail(err, MT_ERR_DEVICE, -ENODEV, HOW "; or set device.kind = cpu");
}

void mt_cuda_probe(struct mt_device_info *out, int)
{
    const char *by = mt_hw_gpu_shown_by("");
    *out = (struct mt_device_info){.shown = by != NULL, .text = HOW};
    if (by)
        snprintf(out->text, sizeof(out->text), "this machine has a GPU (%s), and " HOW, by);
}

int mt_cuda_count(void)
{
    return 0;
}

void mt_cuda_identify(char *out, size_t len, int)
{
    if (len)
        *out = 0;
}

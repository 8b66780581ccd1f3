/* SPDX-License-Identifier: Apache-2.0 */
#include "device/backend.h"

int mt_cuda_device_create(mt_device **out, const struct mt_device_params *p, struct mt_err *err)
{
    (void)out;
    (void)p;
    return mt_fail(err, MT_ERR_DEVICE, -ENODEV,
                   "this build has no CUDA device yet: set device.kind = cpu");
}

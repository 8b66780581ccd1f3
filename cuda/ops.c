/* SPDX-License-Identifier: Apache-2.0 */
/* Calls the kernels for the backend's table; messages describe the operation. */
#include "cuda_priv.h"
#include "device/op.h"
#include "kernels.h"

#define LAUNCH(ID, name, type)                                                                     \
    int mt_cuda_op_##name(mt_device *dev, const type *a, struct mt_err *err)                       \
    {                                                                                              \
        char text[160];                                                                            \
        struct mt_cuda_device *d = mt_cuda(dev);                                                   \
        int rc = mt_cuda_enter(d, err);                                                            \
        if (rc)                                                                                    \
            return rc;                                                                             \
        cudaError_t e = mt_cuda_##name(a, mt_cuda_stream(d, MT_STREAM_COMPUTE));                   \
        return e == cudaSuccess                                                                    \
                   ? 0                                                                             \
                   : mt_cuda_check(d, e, err, #name " of %s",                                      \
                                   mt_dev_op_describe(text, sizeof(text), MT_DEV_##ID, a));        \
    }
MT_DEVICE_OPS_OTHERS(LAUNCH, LAUNCH)
#undef LAUNCH

cudaError_t mt_cuda_zero(const struct mt_zero *a, cudaStream_t stream)
{
    return cudaMemsetAsync(a->ptr, 0, a->bytes, stream);
}

int mt_cuda_submit(mt_device *dev, enum mt_dev_op op, const void *args, struct mt_err *err)
{
    switch (op) {
#define SUBMIT(ID, name, type)                                                                     \
    case MT_DEV_##ID:                                                                              \
        return mt_cuda_op_##name(dev, args, err);
        MT_DEVICE_OPS(SUBMIT, SUBMIT)
#undef SUBMIT
    default:
        return mt_fail(err, MT_ERR_DEVICE, -EINVAL, "GPU %d: no operation %d", mt_cuda(dev)->index, (int)op);
    }
}

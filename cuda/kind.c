/* SPDX-License-Identifier: Apache-2.0 */
/* What is known of CUDA devices without having one. */
#include "kind.h"

#include "device/arena.h"
#include "device/select.h"
#include "workspace.h"

static size_t workspace(const struct mt_device_limits *l, enum mt_dev_op op, const void *args)
{
    (void)l;
    return mt_cuda_workspace(op, args);
}

const struct mt_device_kind mt_cuda_kind = {
    .name = "cuda",
    .alignment = MT_ARENA_ALIGNMENT,
    .row_bucket = 128,
    .library_bytes = 64 << 20, /* cuBLASLt's workspace and a reserve */
    .own_bytes = MT_CUDA_BLAS_BYTES,
    .workspace = workspace,
    .probe = mt_cuda_probe,
    .create = mt_cuda_device_create,
};

const struct mt_device_census mt_cuda_census = {.count = mt_cuda_count,
                                                .identify = mt_cuda_identify};

/* SPDX-License-Identifier: Apache-2.0 */
/* What is known of CUDA devices without having one. */
#include "cuda_kind.h"

#include "device/arena.h"
#include "workspace.h"

static size_t workspace(const struct mt_device_limits *l, enum mt_dev_op op, const void *args)
{
    return mt_cuda_workspace(l->capability, op, args);
}

const struct mt_device_kind mt_cuda_kind = {
    .name = "cuda",
    .alignment = MT_ARENA_ALIGNMENT,
    .row_bucket = 128,
    .coded_rows = 256,
    .library_bytes = 64 << 20, /* cuBLASLt's workspace and a reserve */
    .own_bytes = MT_CUDA_BLAS_BYTES,
    .sides = 3,
    .side_bytes = MT_CUDA_BLAS_BYTES,
    .workspace = workspace,
    .probe = mt_cuda_probe,
    .create = mt_cuda_device_create,
    .count = mt_cuda_count,
    .identify = mt_cuda_identify,
};

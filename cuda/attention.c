/* SPDX-License-Identifier: Apache-2.0 */
/* Which attention runs. */
#include "attention.h"

int mt_cuda_attention_create(struct mt_cuda_device *d, struct mt_err *err)
{
    (void)d;
    (void)err;
    return 0;
}

void mt_cuda_attention_destroy(struct mt_cuda_device *d)
{
    (void)d;
}

const char *mt_cuda_attention_describe(const struct mt_cuda_device *d)
{
    (void)d;
    return "tiled";
}

size_t mt_cuda_attention_workspace(mt_device *dev, size_t n, size_t max_len, size_t n_q, size_t n_kv,
                                   size_t head_dim, enum mt_dtype dtype)
{
    (void)dev;
    (void)n;
    return mt_cuda_tiled_workspace(max_len, n_q, n_kv, head_dim, dtype);
}

int mt_cuda_op_attention(mt_device *dev, const struct mt_attention *a, struct mt_err *err)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    int rc = mt_cuda_enter(d, err);
    return rc ? rc : mt_cuda_tiled_attention(d, a, err);
}

int mt_cuda_op_attention_bwd(mt_device *dev, const struct mt_attention_bwd *b, struct mt_err *err)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    int rc = mt_cuda_enter(d, err);
    return rc ? rc : mt_cuda_tiled_attention_bwd(d, b, err);
}

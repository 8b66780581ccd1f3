/* SPDX-License-Identifier: Apache-2.0 */
/* From the backend's table to the kernels; what an operation was asked to do goes into its messages. */
#include <stdio.h>

#include "cuda_priv.h"
#include "kernels.h"

enum { TEXT = 160 };

#define DESCRIBE(name, type, ...)                                                                  \
    static void describe_##name(char *buf, const type *a)                                          \
    {                                                                                              \
        snprintf(buf, TEXT, __VA_ARGS__);                                                          \
    }

static const char *dt(enum mt_dtype t)
{
    return mt_dtype_name(t);
}

DESCRIBE(embedding, struct mt_embedding, "%zu of %zu rows of %zu, %s", a->n, a->vocab, a->c, dt(a->dtype))
DESCRIBE(embedding_bwd, struct mt_embedding_bwd, "%zu tokens in %zu runs, rows of %zu, %s", a->n,
         a->n_runs, a->c, dt(a->dtype))
DESCRIBE(rmsnorm, struct mt_rmsnorm, "[%zu, %zu] %s", a->n, a->c, dt(a->dtype))
DESCRIBE(rmsnorm_bwd, struct mt_rmsnorm_bwd, "[%zu, %zu] %s", a->n, a->c, dt(a->dtype))
DESCRIBE(bias_bwd, struct mt_bias_bwd, "[%zu, %zu] %s", a->n, a->c, dt(a->dtype))
DESCRIBE(qk_rope, struct mt_qk_rope, "%zu rows of %zu and %zu heads of %zu, %s", a->n, a->n_q, a->n_kv,
         a->head_dim, dt(a->dtype))
DESCRIBE(qk_rope_bwd, struct mt_qk_rope_bwd, "%zu rows of %zu and %zu heads of %zu, %s", a->n, a->n_q,
         a->n_kv, a->head_dim, dt(a->dtype))
DESCRIBE(glu, struct mt_glu, "[%zu, 2 * %zu] %s", a->n, a->f, dt(a->dtype))
DESCRIBE(glu_bwd, struct mt_glu_bwd, "[%zu, 2 * %zu] %s", a->n, a->f, dt(a->dtype))
DESCRIBE(cross_entropy, struct mt_cross_entropy, "[%zu, %zu] to %s", a->n, a->vocab, dt(a->dtype))
DESCRIBE(gather_rows, struct mt_rows, "%zu of %zu rows of %zu, %s", a->n, a->n_dst, a->c, dt(a->dtype))
DESCRIBE(scatter_rows, struct mt_rows, "%zu of %zu rows of %zu, %s", a->n, a->n_dst, a->c, dt(a->dtype))
DESCRIBE(add, struct mt_add, "%zu of %s", a->n, dt(a->dtype))
DESCRIBE(grad_cast, struct mt_grad_cast, "%zu to %s", a->n, dt(a->dst_dtype))
DESCRIBE(join, struct mt_join, "%zu", a->n)
DESCRIBE(cast, struct mt_cast, "%zu from %s to %s", a->n, dt(a->src_dtype), dt(a->dst_dtype))

#define LAUNCH(name, type)                                                                         \
    int mt_cuda_op_##name(mt_device *dev, const type *a, struct mt_err *err)                       \
    {                                                                                              \
        struct mt_cuda_device *d = mt_cuda(dev);                                                   \
        int rc = mt_cuda_enter(d, err);                                                            \
        if (rc)                                                                                    \
            return rc;                                                                             \
        cudaError_t e = mt_cuda_##name(a, d->streams[MT_STREAM_COMPUTE]);                          \
        if (e == cudaSuccess)                                                                      \
            return 0;                                                                              \
        char text[TEXT];                                                                           \
        describe_##name(text, a);                                                                  \
        return mt_cuda_check(d, e, err, #name " of %s", text);                                     \
    }
MT_CUDA_KERNEL_OPS(LAUNCH)
#undef LAUNCH

int mt_cuda_op_zero(mt_device *dev, const struct mt_zero *a, struct mt_err *err)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    int rc = mt_cuda_enter(d, err);
    return rc ? rc
              : mt_cuda_check(d, cudaMemsetAsync(a->ptr, 0, a->bytes, d->streams[MT_STREAM_COMPUTE]),
                              err, "zero of %zu bytes", a->bytes);
}

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MT_CUDA_ATTENTION_H
#define MT_CUDA_ATTENTION_H

#include "cuda_priv.h"

/**
 * Two ways to the same result: cuDNN's fused attention where it was built in and supports the shape, and
 * tiles of matrix products with a softmax between, for everything. MEGATRAIN_ATTENTION=tiled in the
 * environment takes the second always.
 */
int mt_cuda_attention_create(struct mt_cuda_device *d, struct mt_err *err);
void mt_cuda_attention_destroy(struct mt_cuda_device *d);
/** "cuDNN 9.19.0" or "tiled". */
const char *mt_cuda_attention_describe(const struct mt_cuda_device *d);
size_t mt_cuda_attention_workspace(mt_device *dev, size_t n, size_t max_len, size_t n_q, size_t n_kv,
                                   size_t head_dim, enum mt_dtype dtype);

/* --- attention_tiled.c ------------------------------------------------------------------------- */

int mt_cuda_tiled_attention(struct mt_cuda_device *d, const struct mt_attention *a,
                            struct mt_err *err);
int mt_cuda_tiled_attention_bwd(struct mt_cuda_device *d, const struct mt_attention_bwd *b,
                                struct mt_err *err);
size_t mt_cuda_tiled_workspace(size_t max_len, size_t n_q, size_t n_kv, size_t head_dim,
                               enum mt_dtype dtype);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/state.h"

/**
 * mt_op_gemm(), in FP8 if the model computes so, A and B are of the compute dtype, and both sides of the linear layer
 * are whole vectors (product.c). Rows of A and B lie side by side.
 */
int mt_product(mt_model *m, const struct mt_gemm *g, struct mt_err *err);
/** d = a W or, transposed, a W^T; plus c. In FP32, so that a sum of several products is rounded once. */
struct mt_sum_product {
    size_t in, out;
    const void *a; /* [n, in] */
    enum mt_dtype dtype; /* of a and w */
    const void *w;
    bool transposed, of_router; /* of a router's own weight: never in FP8 */
    const float *c;
    float *d; /* [n, out] */
};
int mt_sum_product(mt_model *m, size_t n, const struct mt_sum_product *p, struct mt_err *err);
/** After a product with this A: if the next one is a weight's gradient that has it as A, too, its content is the same. */
static inline void mt_product_again(mt_model *m, const void *a)
{
    m->own.product.known = m->p.fp8 ? a : NULL;
}
/** Are both sides of a linear layer whole vectors of 16 bytes in FP8? */
static inline bool mt_has_whole_vectors(size_t out, size_t in)
{
    return out % 16 == 0 && in % 16 == 0;
}

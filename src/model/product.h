/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/state.h"

/**
 * mt_op_gemm(), in FP8 if the model computes so, A and B are of the compute dtype, and both sides of the linear layer
 * are whole vectors (product.c). Rows of A and B lie side by side.
 */
int mt_product(mt_model *m, const struct mt_gemm *g, struct mt_err *err);
/** mt_product() of mt_gemm_output(), whose weight begins at element `at` of the weights w: by its codes, tensor by
 * tensor, if w has nothing else of it. */
int mt_weight_product(mt_model *m, struct mt_gemm *g, const void *w, size_t at, struct mt_err *err);
/** A linear layer's rows and dtypes: of its operands, and of the product. */
struct mt_linear_shape {
    size_t n, in, out;
    enum mt_dtype dtype, d_dtype;
};
/** Its three products, of x [n, in], w [out, in], dy [n, out], whose rows lie end to end: y = x w^T, dx = dy w and
 * dw (+)= dy^T x. Who has rows elsewhere sets lda, ldb and ldd, who adds to something c. */
struct mt_gemm mt_gemm_output(const struct mt_linear_shape *s, const void *x, const void *w, void *y);
struct mt_gemm mt_gemm_input_grad(const struct mt_linear_shape *s, const void *dy, const void *w, void *dx);
struct mt_gemm mt_gemm_weight_grad(const struct mt_linear_shape *s, const void *dy, const void *x, float *dw, bool add);
/** The product is added to what is in d. */
static inline void mt_gemm_add(struct mt_gemm *g)
{
    g->c = g->d;
    g->ldc = g->ldd;
}
/** After a product with this A: if the next one is a weight's gradient that has it as A, too, its content is the same. */
static inline void mt_product_again(mt_model *m, const void *a)
{
    m->own.product.known = m->p.fp8 ? a : NULL;
}
/** Elements of the weight that t begins, if products in FP8 alone read it, so that it can become codes in its place
 * (mt_model_encode()); else 0. */
size_t mt_coded_elems(const struct mt_layout *l, const struct mt_tensor *t);
/** Are both sides of a linear layer whole vectors of 16 bytes in FP8? */
static inline bool mt_has_whole_vectors(size_t out, size_t in)
{
    return out % 16 == 0 && in % 16 == 0;
}

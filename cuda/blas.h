/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/strbuf.h"
#include "cuda_priv.h"

/**
 * D = alpha op(A) op(B) (+ bias) + beta C by cuBLASLt on the COMPUTE stream, row-major, for `batch` products
 * at fixed strides. f32 sums, never TF32, one rounding to d_dtype; of sums of E4M3's products the tensor cores of sm_89 and
 * sm_90 keep 13 bits, and what they have of some 128 of K is added in f32. Shapes, dtypes and leading dimensions as
 * in struct mt_gemm. The algorithm, and so the result, is a function of the shape and of the table of choices
 * (choices.h), in which a shape has what was fastest when it was timed, else the heuristic's first that starts: the
 * workspace has a fixed size, of pointers only 16-byte alignment matters, and partial sums over parts of K are kept in
 * f32 and added in a fixed order (no atomics; cuBLAS promises the same bits for the same algorithm on the same kind of
 * GPU).
 */
struct mt_cuda_product {
    size_t m, n, k;
    enum mt_dtype dtype, d_dtype;
    bool trans_a, trans_b;
    float alpha, beta;
    const void *a, *b, *bias, *c; /* bias: in dtype, or D's with E4M3; only if batch is 1; c: NULL if beta is 0 */
    const float *a_scale, *b_scale; /* of E4M3, in device memory */
    void *d;
    size_t lda, ldb, ldc, ldd;
    size_t batch, stride_a, stride_b, stride_d; /* strides in elements; C has D's stride; batch 0 means 1 */
};

/** Makes cuBLASLt available for all later calls (blas_lazy.c or blas_linked.c). -ENODEV: it is not found. */
int mt_cuda_blas_load(struct mt_err *err);
int mt_cuda_blas_create(struct mt_cuda_device *d, struct mt_err *err);
void mt_cuda_blas_destroy(struct mt_cuda_device *d);
/** Thread-safety: the thread that feeds the COMPUTE stream. `op` names the operation in messages. */
int mt_cuda_multiply(struct mt_cuda_device *d, const struct mt_cuda_product *p, const char *op,
                     struct mt_err *err);
/** mt_device_tune(), mt_device_products(), mt_device_adopt_products(). */
void mt_cuda_blas_tune(mt_device *dev, bool on);
size_t mt_cuda_blas_choices(mt_device *dev, struct mt_str *out);
bool mt_cuda_blas_adopt(mt_device *dev, const char *text);
/** "cuBLASLt 13.1.0". */
void mt_cuda_blas_describe(char *buf, size_t len);

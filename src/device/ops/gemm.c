/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ops/row.h"

/* What matrix units want of FP8. */
static const char *check_codes(const struct mt_gemm *a)
{
    MT_OP_NEED(!a->trans_a && a->trans_b && a->a_scale && a->b_scale);
    MT_OP_NEED(a->n % 16 == 0 && a->k % 16 == 0 && a->lda % 16 == 0 && a->ldb % 16 == 0);
    MT_OP_NEED(aligned(a->a) && aligned(a->b));
    MT_OP_NEED(a->c != a->d || a->ldc == a->ldd);
    return NULL;
}

static const char *check_gemm(const struct mt_gemm *a)
{
    MT_OP_NEED(a->a && a->b && a->d && a->n && a->k);
    MT_OP_NEED(a->d_dtype == (a->dtype == MT_E4M3 ? MT_BF16 : a->dtype) || a->d_dtype == MT_F32);
    MT_OP_NEED(a->lda >= (a->trans_a ? a->m : a->k));
    MT_OP_NEED(a->ldb >= (a->trans_b ? a->k : a->n));
    MT_OP_NEED(a->ldd >= a->n && (!a->c || a->ldc >= a->n));
    MT_OP_NEED(a->d != a->a && a->d != a->b);
    if (a->dtype == MT_E4M3)
        return check_codes(a);
    MT_OP_NEED(a->c != a->d || a->ldc == a->ldd);
    return NULL;
}

static void cost_gemm(const struct mt_gemm *a, struct mt_metered *out)
{
    out->variant = a->trans_a ? MT_GEMM_TN : a->trans_b ? MT_GEMM_NT : MT_GEMM_NN;
    mt_op_shape(out, a->dtype, MT_DIMS(a->m, a->n, a->k));
    out->flags = (a->bias || a->c ? MT_METER_ADDS : 0) |
                 (a->d_dtype == MT_F32 && a->dtype != MT_F32 ? MT_METER_F32_OUT : 0);
    out->flops = 2 * (double)a->m * (double)a->n * (double)a->k;
    out->bytes = mt_op_bytes(a->m, a->k, a->dtype) + mt_op_bytes(a->k, a->n, a->dtype) +
                 mt_op_bytes(a->m, a->n, a->d_dtype) * (a->c ? 2 : 1);
}

/* Bytes from 0 to 126, none of them a NaN. */
static const void *codes(mt_example *x, size_t n)
{
    return mt_example_ints(x, n / 4, 0x01010101, 0x7f7f7f7f);
}

/* With MT_METER_ADDS, a weight gradient adds to itself (C = D), others add to another matrix. */
static void fill_gemm(mt_example *x, const struct mt_metered *shape, struct mt_gemm *a)
{
    bool in_codes = shape->dtype == MT_E4M3;
    size_t m = (size_t)shape->dim[0], n = (size_t)shape->dim[1], k = (size_t)shape->dim[2];
    bool adds = shape->flags & MT_METER_ADDS;
    *a = (struct mt_gemm){.m = m, .n = n, .k = k, .dtype = shape->dtype,
                          .d_dtype = shape->flags & MT_METER_F32_OUT ? MT_F32 : in_codes ? MT_BF16 : shape->dtype,
                          .trans_a = shape->variant == MT_GEMM_TN, .trans_b = shape->variant == MT_GEMM_NT};
    if (in_codes) {
        a->a = codes(x, m * k);
        a->b = codes(x, k * n);
        a->a_scale = mt_example_read(x, MT_F32, 1);
        a->b_scale = mt_example_read(x, MT_F32, 1);
    } else {
        a->a = mt_example_fresh(x, a->dtype, m * k);
        a->b = mt_example_read(x, a->dtype, k * n);
    }
    bool gradient = a->trans_a || (in_codes && a->d_dtype == MT_F32);
    a->d = adds && gradient ? mt_example_update(x, a->d_dtype, m * n) : mt_example_write(x, a->d_dtype, m * n);
    a->lda = a->trans_a ? m : k;
    a->ldb = a->trans_b ? k : n;
    a->ldd = n;
    if (adds) {
        a->c = gradient ? a->d : mt_example_read(x, a->d_dtype, m * n);
        a->ldc = n;
    }
}

MT_OP_ROW_OF(gemm, mt_gemm, m, ("gemm_nt", "gemm_nn", "gemm_tn"), .bound = MT_BOUND_PRODUCT,
             .dim = {MT_SIZE_ROWS, MT_SIZE_FFN, MT_SIZE_HIDDEN},
             .flags = {0, MT_METER_ADDS, MT_METER_ADDS | MT_METER_F32_OUT});

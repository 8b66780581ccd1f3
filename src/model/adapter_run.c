/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low-rank adapters on a linear layer: y += s (x A^T) B^T, and backward. The A of a layer's targets lie end to end, so
 * one product makes x A^T of them all; each B then works on its own columns of it and of y. x A^T and s dy B are
 * rounded to the compute dtype, sums are FP32. x A^T is made again in backward: a thin product.
 */
#include "model/model_priv.h"

/* x A^T of all targets: [n, rank]. */
static int inner(mt_model *m, const struct mt_adapter_run *a, struct mt_err *err)
{
    const struct mt_adapter *ad = a->adapter;
    return mt_op_gemm(m->dev,
                      &(struct mt_gemm){
                          .m = a->n,
                          .n = ad->rank,
                          .k = ad->in,
                          .dtype = m->dt,
                          .d_dtype = m->dt,
                          .trans_b = true,
                          .a = a->x,
                          .lda = ad->in,
                          .b = mt_elem(m, a->w, ad->a.at),
                          .ldb = ad->in,
                          .d = m->adapter_x,
                          .ldd = ad->rank,
                      },
                      err);
}

int mt_adapter_forward(mt_model *m, const struct mt_adapter_run *a, struct mt_err *err)
{
    const struct mt_adapter *ad = a->adapter;
    int rc = ad ? inner(m, a, err) : 0;
    for (size_t i = 0; ad && i < ad->n_targets && !rc; i++) {
        const struct mt_adapter_target *t = &ad->target[i];
        void *y = (char *)a->y + t->col * mt_dtype_size(a->y_dtype);
        rc = mt_op_gemm(m->dev,
                        &(struct mt_gemm){
                            .m = a->n,
                            .n = t->out,
                            .k = t->rank,
                            .dtype = m->dt,
                            .d_dtype = a->y_dtype,
                            .trans_b = true,
                            .scale = t->scale,
                            .a = mt_elem(m, m->adapter_x, t->row),
                            .lda = ad->rank,
                            .b = mt_elem(m, a->w, t->b.at),
                            .ldb = t->rank,
                            .c = y,
                            .ldc = a->ld,
                            .d = y,
                            .ldd = a->ld,
                        },
                        err);
    }
    return rc;
}

/* s dy B of a target, into its columns of [n, rank]. */
static int outer_grad(mt_model *m, const struct mt_adapter_run *a, const struct mt_adapter_target *t,
                      struct mt_err *err)
{
    return mt_op_gemm(m->dev,
                      &(struct mt_gemm){
                          .m = a->n,
                          .n = t->rank,
                          .k = t->out,
                          .dtype = m->dt,
                          .d_dtype = m->dt,
                          .scale = t->scale,
                          .a = mt_elem(m, a->dy, t->col),
                          .lda = a->ld,
                          .b = mt_elem(m, a->w, t->b.at),
                          .ldb = t->rank,
                          .d = mt_elem(m, m->adapter_dy, t->row),
                          .ldd = a->adapter->rank,
                      },
                      err);
}

int mt_adapter_input_grad(mt_model *m, const struct mt_adapter_run *a, struct mt_err *err)
{
    const struct mt_adapter *ad = a->adapter;
    int rc = 0;
    if (!ad)
        return 0;
    for (size_t i = 0; i < ad->n_targets && !rc; i++)
        rc = outer_grad(m, a, &ad->target[i], err);
    if (rc)
        return rc;
    return mt_op_gemm(m->dev,
                      &(struct mt_gemm){
                          .m = a->n,
                          .n = ad->in,
                          .k = ad->rank,
                          .dtype = m->dt,
                          .d_dtype = m->dt,
                          .a = m->adapter_dy,
                          .lda = ad->rank,
                          .b = mt_elem(m, a->w, ad->a.at),
                          .ldb = ad->in,
                          .c = a->dx,
                          .ldc = ad->in,
                          .d = a->dx,
                          .ldd = ad->in,
                      },
                      err);
}

/* dB += s dy^T (x A^T) */
static int b_grad(mt_model *m, const struct mt_adapter_run *a, const struct mt_adapter_target *t, struct mt_err *err)
{
    float *db = mt_grad_of(a->g, t->b);
    return mt_op_gemm(m->dev,
                      &(struct mt_gemm){
                          .m = t->out,
                          .n = t->rank,
                          .k = a->n,
                          .dtype = m->dt,
                          .d_dtype = MT_F32,
                          .trans_a = true,
                          .scale = t->scale,
                          .a = mt_elem(m, a->dy, t->col),
                          .lda = a->ld,
                          .b = mt_elem(m, m->adapter_x, t->row),
                          .ldb = a->adapter->rank,
                          .c = db,
                          .ldc = t->rank,
                          .d = db,
                          .ldd = t->rank,
                      },
                      err);
}

int mt_adapter_weight_grad(mt_model *m, const struct mt_adapter_run *a, struct mt_err *err)
{
    const struct mt_adapter *ad = a->adapter;
    int rc = ad ? inner(m, a, err) : 0;
    if (!ad)
        return 0;
    for (size_t i = 0; i < ad->n_targets && !rc; i++)
        rc = b_grad(m, a, &ad->target[i], err);
    if (rc)
        return rc;
    float *da = mt_grad_of(a->g, ad->a);
    return mt_op_gemm(m->dev,
                      &(struct mt_gemm){
                          .m = ad->rank,
                          .n = ad->in,
                          .k = a->n,
                          .dtype = m->dt,
                          .d_dtype = MT_F32,
                          .trans_a = true,
                          .a = m->adapter_dy,
                          .lda = ad->rank,
                          .b = a->x,
                          .ldb = ad->in,
                          .c = da,
                          .ldc = ad->in,
                          .d = da,
                          .ldd = ad->in,
                      },
                      err);
}

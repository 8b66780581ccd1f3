/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A linear layer with DoRA: with z = W x + s B (A x) and g = m / |W + s B A| by rows, y = g z + b. The layer's own
 * product and its adapters' make z as they do without DoRA; g is computed from W whenever it is needed, since W is
 * streamed: besides W, |W + s B A| needs only W A^T and A A^T (device/ops.h, mt_dora_scale). Backward uses g dy; m's
 * gradient is the sum of dy z / |W + s B A|, with z recomputed.
 */
#include <assert.h>

#include "base/mem.h"
#include "model/linear.h"
#include "model/packing.h"

struct dora_scratch {
    float *scale, *inverse; /* [out] */
    float *wa, *gram;       /* [out, rank], [rank, rank] of the largest target */
    void *z, *dz;           /* [max_tokens, out]; backward needs both */
};

static size_t lay_out(struct dora_scratch *s, const struct mt_model_params *p, void *base)
{
    size_t out = 0, wide = 0, rank = 0, at = 0, size = p->max_tokens * mt_dtype_size(p->dtype);
    for (const struct mt_adapter *ad = p->layout->adapters; ad < p->layout->adapters + p->layout->n_adapters; ad++) {
        for (size_t k = 0; ad->dora && k < ad->n_targets; k++) {
            const struct mt_adapter_target *t = &ad->target[k];
            rank = MT_MAX(rank, t->rank);
            wide = MT_MAX(wide, t->out * t->rank);
            out = MT_MAX(out, ad->out);
        }
    }
    s->scale = mt_take(base, &at, out * sizeof(float));
    s->inverse = mt_take(base, &at, out * sizeof(float));
    s->wa = mt_take(base, &at, wide * sizeof(float));
    s->gram = mt_take(base, &at, rank * rank * sizeof(float));
    s->z = mt_take(base, &at, out * size);
    s->dz = mt_take(base, &at, p->backward ? out * size : 0);
    return at;
}

size_t mt_dora_bytes(const struct mt_model_params *p)
{
    struct dora_scratch s;
    return lay_out(&s, p, NULL);
}

void mt_dora_end(mt_model *m)
{
    m->dora_of = NULL;
    mt_model_poison(m, m->dora, mt_dora_bytes(&m->p));
}

static struct dora_scratch scratch_of(const mt_model *m)
{
    struct dora_scratch s;
    lay_out(&s, &m->p, m->dora);
    return s;
}

/* d = x A^T of rows of x and of A, in f32. */
static int times_a(mt_model *m, const struct mt_linear_shape *s, const void *x, const void *a, float *d,
                   struct mt_err *err)
{
    struct mt_gemm g = mt_gemm_output(s, x, a, d);
    return mt_op_gemm(m->dev, &g, err);
}

static int no_scale(mt_model *m, size_t first, size_t end, const struct dora_scratch *s, struct mt_err *err)
{
    return mt_op_dora_scale(m->dev, &(struct mt_dora_scale){.n = end - first, .dtype = m->dt, .scale = s->scale + first,
                                                            .inverse = s->inverse + first}, err);
}

static int scale_of(mt_model *m, const struct mt_dora_run *a, const struct mt_adapter_target *t,
                    const struct dora_scratch *s, struct mt_err *err)
{
    const struct mt_adapter *ad = mt_running_adapter(m, a->p.adapter);
    const void *w = mt_elem(m, a->w, a->p.at + t->col * ad->in);
    const void *factor = mt_adapter_elem(m, a->w, ad->a, t->row * ad->in);
    const struct mt_linear_shape of_w = {t->out, ad->in, t->rank, m->dt, MT_F32},
                                 of_a = {t->rank, ad->in, t->rank, m->dt, MT_F32};
    int rc = times_a(m, &of_w, w, factor, s->wa, err) ?: times_a(m, &of_a, factor, factor, s->gram, err);
    return rc ? rc : mt_op_dora_scale(m->dev,
                                      &(struct mt_dora_scale){
                                          .n = t->out,
                                          .c = ad->in,
                                          .r = t->rank,
                                          .dtype = m->dt,
                                          .s = t->scale,
                                          .w = w,
                                          .b = mt_adapter_elem(m, a->w, t->b, 0),
                                          .magnitude = mt_adapter_elem(m, a->w, t->magnitude, 0),
                                          .wa = s->wa,
                                          .gram = s->gram,
                                          .scale = s->scale + t->col,
                                          .inverse = s->inverse + t->col,
                                      },
                                      err);
}

/* The same of a target that is merged: as they were when the weights were loaded. */
static int merged_scale(mt_model *m, const struct mt_dora_run *a, const struct mt_adapter_target *t,
                        const struct dora_scratch *s, struct mt_err *err)
{
    size_t unit = m->layout->tensors[t->tensor].unit, bytes = t->out * sizeof(float);
    const float *from = mt_unit_norms(m->layout, unit, m->dt, a->w) + t->norm;
    return mt_model_copy(m, s->scale + t->col, from, bytes, err)
        ?: mt_model_copy(m, s->inverse + t->col, from + m->layout->units[unit].n_norms, bytes, err);
}

/* g and 1 / |W + s B A| (merged: 1 / magnitude, since z is g z then) of all columns of the layer's output; 1 and 0 for columns without an adapter. */
static int scales(mt_model *m, const struct mt_dora_run *a, const struct dora_scratch *s, struct mt_err *err)
{
    const struct mt_adapter *ad = mt_running_adapter(m, a->p.adapter);
    size_t done = 0;
    int rc = 0;
    for (size_t i = 0; i < ad->n_targets && !rc; i++) {
        rc = no_scale(m, done, ad->target[i].col, s, err)
          ?: (ad->merged ? merged_scale : scale_of)(m, a, &ad->target[i], s, err);
        done = ad->target[i].col + ad->target[i].out;
    }
    return rc ?: no_scale(m, done, ad->out, s, err);
}

/* z: the layer's output without DoRA, bias and residual. */
static int product(mt_model *m, const struct mt_dora_run *a, void *z, struct mt_err *err)
{
    const struct mt_adapter *ad = mt_running_adapter(m, a->p.adapter);
    const struct mt_linear_shape shape = {a->n, ad->in, ad->out, m->dt, m->dt};
    struct mt_gemm g = mt_gemm_output(&shape, a->x, mt_elem(m, a->w, a->p.at), z);
    struct mt_adapter_run run = {.adapter = ad, .n = a->n, .ld = ad->out, .y_dtype = m->dt, .x = a->x, .w = a->w,
                                 .y = z};
    return mt_product(m, &g, err) ?: mt_adapter_forward(m, &run, err);
}

/* out = add + bias + g x, of the dtype that `a` says. */
static int by_scale(mt_model *m, const struct mt_dora_run *a, const void *x, const void *bias, const void *add,
                    void *out, struct mt_err *err)
{
    return mt_op_scale_columns(m->dev,
                               &(struct mt_scale_columns){
                                   .n = a->n,
                                   .c = mt_running_adapter(m, a->p.adapter)->out,
                                   .dtype = m->dt,
                                   .out_dtype = a->f32 ? MT_F32 : m->dt,
                                   .x = x,
                                   .scale = scratch_of(m).scale,
                                   .bias = bias,
                                   .add = add,
                                   .out = out,
                               },
                               err);
}

int mt_dora_forward(mt_model *m, const struct mt_dora_run *a, struct mt_param bias, const void *residual, void *y,
                    struct mt_err *err)
{
    struct dora_scratch s = scratch_of(m);
    int rc = scales(m, a, &s, err)
          ?: product(m, a, s.z, err)
          ?: by_scale(m, a, s.z, bias.n ? mt_elem(m, a->w, bias.at) : NULL, residual, y, err);
    mt_dora_end(m);
    return rc;
}

int mt_dora_output_grad(mt_model *m, const struct mt_dora_run *a, const void *dy, const void **dz, struct mt_err *err)
{
    struct dora_scratch s = scratch_of(m);
    int rc = scales(m, a, &s, err);
    *dz = s.dz;
    m->dora_of = mt_running_adapter(m, a->p.adapter);
    return rc ?: by_scale(m, a, dy, NULL, NULL, s.dz, err);
}

const void *mt_dora_kept_grad(const mt_model *m, const struct mt_dora_run *a)
{
    assert(m->dora_of == mt_running_adapter(m, a->p.adapter));
    return scratch_of(m).dz;
}

int mt_dora_magnitude_grad(mt_model *m, const struct mt_dora_run *a, const void *dy, float *g, struct mt_err *err)
{
    const struct mt_adapter *ad = mt_running_adapter(m, a->p.adapter);
    struct dora_scratch s = scratch_of(m);
    int rc = product(m, a, s.z, err);
    for (const struct mt_adapter_target *t = ad->target; t < ad->target + ad->n_targets && !rc; t++) {
        rc = mt_op_bias_bwd(m->dev,
                            &(struct mt_bias_bwd){
                                .n = a->n,
                                .c = t->out,
                                .ld = ad->out,
                                .dtype = m->dt,
                                .dy = mt_elem(m, dy, t->col),
                                .x = mt_elem(m, s.z, t->col),
                                .scale = s.inverse + t->col,
                                .db = mt_grad_of(g, t->magnitude),
                                .workspace = m->own.workspace,
                            },
                            err);
    }
    return rc;
}

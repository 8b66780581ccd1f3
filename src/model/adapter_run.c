/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low-rank adapters on a linear layer: y += s (x A^T) B^T, and backward. The A of a layer's targets are end to end, so
 * one product makes x A^T of them all; each B then uses its own columns of that and of y. x A^T and s dy B are
 * rounded to the compute dtype, sums are FP32. Backward recomputes x A^T: a thin product. With dropout (on x, before A,
 * as in PEFT) every target has its own mask, drawn again whenever it is needed, and its own products.
 */
#include <assert.h>

#include "model/linear.h"

/* Rows [first, first + n) of A: those of all the layer's targets, or of one. */
struct rows {
    size_t first, n;
};

static struct rows rows_of(const struct mt_adapter_target *t)
{
    return (struct rows){t->row, t->rank};
}

static struct rows all_rows(const struct mt_adapter *ad)
{
    return (struct rows){0, ad->rank};
}

/* A for these rows, and a target's B, as linear layers of the run's rows. */
static struct mt_linear_shape shape_of_a(const mt_model *m, const struct mt_adapter_run *a, struct rows r)
{
    return (struct mt_linear_shape){a->n, a->adapter->in, r.n, m->dt, m->dt};
}

static struct mt_linear_shape shape_of_b(const mt_model *m, const struct mt_adapter_run *a,
                                         const struct mt_adapter_target *t)
{
    return (struct mt_linear_shape){a->n, t->rank, t->out, m->dt, m->dt};
}

static const void *weight_of_a(const mt_model *m, const struct mt_adapter_run *a, struct rows r)
{
    return mt_adapter_elem(m, a->w, a->adapter->a, r.first * a->adapter->in);
}

/* x A^T for these rows of A: columns of [n, rank]. */
static int inner(mt_model *m, const struct mt_adapter_run *a, struct rows r, const void *x, struct mt_err *err)
{
    struct mt_linear_shape s = shape_of_a(m, a, r);
    struct mt_gemm g = mt_gemm_output(&s, x, weight_of_a(m, a, r), mt_elem(m, m->own.adapter_x, r.first));
    g.ldd = a->adapter->rank;
    return mt_op_gemm(m->dev, &g, err);
}

static bool drops(const mt_model *m, const struct mt_adapter *ad)
{
    return ad->dropout > 0 && m->training;
}

/* x after the target's dropout: added to `sum`, or if that is NULL written to m->adapter_in. */
static int drop(mt_model *m, const struct mt_adapter_run *a, const struct mt_adapter_target *t, const void *x,
                void *sum, struct mt_err *err)
{
    return mt_op_dropout(m->dev,
                         &(struct mt_dropout){
                             .n = a->n,
                             .c = a->adapter->in,
                             .dtype = m->dt,
                             .out_dtype = sum ? a->dx_dtype : m->dt,
                             .p = (float)a->adapter->dropout,
                             .seed = m->running->of.seed,
                             .stream = m->running->of.step << 32 | t->key,
                             .first_row = m->running->first_row,
                             .rows = m->rows,
                             .x = x,
                             .add = sum,
                             .out = sum ? sum : m->adapter_in,
                         },
                         err);
}

/* x A^T of all targets; with dropout each of its own masked x. */
static int inner_of_all(mt_model *m, const struct mt_adapter_run *a, struct mt_err *err)
{
    const struct mt_adapter *ad = a->adapter;
    int rc = 0;
    if (!drops(m, ad))
        return inner(m, a, all_rows(ad), a->x, err);
    for (size_t i = 0; i < ad->n_targets && !rc; i++)
        rc = drop(m, a, &ad->target[i], a->x, NULL, err)
          ?: inner(m, a, rows_of(&ad->target[i]), m->adapter_in, err);
    return rc;
}

/* They are of no further use, x A^T after each pass and s dy B after the weights' gradients. */
static void poison(mt_model *m, const struct mt_adapter_run *a, bool dy)
{
    size_t size = mt_dtype_size(m->dt), bytes = a->n * a->adapter->rank * size;
    mt_model_poison(m, m->own.adapter_x, bytes);
    mt_model_poison(m, m->own.adapter_dy, dy ? bytes : 0);
    mt_model_poison(m, m->adapter_in, drops(m, a->adapter) ? a->n * a->adapter->in * size : 0);
}

/* The run of a layer with the adapter of the learner whose micro-batch is running. */
static struct mt_adapter_run of_running(const mt_model *m, const struct mt_adapter_run *a)
{
    struct mt_adapter_run own = *a;
    own.adapter = mt_running_adapter(m, a->adapter);
    return own;
}

/* y += s (x A^T) B^T of a target, in its columns. */
static int outer(mt_model *m, const struct mt_adapter_run *a, const struct mt_adapter_target *t, struct mt_err *err)
{
    struct mt_linear_shape s = shape_of_b(m, a, t);
    s.d_dtype = a->y_dtype;
    struct mt_gemm g = mt_gemm_output(&s, mt_elem(m, m->own.adapter_x, t->row), mt_adapter_elem(m, a->w, t->b, 0),
                                      (char *)a->y + t->col * mt_dtype_size(a->y_dtype));
    g.scale = t->scale;
    g.lda = a->adapter->rank;
    g.ldd = a->ld;
    mt_gemm_add(&g);
    return mt_op_gemm(m->dev, &g, err);
}

int mt_adapter_forward(mt_model *m, const struct mt_adapter_run *layer, struct mt_err *err)
{
    const struct mt_adapter_run own = of_running(m, layer), *a = &own;
    const struct mt_adapter *ad = a->adapter;
    if (!ad || ad->merged)
        return 0;
    int rc = inner_of_all(m, a, err);
    for (size_t i = 0; i < ad->n_targets && !rc; i++)
        rc = outer(m, a, &ad->target[i], err);
    poison(m, a, false);
    return rc;
}

/* s dy B of a target, into its columns of [n, rank]. */
static int outer_grad(mt_model *m, const struct mt_adapter_run *a, const struct mt_adapter_target *t,
                      struct mt_err *err)
{
    struct mt_linear_shape s = shape_of_b(m, a, t);
    struct mt_gemm g = mt_gemm_input_grad(&s, mt_elem(m, a->dy, t->col), mt_adapter_elem(m, a->w, t->b, 0),
                                          mt_elem(m, m->own.adapter_dy, t->row));
    g.scale = t->scale;
    g.lda = a->ld;
    g.ldd = a->adapter->rank;
    return mt_op_gemm(m->dev, &g, err);
}

/* (s dy B) A for these rows of A: added to `sum`, or if that is NULL written to m->adapter_in. */
static int input_grad(mt_model *m, const struct mt_adapter_run *a, struct rows r, void *sum, struct mt_err *err)
{
    struct mt_linear_shape s = shape_of_a(m, a, r);
    s.d_dtype = sum ? a->dx_dtype : m->dt;
    struct mt_gemm g = mt_gemm_input_grad(&s, mt_elem(m, m->own.adapter_dy, r.first), weight_of_a(m, a, r),
                                          sum ? sum : m->adapter_in);
    g.lda = a->adapter->rank;
    if (sum)
        mt_gemm_add(&g);
    return mt_op_gemm(m->dev, &g, err);
}

int mt_adapter_input_grad(mt_model *m, const struct mt_adapter_run *layer, struct mt_err *err)
{
    const struct mt_adapter_run own = of_running(m, layer), *a = &own;
    const struct mt_adapter *ad = a->adapter;
    int rc = 0;
    if (!ad)
        return 0;
    m->own.dy_of = ad;
    for (size_t i = 0; i < ad->n_targets && !rc; i++)
        rc = outer_grad(m, a, &ad->target[i], err);
    if (rc || ad->merged) /* the product with W has the rest */
        return rc;
    if (!drops(m, ad))
        return input_grad(m, a, all_rows(ad), a->dx, err);
    for (size_t i = 0; i < ad->n_targets && !rc; i++)
        rc = input_grad(m, a, rows_of(&ad->target[i]), NULL, err)
          ?: drop(m, a, &ad->target[i], m->adapter_in, a->dx, err);
    return rc;
}

static float *grad_of(const struct mt_adapter_run *a, struct mt_param p)
{
    return a->g + (p.grad - a->g_first);
}

/* dB += s dy^T (x A^T) */
static int b_grad(mt_model *m, const struct mt_adapter_run *a, const struct mt_adapter_target *t, struct mt_err *err)
{
    struct mt_linear_shape s = shape_of_b(m, a, t);
    struct mt_gemm g = mt_gemm_weight_grad(&s, mt_elem(m, a->dy, t->col), mt_elem(m, m->own.adapter_x, t->row),
                                           grad_of(a, t->b), true);
    g.scale = t->scale;
    g.lda = a->ld;
    g.ldb = a->adapter->rank;
    return mt_op_gemm(m->dev, &g, err);
}

/* dA += (s dy B)^T x for these rows */
static int a_grad(mt_model *m, const struct mt_adapter_run *a, struct rows r, const void *x, struct mt_err *err)
{
    struct mt_linear_shape s = shape_of_a(m, a, r);
    struct mt_gemm g = mt_gemm_weight_grad(&s, mt_elem(m, m->own.adapter_dy, r.first), x,
                                           grad_of(a, a->adapter->a) + r.first * a->adapter->in, true);
    g.lda = a->adapter->rank;
    return mt_op_gemm(m->dev, &g, err);
}

int mt_adapter_weight_grad(mt_model *m, const struct mt_adapter_run *layer, struct mt_err *err)
{
    const struct mt_adapter_run own = of_running(m, layer), *a = &own;
    const struct mt_adapter *ad = a->adapter;
    int rc = 0;
    if (!ad)
        return 0;
    assert(m->own.dy_of == ad);
    m->own.dy_of = NULL;
    bool dropped = drops(m, ad);
    if (!dropped)
        rc = inner(m, a, all_rows(ad), a->x, err);
    for (const struct mt_adapter_target *t = ad->target; t < ad->target + ad->n_targets && !rc; t++) {
        if (dropped)
            rc = drop(m, a, t, a->x, NULL, err);
        if (!rc && dropped)
            rc = inner(m, a, rows_of(t), m->adapter_in, err);
        rc = rc ?: b_grad(m, a, t, err);
        if (!rc && dropped)
            rc = a_grad(m, a, rows_of(t), m->adapter_in, err);
    }
    if (!rc && !dropped)
        rc = a_grad(m, a, all_rows(ad), a->x, err);
    poison(m, a, true);
    return rc;
}

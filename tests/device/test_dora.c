/* SPDX-License-Identifier: Apache-2.0 */
/* DoRA: norms of W + s B A that is never made, columns scaled by them, and the gradient of magnitudes. */
#include <math.h>

#include "harness.h"

struct dora {
    size_t n, c, r;
};

/* W A^T and A A^T as products would leave them, rounded to f32. */
static struct dbuf *product(struct harness *h, const double *x, size_t n, const double *a, size_t r, size_t c)
{
    double *out = scratch(h, n * r);
    for (size_t i = 0; i < n * r; i++)
        for (size_t k = 0; k < c; k++)
            out[i] += x[i / r * c + k] * a[i % r * c + k];
    return buf_values(h, MT_F32, n * r, out);
}

static void scale_case(struct harness *h, const struct dora *d)
{
    double *w, *b, *a, *m, *scale = scratch(h, d->n), *inverse = scratch(h, d->n), s = 1.5;
    struct dbuf *bw = buf_random(h, h->dtype, d->n * d->c, 1, &w), *bb = buf_random(h, h->dtype, d->n * d->r, 0.3, &b);
    struct dbuf *bm = buf_random(h, h->dtype, d->n, 1, &m), *out[2] = {buf_nan(h, MT_F32, d->n), buf_nan(h, MT_F32, d->n)};
    buf_random(h, h->dtype, d->r * d->c, 0.3, &a);
    struct mt_dora_scale op = {.n = d->n, .c = d->c, .r = d->r, .dtype = h->dtype, .s = (float)s, .w = bw->p, .b = bb->p,
                               .magnitude = bm->p, .wa = product(h, w, d->n, a, d->r, d->c)->p,
                               .gram = product(h, a, d->r, a, d->r, d->c)->p, .scale = out[0]->p, .inverse = out[1]->p};
    RUN(h, mt_op_dora_scale, &op);
    for (size_t i = 0; i < d->n; i++) {
        double sum = 0;
        for (size_t j = 0; j < d->c; j++) {
            double v = w[i * d->c + j];
            for (size_t k = 0; k < d->r; k++)
                v += s * b[i * d->r + k] * a[k * d->c + j];
            sum += v * v;
        }
        inverse[i] = 1 / sqrt(sum);
        scale[i] = m[i] * inverse[i];
    }
    expect_close(h, "scale", buf_get(h, out[0]), scale, d->n, 2e-6);
    expect_close(h, "inverse", buf_get(h, out[1]), inverse, d->n, 2e-6);
    RUN(h, mt_op_dora_scale, &(struct mt_dora_scale){.n = d->n, .dtype = h->dtype, .scale = out[0]->p, .inverse = out[1]->p});
    for (size_t i = 0; i < d->n; i++) {
        scale[i] = 1;
        inverse[i] = 0;
    }
    expect_close(h, "no scale", buf_get(h, out[0]), scale, d->n, 0);
    expect_close(h, "no inverse", buf_get(h, out[1]), inverse, d->n, 0);
}

DEVICE_TEST(dora_scale_is_of_the_sum_that_is_not_made)
{
    static const struct dora shapes[] = {{5, 24, 4}, {67, 33, 3}, {3, 2600, 16}, {2, 40, 300}, {1, 8, 1}};
    for (size_t i = 0; i < sizeof(shapes) / sizeof(*shapes); i++)
        scale_case(h, &shapes[i]);
}

static void columns_case(struct harness *h, size_t n, size_t c, enum mt_dtype out)
{
    double *x, *scale, *bias, *add, *want = scratch(h, n * c);
    struct dbuf *bx = buf_random(h, h->dtype, n * c, 1, &x), *bs = buf_random(h, MT_F32, c, 1, &scale);
    struct dbuf *bb = buf_random(h, h->dtype, c, 1, &bias), *ba = buf_random(h, out, n * c, 1, &add);
    struct mt_scale_columns op = {.n = n, .c = c, .dtype = h->dtype, .out_dtype = out, .x = bx->p, .scale = bs->p,
                                  .bias = bb->p, .add = ba->p, .out = ba->p};
    double tol = out == MT_F32 ? 3e-7 : 3e-3;
    RUN(h, mt_op_scale_columns, &op);
    for (size_t i = 0; i < n * c; i++)
        want[i] = add[i] + bias[i % c] + scale[i % c] * x[i];
    expect_close(h, "all", buf_get(h, ba), want, n * c, tol);
    op.bias = op.add = NULL;
    op.out_dtype = h->dtype;
    op.out = bx->p;
    RUN(h, mt_op_scale_columns, &op);
    for (size_t i = 0; i < n * c; i++)
        want[i] = scale[i % c] * x[i];
    expect_close(h, "scaled in place", buf_get(h, bx), want, n * c, tolerance(h, 3e-7, 3e-3));
}

DEVICE_TEST(dora_columns_are_scaled)
{
    columns_case(h, 37, 24, h->dtype);
    columns_case(h, 3, 2051, h->dtype);
    columns_case(h, 130, 520, h->dtype);
    columns_case(h, 5, 520, MT_F32);
    columns_case(h, 3, 33, MT_F32);
}

static void magnitude_case(struct harness *h, size_t n, size_t c, size_t ld)
{
    double *dy, *x, *scale, *db, *want = scratch(h, c);
    struct dbuf *by = buf_random(h, h->dtype, n * ld, 1, &dy), *bx = buf_random(h, h->dtype, n * ld, 1, &x);
    struct dbuf *bs = buf_random(h, MT_F32, c, 1, &scale), *bd = buf_random(h, MT_F32, c, 1, &db);
    struct mt_bias_bwd a = {.n = n, .c = c, .ld = ld, .dtype = h->dtype, .dy = by->p, .x = bx->p, .scale = bs->p,
                            .db = bd->p};
    a.workspace = workspace(h, mt_op_bias_bwd_workspace(h->dev, &a));
    RUN(h, mt_op_bias_bwd, &a);
    for (size_t k = 0; k < c; k++) {
        for (size_t i = 0; i < n; i++)
            want[k] += dy[i * ld + k] * x[i * ld + k];
        want[k] = db[k] + scale[k] * want[k];
    }
    expect_close(h, "db", buf_get(h, bd), want, c, 2e-6);
}

DEVICE_TEST(dora_magnitudes_gradient_is_the_sum_of_products)
{
    magnitude_case(h, 131, 72, 80);
    magnitude_case(h, 1, 8, 8);
    magnitude_case(h, 70, 33, 35);
    magnitude_case(h, 1500, 520, 520);
}

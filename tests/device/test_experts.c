/* SPDX-License-Identifier: Apache-2.0 */
/* Rows to an expert and back, and the backward of its gated unit. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "harness.h"

/* An expert's list: of every `step`-th token its slot token % k. */
static struct dbuf *list_of(struct harness *h, size_t n, size_t k, size_t step, int32_t **host)
{
    int32_t *list = (int32_t *)(void *)scratch(h, n + 1);
    for (size_t i = 0; i < n; i++)
        list[i] = (int32_t)(i * step * k + i * step % k);
    *host = list;
    return buf_ints(h, list, n);
}

struct moved {
    size_t n, padded, c, k, step;
    bool weights;
};

static void moved_case(struct harness *h, const struct moved *m)
{
    size_t n = m->n, c = m->c, k = m->k, rows = n + m->padded, tokens = n * m->step + 1;
    double *x, *w = NULL, *want = scratch(h, rows * c);
    int32_t *list;
    struct dbuf *bl = list_of(h, n, k, m->step, &list), *bx = buf_random(h, h->dtype, tokens * c, 1, &x);
    struct dbuf *bw = m->weights ? buf_random(h, MT_F32, tokens * k, 1, &w) : NULL, *out = buf_nan(h, h->dtype, rows * c);
    RUN(h, mt_op_moe_gather, &(struct mt_moe_gather){.n = n, .n_padded = rows, .c = c, .k = k, .dtype = h->dtype, .list = bl->p,
                                                     .x = bx->p, .weights = bw ? bw->p : NULL, .out = out->p});
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < c; j++)
            want[i * c + j] = x[(size_t)list[i] / k * c + j] * (w ? w[list[i]] : 1);
    expect_close(h, "gathered", buf_get(h, out), want, rows * c, w ? tolerance(h, 1e-7, 3e-3) : 0);
}

DEVICE_TEST(rows_go_to_an_expert)
{
    moved_case(h, &(struct moved){.n = 1, .c = 8, .k = 1, .step = 1});
    moved_case(h, &(struct moved){.n = 37, .padded = 91, .c = 72, .k = 8, .step = 3});
    moved_case(h, &(struct moved){.n = 37, .padded = 91, .c = 72, .k = 8, .step = 3, .weights = true});
    moved_case(h, &(struct moved){.n = 5, .padded = 1, .c = 33, .k = 4, .step = 2});
    moved_case(h, &(struct moved){.n = 5, .padded = 1, .c = 33, .k = 4, .step = 2, .weights = true});
    moved_case(h, &(struct moved){.n = 9, .c = 4104, .k = 6, .step = 1, .weights = true});
    moved_case(h, &(struct moved){.n = 3, .padded = 2, .c = 5003, .k = 2, .step = 5, .weights = true});
    moved_case(h, &(struct moved){.n = 700, .c = 24, .k = 3, .step = 1, .weights = true});
}

/* The bucket of an expert that has no row. */
DEVICE_TEST(an_expert_without_rows_gets_zeros)
{
    enum { ROWS = 16, C = 40 };
    struct dbuf *out = buf_nan(h, h->dtype, ROWS * C), *x = buf_nan(h, h->dtype, C), *list = buf_nan(h, MT_F32, 1);
    RUN(h, mt_op_moe_gather, &(struct mt_moe_gather){.n = 0, .n_padded = ROWS, .c = C, .k = 2, .dtype = h->dtype,
                                                     .list = list->p, .x = x->p, .out = out->p});
    expect_close(h, "zeros", buf_get(h, out), scratch(h, ROWS * C), ROWS * C, 0);
}

struct combined {
    size_t n, c, k, first, rows; /* of all n * k places, src has those from `first` on */
    size_t skip;                 /* every skip-th token has no entry; 0: all have */
    bool down, weights;
};

/* Places by a permutation, so that a token's entries are in no order. */
static void places_of(const struct combined *s, int32_t *places)
{
    size_t all = s->n * s->k, stride = all > 7 ? 7 : 1;
    while (all % stride == 0 && stride > 1)
        stride += 2;
    for (size_t i = 0; i < all; i++)
        places[i] = s->skip && i / s->k % s->skip == 0 ? -1 : (int32_t)(i * stride % all);
}

/* One rounding of each product and of each sum, in the order of places. */
static void combined_reference(const struct combined *s, const int32_t *places, const double *x, const double *w, double *sum)
{
    for (size_t i = 0; i < s->rows; i++) {
        size_t row = s->down ? s->rows - 1 - i : i;
        for (size_t e = 0; e < s->n * s->k; e++)
            for (size_t j = 0; places[e] == (int32_t)(s->first + row) && j < s->c; j++) {
                double *at = &sum[e / s->k * s->c + j];
                *at = (double)((float)*at + (float)(w ? w[e] : 1) * (float)x[row * s->c + j]);
            }
    }
}

static void combined_case(struct harness *h, const struct combined *s)
{
    int32_t *places = (int32_t *)(void *)scratch(h, s->n * s->k);
    double *x, *w = NULL, *sum;
    places_of(s, places);
    struct dbuf *bp = buf_ints(h, places, s->n * s->k), *src = buf_random(h, h->dtype, s->rows * s->c, 1, &x);
    struct dbuf *bw = s->weights ? buf_random(h, MT_F32, s->n * s->k, 1, &w) : NULL;
    struct dbuf *bs = buf_random(h, MT_F32, s->n * s->c, 1, &sum);
    RUN(h, mt_op_moe_combine, &(struct mt_moe_combine){.n = s->n, .c = s->c, .k = s->k, .rows = s->rows, .first = s->first,
                                                       .down = s->down, .dtype = h->dtype, .places = bp->p,
                                                       .weights = bw ? bw->p : NULL, .src = src->p, .sum = bs->p});
    combined_reference(s, places, x, w, sum);
    expect_close(h, "sums", buf_get(h, bs), sum, s->n * s->c, 0); /* these roundings and no other */
}

DEVICE_TEST(outputs_are_added_in_the_order_of_places)
{
    combined_case(h, &(struct combined){.n = 1, .c = 8, .k = 1, .rows = 1});
    combined_case(h, &(struct combined){.n = 20, .c = 48, .k = 3, .rows = 60, .weights = true});
    combined_case(h, &(struct combined){.n = 20, .c = 48, .k = 3, .rows = 60, .down = true});
    combined_case(h, &(struct combined){.n = 37, .c = 72, .k = 8, .first = 90, .rows = 61, .skip = 5, .weights = true});
    combined_case(h, &(struct combined){.n = 37, .c = 72, .k = 8, .first = 90, .rows = 61, .skip = 5, .down = true});
    combined_case(h, &(struct combined){.n = 5, .c = 33, .k = 4, .first = 3, .rows = 9, .weights = true});
    combined_case(h, &(struct combined){.n = 5, .c = 33, .k = 7, .first = 3, .rows = 20, .down = true});
    combined_case(h, &(struct combined){.n = 5, .c = 35, .k = 7, .first = 2, .rows = 30, .weights = true});
    combined_case(h, &(struct combined){.n = 3, .c = 5003, .k = 2, .first = 1, .rows = 5, .down = true, .weights = true});
    combined_case(h, &(struct combined){.n = 9, .c = 4104, .k = 6, .rows = 70, .first = 2, .weights = true}); /* beyond all */
    combined_case(h, &(struct combined){.n = 300, .c = 24, .k = 10, .first = 700, .rows = 1000});
}

/* Where the outputs are summed in parts, each part goes on where the one before ended. */
DEVICE_TEST(parts_of_a_sum_have_the_bits_of_one)
{
    enum { N = 24, K = 6, C = 40, ROWS = N * K, CUT = 57 };
    int32_t places[ROWS];
    double *x, *w, *zero = scratch(h, N * C);
    places_of(&(struct combined){.n = N, .k = K}, places);
    struct dbuf *bp = buf_ints(h, places, ROWS), *src = buf_random(h, MT_F32, ROWS * C, 1, &x);
    struct dbuf *bw = buf_random(h, MT_F32, ROWS, 1, &w), *whole = buf_values(h, MT_F32, N * C, zero);
    struct dbuf *parts = buf_values(h, MT_F32, N * C, zero);
    struct mt_moe_combine a = {.n = N, .c = C, .k = K, .rows = ROWS, .dtype = MT_F32, .places = bp->p, .weights = bw->p,
                               .src = src->p, .sum = whole->p};
    RUN(h, mt_op_moe_combine, &a);
    a.sum = parts->p;
    a.rows = CUT;
    RUN(h, mt_op_moe_combine, &a);
    a.first = CUT;
    a.rows = ROWS - CUT;
    a.src = (const float *)src->p + (size_t)CUT * C;
    RUN(h, mt_op_moe_combine, &a);
    expect_close(h, "parts", buf_get(h, parts), buf_get(h, whole), N * C, 0);
}

/* --- the gated unit --------------------------------------------------------------------------- */

enum { CLAMP = 7 };

/* act(g) u and its derivatives. */
static double unit(enum mt_glu_kind kind, double g, double u, double *by_g, double *by_u)
{
    double alpha = 1.702;
    if (kind == MT_GLU_RELU2) {
        *by_g = 2 * fmax(g, 0);
        *by_u = 0;
        return pow(fmax(g, 0), 2);
    }
    if (kind == MT_GLU_GELU_TANH) {
        double z = sqrt(2 / M_PI) * (g + 0.044715 * g * g * g), t = tanh(z), act = 0.5 * g * (1 + t);
        *by_g = u * (0.5 * (1 + t) + 0.5 * g * (1 - t * t) * sqrt(2 / M_PI) * (1 + 3 * 0.044715 * g * g));
        *by_u = act;
        return act * u;
    }
    bool clamped = kind == MT_GLU_CLAMPED;
    double x = clamped ? fmin(g, CLAMP) : g, v = clamped ? fmax(fmin(u, CLAMP), -CLAMP) + 1 : u;
    double a = clamped ? alpha : 1, s = sigmoid(a * x);
    *by_g = clamped && g > CLAMP ? 0 : v * s * (1 + a * x * (1 - s));
    *by_u = clamped && fabs(u) > CLAMP ? 0 : x * s;
    return x * s * v;
}

struct expert {
    size_t n, padded, f, k, c; /* c: with biases */
    enum mt_glu_kind kind;
    bool in_place;
};

struct expert_case {
    double *x, *dout, *w, *bias, *d_o;
    int32_t *list;
};

static void expert_reference(const struct expert *s, const struct expert_case *c, double *dx, double *out, double *dw)
{
    size_t f = s->f, inputs = mt_glu_inputs(s->kind);
    for (size_t i = 0; i < s->n; i++) {
        double w = c->w[c->list[i]], dot = 0, by_g, by_u;
        for (size_t j = 0; j < f; j++) {
            size_t gate = i * inputs * f + j, up = gate + (inputs - 1) * f;
            double d = c->dout[i * f + j], y = unit(s->kind, c->x[gate], c->x[up], &by_g, &by_u);
            dx[gate] = w * d * by_g;
            if (inputs == 2)
                dx[up] = w * d * by_u;
            out[i * f + j] = w * y;
            dot += d * y;
        }
        for (size_t j = 0; j < s->c; j++)
            dot += c->bias[j] * c->d_o[i * s->c + j];
        dw[c->list[i]] = dot;
    }
}

static void expert_unit_case(struct harness *h, const struct expert *s)
{
    size_t n = s->n, f = s->f, k = s->k, rows = n + s->padded, tokens = 2 * n + 1, in = mt_glu_inputs(s->kind) * f;
    struct expert_case c;
    struct dbuf *bl = list_of(h, n, k, 2, &c.list), *gu = buf_random(h, h->dtype, rows * in, 4, &c.x);
    struct dbuf *dout = buf_random(h, h->dtype, rows * f, 1, &c.dout), *bw = buf_random(h, MT_F32, tokens * k, 1, &c.w);
    struct dbuf *bias = s->c ? buf_random(h, h->dtype, s->c, 1, &c.bias) : NULL;
    struct dbuf *d_o = s->c ? buf_random(h, h->dtype, rows * s->c, 1, &c.d_o) : NULL;
    struct dbuf *dx = s->in_place ? gu : buf_nan(h, h->dtype, rows * in);
    struct dbuf *out = s->in_place ? dout : buf_nan(h, h->dtype, rows * f), *dw = buf_random(h, MT_F32, tokens * k, 1, NULL);
    double *want_dx = scratch(h, rows * in), *want_out = scratch(h, rows * f), *want_dw = buf_get(h, dw);
    expert_reference(s, &c, want_dx, want_out, want_dw);
    RUN(h, mt_op_expert_glu_bwd,
        &(struct mt_expert_glu_bwd){.n = n, .n_padded = rows, .f = f, .k = k, .dtype = h->dtype, .kind = s->kind, .alpha = 1.702f,
                                    .limit = CLAMP, .gate_up = gu->p, .dout = dout->p, .list = bl->p, .weights = bw->p,
                                    .c = s->c, .down_bias = bias ? bias->p : NULL, .d_o = d_o ? d_o->p : NULL,
                                    .dgate_up = dx->p, .out = out->p, .dweights = dw->p});
    expect_close(h, "dgate_up", buf_get(h, dx), want_dx, rows * in, tolerance(h, 5e-6, 3e-3));
    expect_close(h, "out", buf_get(h, out), want_out, rows * f, tolerance(h, 1e-6, 3e-3));
    /* f32 sums of terms of either sign: what is lost of the terms counts against what remains of them. Entries of
     * other experts stay. */
    expect_close(h, "dweights", buf_get(h, dw), want_dw, tokens * k, tolerance(h, 1e-5, 5e-5));
}

DEVICE_TEST(expert_units_match_the_derivative)
{
    for (int kind = MT_GLU_SILU; kind <= MT_GLU_RELU2; kind++) {
        enum mt_glu_kind g = (enum mt_glu_kind)kind;
        expert_unit_case(h, &(struct expert){.n = 13, .padded = 3, .f = 1096, .k = 4, .kind = g});
        expert_unit_case(h, &(struct expert){.n = 5, .f = 33, .k = 2, .kind = g, .in_place = true});
        expert_unit_case(h, &(struct expert){.n = 9, .padded = 7, .f = 72, .k = 8, .c = 35, .kind = g, .in_place = true});
        expert_unit_case(h, &(struct expert){.n = 2, .padded = 1, .f = 5001, .k = 1, .c = 3000, .kind = g});
    }
    expert_unit_case(h, &(struct expert){.n = 1, .f = 4104, .k = 1});
    expert_unit_case(h, &(struct expert){.n = 160, .f = 8, .k = 3, .in_place = true});
}

/* --- the shared expert's gate ------------------------------------------------------------------- */

static void gate_case(struct harness *h, size_t n, size_t c, size_t f)
{
    double *x, *w, *act, *dgate, *dx, *dw, *want_gate = scratch(h, n), *want = scratch(h, n * f);
    struct dbuf *bx = buf_random(h, h->dtype, n * c, 1, &x), *bw = buf_random(h, h->dtype, c, 1 / sqrt((double)c), &w);
    struct dbuf *ba = buf_random(h, h->dtype, n * f, 1, &act), *bg = buf_nan(h, MT_F32, n);
    RUN(h, mt_op_shared_gate, &(struct mt_shared_gate){.n = n, .c = c, .f = f, .dtype = h->dtype, .x = bx->p, .w = bw->p,
                                                       .act = ba->p, .gate = bg->p});
    struct dbuf *bdg = buf_random(h, MT_F32, n, 1, &dgate), *bdx = buf_random(h, MT_F32, n * c, 1, &dx);
    struct dbuf *bdw = buf_random(h, MT_F32, c, 1, &dw), *again = buf_values(h, MT_F32, n * c, dx);
    struct mt_shared_gate_bwd b = {.n = n, .c = c, .dtype = h->dtype, .x = bx->p, .w = bw->p, .gate = bg->p,
                                   .dgate = bdg->p, .dx = bdx->p, .dw = bdw->p};
    b.workspace = workspace(h, mt_op_shared_gate_bwd_workspace(h->dev, &b));
    RUN(h, mt_op_shared_gate_bwd, &b);
    b.dx = again->p;
    b.dw = NULL;
    RUN(h, mt_op_shared_gate_bwd, &b);
    for (size_t i = 0; i < n; i++) {
        double dot = 0;
        for (size_t k = 0; k < c; k++)
            dot += x[i * c + k] * w[k];
        double g = want_gate[i] = sigmoid(dot), d = dgate[i] * g * (1 - g);
        for (size_t k = 0; k < f; k++)
            want[i * f + k] = act[i * f + k] * g;
        for (size_t k = 0; k < c; k++) {
            dx[i * c + k] += d * w[k];
            dw[k] += d * x[i * c + k];
        }
    }
    expect_close(h, "gate", buf_get(h, bg), want_gate, n, 2e-6);
    expect_close(h, "gated", buf_get(h, ba), want, n * f, tolerance(h, 2e-6, 3e-3));
    expect_close(h, "dx", buf_get(h, bdx), dx, n * c, 2e-6);
    expect_close(h, "dx without dw", buf_get(h, again), dx, n * c, 2e-6);
    expect_close(h, "dw", buf_get(h, bdw), dw, c, 2e-6);
}

DEVICE_TEST(shared_gates_match_the_derivative)
{
    gate_case(h, 1, 8, 8);
    gate_case(h, 67, 72, 40);
    gate_case(h, 9, 33, 21);
    gate_case(h, 6, 4104, 5008);
    gate_case(h, 3, 2056, 35);
}

/* Its backward takes the gate as the weight of an expert that has every row. */
DEVICE_TEST(an_expert_without_a_list_has_every_row)
{
    enum { N = 11, F = 40 };
    double *w;
    int32_t all[N];
    struct dbuf *gu = buf_random(h, h->dtype, N * 2 * F, 2, NULL), *dout = buf_random(h, h->dtype, N * F, 1, NULL);
    struct dbuf *bw = buf_random(h, MT_F32, N, 1, &w), *dx[2], *out[2], *dw[2];
    for (int i = 0; i < N; i++)
        all[i] = i;
    for (int k = 0; k < 2; k++) {
        dx[k] = buf_nan(h, h->dtype, N * 2 * F);
        out[k] = buf_nan(h, h->dtype, N * F);
        dw[k] = buf_nan(h, MT_F32, N);
        RUN(h, mt_op_expert_glu_bwd,
            &(struct mt_expert_glu_bwd){.n = N, .n_padded = N, .f = F, .k = 1, .dtype = h->dtype, .gate_up = gu->p,
                                        .dout = dout->p, .list = k ? buf_ints(h, all, N)->p : NULL, .weights = bw->p,
                                        .dgate_up = dx[k]->p, .out = out[k]->p, .dweights = dw[k]->p});
    }
    expect_close(h, "dgate_up", buf_get(h, dx[0]), buf_get(h, dx[1]), N * 2 * F, 0);
    expect_close(h, "out", buf_get(h, out[0]), buf_get(h, out[1]), N * F, 0);
    expect_close(h, "dweights", buf_get(h, dw[0]), buf_get(h, dw[1]), N, 0);
}

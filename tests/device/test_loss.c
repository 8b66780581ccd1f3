/* SPDX-License-Identifier: Apache-2.0 */
/* Gated units and cross-entropy. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "harness.h"

enum { CLAMP = 4 };
#define ALPHA 1.702

/* Of the gate alone; what is added to the up half is glu_case()'s. */
static double gate(double x, enum mt_glu_kind kind, double *slope)
{
    if (kind == MT_GLU_CLAMPED) {
        double g = fmin(x, CLAMP), s = sigmoid(ALPHA * g);
        *slope = x > CLAMP ? 0 : s * (1 + ALPHA * g * (1 - s));
        return g * s;
    }
    if (kind == MT_GLU_SILU) {
        double s = sigmoid(x);
        *slope = s * (1 + x * (1 - s));
        return x * s;
    }
    double u = sqrt(2 / M_PI) * (x + 0.044715 * x * x * x), t = tanh(u);
    *slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
    return 0.5 * x * (1 + t);
}

/*
 * The slope is s (1 + x (1 - s)) with the gate s = 1 / (1 + e^-x), and for GELU s + x (2 s (1 - s)) z'(x), with
 * z'(x) = 0.8 (1 + 0.134 x^2). Where s is nearly 1, a relative error of s is one of x, or of 2 x z'(x), times as much
 * in 1 - s. A GPU's reciprocal promises 1 ulp, 2^-23, and two are allowed for here; over gates of spread 3 the root
 * mean square of 2 x z'(x), x > 0, is 19: 19 * 2^-22 = 4.5e-6, in SiLU a tenth of it.
 */
#define GLU_DX_F32 5e-6

static void glu_case(struct harness *h, size_t n, size_t f, enum mt_glu_kind kind)
{
    double *x, *dy, slope;
    struct dbuf *gu = buf_random(h, h->dtype, n * 2 * f, 3, &x), *g = buf_random(h, h->dtype, n * f, 1, &dy);
    struct dbuf *y = buf_nan(h, h->dtype, n * f), *apart = buf_nan(h, h->dtype, n * 2 * f);
    double *want = scratch(h, n * f), *want_dx = scratch(h, n * 2 * f);
    RUN(h, mt_op_glu, &(struct mt_glu){.n = n, .f = f, .dtype = h->dtype, .kind = kind, .gate_up = gu->p, .out = y->p,
                                       .alpha = (float)ALPHA, .limit = CLAMP});
    struct mt_glu_bwd b = {.n = n, .f = f, .dtype = h->dtype, .kind = kind, .gate_up = gu->p, .dout = g->p,
                           .dgate_up = apart->p, .alpha = (float)ALPHA, .limit = CLAMP};
    RUN(h, mt_op_glu_bwd, &b);
    b.dgate_up = gu->p;
    b.out = g->p;
    RUN(h, mt_op_glu_bwd, &b);
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < f; k++) {
            double up = x[i * 2 * f + f + k], a = gate(x[i * 2 * f + k], kind, &slope);
            bool cut = kind == MT_GLU_CLAMPED && fabs(up) > CLAMP;
            double u = kind == MT_GLU_CLAMPED ? fmax(fmin(up, CLAMP), -CLAMP) + 1 : up;
            want[i * f + k] = a * u;
            want_dx[i * 2 * f + k] = dy[i * f + k] * u * slope;
            want_dx[i * 2 * f + f + k] = cut ? 0 : dy[i * f + k] * a;
        }
    expect_close(h, "y", buf_get(h, y), want, n * f, tolerance(h, 1e-6, 3e-3));
    expect_close(h, "y once more, over dy", buf_get(h, g), want, n * f, tolerance(h, 1e-6, 3e-3));
    expect_close(h, "dx", buf_get(h, apart), want_dx, n * 2 * f, tolerance(h, GLU_DX_F32, 3e-3));
    expect_close(h, "dx in place", buf_get(h, gu), want_dx, n * 2 * f, tolerance(h, GLU_DX_F32, 3e-3));
}

DEVICE_TEST(gated_units_match)
{
    glu_case(h, 1, 8, MT_GLU_SILU);
    glu_case(h, 13, 1096, MT_GLU_SILU);
    glu_case(h, 5, 72, MT_GLU_GELU_TANH);
    glu_case(h, 3, 7, MT_GLU_SILU);
    glu_case(h, 9, 1001, MT_GLU_GELU_TANH);
    glu_case(h, 2, 9000, MT_GLU_SILU);
    glu_case(h, 1, 4104, MT_GLU_GELU_TANH);
    glu_case(h, 2, 601, MT_GLU_SILU);
    glu_case(h, 7, 72, MT_GLU_CLAMPED);
    glu_case(h, 3, 1001, MT_GLU_CLAMPED);
    glu_case(h, 2, 4104, MT_GLU_CLAMPED);
}

static double softplus(double x)
{
    return log1p(exp(x));
}

/* With x on both sides of 0, and some between eps and 0, where the curve does not follow e^x. */
static void xielu_case(struct harness *h, size_t n, size_t f)
{
    static const double shape[] = {0.25, -0.75, 0.5, -0.0078125};
    double *x, *dy, *d0, *want = scratch(h, n * f), *want_dx = scratch(h, n * f);
    struct dbuf *bs = buf_values(h, h->dtype, 4, shape), *bx = buf_random(h, h->dtype, n * f, 2, &x);
    struct dbuf *y = buf_nan(h, h->dtype, n * f), *dx = buf_nan(h, h->dtype, n * f);
    struct dbuf *g = buf_random(h, h->dtype, n * f, 1, &dy), *ds = buf_random(h, MT_F32, 2, 1, &d0);
    for (size_t i = 0; i < n * f; i += 5)
        x[i] = i % 2 ? -0.00390625 : 0; /* exact in bf16 */
    bx = buf_values(h, h->dtype, n * f, x);
    struct mt_xielu_bwd b = {.n = n, .f = f, .dtype = h->dtype, .x = bx->p, .dout = g->p, .shape = bs->p, .dx = dx->p};
    RUN(h, mt_op_xielu, &(struct mt_xielu){.n = n, .f = f, .dtype = h->dtype, .x = bx->p, .shape = bs->p, .out = y->p});
    RUN(h, mt_op_xielu_bwd, &b);
    double *apart = buf_get(h, dx), p = softplus(shape[0]), q = shape[2] + softplus(shape[1]), largest = 0;
    double sp = sigmoid(shape[0]), sn = sigmoid(shape[1]), of[2] = {0, 0};
    for (size_t i = 0; i < n * f; i++) {
        double e = expm1(fmin(x[i], shape[3])), v = x[i];
        double slope = v > 0 ? 2 * p * v : q * ((v < shape[3] ? e + 1 : 0) - 1);
        want[i] = (v > 0 ? p * v * v : q * (e - v)) + shape[2] * v;
        want_dx[i] = dy[i] * (slope + shape[2]);
        of[v <= 0] += dy[i] * (v > 0 ? v * v * sp : (e - v) * sn);
        largest += dy[i] * dy[i];
    }
    of[0] += d0[0];
    of[1] += d0[1];
    double *first = buf_get(h, y);
    expect_close(h, "xielu", first, want, n * f, tolerance(h, 2e-6, 4e-3));
    expect_close(h, "its gradient", apart, want_dx, n * f, tolerance(h, 2e-6, 4e-3));
    b.dx = bx->p; /* in place, with the output again, and the alphas */
    b.out = g->p;
    b.dshape = ds->p;
    b.workspace = workspace(h, mt_op_xielu_bwd_workspace(h->dev, &b));
    RUN(h, mt_op_xielu_bwd, &b);
    expect_close(h, "in place", buf_get(h, bx), apart, n * f, 0);
    expect_close(h, "the output again", buf_get(h, g), first, n * f, 0);
    double *got = buf_get(h, ds);
    for (int i = 0; i < 2; i++)
        if (!(fabs(got[i] - of[i]) < 1e-5 * (1 + sqrt(largest))))
            must(h, "alphas", -1, &(struct mt_err){.msg = "their gradient is wrong"});
}

DEVICE_TEST(xielu_and_its_gradient)
{
    xielu_case(h, 1, 8);
    xielu_case(h, 13, 1096);
    xielu_case(h, 3, 7);
    xielu_case(h, 70, 1001);
    xielu_case(h, 2, 9000);
}

static void activate_case(struct harness *h, size_t n, size_t f, enum mt_activate_kind kind)
{
    double *x, *dy, slope;
    struct dbuf *bx = buf_random(h, h->dtype, n * f, 3, &x), *g = buf_random(h, h->dtype, n * f, 1, &dy);
    struct dbuf *y = buf_nan(h, h->dtype, n * f), *apart = buf_nan(h, h->dtype, n * f);
    double *want = scratch(h, n * f), *want_dx = scratch(h, n * f);
    struct mt_activate_bwd b = {.n = n, .f = f, .dtype = h->dtype, .kind = kind, .x = bx->p, .dout = g->p, .dx = apart->p};
    RUN(h, mt_op_activate, &(struct mt_activate){.n = n, .f = f, .dtype = h->dtype, .kind = kind, .x = bx->p, .out = y->p});
    RUN(h, mt_op_activate_bwd, &b);
    b.dx = bx->p;
    b.out = g->p;
    RUN(h, mt_op_activate_bwd, &b);
    for (size_t i = 0; i < n * f; i++) {
        want[i] = kind == MT_ACTIVATE_RELU2 ? pow(fmax(x[i], 0), 2) : gate(x[i], MT_GLU_GELU_TANH, &slope);
        want_dx[i] = dy[i] * (kind == MT_ACTIVATE_RELU2 ? 2 * fmax(x[i], 0) : slope);
    }
    expect_close(h, "y", buf_get(h, y), want, n * f, tolerance(h, 1e-6, 3e-3));
    expect_close(h, "y once more, over dy", buf_get(h, g), want, n * f, tolerance(h, 1e-6, 3e-3));
    expect_close(h, "dx", buf_get(h, apart), want_dx, n * f, tolerance(h, GLU_DX_F32, 3e-3));
    expect_close(h, "dx in place", buf_get(h, bx), want_dx, n * f, tolerance(h, GLU_DX_F32, 3e-3));
}

DEVICE_TEST(units_without_a_gate_match)
{
    for (int kind = MT_ACTIVATE_RELU2; kind <= MT_ACTIVATE_GELU_TANH; kind++) {
        activate_case(h, 1, 8, (enum mt_activate_kind)kind);
        activate_case(h, 13, 1096, (enum mt_activate_kind)kind);
        activate_case(h, 3, 7, (enum mt_activate_kind)kind);
        activate_case(h, 9, 1001, (enum mt_activate_kind)kind);
        activate_case(h, 2, 9000, (enum mt_activate_kind)kind);
    }
}

/* relu would hide it. */
DEVICE_TEST(a_nan_stays_one_without_a_gate)
{
    enum { F = 16 };
    struct dbuf *x = buf_nan(h, h->dtype, F), *g = buf_random(h, h->dtype, F, 1, NULL), *y = buf_random(h, h->dtype, F, 1, NULL);
    RUN(h, mt_op_activate, &(struct mt_activate){.n = 1, .f = F, .dtype = h->dtype, .x = x->p, .out = y->p});
    RUN(h, mt_op_activate_bwd, &(struct mt_activate_bwd){.n = 1, .f = F, .dtype = h->dtype, .x = x->p, .dout = g->p,
                                                         .dx = x->p, .out = g->p});
    struct dbuf *made[] = {y, x, g};
    double is[F], want[F];
    for (size_t i = 0; i < MT_ARRAY_LEN(made); i++) {
        double *got = buf_get(h, made[i]);
        for (int k = 0; k < F; k++) {
            is[k] = isnan(got[k]);
            want[k] = 1;
        }
        expect_close(h, "NaNs", is, want, F, 0);
    }
}

DEVICE_TEST(gated_units_survive_large_inputs)
{
    enum { F = 16 };
    double *x;
    struct dbuf *gu = buf_random(h, h->dtype, 2 * F, 300, &x), *y = buf_nan(h, h->dtype, F);
    RUN(h, mt_op_glu, &(struct mt_glu){.n = 1, .f = F, .dtype = h->dtype, .gate_up = gu->p, .out = y->p});
    double *got = buf_get(h, y), *want = scratch(h, F), slope;
    for (int k = 0; k < F; k++)
        want[k] = gate(x[k], MT_GLU_SILU, &slope) * x[F + k];
    expect_close(h, "y", got, want, F, tolerance(h, 1e-6, 3e-3));
}

/* `pad` elements between rows of logits; without them the gradient takes the logits' place. by_row: each row has a scale
 * of its own, of either sign, and some have none. cap: 0 for none. */
static void capped_loss_case(struct harness *h, size_t n, size_t vocab, size_t pad, bool by_row, double cap)
{
    double *x, *scale = scratch(h, n);
    bool in_place = pad == 0;
    size_t ld = vocab + pad, ldd = in_place ? ld * 4 / mt_dtype_size(h->dtype) : vocab + 1;
    int32_t *t = (int32_t *)(void *)scratch(h, n);
    for (size_t i = 0; i < n; i++) {
        t[i] = i % 5 == 3 ? -100 : (int32_t)((i * 7919) % vocab);
        scale[i] = by_row ? ((double)(i % 4) - 1) / 16 : 0.125;
    }
    struct dbuf *logits = buf_random(h, MT_F32, n * ld, 4, &x), *targets = buf_ints(h, t, n);
    struct dbuf *loss = buf_nan(h, MT_F32, n), *correct = buf_nan(h, MT_F32, n);
    struct dbuf *d = in_place ? logits : buf_nan(h, h->dtype, n * ldd), *entropy = buf_nan(h, MT_F32, n);
    struct dbuf *scales = buf_values(h, MT_F32, n, scale);
    if (cap > 0) {
        RUN(h, mt_op_cap, &(struct mt_cap){n, vocab, ld, (float)cap, logits->p});
        for (size_t i = 0; i < n * ld; i++)
            x[i] = i % ld < vocab ? cap * tanh(x[i] / cap) : x[i];
        expect_close(h, "capped", buf_get(h, logits), x, n * ld, 4e-7);
    }
    RUN(h, mt_op_cross_entropy,
        &(struct mt_cross_entropy){.n = n, .vocab = vocab, .ld = ld, .dtype = h->dtype,
                                   .logits = logits->p, .targets = targets->p, .loss = loss->p,
                                   .correct = correct->p, .entropy = entropy->p, .dlogits = d->p, .ld_dlogits = ldd,
                                   .scale = by_row ? 1000 : 0.125f, .row_scale = by_row ? scales->p : NULL,
                                   .cap = (float)cap});
    struct dbuf view = *d;
    view.dtype = h->dtype;
    view.n = n * ldd;
    double *got = buf_get(h, &view), *g = scratch(h, n * vocab), *want = scratch(h, n * vocab);
    double *want_loss = scratch(h, n), *want_entropy = scratch(h, n);
    for (size_t i = 0; i < n; i++) {
        double max = -1e300, sum = 0;
        for (size_t k = 0; k < vocab; k++)
            max = fmax(max, x[i * ld + k]);
        for (size_t k = 0; k < vocab; k++)
            sum += exp(x[i * ld + k] - max);
        want_loss[i] = t[i] < 0 ? 0 : max + log(sum) - x[i * ld + (size_t)t[i]];
        want_entropy[i] = 0;
        for (size_t k = 0; k < vocab; k++) {
            double p = exp(x[i * ld + k] - max) / sum;
            want_entropy[i] -= t[i] < 0 ? 0 : p * log(p);
            double y = x[i * ld + k], slope = cap > 0 ? 1 - y / cap * (y / cap) : 1;
            want[i * vocab + k] = t[i] < 0 ? 0 : (p - (k == (size_t)t[i])) * scale[i] * slope;
            g[i * vocab + k] = got[i * ldd + k];
        }
    }
    expect_close(h, "loss", buf_get(h, loss), want_loss, n, 2e-6);
    expect_close(h, "entropy", buf_get(h, entropy), want_entropy, n, 2e-6);
    expect_close(h, "dlogits", g, want, n * vocab, tolerance(h, 4e-6, 3e-3));
}

static void loss_case(struct harness *h, size_t n, size_t vocab, size_t pad, bool by_row)
{
    capped_loss_case(h, n, vocab, pad, by_row, 0);
}

DEVICE_TEST(capped_logits_match)
{
    capped_loss_case(h, 5, 1001, 3, true, 2.5);
    capped_loss_case(h, 3, 20011, 0, false, 30);
    capped_loss_case(h, 4, 2060, 0, false, 5);
}

/* Rows of one value, but for a few: {at, value} pairs. */
DEVICE_TEST(the_first_of_the_largest_is_the_guess)
{
    enum { N = 7, V = 20011 };
    static const int32_t targets[N] = {0, 1, 9000, 9000, 20010, -1, 17};
    static const double want_correct[N] = {1, 0, 1, 0, 1, 0, 0};
    double *x = scratch(h, (size_t)N * V), *want_loss = scratch(h, N);
    for (int i = 0; i < N * V; i++)
        x[i] = -INFINITY;
    for (int i = 0; i < 2; i++) /* all the same: the first */
        for (int k = 0; k < V; k++)
            x[i * V + k] = 0.5;
    x[2 * V + 9000] = x[2 * V + 9001] = x[2 * V + 19999] = 3; /* the others are -infinity */
    x[3 * V + 8999] = x[3 * V + 9000] = 3;
    x[4 * V + 20010] = 2;
    x[4 * V + 5] = 1;
    x[5 * V] = 1;
    x[6 * V + 18] = 4;
    x[6 * V + 17] = 3.9990234375;
    want_loss[0] = want_loss[1] = log(V);
    want_loss[2] = log(3);
    want_loss[3] = log(2);
    want_loss[4] = log(1 + exp(-1));
    want_loss[6] = log(1 + exp(4 - 3.9990234375));
    struct dbuf *logits = buf_values(h, MT_F32, (size_t)N * V, x), *loss = buf_nan(h, MT_F32, N);
    struct dbuf *correct = buf_nan(h, MT_F32, N), *d = buf_nan(h, h->dtype, (size_t)N * V), *entropy = buf_nan(h, MT_F32, N);
    struct mt_cross_entropy a = {.n = N, .vocab = V, .ld = V, .dtype = h->dtype, .logits = logits->p,
                                 .targets = buf_ints(h, targets, N)->p, .loss = loss->p,
                                 .correct = correct->p, .entropy = entropy->p, .dlogits = d->p, .ld_dlogits = V, .scale = 1};
    RUN(h, mt_op_cross_entropy, &a);
    expect_close(h, "loss", buf_get(h, loss), want_loss, N, 1e-6);
    expect_close(h, "correct", buf_get_ints(h, correct), want_correct, N, 0);
    double p = 1 / (1 + exp(1)), want_entropy[N] = {log(V), log(V), log(3), log(2), -p * log(p) - (1 - p) * log(1 - p)};
    p = exp(-want_loss[6]);
    want_entropy[6] = -p * log(p) - (1 - p) * log(1 - p);
    expect_close(h, "entropy", buf_get(h, entropy), want_entropy, N, 1e-6);
    double *want = scratch(h, (size_t)N * V);
    for (int i = 0; i < N; i++)
        for (int k = 0; targets[i] >= 0 && k < V; k++)
            want[i * V + k] = exp(x[i * V + k] - x[i * V + targets[i]] - want_loss[i]) - (k == targets[i]);
    expect_close(h, "dlogits", buf_get(h, d), want, (size_t)N * V, tolerance(h, 1e-6, 3e-3));
    a.dlogits = NULL;
    a.correct = NULL;
    RUN(h, mt_op_cross_entropy, &a); /* the loss alone */
    expect_close(h, "loss alone", buf_get(h, loss), want_loss, N, 1e-6);
}

DEVICE_TEST(cross_entropy_matches)
{
    loss_case(h, 3, 7, 3, false);
    loss_case(h, 5, 20011, 0, false);
    loss_case(h, 2, 20012, 3, false);
    loss_case(h, 1, 8, 3, false);
    loss_case(h, 23, 1001, 3, false);
    loss_case(h, 9, 5003, 0, false);
    loss_case(h, 40, 272, 0, false);
    for (size_t part = 0; part < 4; part++) { /* rows that end in each part of what a GPU's thread has at once */
        for (size_t pad = 1; pad < 4; pad++)
            loss_case(h, 4, 2048 * part + 12 - pad, pad, false);
        loss_case(h, 4, 2048 * part + 11, 3, false); /* with rows that are not aligned */
    }
}

/* Logits of 60 to 72, of which the target's alone is large: losses of about 1%, whose errors must not be those of 72. */
DEVICE_TEST(sure_tokens_are_exact)
{
    enum { N = 6, V = 4099 };
    double *x = scratch(h, (size_t)N * V), *want = scratch(h, (size_t)N * V), want_loss[N];
    int32_t t[N];
    for (size_t i = 0; i < N; i++) {
        t[i] = (int32_t)(i * 677);
        double rest = 0;
        for (size_t k = 0; k < V; k++) {
            x[i * V + k] = (double)(float)(58.5 + 0.37 * (double)((k + i) % 3));
            rest += k == (size_t)t[i] ? 0 : exp(x[i * V + k] - 72.3125);
        }
        x[i * V + (size_t)t[i]] = 72.3125;
        want_loss[i] = log1p(rest);
        for (size_t k = 0; k < V; k++)
            want[i * V + k] = (k == (size_t)t[i] ? -rest : exp(x[i * V + k] - 72.3125)) / (1 + rest);
    }
    struct dbuf *logits = buf_values(h, MT_F32, (size_t)N * V, x), *loss = buf_nan(h, MT_F32, N);
    struct dbuf *d = buf_nan(h, h->dtype, (size_t)N * V);
    RUN(h, mt_op_cross_entropy,
        &(struct mt_cross_entropy){.n = N, .vocab = V, .ld = V, .dtype = h->dtype, .logits = logits->p, .scale = 1,
                                   .targets = buf_ints(h, t, N)->p, .loss = loss->p, .dlogits = d->p, .ld_dlogits = V});
    /* each of 1 + 1.5e-6 + ... is rounded to 2^-23, in one of 16 lanes; of log-sum-exp, all would be to 2^-17 */
    expect_close(h, "loss", buf_get(h, loss), want_loss, N, 1e-4);
    expect_close(h, "dlogits", buf_get(h, d), want, (size_t)N * V, tolerance(h, 1e-4, 3e-3));
}

DEVICE_TEST(rows_of_different_weight_match)
{
    loss_case(h, 9, 5003, 0, true);
    loss_case(h, 23, 1001, 3, true);
    loss_case(h, 6, 2051, 1, true);
}

/* Without a gradient the logits of further ids are returned; with one, in the logits' place or apart, the gradients of these ids are
 * what is given, and all others what they would be. Nothing is read or written for -1, or of a row without a target. */
static void further_ids_case(struct harness *h, size_t n, size_t v, size_t few, bool in_place)
{
    size_t ld = mt_align_up(v, 8);
    double *x, *values, *want = scratch(h, n * few);
    int32_t *t = (int32_t *)(void *)scratch(h, n), *ids = (int32_t *)(void *)scratch(h, n * few);
    for (size_t i = 0; i < n; i++) {
        t[i] = i % 4 == 3 ? -1 : (int32_t)((i * 31) % v);
        for (size_t k = 0; k < few; k++)
            ids[i * few + k] = (i + k) % 5 == 4 ? -1 : (int32_t)((i * 7 + k * 13) % v);
    }
    struct dbuf *logits = buf_random(h, MT_F32, n * ld, 4, &x), *returned = buf_nan(h, MT_F32, n * few), *loss = buf_nan(h, MT_F32, n);
    struct dbuf *apart = buf_nan(h, h->dtype, n * ld), *plain = buf_nan(h, h->dtype, n * ld);
    struct dbuf *given = buf_random(h, MT_F32, n * few, 1, &values);
    struct mt_cross_entropy a = {.n = n, .vocab = v, .ld = ld, .dtype = h->dtype, .logits = logits->p, .scale = 0.5f,
                                 .targets = buf_ints(h, t, n)->p, .loss = loss->p, .ld_dlogits = ld, .n_few = few,
                                 .few = buf_ints(h, ids, n * few)->p, .few_values = returned->p};
    RUN(h, mt_op_cross_entropy, &a);
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < few; k++) {
            int32_t id = ids[i * few + k];
            want[i * few + k] = id < 0 || t[i] < 0 ? 99 : x[i * ld + (size_t)id];
        }
    double *got = buf_get(h, returned);
    for (size_t i = 0; i < n * few; i++)
        got[i] = isnan(got[i]) ? 99 : got[i]; /* was not written */
    expect_close(h, "logits of further ids", got, want, n * few, 0);
    struct mt_cross_entropy without = a;
    without.n_few = 0;
    without.dlogits = plain->p;
    RUN(h, mt_op_cross_entropy, &without);
    double *all = buf_get(h, plain);
    a.few_values = given->p;
    a.dlogits = in_place ? logits->p : apart->p;
    a.ld_dlogits = in_place ? ld * 4 / mt_dtype_size(h->dtype) : ld;
    RUN(h, mt_op_cross_entropy, &a);
    struct dbuf out = in_place ? *logits : *apart;
    out.dtype = h->dtype;
    out.n = n * a.ld_dlogits;
    double *d = buf_get(h, &out), *g = scratch(h, n * v), *w = scratch(h, n * v);
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < v; k++) {
            g[i * v + k] = d[i * a.ld_dlogits + k];
            w[i * v + k] = all[i * ld + k];
        }
        for (size_t j = 0; t[i] >= 0 && j < few; j++)
            if (ids[i * few + j] >= 0)
                w[i * v + (size_t)ids[i * few + j]] = values[i * few + j];
    }
    expect_close(h, "gradients with those of further ids", g, w, n * v, tolerance(h, 0, 4e-3));
}

DEVICE_TEST(further_ids_have_gradients_of_their_own)
{
    further_ids_case(h, 9, 97, 7, false);
    further_ids_case(h, 9, 97, 7, true);
    further_ids_case(h, 6, 5003, 600, true);
    further_ids_case(h, 5, 20011, 22, false);
    further_ids_case(h, 3, 32009, 2100, false);
    further_ids_case(h, 3, 32016, 2100, false);
}

/* What a call of the host needs: it makes weights of losses, as an objective does. */
struct weighing {
    size_t n;
    const float *loss;
    float *weight;
};

static void weigh(void *ctx)
{
    const struct weighing *w = ctx;
    for (size_t i = 0; i < w->n; i++)
        w->weight[i] = 2 * w->loss[i];
}

static void copy_on_compute(struct harness *h, void *dst, const void *src, size_t bytes)
{
    struct mt_copy c = {dst, bytes, src, bytes, bytes, 1};
    struct mt_err err = {0};
    must(h, "copy", mt_device_copy(h->dev, MT_STREAM_COMPUTE, &c, &err), &err);
}

/* Losses go to the host, and weights come back, in the order in which they were submitted, without a wait between. */
DEVICE_TEST(the_host_is_called_in_the_stream_s_order)
{
    enum { N = 300, V = 97, TIMES = 3 };
    double *x, *want = scratch(h, (size_t)N * V);
    float loss[N], weight[N];
    int32_t *t = (int32_t *)(void *)scratch(h, N);
    for (size_t i = 0; i < N; i++)
        t[i] = (int32_t)((i * 31) % V);
    struct dbuf *logits = buf_random(h, MT_F32, (size_t)N * V, 4, &x), *targets = buf_ints(h, t, N);
    struct dbuf *losses = buf_nan(h, MT_F32, N), *weights = buf_nan(h, MT_F32, N);
    struct dbuf *d = buf_nan(h, h->dtype, (size_t)N * V);
    struct mt_cross_entropy a = {.n = N, .vocab = V, .ld = V, .dtype = h->dtype, .logits = logits->p,
                                 .targets = targets->p, .loss = losses->p, .ld_dlogits = V};
    struct weighing w = {N, loss, weight};
    struct mt_err err = {0};
    for (int k = 0; k < TIMES; k++) {
        a.dlogits = NULL;
        a.row_scale = NULL;
        RUN(h, mt_op_cross_entropy, &a);
        copy_on_compute(h, loss, losses->p, sizeof(loss));
        must(h, "call", mt_device_call(h->dev, weigh, &w, &err), &err);
        copy_on_compute(h, weights->p, weight, sizeof(weight));
        a.dlogits = d->p;
        a.row_scale = weights->p;
        RUN(h, mt_op_cross_entropy, &a);
    }
    double *got = buf_get(h, d);
    for (size_t i = 0; i < N; i++)
        for (size_t k = 0; k < V; k++) {
            double p = exp(x[i * V + k] - x[i * V + (size_t)t[i]] - (double)loss[i]);
            want[i * V + k] = (p - (k == (size_t)t[i])) * 2 * (double)loss[i];
        }
    expect_close(h, "dlogits", got, want, (size_t)N * V, tolerance(h, 4e-6, 3e-3));
}

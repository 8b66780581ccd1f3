/* SPDX-License-Identifier: Apache-2.0 */
/* Directions that optimizers make of gradients, against their formulas in double. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/philox.h"
#include "harness.h"
#include "optim/optimizer.h"

struct factored {
    size_t rows, cols;
    double beta2, *g, *w, *row, *col, *u, scale;
};

static double mean_of_squares(const double *x, size_t n, size_t step, double eps)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += x[i * step] * x[i * step] + eps;
    return sum / (double)n;
}

/* Shazeer and Stern 2018, algorithm 4, with eps 1e-30 and 1e-3, and clipping at 1. */
static void adafactor(struct factored *f)
{
    size_t n = f->rows * f->cols;
    double mean = 0;
    for (size_t i = 0; i < f->rows; i++)
        f->row[i] = f->beta2 * f->row[i] + (1 - f->beta2) * mean_of_squares(f->g + i * f->cols, f->cols, 1, 1e-30);
    for (size_t i = 0; i < f->rows; i++)
        mean += f->row[i] / (double)f->rows;
    for (size_t k = 0; f->cols > 1 && k < f->cols; k++)
        f->col[k] = f->beta2 * f->col[k] + (1 - f->beta2) * mean_of_squares(f->g + k, f->rows, f->cols, 1e-30);
    for (size_t i = 0; i < n; i++)
        f->u[i] = f->cols > 1 ? f->g[i] / sqrt(f->row[i / f->cols] / mean) / sqrt(f->col[i % f->cols])
                              : f->g[i] / sqrt(f->row[i]);
    double rms = sqrt(mean_of_squares(f->u, n, 1, 0));
    for (size_t i = 0; i < n && rms > 1; i++)
        f->u[i] /= rms;
    f->scale = fmax(1e-3, sqrt(mean_of_squares(f->w, n, 1, 0)));
}

static void adafactor_case(struct harness *h, size_t rows, size_t cols, double spread)
{
    size_t n = rows * cols;
    struct factored f = {.rows = rows, .cols = cols, .beta2 = 0.75, .u = scratch(h, n)};
    struct dbuf *g = buf_random(h, MT_F32, n, spread, &f.g), *w = buf_random(h, h->dtype, n, 0.02, &f.w);
    struct dbuf *row = buf_random(h, MT_F32, rows, spread * spread, &f.row);
    struct dbuf *col = buf_random(h, MT_F32, cols, spread * spread, &f.col), *scale = buf_nan(h, MT_F32, 1);
    for (size_t i = 0; i < rows; i++)
        f.row[i] = fabs(f.row[i]);
    for (size_t k = 0; k < cols; k++)
        f.col[k] = fabs(f.col[k]);
    row = buf_values(h, MT_F32, rows, f.row);
    col = buf_values(h, MT_F32, cols, f.col);
    struct mt_adafactor a = {.rows = rows, .cols = cols, .dtype = h->dtype, .beta2 = (float)f.beta2, .eps = 1e-30f, .clip = 1,
                             .least = 1e-3f, .g = g->p, .w = w->p, .row = row->p, .col = cols > 1 ? col->p : NULL,
                             .scale = scale->p, .workspace = workspace(h, mt_adafactor_workspace(rows, cols))};
    RUN(h, mt_op_adafactor, &a);
    adafactor(&f);
    expect_close(h, "row", buf_get(h, row), f.row, rows, 2e-6);
    expect_close(h, "col", buf_get(h, col), f.col, cols, 2e-6);
    expect_close(h, "direction", buf_get(h, g), f.u, n, 4e-6);
    expect_close(h, "scale", buf_get(h, scale), &f.scale, 1, 2e-6);
}

DEVICE_TEST(adafactors_direction_is_its_formulas)
{
    adafactor_case(h, 5, 24, 1e-3);
    adafactor_case(h, 1, 3, 1);
    adafactor_case(h, 130, 33, 1e-8);
    adafactor_case(h, 1100, 67, 1e3);
    adafactor_case(h, 3, 6001, 1e-2);
    adafactor_case(h, 1, 1, 1);
    adafactor_case(h, 20011, 1, 1e-4);
}

enum { KEPT_ROWS = 40, KEPT_COLS = 24 };

/* Runs the operation: g becomes the direction, row and col what they are then. */
static void run_kept(struct harness *h, float beta2, double *g, double *row, double *col)
{
    enum { N = KEPT_ROWS * KEPT_COLS };
    struct dbuf *w = buf_random(h, h->dtype, N, 1, NULL), *scale = buf_nan(h, MT_F32, 1), *bg = buf_values(h, MT_F32, N, g);
    struct dbuf *br = buf_values(h, MT_F32, KEPT_ROWS, row), *bc = buf_values(h, MT_F32, KEPT_COLS, col);
    struct mt_adafactor a = {.rows = KEPT_ROWS, .cols = KEPT_COLS, .dtype = h->dtype, .beta2 = beta2, .eps = 1e-30f, .clip = 1,
                             .least = 1e-3f, .g = bg->p, .w = w->p, .row = br->p, .col = bc->p, .scale = scale->p,
                             .workspace = workspace(h, mt_adafactor_workspace(KEPT_ROWS, KEPT_COLS))};
    RUN(h, mt_op_adafactor, &a);
    memcpy(g, buf_get(h, bg), N * sizeof(*g));
    memcpy(row, buf_get(h, br), KEPT_ROWS * sizeof(*row));
    memcpy(col, buf_get(h, bc), KEPT_COLS * sizeof(*col));
}

DEVICE_TEST(adafactor_keeps_states_if_a_gradient_is_not_finite)
{
    double *g, row[KEPT_ROWS], col[KEPT_COLS], old_row[KEPT_ROWS], old_col[KEPT_COLS];
    buf_random(h, MT_F32, KEPT_ROWS * KEPT_COLS, 1, &g);
    g[5 * KEPT_COLS + 7] = NAN;
    for (int i = 0; i < KEPT_ROWS; i++)
        row[i] = old_row[i] = 1 + i;
    for (int k = 0; k < KEPT_COLS; k++)
        col[k] = old_col[k] = 2 + k;
    run_kept(h, 0.5f, g, row, col);
    expect_close(h, "row", row, old_row, KEPT_ROWS, 0);
    expect_close(h, "col", col, old_col, KEPT_COLS, 0);
    expect_close(h, "direction", g, scratch(h, KEPT_ROWS * KEPT_COLS), KEPT_ROWS * KEPT_COLS, 0);
}

/* Squares of 1e19, each of which FP32 holds, but not the sum of 40. */
DEVICE_TEST(adafactor_keeps_a_column_whose_sum_overflows)
{
    double *g, row[KEPT_ROWS] = {0}, col[KEPT_COLS] = {0}, want[KEPT_COLS];
    for (int first = 0; first < 2; first++) { /* step: the states were 0; later ones */
        float beta2 = first ? 0 : 0.5f;
        buf_random(h, MT_F32, KEPT_ROWS * KEPT_COLS, 1, &g);
        for (int i = 0; i < KEPT_ROWS; i++) {
            g[i * KEPT_COLS + 7] = 1e19;
            row[i] = first ? 0 : 1;
        }
        for (int k = 0; k < KEPT_COLS; k++) {
            col[k] = first ? 0 : 2;
            want[k] = beta2 * col[k] + (1 - beta2) * mean_of_squares(g + k, KEPT_ROWS, KEPT_COLS, 1e-30);
        }
        want[7] = col[7];
        run_kept(h, beta2, g, row, col);
        expect_close(h, "col", col, want, KEPT_COLS, 2e-6);
        expect_close(h, "direction", g, scratch(h, KEPT_ROWS * KEPT_COLS), KEPT_ROWS * KEPT_COLS, 0);
    }
}

static void muon_case(struct harness *h, enum mt_dtype moments, size_t n, double spread, bool finite)
{
    double *g, *m, *x = scratch(h, n), norm = 0, mu = 0.95;
    buf_random(h, MT_F32, n, spread, &g);
    g[n / 2] = finite ? g[n / 2] : INFINITY;
    struct dbuf *bg = buf_values(h, MT_F32, n, g), *bm = buf_random(h, moments, n, spread, &m), *bx = buf_nan(h, h->dtype, n);
    struct mt_muon a = {.n = n, .dtype = h->dtype, .m_dtype = moments, .mu = (float)mu, .g = bg->p, .m = bm->p, .x = bx->p,
                        .workspace = workspace(h, (n / MT_DIRECT_PIECE + 2) * sizeof(float))};
    RUN(h, mt_op_muon, &a);
    for (size_t i = 0; i < n && finite; i++) {
        m[i] += (1 - mu) * (g[i] - m[i]);
        x[i] = g[i] + mu * (m[i] - g[i]);
        norm += x[i] * x[i];
    }
    for (size_t i = 0; i < n; i++)
        x[i] /= fmax(sqrt(norm), 1e-7);
    expect_close(h, "momentum", buf_get(h, bm), m, n, moments == MT_F32 ? 1e-6 : 3e-3);
    expect_close(h, "matrix", buf_get(h, bx), x, n, tolerance(h, 2e-6, 3e-3));
}

DEVICE_TEST(muons_momentum_is_its_formula)
{
    static const enum mt_dtype moments[] = {MT_F32, MT_BF16};
    for (size_t i = 0; i < MT_ARRAY_LEN(moments); i++) {
        muon_case(h, moments[i], 7, 1, true);
        muon_case(h, moments[i], 20011, 1e-6, true);
        muon_case(h, moments[i], 3 * MT_DIRECT_PIECE, 1e3, true);
        muon_case(h, moments[i], 20011, 1, false);
    }
}

/* d = x y, of rows x inner and inner x cols; y is transposed: cols x inner. */
static void multiply_by_transposed(const double *x, const double *y, double *d, size_t rows, size_t inner, size_t cols)
{
    for (size_t i = 0; i < rows; i++)
        for (size_t k = 0; k < cols; k++) {
            d[i * cols + k] = 0;
            for (size_t j = 0; j < inner; j++)
                d[i * cols + k] += x[i * inner + j] * y[k * inner + j];
        }
}

static void transpose(const double *x, double *to, size_t rows, size_t cols)
{
    for (size_t i = 0; i < rows * cols; i++)
        to[i % cols * rows + i / cols] = x[i];
}

struct matrix {
    size_t rows, cols;
    double *g, *m, *u; /* gradient, momentum, direction */
    double *x, *xt, *a, *aa;
};

/* Newton-Schulz of u as torch.optim.Muon writes it, in double: u := 0.2 sqrt(max side) times what five iterations give. */
static void orthogonalise(struct matrix *q)
{
    bool tall = q->rows > q->cols;
    size_t m = tall ? q->cols : q->rows, n = tall ? q->rows : q->cols;
    double norm = sqrt(mean_of_squares(q->u, m * n, 1, 0) * (double)(m * n)), scale = 0.2 * sqrt((double)n);
    if (tall)
        transpose(q->u, q->x, n, m);
    else
        memcpy(q->x, q->u, m * n * sizeof(*q->x));
    for (size_t i = 0; i < m * n; i++)
        q->x[i] /= fmax(norm, 1e-7);
    for (int step = 0; step < 5; step++) {
        multiply_by_transposed(q->x, q->x, q->a, m, n, m);
        multiply_by_transposed(q->a, q->a, q->aa, m, m, m); /* a is its own transpose */
        for (size_t i = 0; i < m * m; i++)
            q->aa[i] = -4.7750 * q->a[i] + 2.0315 * q->aa[i] + (i % (m + 1) ? 0 : 3.4445);
        transpose(q->x, q->xt, m, n);
        multiply_by_transposed(q->aa, q->xt, q->x, m, m, n);
    }
    for (size_t i = 0; i < m * n; i++)
        q->x[i] *= scale;
    if (tall)
        transpose(q->x, q->u, m, n);
    else
        memcpy(q->u, q->x, m * n * sizeof(*q->x));
}

static void expect_cosine(struct harness *h, const char *what, const double *got, const double *want, size_t n, double least)
{
    double dot = 0, a = 0, b = 0;
    for (size_t i = 0; i < n; i++) {
        dot += got[i] * want[i];
        a += got[i] * got[i];
        b += want[i] * want[i];
    }
    double cosine = dot / sqrt(a * b);
    if (!(cosine > least)) {
        printf("FAIL %s %s %s: %s: cosine %.6f; least %.6f\n", h->device_name, h->test_name, mt_dtype_name(h->dtype), what,
               cosine, least);
        h->failures++;
    }
}

/* Updates with a new gradient each: noise, and a direction that all have in common. */
static void muon_updates(struct harness *h, const struct mt_optimizer *o, size_t rows, size_t cols)
{
    enum { UPDATES = 4 };
    size_t n = rows * cols, side = MT_MIN(rows, cols);
    struct matrix q = {.rows = rows, .cols = cols, .m = scratch(h, n), .u = scratch(h, n), .x = scratch(h, n),
                       .xt = scratch(h, n), .a = scratch(h, side * side), .aa = scratch(h, side * side)};
    struct dbuf *m = buf_values(h, o->state[0].dtype, n, q.m), *w = buf_random(h, h->dtype, n, 1, NULL);
    double keys[MT_OPTIMIZER_SLOTS] = {0}, mu = 0, *left, *right;
    for (int i = 0; i < o->n_keys; i++)
        keys[i] = o->keys[i].def;
    mt_optimizer_default("muon", "momentum", &mu);
    buf_random(h, MT_F32, rows, 1e-3, &left);
    buf_random(h, MT_F32, cols, 1, &right);
    for (uint64_t t = 1; t <= UPDATES; t++) {
        struct mt_err err = {0};
        buf_random(h, MT_F32, n, 1e-3, &q.g);
        for (size_t i = 0; i < n; i++)
            q.g[i] = (double)(float)(q.g[i] + left[i / cols] * right[i % cols]);
        struct dbuf *g = buf_values(h, MT_F32, n, q.g);
        struct mt_direction d = {.dev = h->dev, .rows = rows, .cols = cols, .dtype = h->dtype, .g = g->p, .w = w->p,
                                 .state = {m->p}, .keys = keys, .t = t};
        d.scratch = workspace(h, o->direct_scratch(&d));
        must(h, "direct", o->direct(o, &d, &err), &err);
        for (size_t i = 0; i < n; i++) {
            q.m[i] += (1 - mu) * (q.g[i] - q.m[i]);
            q.u[i] = q.g[i] + mu * (q.m[i] - q.g[i]);
        }
        orthogonalise(&q);
        if (h->dtype == MT_F32 && o->state[0].dtype == MT_F32)
            expect_close(h, "direction", buf_get(h, g), q.u, n, 1e-4);
        expect_cosine(h, "direction", buf_get(h, g), q.u, n, 0.999);
    }
}

DEVICE_TEST(muons_direction_is_its_formulas)
{
    static const enum mt_state_type types[] = {MT_STATE_F32, MT_STATE_BF16};
    for (size_t i = 0; i < MT_ARRAY_LEN(types); i++) {
        const struct mt_optimizer *o = mt_optimizer_find("muon", types[i], NULL);
        muon_updates(h, o, 24, 64);
        muon_updates(h, o, 96, 40);
        muon_updates(h, o, 48, 48);
        muon_updates(h, o, 8, 200);
    }
}

DEVICE_TEST(signs_are_those_of_their_bits)
{
    enum { N = 20011 };
    double *want = scratch(h, N);
    struct dbuf *x = buf_nan(h, MT_F32, N);
    const uint64_t seed = UINT64_C(0x123456789abcdef0), stream = UINT64_C(0xA700000001000007);
    RUN(h, mt_op_signs, &(struct mt_signs){.n = N, .scale = 0.25f, .seed = seed, .stream = stream, .x = x->p});
    for (size_t i = 0; i < N; i++)
        want[i] = mt_philox(seed, stream, i / 128).v[i / 32 % 4] >> i % 32 & 1 ? -0.25 : 0.25;
    expect_close(h, "signs", buf_get(h, x), want, N, 0);
}

struct projected {
    size_t rows, cols, rank;
    bool by_tensor;
    double *g, *low, *m, *v, *s, norm, growth;
};

/* Zhu et al. 2024, algorithm 1 with the limiter of apollo-torch: g becomes the direction, of scale 1. */
static void apollo(struct projected *p)
{
    size_t channels = MT_MAX(p->rows, p->cols), n = p->rows * p->cols;
    double all_low = 0, all_u = 0, norm = 0;
    for (size_t c = 0; c < channels; c++) {
        double low = 0, u = 0;
        for (size_t i = c * p->rank; i < (c + 1) * p->rank; i++) {
            p->m[i] = 0.9 * p->m[i] + 0.1 * p->low[i];
            p->v[i] = 0.99 * p->v[i] + 0.01 * p->low[i] * p->low[i];
            low += p->low[i] * p->low[i];
            u += pow(p->m[i] / (sqrt(p->v[i]) + 1e-6), 2);
        }
        p->s[c] = sqrt(u) / (sqrt(low) + 1e-8);
        all_low += low;
        all_u += u;
    }
    for (size_t i = 0; i < n; i++) {
        double of_channel = p->s[p->rows >= p->cols ? i / p->cols : i % p->cols];
        p->g[i] *= p->by_tensor ? sqrt(all_u) / (sqrt(all_low) + 1e-8) : of_channel;
        norm += p->g[i] * p->g[i];
    }
    double f = p->growth && p->norm ? fmax(sqrt(norm) / (p->norm + 1e-8), p->growth) / p->growth : 1;
    for (size_t i = 0; i < n; i++)
        p->g[i] /= f;
    p->norm = sqrt(norm) / f;
}

/* Updates whose gradients are 0, grow, are once not finite, and once have squares that overflow. */
static void apollo_case(struct harness *h, size_t rows, size_t cols, size_t rank, bool by_tensor, double growth)
{
    static const double sizes[] = {0, 1e-3, 4e-3, NAN, 1e20, 1e-3};
    size_t n = rows * cols, low = MT_MAX(rows, cols) * rank;
    struct projected p = {.rows = rows, .cols = cols, .rank = rank, .by_tensor = by_tensor, .growth = growth,
                          .m = scratch(h, low), .v = scratch(h, low), .s = scratch(h, MT_MAX(rows, cols))};
    struct dbuf *m = buf_values(h, MT_F32, low, p.m), *v = buf_values(h, MT_F32, low, p.v);
    struct dbuf *norm = buf_values(h, MT_F32, 1, &p.norm);
    for (size_t t = 0; t < MT_ARRAY_LEN(sizes); t++) {
        double size = isfinite(sizes[t]) ? sizes[t] : 1;
        buf_random(h, MT_F32, n, size, &p.g);
        buf_random(h, MT_F32, low, size, &p.low);
        if (!isfinite(sizes[t]))
            p.g[n / 2] = INFINITY;
        struct dbuf *g = buf_values(h, MT_F32, n, p.g), *projected = buf_values(h, MT_F32, low, p.low);
        struct mt_apollo a = {.rows = rows, .cols = cols, .rank = rank, .by_tensor = by_tensor, .beta1 = 0.9f, .beta2 = 0.99f,
                              .eps = 1e-6f, .growth = (float)growth, .scale = 1, .g = g->p, .low = projected->p, .m = m->p,
                              .v = v->p, .norm = norm->p,
                              .workspace = workspace(h, mt_apollo_workspace(rows, cols) * sizeof(float))};
        RUN(h, mt_op_apollo, &a);
        if (sizes[t] < 1)
            apollo(&p);
        else
            memset(p.g, 0, n * sizeof(*p.g));
        expect_close(h, "direction", buf_get(h, g), p.g, n, 5e-6);
        expect_close(h, "first moments", buf_get(h, m), p.m, low, 1e-6);
        expect_close(h, "second moments", buf_get(h, v), p.v, low, 1e-6);
        expect_close(h, "norm", buf_get(h, norm), &p.norm, 1, 2e-6);
    }
}

DEVICE_TEST(apollos_direction_is_its_formulas)
{
    apollo_case(h, 24, 65, 5, false, 1.01);
    apollo_case(h, 96, 40, 8, false, 1.01);
    apollo_case(h, 33, 33, 1, true, 1.01);
    apollo_case(h, 9, 2100, 3, true, 0);
    apollo_case(h, 1, 8, 1, false, 1.01);
}

/* Rows a [n, m] = u diag(value) with orthonormal rows of u: a random matrix's, by Gram and Schmidt. */
static double *orthonormal(struct harness *h, size_t n, size_t m)
{
    double *u;
    buf_random(h, MT_F32, n * m, 1, &u);
    for (size_t i = 0; i < n; i++)
        for (size_t pass = 0; pass < 2; pass++) {
            double norm = 0;
            for (size_t j = 0; j < i; j++) {
                double dot = 0;
                for (size_t k = 0; k < m; k++)
                    dot += u[i * m + k] * u[j * m + k];
                for (size_t k = 0; k < m; k++)
                    u[i * m + k] -= dot * u[j * m + k];
            }
            for (size_t k = 0; k < m; k++)
                norm += u[i * m + k] * u[i * m + k];
            for (size_t k = 0; k < m; k++)
                u[i * m + k] /= sqrt(norm);
        }
    return u;
}

/* sum over i of value(i) x[i]^T y[i], of rows of x [n, rows] and y [n, cols]. */
static double *compose(struct harness *h, size_t n, const double *x, size_t rows, const double *y, size_t cols,
                       double (*value)(size_t i))
{
    double *a = scratch(h, rows * cols);
    for (size_t i = 0; i < n; i++)
        for (size_t r = 0; r < rows; r++)
            for (size_t c = 0; c < cols; c++)
                a[r * cols + c] += value(i) * x[i * rows + r] * y[i * cols + c];
    return a;
}

static double apart_by_1_percent(size_t i)
{
    return 1e-3 * pow(0.99, (double)i);
}

static double falls_fast(size_t i)
{
    return pow(0.6, (double)i);
}

/* w a w^T = 1, and in the order of the eigenvalues; n is the same for vectors and values. */
static void eigen_case(struct harness *h, size_t n, double (*value)(size_t i))
{
    const double *u = orthonormal(h, n, n), *a = compose(h, n, u, n, u, n, value);
    struct dbuf *in = buf_values(h, MT_F32, n * n, a), *w = buf_nan(h, MT_F32, n * n);
    RUN(h, mt_op_eigen, &(struct mt_eigen){.n = n, .sweeps = 10, .a = in->p, .w = w->p,
                                           .workspace = workspace(h, mt_eigen_workspace(n) * sizeof(float))});
    const double *got = buf_get(h, w);
    double *along = scratch(h, n), *want = scratch(h, n);
    for (size_t i = 0; i < n && value(i) > 1e-3 * value(0); i++) {
        for (size_t k = 0; k < n; k++)
            along[i] += got[i * n + k] * u[i * n + k] * sqrt(value(i));
        along[i] = fabs(along[i]);
        want[i] = 1;
    }
    expect_close(h, "eigenvectors over the roots", along, want, n, 1e-4);
}

DEVICE_TEST(eigenvectors_are_sorted_and_scaled)
{
    eigen_case(h, 1, falls_fast);
    eigen_case(h, 2, falls_fast);
    eigen_case(h, 33, falls_fast);
    eigen_case(h, 65, apart_by_1_percent);
    eigen_case(h, 130, apart_by_1_percent);
    double *zeros = scratch(h, 9), one[9] = {[0] = 1, [4] = 1, [8] = 1};
    struct dbuf *a = buf_values(h, MT_F32, 9, zeros), *w = buf_nan(h, MT_F32, 9);
    RUN(h, mt_op_eigen, &(struct mt_eigen){.n = 3, .sweeps = 1, .a = a->p, .w = w->p,
                                           .workspace = workspace(h, mt_eigen_workspace(3) * sizeof(float))});
    expect_close(h, "of zeros", buf_get(h, w), one, 9, 0);
}

DEVICE_TEST(rows_of_norm_1_are_copied)
{
    double x[15] = {0.625, 0.75, 0, 0, 0, 0, 0, NAN, 1, 0.5, 0.5, 0.5, 0, INFINITY, 0}, want[15];
    struct dbuf *from = buf_values(h, MT_F32, 15, x);
    double *old;
    struct dbuf *to = buf_random(h, MT_F32, 15, 1, &old);
    for (size_t row = 0; row < 5; row++) {
        const double *of = row == 0 || row == 3 ? x + 3 * row : old + 3 * row, *was = old + 3 * row;
        double sign = of != was && of[0] * was[0] + of[1] * was[1] + of[2] * was[2] < 0 ? -1 : 1;
        for (size_t i = 0; i < 3; i++)
            want[3 * row + i] = sign * of[i];
    }
    RUN(h, mt_op_unit_rows, &(struct mt_unit_rows){.rows = 5, .cols = 3, .from = from->p, .to = to->p});
    expect_close(h, "rows", buf_get(h, to), want, 15, 0);
}

struct galore {
    size_t rows, cols, rank; /* the smaller side is `small`, the larger `large` */
    double *g, *p, *low, *m, *v;
};

/* galore-torch's AdamW with our projection; g becomes the direction, of scale 1 / 4. */
static void galore(struct galore *q, size_t t)
{
    bool tall = q->rows >= q->cols;
    size_t large = MT_MAX(q->rows, q->cols), small = MT_MIN(q->rows, q->cols), n = large * q->rank;
    memset(q->low, 0, n * sizeof(*q->low));
    for (size_t r = 0; r < q->rank; r++)
        for (size_t l = 0; l < large; l++)
            for (size_t k = 0; k < small; k++)
                q->low[r * large + l] += q->p[r * small + k] * q->g[tall ? l * q->cols + k : k * q->cols + l];
    for (size_t i = 0; i < n; i++) {
        q->m[i] = 0.9 * q->m[i] + 0.1 * q->low[i];
        q->v[i] = 0.99 * q->v[i] + 0.01 * q->low[i] * q->low[i];
        q->low[i] = q->m[i] / (sqrt(q->v[i]) + 1e-6) * sqrt(1 - pow(0.99, (double)t)) / (1 - pow(0.9, (double)t)) / 4;
    }
    memset(q->g, 0, large * small * sizeof(*q->g));
    for (size_t r = 0; r < q->rank; r++)
        for (size_t l = 0; l < large; l++)
            for (size_t k = 0; k < small; k++)
                q->g[tall ? l * q->cols + k : k * q->cols + l] += q->p[r * small + k] * q->low[r * large + l];
}

/* The sine of the largest angle between the kept vectors and those of the largest singular values, to the Frobenius norm. */
static double angle(const double *p, size_t rank, const double *u, size_t small)
{
    double sum = 0;
    for (size_t r = 0; r < rank; r++) {
        double left = 0;
        for (size_t k = 0; k < small; k++) {
            double along = 0;
            for (size_t i = 0; i < rank; i++) {
                double dot = 0;
                for (size_t j = 0; j < small; j++)
                    dot += p[r * small + j] * u[i * small + j];
                along += dot * u[i * small + k];
            }
            left += pow(p[r * small + k] - along, 2);
        }
        sum += left;
    }
    return sqrt(sum);
}

/* Twenty updates; every seventh finds the vectors of a matrix whose singular values differ by 1%. One is not finite. */
static void galore_case(struct harness *h, size_t rows, size_t cols, size_t rank)
{
    enum { UPDATES = 20, GAP = 7, BAD = 5 };
    const struct mt_optimizer *o = mt_optimizer_find("galore", MT_STATE_F32, NULL);
    const double keys[] = {0.9, 0.99, 1e-6, (double)rank, GAP, 0.25};
    size_t large = MT_MAX(rows, cols), small = MT_MIN(rows, cols);
    struct galore q = {.rows = rows, .cols = cols, .rank = rank, .low = scratch(h, large * rank),
                       .m = scratch(h, large * rank), .v = scratch(h, large * rank)};
    struct dbuf *m = buf_values(h, MT_F32, large * rank, q.m), *v = buf_values(h, MT_F32, large * rank, q.v);
    struct dbuf *p = buf_nan(h, MT_F32, small * rank), *w = buf_random(h, h->dtype, rows * cols, 1, NULL);
    struct mt_err err = {0};
    for (size_t t = 1; t <= UPDATES; t++) {
        const double *x = orthonormal(h, small, small), *y = orthonormal(h, small, large);
        q.g = compose(h, small, rows == small ? x : y, rows, rows == small ? y : x, cols, apart_by_1_percent);
        if (t == BAD)
            q.g[rows * cols / 2] = INFINITY;
        struct dbuf *g = buf_values(h, MT_F32, rows * cols, q.g);
        struct mt_direction d = {.dev = h->dev, .rows = rows, .cols = cols, .dtype = h->dtype, .g = g->p, .w = w->p,
                                 .state = {m->p, v->p, p->p}, .keys = keys, .t = t, .seed = 9, .tensor = 3, .rank = rank};
        d.scratch = workspace(h, o->direct_scratch(&d));
        must(h, "direct", o->direct(o, &d, &err), &err);
        q.p = buf_get(h, p);
        double one = 1, more = 1 + angle(q.p, rank, x, small);
        if (t % GAP == 1)
            expect_close(h, "1 and the sine of the angle to the singular vectors", &more, &one, 1, 1e-4);
        if (t == BAD)
            memset(q.g, 0, rows * cols * sizeof(*q.g));
        else
            galore(&q, t);
        expect_close(h, "direction", buf_get(h, g), q.g, rows * cols, 1e-5);
    }
}

static double eight_alone(size_t i)
{
    static const double of[] = {1, 0.9456, 0.9447, 0.7, 0.6, 0.4, 0.3, 0.2};
    return i < 8 ? 1e-3 * of[i] : 0;
}

/* Singular vectors one by one, of gradients with eight singular values of which two are 0.1% apart, and rounding. */
DEVICE_TEST(galores_vectors_are_not_turned_against_each_other)
{
    enum { SMALL = 24, LARGE = 32, RANK = 8, DRAWS = 32 };
    const struct mt_optimizer *o = mt_optimizer_find("galore", MT_STATE_F32, NULL);
    const double keys[] = {0.9, 0.99, 1e-6, RANK, 1, 0.25};
    double *cosine = scratch(h, DRAWS * RANK), *one = scratch(h, DRAWS * RANK), *zeros = scratch(h, LARGE * RANK);
    struct mt_err err = {0};
    size_t draws = strcmp(h->device_name, "cpu") ? DRAWS / 4 : DRAWS; /* an emulation takes seconds */
    for (size_t t = 0; t < draws; t++) {
        bool tall = t % 2;
        const double *x = orthonormal(h, SMALL, SMALL), *y = orthonormal(h, SMALL, LARGE);
        size_t rows = tall ? LARGE : SMALL, cols = tall ? SMALL : LARGE;
        double *a = compose(h, SMALL, tall ? y : x, rows, tall ? x : y, cols, eight_alone), *noise;
        buf_random(h, MT_F32, rows * cols, 1e-4, &noise);
        for (size_t i = 0; i < rows * cols; i++)
            a[i] += pow(10, -7 - (double)(t / 2 % 4)) * noise[i];
        struct dbuf *g = buf_values(h, MT_F32, rows * cols, a), *p = buf_nan(h, MT_F32, SMALL * RANK);
        struct dbuf *m = buf_values(h, MT_F32, LARGE * RANK, zeros), *v = buf_values(h, MT_F32, LARGE * RANK, zeros);
        struct mt_direction d = {.dev = h->dev, .rows = rows, .cols = cols, .dtype = h->dtype, .g = g->p, .w = g->p,
                                 .state = {m->p, v->p, p->p}, .keys = keys, .t = 1, .seed = t, .tensor = 3, .rank = RANK};
        d.scratch = workspace(h, o->direct_scratch(&d));
        must(h, "direct", o->direct(o, &d, &err), &err);
        const double *got = buf_get(h, p);
        for (size_t i = 0; i < RANK * SMALL; i++)
            cosine[t * RANK + i / SMALL] += got[i] * x[i];
        for (size_t i = t * RANK; i < (t + 1) * RANK; i++) {
            cosine[i] = fabs(cosine[i]);
            one[i] = 1;
        }
    }
    /* angles of 3e-3 at most: 1.4e-3 was measured, of the two, and a quarter turn without a basis that is orthonormal */
    expect_close(h, "cosines of the angles to the singular vectors", cosine, one, draws * RANK, 5e-6);
}

DEVICE_TEST(galores_direction_is_its_formulas)
{
    galore_case(h, 24, 65, 5);
    galore_case(h, 96, 40, 8);
    galore_case(h, 33, 33, 33);
}

/* Of gradients that are not finite, 0, or of rank 1: the projection begins with random rows, which stay. */
DEVICE_TEST(galore_projects_what_has_no_singular_vectors)
{
    enum { ROWS = 12, COLS = 20, RANK = 4 };
    const struct mt_optimizer *o = mt_optimizer_find("galore", MT_STATE_F32, NULL);
    const double keys[] = {0.9, 0.99, 1e-6, RANK, 1, 0.25};
    struct mt_err err = {0};
    for (int kind = 0; kind < 3; kind++) {
        double *g = scratch(h, ROWS * COLS), *zeros = scratch(h, COLS * RANK), norms[RANK] = {0}, ones[RANK] = {1, 1, 1, 1};
        for (size_t i = 0; i < ROWS * COLS; i++)
            g[i] = kind == 2 ? (double)(i / COLS + 1) * 1e-3 : 0;
        if (kind == 0)
            g[7] = NAN;
        struct dbuf *bg = buf_values(h, MT_F32, ROWS * COLS, g), *p = buf_nan(h, MT_F32, ROWS * RANK);
        struct dbuf *m = buf_values(h, MT_F32, COLS * RANK, zeros), *v = buf_values(h, MT_F32, COLS * RANK, zeros);
        struct mt_direction d = {.dev = h->dev, .rows = ROWS, .cols = COLS, .dtype = h->dtype, .g = bg->p, .w = bg->p,
                                 .state = {m->p, v->p, p->p}, .keys = keys, .t = 1, .seed = 9, .tensor = 3, .rank = RANK};
        d.scratch = workspace(h, o->direct_scratch(&d));
        must(h, "direct", o->direct(o, &d, &err), &err);
        const double *rows = buf_get(h, p);
        for (size_t i = 0; i < ROWS * RANK; i++)
            norms[i / ROWS] += rows[i] * rows[i];
        expect_close(h, "norms of the projection's rows", norms, ones, RANK, 1e-5);
        if (kind < 2)
            expect_close(h, "no direction", buf_get(h, bg), scratch(h, ROWS * COLS), ROWS * COLS, 0);
    }
}

DEVICE_TEST(numbers_are_widened_and_scaled)
{
    enum { N = 20011 };
    double *x, *want = scratch(h, N);
    struct dbuf *bx = buf_random(h, h->dtype, N, 1, &x), *by = buf_nan(h, MT_F32, N);
    RUN(h, mt_op_widen, &(struct mt_widen){.n = N, .dtype = h->dtype, .scale = 3, .x = bx->p, .y = by->p});
    for (size_t i = 0; i < N; i++)
        want[i] = 3 * x[i];
    expect_close(h, "widened", buf_get(h, by), want, N, 2e-7);
}

DEVICE_TEST(gradient_sums_and_casts_are_made_alone)
{
    enum { N = MT_SUMSQ_BLOCK + 77 };
    struct dbuf *src = buf_random(h, MT_F32, N, 0.01, NULL), *dst[2] = {buf_nan(h, h->dtype, N), buf_nan(h, h->dtype, N)};
    struct dbuf *part[2] = {buf_nan(h, MT_F32, 2), buf_nan(h, MT_F32, 2)};
    RUN(h, mt_op_grad_cast, &(struct mt_grad_cast){N, src->p, h->dtype, dst[0]->p, part[0]->p});
    RUN(h, mt_op_grad_cast, &(struct mt_grad_cast){N, src->p, h->dtype, dst[1]->p, NULL});
    RUN(h, mt_op_grad_cast, &(struct mt_grad_cast){N, src->p, h->dtype, NULL, part[1]->p});
    expect_close(h, "cast", buf_get(h, dst[1]), buf_get(h, dst[0]), N, 0);
    expect_close(h, "sums", buf_get(h, part[1]), buf_get(h, part[0]), 2, 0);
}

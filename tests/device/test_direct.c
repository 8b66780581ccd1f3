/* SPDX-License-Identifier: Apache-2.0 */
/* Directions that optimizers make of gradients, against their formulas in double. */
#include <math.h>
#include <string.h>

#include "harness.h"

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

static void adafactors_direction_is_its_formulas(struct harness *h)
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

static void adafactor_keeps_states_if_a_gradient_is_not_finite(struct harness *h)
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
static void adafactor_keeps_a_column_whose_sum_overflows(struct harness *h)
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

static void muons_momentum_is_its_formula(struct harness *h)
{
    static const enum mt_dtype moments[] = {MT_F32, MT_BF16};
    for (size_t i = 0; i < MT_ARRAY_LEN(moments); i++) {
        muon_case(h, moments[i], 7, 1, true);
        muon_case(h, moments[i], 20011, 1e-6, true);
        muon_case(h, moments[i], 3 * MT_DIRECT_PIECE, 1e3, true);
        muon_case(h, moments[i], 20011, 1, false);
    }
}

static void numbers_are_widened_and_scaled(struct harness *h)
{
    enum { N = 20011 };
    double *x, *want = scratch(h, N);
    struct dbuf *bx = buf_random(h, h->dtype, N, 1, &x), *by = buf_nan(h, MT_F32, N);
    RUN(h, mt_op_widen, &(struct mt_widen){.n = N, .dtype = h->dtype, .scale = 3, .x = bx->p, .y = by->p});
    for (size_t i = 0; i < N; i++)
        want[i] = 3 * x[i];
    expect_close(h, "widened", buf_get(h, by), want, N, 2e-7);
}

static void sums_and_casts_are_made_alone(struct harness *h)
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

const struct device_test direct_tests[] = {
    {"adafactors_direction_is_its_formulas", adafactors_direction_is_its_formulas},
    {"adafactor_keeps_states_if_a_gradient_is_not_finite", adafactor_keeps_states_if_a_gradient_is_not_finite},
    {"adafactor_keeps_a_column_whose_sum_overflows", adafactor_keeps_a_column_whose_sum_overflows},
    {"muons_momentum_is_its_formula", muons_momentum_is_its_formula},
    {"numbers_are_widened_and_scaled", numbers_are_widened_and_scaled},
    {"gradient_sums_and_casts_are_made_alone", sums_and_casts_are_made_alone},
    {NULL, NULL},
};

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * GaLore (Zhao et al. 2024) as galore-torch 1.0's AdamW: gradients of the matrices of layers, each tensor of the files
 * by itself, are projected to the `rank` singular vectors of their smaller side with the largest singular values, have
 * Adam's moments and steps there, and are projected back; all other tensors have AdamW. Every `projection_gap`
 * updates the vectors are found anew, and the moments are kept. Ours: decay comes first, and how the vectors are found.
 *
 * They are found by subspace iteration from random signs, with EXTRA vectors more than are kept (Halko, Martinsson and
 * Tropp 2011). Each half of an iteration multiplies by the gradient or its transpose, and makes the result's rows
 * orthonormal and sorted by eigenvectors of their products (a Rayleigh-Ritz step). An iteration takes the other vectors
 * out of the kept ones by the square of the singular value number rank + EXTRA + 1 over number rank: with singular
 * values that differ by 1% from one to the next, 1e-6 is left of them after all.
 *
 * The gradient of a few tokens has few singular values above rounding. Rows that stand for the others are then what
 * rounding left, of any norm and along the kept ones, and where rows are not orthonormal the eigenvectors are not the
 * singular vectors: close ones come out turned against each other. So the last half of an iteration begins with rows
 * that are made orthonormal by themselves. What the kept vectors are still turned by is FP32's rounding over the
 * distance of the squares of their singular values: 1e-6 where these differ by 5%, 1e-3 where they differ by 0.1%.
 */
#include <math.h>

#include "device/carve.h"
#include "device/ops.h"
#include "optim/projected.h"

enum { BETA1, BETA2, EPS, RANK, GAP, SCALE, N_KEYS };
static const struct mt_optimizer_key keys[] = {
    [BETA1] = MT_OPTIMIZER_KEY("beta1", 0.9, 0, 0.999999, "Decay of the first moment."),
    [BETA2] = MT_OPTIMIZER_KEY("beta2", 0.999, 0, 0.9999999, "Decay of the second moment."),
    [EPS] = MT_OPTIMIZER_KEY("eps", 1e-6, 0, 1, "Added outside the square root."),
    [RANK] = MT_OPTIMIZER_WHOLE_KEY("rank", 128, 1, 65536, "As of apollo."),
    [GAP] = MT_OPTIMIZER_WHOLE_KEY("projection_gap", 200, 1, 1e9, "As of apollo."),
    [SCALE] = MT_OPTIMIZER_KEY("galore_scale", 0.25, 1e-6, 1e6, "Directions are multiplied by it."),
};
enum { ALIGN = 256, EXTRA = 64, ITERATIONS = 12, SWEEPS = 6 };
static const float NONE = 1e-11f; /* of the largest squared singular value: rounding may have left as much of 0 */
static const float ROUNDED = 1e-6f; /* of the largest square of a row: the same */

static size_t projection_bytes(const struct mt_state_shape *t)
{
    return t->matrix ? MT_MIN(t->rows, t->cols) * mt_low_rank(t->rank, t->rows, t->cols) * sizeof(float) : 0;
}

/* Rows of the smaller side and of the larger, each before and after they are made orthonormal; matrices of the rows. */
struct space {
    float *small[2], *large[2], *gram, *turn, *work;
    size_t n, n_small, n_large; /* rows, and their lengths */
    size_t bytes;
};

static struct space space_of(const struct mt_direction *d)
{
    size_t n_small = MT_MIN(d->rows, d->cols), n_large = MT_MAX(d->rows, d->cols);
    size_t n = MT_MIN(mt_low_rank(d->rank, d->rows, d->cols) + EXTRA, n_small);
    size_t work = MT_MAX(mt_eigen_workspace(n), mt_div_up(n * n_large, (size_t)MT_DIRECT_PIECE) + 1) * sizeof(float);
    struct mt_carve c = {d->scratch, 0};
    struct space s = {.n = n, .n_small = n_small, .n_large = n_large};
    for (int i = 0; i < 2; i++) {
        s.small[i] = mt_carve(&c, n * n_small * sizeof(float), ALIGN);
        s.large[i] = mt_carve(&c, n * n_large * sizeof(float), ALIGN);
    }
    s.gram = mt_carve(&c, n * n * sizeof(float), ALIGN);
    s.turn = mt_carve(&c, n * n * sizeof(float), ALIGN);
    s.work = mt_carve(&c, work, ALIGN);
    s.bytes = c.used;
    return s;
}

static size_t scratch(const struct mt_direction *d)
{
    return space_of(d).bytes;
}

static int multiply(const struct mt_direction *d, const struct mt_gemm *shape, struct mt_err *err)
{
    struct mt_gemm g = *shape;
    g.dtype = g.d_dtype = MT_F32;
    g.scale = g.scale != 0 ? g.scale : 1;
    return mt_op_gemm(d->dev, &g, err);
}

/* Orthonormal rows, sorted, of those of x; both [n, len]. */
static int straighten(const struct mt_direction *d, const struct space *s, const float *x, size_t len, float *rows,
                      const struct mt_eigen *how, struct mt_err *err)
{
    struct mt_eigen eigen = {.n = s->n, .sweeps = how->sweeps, .least = how->least, .a = s->gram, .w = s->turn,
                             .workspace = s->work};
    return multiply(d, &(struct mt_gemm){.m = s->n, .n = s->n, .k = len, .trans_b = true, .a = x, .lda = len, .b = x,
                                         .ldb = len, .d = s->gram, .ldd = s->n}, err)
        ?: mt_op_eigen(d->dev, &eigen, err)
        ?: multiply(d, &(struct mt_gemm){.m = s->n, .n = len, .k = s->n, .a = s->turn, .lda = s->n, .b = x,
                                         .ldb = len, .d = rows, .ldd = len}, err);
}

/* From vectors x of the smaller side to those of the larger, or back: orthonormal rows of their products with the
 * gradient, which is transposed where need be. */
static int half(const struct mt_direction *d, const struct space *s, const float *x, bool back,
                const struct mt_eigen *how, struct mt_err *err)
{
    size_t from = back ? s->n_large : s->n_small, to = back ? s->n_small : s->n_large;
    float *product = back ? s->small[0] : s->large[0], *rows = back ? s->small[1] : s->large[1];
    bool tall = d->rows >= d->cols;
    int rc = multiply(d, &(struct mt_gemm){.m = s->n, .n = to, .k = from, .trans_b = tall != back, .a = x, .lda = from,
                                           .b = d->g, .ldb = d->cols, .d = product, .ldd = to}, err);
    return rc ?: straighten(d, s, product, to, rows, how, err);
}

/* Before the first projection there are random signs, which stay where a gradient has no singular vectors. */
static int find_projection(const struct mt_direction *d, const struct space *s, size_t rank, struct mt_err *err)
{
    uint64_t drawn = (d->t - 1) / (uint64_t)d->keys[GAP];
    double norm = 1 / sqrt((double)s->n_small);
    int rc = drawn ? 0 : mt_low_signs(d, rank * s->n_small, norm, drawn, d->state[MT_LOW_OWN], err);
    rc = rc ?: mt_low_signs(d, s->n * s->n_small, norm, drawn, s->small[1], err);
    const struct mt_eigen step = {.sweeps = SWEEPS}, alone = {.sweeps = SWEEPS, .least = ROUNDED},
                          last = {.sweeps = 2 * SWEEPS, .least = NONE}; /* from rows in any order */
    for (int i = 0; i < 2 * ITERATIONS - 1 && !rc; i++)
        rc = half(d, s, i % 2 ? s->large[1] : s->small[1], i % 2, &step, err);
    rc = rc ?: straighten(d, s, s->large[1], s->n_large, s->large[0], &alone, err)
            ?: half(d, s, s->large[0], true, &last, err);
    struct mt_unit_rows rows = {.rows = rank, .cols = s->n_small, .from = s->small[1], .to = d->state[MT_LOW_OWN]};
    return rc ?: mt_op_unit_rows(d->dev, &rows, err);
}

/* The projected gradient and what comes of it is [rows, rank] of a tall matrix, [rank, cols] of a wide one. */
static int direct(const struct mt_optimizer *, const struct mt_direction *d, struct mt_err *err)
{
    struct space s = space_of(d);
    struct mt_adam_rates r = {d->keys[BETA1], d->keys[BETA2], d->keys[EPS]};
    size_t rank = mt_low_rank(d->rank, d->rows, d->cols);
    bool tall = d->rows >= d->cols;
    float *p = d->state[MT_LOW_OWN], *low = s.large[0], scale = (float)(d->keys[SCALE] * mt_low_step(&r, d->t));
    struct mt_gemm to = {.m = d->rows, .n = rank, .k = d->cols, .trans_b = true, .a = d->g, .lda = d->cols, .b = p,
                         .ldb = d->cols, .d = low, .ldd = rank};
    struct mt_gemm back = {.m = d->rows, .n = d->cols, .k = rank, .scale = scale, .a = low, .lda = rank, .b = p,
                           .ldb = d->cols, .d = d->g, .ldd = d->cols};
    if (!tall) {
        to = (struct mt_gemm){.m = rank, .n = d->cols, .k = d->rows, .a = p, .lda = d->rows, .b = d->g, .ldb = d->cols,
                              .d = low, .ldd = d->cols};
        back = (struct mt_gemm){.m = d->rows, .n = d->cols, .k = rank, .scale = scale, .trans_a = true, .a = p,
                                .lda = d->rows, .b = low, .ldb = d->cols, .d = d->g, .ldd = d->cols};
    }
    int rc = (d->t - 1) % (uint64_t)d->keys[GAP] ? 0 : find_projection(d, &s, rank, err);
    rc = rc ?: multiply(d, &to, err);
    if (!rc)
        rc = mt_op_low_adam(d->dev,
                            &(struct mt_low_adam){
                                .n = rank * s.n_large,
                                .beta1 = (float)r.beta1,
                                .beta2 = (float)r.beta2,
                                .eps = (float)r.eps,
                                .low = low,
                                .m = d->state[MT_LOW_FIRST],
                                .v = d->state[MT_LOW_SECOND],
                                .workspace = s.work,
                            },
                            err);
    return rc ?: multiply(d, &back, err);
}

static const struct mt_optimizer galore = {
    .type = "galore", .title = "GaLore", .state_type = MT_STATE_F32, .grain = 1,
    MT_LOW_STATES("projection", "projections", projection_bytes),
    .n_keys = N_KEYS, .keys = keys, .matrices = true, .lean_masters = true, .update = mt_low_update, .direct = direct,
    .direct_scratch = scratch,
};
MT_OPTIMIZER(galore, &galore);

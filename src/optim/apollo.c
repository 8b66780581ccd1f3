/* SPDX-License-Identifier: Apache-2.0 */
/*
 * APOLLO (Zhu et al. 2024) as apollo-torch 1.0.3: gradients of the matrices of layers, each tensor of the files by
 * itself, are scaled by channels, or whole, as Adam would scale their random projection to `rank` dimensions of the
 * smaller side; all other tensors have AdamW. As there, eps is added before bias correction. Ours: projections of
 * signs, and decay comes first.
 */
#include <math.h>

#include "device/carve.h"
#include "device/ops.h"
#include "optim/projected.h"

enum { BETA1, BETA2, EPS, RANK, GAP, SCALE, GROWTH, BY_TENSOR, N_KEYS };
static const struct mt_optimizer_key keys[] = {
    [BETA1] = MT_OPTIMIZER_KEY("beta1", 0.9, 0, 0.999999, "Decay of the first moment."),
    [BETA2] = MT_OPTIMIZER_KEY("beta2", 0.999, 0, 0.9999999, "Decay of the second moment."),
    [EPS] = MT_OPTIMIZER_KEY("eps", 1e-6, 0, 1, "Added outside the square root."),
    [RANK] = MT_OPTIMIZER_WHOLE_KEY("rank", 256, 1, 65536, "Dimensions that gradients of matrices are projected to; at most "
                                                           "their smaller side. A whole number."),
    [GAP] = MT_OPTIMIZER_WHOLE_KEY("projection_gap", 200, 1, 1e9, "Updates after which apollo draws projections anew, and galore finds them anew."),
    [SCALE] = MT_OPTIMIZER_KEY("direction_scale", 1, 1e-6, 1e6, "Directions are multiplied by its root: 128 with a rank of 1 "
                                                                "(APOLLO-Mini), 1 with 256."),
    [GROWTH] = MT_OPTIMIZER_KEY("growth", 1.01, 0, 1e6, "How much a direction's norm may grow from update to update; 0: any."),
    [BY_TENSOR] = MT_OPTIMIZER_WHOLE_KEY("by_tensor", 0, 0, 1, "1: one factor for a tensor (APOLLO-Mini), instead of one for "
                                                               "each channel."),
};
enum { ALIGN = 256 };

static size_t norm_bytes(const struct mt_state_shape *t)
{
    return t->matrix ? sizeof(float) : 0;
}

/* The projection, the projected gradient, sums. */
struct space {
    float *p, *low, *sums;
    size_t bytes;
};

static struct space space_of(const struct mt_direction *d)
{
    size_t rank = mt_low_rank(d->rank, d->rows, d->cols);
    struct mt_carve c = {d->scratch, 0};
    struct space s;
    s.p = mt_carve(&c, MT_MIN(d->rows, d->cols) * rank * sizeof(float), ALIGN);
    s.low = mt_carve(&c, MT_MAX(d->rows, d->cols) * rank * sizeof(float), ALIGN);
    s.sums = mt_carve(&c, mt_apollo_workspace(d->rows, d->cols) * sizeof(float), ALIGN);
    s.bytes = c.used;
    return s;
}

static size_t scratch(const struct mt_direction *d)
{
    return space_of(d).bytes;
}

/* low = g p^T of a tall matrix, p [rank, cols]; g^T p of a wide one, p [rows, rank]. */
static int project(const struct mt_direction *d, const struct space *s, size_t rank, struct mt_err *err)
{
    bool tall = d->rows >= d->cols;
    uint64_t drawn = (d->t - 1) / (uint64_t)d->keys[GAP];
    struct mt_gemm low = {.m = MT_MAX(d->rows, d->cols), .n = rank, .k = MT_MIN(d->rows, d->cols), .dtype = MT_F32,
                          .d_dtype = MT_F32, .trans_a = !tall, .trans_b = tall, .scale = 1, .a = d->g, .lda = d->cols,
                          .b = s->p, .ldb = tall ? d->cols : rank, .d = s->low, .ldd = rank};
    int rc = mt_low_signs(d, MT_MIN(d->rows, d->cols) * rank, 1 / sqrt((double)rank), drawn, s->p, err);
    return rc ?: mt_op_gemm(d->dev, &low, err);
}

static int direct(const struct mt_optimizer *, const struct mt_direction *d, struct mt_err *err)
{
    struct space s = space_of(d);
    size_t rank = mt_low_rank(d->rank, d->rows, d->cols);
    struct mt_adam_rates r = {d->keys[BETA1], d->keys[BETA2], d->keys[EPS]};
    int rc = project(d, &s, rank, err);
    return rc ? rc : mt_op_apollo(d->dev,
                                  &(struct mt_apollo){
                                      .rows = d->rows,
                                      .cols = d->cols,
                                      .rank = rank,
                                      .by_tensor = d->keys[BY_TENSOR] > 0,
                                      .beta1 = (float)d->keys[BETA1],
                                      .beta2 = (float)d->keys[BETA2],
                                      .eps = (float)d->keys[EPS],
                                      .growth = (float)d->keys[GROWTH],
                                      .scale = (float)(sqrt(d->keys[SCALE]) * mt_low_step(&r, d->t)),
                                      .g = d->g,
                                      .low = s.low,
                                      .m = d->state[MT_LOW_FIRST],
                                      .v = d->state[MT_LOW_SECOND],
                                      .norm = d->state[MT_LOW_OWN],
                                      .workspace = s.sums,
                                  },
                                  err);
}

static const struct mt_optimizer apollo = {
    .type = "apollo", .title = "APOLLO", .state_type = MT_STATE_F32, .grain = 1,
    MT_LOW_STATES("norm", "norms of directions", norm_bytes),
    .n_keys = N_KEYS, .keys = keys, .matrices = true, .lean_masters = true, .update = mt_low_update, .direct = direct,
    .direct_scratch = scratch,
};
MT_OPTIMIZER(apollo, &apollo);

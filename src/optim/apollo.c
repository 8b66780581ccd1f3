/* SPDX-License-Identifier: Apache-2.0 */
/*
 * APOLLO (Zhu et al. 2024) as apollo-torch 1.0.3: gradients of the matrices of layers, each tensor of the files by
 * itself, are scaled by channels, or whole, as Adam would scale their random projection to `rank` dimensions of the
 * smaller side; all other tensors have AdamW. As there, eps is added before bias correction. Ours: projections of
 * signs, and decay comes first.
 */
#include <math.h>

#include "device/ops.h"
#include "optim/adam.h"
#include "optim/kernel.h"
#include "optim/optimizer.h"

enum { BETA1, BETA2, EPS, RANK, GAP, SCALE, GROWTH, BY_TENSOR, N_KEYS };
static const struct mt_optimizer_key keys[] = {
    [BETA1] = MT_OPTIMIZER_KEY("beta1", 0.9, 0, 0.999999, "Decay of the first moment."),
    [BETA2] = MT_OPTIMIZER_KEY("beta2", 0.999, 0, 0.9999999, "Decay of the second moment."),
    [EPS] = MT_OPTIMIZER_KEY("eps", 1e-6, 0, 1, "Added outside the square root."),
    [RANK] = MT_OPTIMIZER_WHOLE_KEY("rank", 256, 1, 65536, "Dimensions that gradients of matrices are projected to; at most "
                                                           "their smaller side. A whole number."),
    [GAP] = MT_OPTIMIZER_WHOLE_KEY("projection_gap", 200, 1, 1e9, "Updates after which projections are drawn anew."),
    [SCALE] = MT_OPTIMIZER_KEY("direction_scale", 1, 1e-6, 1e6, "Directions are multiplied by its root: 128 with a rank of 1 "
                                                                "(APOLLO-Mini), 1 with 256."),
    [GROWTH] = MT_OPTIMIZER_KEY("growth", 1.01, 0, 1e6, "How much a direction's norm may grow from update to update; 0: any."),
    [BY_TENSOR] = MT_OPTIMIZER_WHOLE_KEY("by_tensor", 0, 0, 1, "1: one factor for a tensor (APOLLO-Mini), instead of one for "
                                                               "each channel."),
};
enum { LOW_FIRST, LOW_SECOND, NORM, FIRST, SECOND };
enum { ALIGN = 256 };
static const uint64_t STREAM = UINT64_C(0xA7) << 56; /* of projections */

static size_t rank_of(size_t rank, size_t rows, size_t cols)
{
    return MT_MIN(rank, MT_MIN(rows, cols));
}

static size_t low_bytes(const struct mt_state_shape *t)
{
    return t->matrix ? MT_MAX(t->rows, t->cols) * rank_of(t->rank, t->rows, t->cols) * sizeof(float) : 0;
}

static size_t norm_bytes(const struct mt_state_shape *t)
{
    return t->matrix ? sizeof(float) : 0;
}

static size_t rest_bytes(const struct mt_state_shape *t)
{
    return t->matrix ? 0 : t->n * sizeof(float);
}

/* The projection, the projected gradient, sums. */
struct space {
    float *p, *low, *sums;
    size_t bytes;
};

static struct space space_of(const struct mt_direction *d)
{
    size_t rank = rank_of(d->rank, d->rows, d->cols);
    size_t p = mt_align_up(MT_MIN(d->rows, d->cols) * rank * sizeof(float), (size_t)ALIGN);
    size_t low = mt_align_up(MT_MAX(d->rows, d->cols) * rank * sizeof(float), (size_t)ALIGN);
    struct space s = {.bytes = p + low + mt_apollo_workspace(d->rows, d->cols) * sizeof(float)};
    char *at = d->scratch;
    if (at) {
        s.p = (float *)(void *)at;
        s.low = (float *)(void *)(at + p);
        s.sums = (float *)(void *)(at + p + low);
    }
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
    struct mt_signs signs = {.n = MT_MIN(d->rows, d->cols) * rank, .scale = (float)(1 / sqrt((double)rank)),
                             .seed = d->seed, .stream = STREAM | drawn << 24 | d->tensor, .x = s->p};
    struct mt_gemm low = {.m = MT_MAX(d->rows, d->cols), .n = rank, .k = MT_MIN(d->rows, d->cols), .dtype = MT_F32,
                          .d_dtype = MT_F32, .trans_a = !tall, .trans_b = tall, .scale = 1, .a = d->g, .lda = d->cols,
                          .b = s->p, .ldb = tall ? d->cols : rank, .d = s->low, .ldd = rank};
    int rc = mt_op_signs(d->dev, &signs, err);
    return rc ? rc : mt_op_gemm(d->dev, &low, err);
}

static int direct(const struct mt_optimizer *o, const struct mt_direction *d, struct mt_err *err)
{
    struct space s = space_of(d);
    size_t rank = rank_of(d->rank, d->rows, d->cols);
    double bc1 = 1 - pow(d->keys[BETA1], (double)d->t), bc2 = 1 - pow(d->keys[BETA2], (double)d->t);
    int rc = project(d, &s, rank, err);
    (void)o;
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
                                      .scale = (float)(sqrt(d->keys[SCALE] * bc2) / bc1),
                                      .g = d->g,
                                      .low = s.low,
                                      .m = d->state[LOW_FIRST],
                                      .v = d->state[LOW_SECOND],
                                      .norm = d->state[NORM],
                                      .workspace = s.sums,
                                  },
                                  err);
}

static uint64_t update(const struct mt_optimizer *o, const struct mt_update *u, enum mt_isa isa)
{
    struct mt_kernel k = mt_kernel_of(u);
    (void)o;
    if (u->state[NORM]) {
        k.rule = MT_RULE_SGD;
        k.s.step = (float)u->lr;
        return mt_kernel_run(&k, isa);
    }
    mt_adam_of_rest(&k, u, u->state[FIRST], u->state[SECOND],
                    (struct mt_adam_rates){u->keys[BETA1], u->keys[BETA2], u->keys[EPS]});
    k.s.eps /= k.s.sqrt_bc2;
    return mt_kernel_run(&k, isa);
}

#define STATE(name_, use_, bytes_, on_device_)                                                            \
    {.name = name_, .use = use_, .dtype = MT_F32, .block = 1, .block_bytes = sizeof(float), .bytes = bytes_, \
     .apart = true, .on_device = on_device_}
static const struct mt_optimizer apollo = {
    .type = "apollo", .title = "APOLLO", .state_type = MT_STATE_F32, .grain = 1, .n_states = 5,
    .state = {[LOW_FIRST] = STATE("low_exp_avg", "first moments (projected)", low_bytes, true),
              [LOW_SECOND] = STATE("low_exp_avg_sq", "second moments (projected)", low_bytes, true),
              [NORM] = STATE("norm", "norms of directions", norm_bytes, true),
              [FIRST] = STATE("exp_avg", "first moments (others)", rest_bytes, false),
              [SECOND] = STATE("exp_avg_sq", "second moments (others)", rest_bytes, false)},
    .n_keys = N_KEYS, .keys = keys, .matrices = true, .lean_masters = true, .update = update, .direct = direct,
    .direct_scratch = scratch,
};
MT_OPTIMIZER(apollo, &apollo);

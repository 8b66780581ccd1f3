/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Adafactor (Shazeer and Stern 2018) with scaled parameters and without momentum, in the order of operations of
 * transformers' (scale_parameter, no relative_step); with updates under backward it is AdaLOMO (Lv et al. 2024). The
 * device makes the direction and the scale max(1e-3, rms of the weights); the rest is a step of gradient descent at the
 * rate lr scale.
 */
#include <math.h>

#include "device/ops.h"
#include "optim/kernel.h"
#include "optim/optimizer.h"

enum { DECAY_RATE, CLIP_THRESHOLD, N_KEYS };
static const struct mt_optimizer_key keys[] = {
    [DECAY_RATE] = MT_OPTIMIZER_KEY("decay_rate", 0.8, 0.01, 1,
                                    "Update t keeps 1 - t^-decay_rate of the means of squares."),
    [CLIP_THRESHOLD] = MT_OPTIMIZER_KEY("clip_threshold", 1, 1e-3, 1e6,
                                        "Largest root mean square of a tensor's direction."),
};
enum { ROW, COL, VECTOR, SCALE };

static size_t row_bytes(const struct mt_state_shape *t)
{
    return t->cols > 1 ? t->rows * sizeof(float) : 0;
}

static size_t col_bytes(const struct mt_state_shape *t)
{
    return t->cols > 1 ? t->cols * sizeof(float) : 0;
}

static size_t vector_bytes(const struct mt_state_shape *t)
{
    return t->cols > 1 ? 0 : t->n * sizeof(float);
}

static size_t scale_bytes(const struct mt_state_shape *)
{
    return sizeof(float);
}

static size_t scratch(const struct mt_direction *d)
{
    return mt_adafactor_workspace(d->rows, d->cols);
}

static int direct(const struct mt_optimizer *, const struct mt_direction *d, struct mt_err *err)
{
    return mt_op_adafactor(d->dev,
                           &(struct mt_adafactor){
                               .rows = d->rows,
                               .cols = d->cols,
                               .dtype = d->dtype,
                               .beta2 = (float)(1 - pow((double)d->t, -d->keys[DECAY_RATE])),
                               .eps = 1e-30f,
                               .clip = (float)d->keys[CLIP_THRESHOLD],
                               .least = 1e-3f,
                               .g = d->g,
                               .w = d->w,
                               .row = d->state[d->cols > 1 ? ROW : VECTOR],
                               .col = d->state[COL],
                               .scale = d->state[SCALE],
                               .workspace = d->scratch,
                           },
                           err);
}

static uint64_t update(const struct mt_optimizer *, const struct mt_update *u, enum mt_isa isa)
{
    const double lr = u->lr * (double)*(const float *)u->state[SCALE];
    struct mt_kernel k = mt_kernel_of(u);
    k.rule = MT_RULE_SGD;
    k.s.keep = (float)(1 - lr * u->weight_decay);
    k.s.step = (float)lr;
    return mt_kernel_run(&k, isa);
}

static const struct mt_optimizer adafactor = {
    .type = "adafactor", .title = "Adafactor", .state_type = MT_STATE_F32, .grain = 1, .n_states = 4,
    .state = {[ROW] = MT_STATE_APART("exp_avg_sq_row", "means of squares (rows)", row_bytes, true),
              [COL] = MT_STATE_APART("exp_avg_sq_col", "means of squares (columns)", col_bytes, true),
              [VECTOR] = MT_STATE_APART("exp_avg_sq", "means of squares (vectors)", vector_bytes, true),
              [SCALE] = MT_STATE_APART("scale", "scales of tensors", scale_bytes, true)},
    .n_keys = N_KEYS, .keys = keys, .lean_masters = true, .update = update, .direct = direct,
    .direct_scratch = scratch,
};
MT_OPTIMIZER(adafactor, &adafactor);

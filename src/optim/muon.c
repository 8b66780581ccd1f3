/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Muon (Jordan et al. 2024) as torch.optim.Muon with `match_rms_adamw` (Moonlight): the matrices of layers, each tensor
 * of the files by itself, take steps of 0.2 sqrt(max(rows, cols)) times their momentum's nearest orthogonal matrix, by five
 * Newton-Schulz iterations on the device. All other tensors have AdamW in FP32, at the same rate and decay.
 *
 * The iteration X = a X + (b A + c A A) X, A = X X^T (of a tall matrix X^T X, from the right) is made as X = s Y:
 * A = s^2 Y Y^T, B = A + c/b A A, Y = Y + b/a B Y, s = a s, so that each is one product.
 */
#include <math.h>

#include "device/carve.h"
#include "device/ops.h"
#include "optim/adam.h"
#include "optim/kernel.h"
#include "optim/optimizer.h"

enum { BETA1, BETA2, EPS, MOMENTUM, N_KEYS };
static const struct mt_optimizer_key keys[] = {
    [BETA1] = MT_OPTIMIZER_KEY("beta1", 0.9, 0, 0.999999, "Decay of the first moment."),
    [BETA2] = MT_OPTIMIZER_KEY("beta2", 0.999, 0, 0.9999999, "Decay of the second moment."),
    [EPS] = MT_OPTIMIZER_KEY("eps", 1e-8, 0, 1, "Added outside the square root."),
    [MOMENTUM] = MT_OPTIMIZER_KEY("momentum", 0.95, 0, 0.999999, "Decay of the sum of gradients."),
};
enum { BUFFER, FIRST, SECOND };
enum { STEPS = 5, ALIGN = 256 };
static const float A = 3.4445f, B = -4.7750f, C = 2.0315f;

static size_t f32_bytes(const struct mt_state_shape *t)
{
    return t->matrix ? t->n * sizeof(float) : 0;
}

static size_t bf16_bytes(const struct mt_state_shape *t)
{
    return t->matrix ? t->n * sizeof(uint16_t) : 0;
}

/* Two matrices, two of their smaller side, sums. */
struct space {
    void *y[2], *gram, *poly;
    float *sums;
    size_t bytes;
};

static struct space space_of(const struct mt_direction *d)
{
    size_t n = d->rows * d->cols, m = MT_MIN(d->rows, d->cols), size = mt_dtype_size(d->dtype);
    struct mt_carve c = {d->scratch, 0};
    struct space s;
    s.y[0] = mt_carve(&c, n * size, ALIGN);
    s.y[1] = mt_carve(&c, n * size, ALIGN);
    s.gram = mt_carve(&c, m * m * size, ALIGN);
    s.poly = mt_carve(&c, m * m * size, ALIGN);
    s.sums = mt_carve(&c, (mt_div_up(n, (size_t)MT_DIRECT_PIECE) + 1) * sizeof(float), ALIGN);
    s.bytes = c.used;
    return s;
}

static size_t scratch(const struct mt_direction *d)
{
    return space_of(d).bytes;
}

/* y to next. */
static int iterate(const struct mt_direction *d, const struct space *s, const void *y, void *next, float scale,
                   struct mt_err *err)
{
    bool wide = d->rows <= d->cols;
    size_t m = wide ? d->rows : d->cols;
    struct mt_gemm gram = {.m = m, .n = m, .k = wide ? d->cols : d->rows, .dtype = d->dtype, .d_dtype = d->dtype,
                           .trans_a = !wide, .trans_b = wide, .scale = scale * scale, .a = y, .b = y, .lda = d->cols,
                           .ldb = d->cols, .d = s->gram, .ldd = m};
    struct mt_gemm poly = {.m = m, .n = m, .k = m, .dtype = d->dtype, .d_dtype = d->dtype, .scale = C / B, .a = s->gram,
                           .b = s->gram, .lda = m, .ldb = m, .c = s->gram, .ldc = m, .d = s->poly, .ldd = m};
    struct mt_gemm step = {.m = d->rows, .n = d->cols, .k = m, .dtype = d->dtype, .d_dtype = d->dtype, .scale = B / A,
                           .a = wide ? s->poly : y, .b = wide ? y : s->poly, .lda = wide ? m : d->cols, .ldb = d->cols,
                           .c = y, .ldc = d->cols, .d = next, .ldd = d->cols};
    return mt_op_gemm(d->dev, &gram, err)
        ?: mt_op_gemm(d->dev, &poly, err)
        ?: mt_op_gemm(d->dev, &step, err);
}

static int direct(const struct mt_optimizer *o, const struct mt_direction *d, struct mt_err *err)
{
    struct space s = space_of(d);
    float scale = 1;
    int rc = mt_op_muon(d->dev,
                        &(struct mt_muon){
                            .n = d->rows * d->cols,
                            .dtype = d->dtype,
                            .m_dtype = o->state[BUFFER].dtype,
                            .mu = (float)d->keys[MOMENTUM],
                            .g = d->g,
                            .m = d->state[BUFFER],
                            .x = s.y[0],
                            .workspace = s.sums,
                        },
                        err);
    for (int i = 0; i < STEPS && !rc; i++, scale *= A)
        rc = iterate(d, &s, s.y[i % 2], s.y[(i + 1) % 2], scale, err);
    if (rc)
        return rc;
    return mt_op_widen(d->dev,
                       &(struct mt_widen){
                           .n = d->rows * d->cols,
                           .dtype = d->dtype,
                           .scale = scale * 0.2f * sqrtf((float)MT_MAX(d->rows, d->cols)),
                           .x = s.y[STEPS % 2],
                           .y = d->g,
                       },
                       err);
}

static uint64_t update(const struct mt_optimizer *, const struct mt_update *u, enum mt_isa isa)
{
    struct mt_kernel k = mt_adam_beside(u, BUFFER, FIRST);
    return mt_kernel_run(&k, isa);
}

#define MUON(type_, dtype_, size_, bytes_)                                                                  \
    {                                                                                                       \
        .type = "muon", .title = "Muon", .state_type = type_, .grain = 1, .n_states = 3,                    \
        .state = {[BUFFER] = {.name = "momentum_buffer", .use = "momentum (matrices)", .dtype = dtype_, .block = 1, \
                              .block_bytes = size_, .bytes = bytes_, .on_device = true},                    \
                  [FIRST] = MT_STATE_APART("exp_avg", "first moments (others)", mt_rest_bytes, false),      \
                  [SECOND] = MT_STATE_APART("exp_avg_sq", "second moments (others)", mt_rest_bytes, false)}, \
        .n_keys = N_KEYS, .keys = keys, .matrices = true, .lean_masters = true, .update = update,           \
        .direct = direct, .direct_scratch = scratch,                                                        \
    }
static const struct mt_optimizer f32 = MUON(MT_STATE_F32, MT_F32, 4, f32_bytes);
static const struct mt_optimizer bf16 = MUON(MT_STATE_BF16, MT_BF16, 2, bf16_bytes);
MT_OPTIMIZER(muon, &f32, &bf16);

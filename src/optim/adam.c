/* SPDX-License-Identifier: Apache-2.0 */
#include "optim/adam.h"

#include <math.h>

#include "optim/kernel.h"
#include "optim/optimizer.h"

void mt_adam_scalars(struct mt_kernel_scalars *s, double lr, struct mt_adam_rates r, uint64_t t)
{
    double bc1 = 1 - pow(r.beta1, (double)t), bc2 = 1 - pow(r.beta2, (double)t);
    s->one_minus_beta1 = (float)(1 - r.beta1);
    s->beta2 = (float)r.beta2;
    s->one_minus_beta2 = (float)(1 - r.beta2);
    s->step = (float)(lr / bc1);
    s->sqrt_bc2 = (float)sqrt(bc2);
    s->eps = (float)r.eps;
}

struct mt_kernel mt_adam_beside(const struct mt_update *u, int own, int rest)
{
    struct mt_kernel k = mt_kernel_of(u);
    if (u->state[own]) {
        k.rule = MT_RULE_SGD;
        k.s.step = (float)u->lr;
        return k;
    }
    k.rule = MT_RULE_ADAMW;
    k.state[0] = u->state[rest];
    k.state[1] = u->state[rest + 1];
    k.state_type = MT_STATE_F32;
    mt_adam_scalars(&k.s, u->lr, (struct mt_adam_rates){u->keys[0], u->keys[1], u->keys[2]}, u->t - u->t0);
    return k;
}

size_t mt_rest_bytes(const struct mt_state_shape *t)
{
    return t->matrix ? 0 : t->n * sizeof(float);
}

enum { BETA1, BETA2, EPS, N_KEYS };
static const struct mt_optimizer_key keys[] = {
    [BETA1] = MT_OPTIMIZER_KEY("beta1", 0.9, 0, 0.999999, "Decay of the first moment."),
    [BETA2] = MT_OPTIMIZER_KEY("beta2", 0.999, 0, 0.9999999, "Decay of the second moment."),
    [EPS] = MT_OPTIMIZER_KEY("eps", 1e-8, 0, 1, "Added outside the square root."),
};

static uint64_t update(const struct mt_optimizer *o, const struct mt_update *u, enum mt_isa isa)
{
    struct mt_kernel k = mt_kernel_of(u);
    k.rule = MT_RULE_ADAMW;
    mt_kernel_states(&k, u, o->state_type, 2);
    mt_adam_scalars(&k.s, u->lr, (struct mt_adam_rates){u->keys[BETA1], u->keys[BETA2], u->keys[EPS]}, u->t - u->t0);
    return mt_kernel_run(&k, isa);
}

#define ADAMW .type = "adamw", .title = "AdamW", .n_keys = N_KEYS, .keys = keys, .update = update, .lean_masters = true
#define PLAIN(dtype, bytes) \
    .state = {MT_STATE_PLAIN("exp_avg", "first moments", dtype, bytes), \
              MT_STATE_PLAIN("exp_avg_sq", "second moments", dtype, bytes)}

const struct mt_optimizer mt_adamw = {ADAMW, .state_type = MT_STATE_F32, .grain = 1, .n_states = 2, PLAIN(MT_F32, 4)};
static const struct mt_optimizer adamw_bf16 = {ADAMW, .state_type = MT_STATE_BF16, .grain = 1, .n_states = 2,
                                               PLAIN(MT_BF16, 2)};
static const struct mt_optimizer adamw_8bit = {
    ADAMW, .state_type = MT_STATE_8BIT, .grain = MT_BLOCK8, .n_states = 4, .thread_ns = 1.25,
    .state = {MT_STATE_BLOCKS8("exp_avg", "first moments"), MT_STATE_BLOCKS8("exp_avg_sq", "second moments"),
              MT_STATE_REST("exp_avg", "first moments"), MT_STATE_REST("exp_avg_sq", "second moments")}};
MT_OPTIMIZER(adamw, &mt_adamw, &adamw_bf16, &adamw_8bit);

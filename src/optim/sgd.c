/* SPDX-License-Identifier: Apache-2.0 */
/* Stochastic gradient descent with decoupled weight decay: m = momentum m + g, w = w - lr wd w - lr m; without
 * momentum no state is kept. */
#include "optim/kernel.h"
#include "optim/optimizer.h"

enum { MOMENTUM, N_KEYS };
static const struct mt_optimizer_key keys[] = {
    [MOMENTUM] = MT_OPTIMIZER_KEY("momentum", 0, 0, 0.999999, "Decay of the sum of gradients; 0: no state is kept."),
};

static uint64_t update(const struct mt_optimizer *o, const struct mt_update *u, enum mt_isa isa)
{
    struct mt_kernel k = mt_kernel_of(u);
    k.rule = MT_RULE_SGD;
    k.s.beta1 = (float)u->keys[MOMENTUM];
    k.s.step = (float)u->lr;
    if (o->n_states)
        mt_kernel_states(&k, u, o->state_type, 1);
    return mt_kernel_run(&k, isa);
}

#define SGD .type = "sgd", .title = "SGD", .n_keys = N_KEYS, .keys = keys, .update = update, .lean_masters = true
static const struct mt_optimizer none = {SGD, .grain = 1};
static const struct mt_optimizer f32 = {SGD, .state_type = MT_STATE_F32, .grain = 1, .n_states = 1, .if_zero = &none,
                                        .state = {MT_STATE_PLAIN("momentum_buffer", "momentum", MT_F32, 4)}};
static const struct mt_optimizer bf16 = {SGD, .state_type = MT_STATE_BF16, .grain = 1, .n_states = 1, .if_zero = &none,
                                         .state = {MT_STATE_PLAIN("momentum_buffer", "momentum", MT_BF16, 2)}};
static const struct mt_optimizer in_8bit = {SGD, .state_type = MT_STATE_8BIT, .grain = MT_BLOCK8, .n_states = 2,
                                            .thread_ns = 0.8, .if_zero = &none,
                                            .state = {MT_STATE_BLOCKS8("momentum_buffer", "momentum"),
                                                      MT_STATE_REST("momentum_buffer", "momentum")}};
MT_OPTIMIZER(sgd, &f32, &bf16, &in_8bit);

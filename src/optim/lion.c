/* SPDX-License-Identifier: Apache-2.0 */
/* Lion (Chen et al. 2023): a step of the sign of a mean of gradients. One state, in the order of operations of
 * lion-pytorch. Its learning rate is 3 to 10 times smaller than AdamW's. */
#include "optim/kernel.h"
#include "optim/optimizer.h"

enum { BETA1, BETA2, N_KEYS };
static const struct mt_optimizer_key keys[] = {
    [BETA1] = MT_OPTIMIZER_KEY("beta1", 0.9, 0, 0.999999, "Decay of the first moment."),
    [BETA2] = MT_OPTIMIZER_KEY("beta2", 0.99, 0, 0.9999999, "Decay of the second moment."),
};

static uint64_t update(const struct mt_optimizer *o, const struct mt_update *u, enum mt_isa isa)
{
    struct mt_kernel k = mt_kernel_of(u);
    k.rule = MT_RULE_LION;
    k.s.beta1 = (float)u->keys[BETA1];
    k.s.one_minus_beta1 = (float)(1 - u->keys[BETA1]);
    k.s.beta2 = (float)u->keys[BETA2];
    k.s.one_minus_beta2 = (float)(1 - u->keys[BETA2]);
    k.s.step = (float)u->lr;
    mt_kernel_states(&k, u, o->state_type, 1);
    return mt_kernel_run(&k, isa);
}

#define LION .type = "lion", .title = "Lion", .n_keys = N_KEYS, .keys = keys, .update = update, .lean_masters = true
static const struct mt_optimizer f32 = {LION, .state_type = MT_STATE_F32, .grain = 1, .n_states = 1,
                                        .state = {MT_STATE_PLAIN("exp_avg", "momentum", MT_F32, 4)}};
static const struct mt_optimizer bf16 = {LION, .state_type = MT_STATE_BF16, .grain = 1, .n_states = 1,
                                         .state = {MT_STATE_PLAIN("exp_avg", "momentum", MT_BF16, 2)}};
static const struct mt_optimizer in_8bit = {LION, .state_type = MT_STATE_8BIT, .grain = MT_BLOCK8, .n_states = 2,
                                            .thread_ns = 0.8,
                                            .state = {MT_STATE_BLOCKS8("exp_avg", "momentum"),
                                                      MT_STATE_REST("exp_avg", "momentum")}};
MT_OPTIMIZER(lion, &f32, &bf16, &in_8bit);

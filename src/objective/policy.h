/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "objective/objective.h"

/**
 * Losses of a policy, in double: functions of the log-probabilities of a rollout's trained tokens. The mean over
 * tokens, rollouts or a constant is taken of terms, and minus their derivatives by lp, divided by the same, are the
 * weights of the rows.
 */

/** Log-probabilities of a token: of the policy, before its update, under the reference, the sampler. */
struct mt_policy_token {
    double lp, old, ref, sampler, advantage;
};
/** Over a rollout's tokens, from zeros: sums of lp - old and of old - sampler. */
struct mt_policy_sums {
    double ratio, drift, n;
};
void mt_policy_add(struct mt_policy_sums *s, const struct mt_policy_token *t);

/** What a token adds. */
struct mt_policy_term {
    double loss, slope; /* its derivative by lp, where what is held by stop-gradient stays */
    double kl, factor;  /* the divergence, without its weight; the factor of the mismatch */
    int clipped; /* -1, 1: the ratio is beyond the lower or the upper bound, and the loss does not depend on it */
};
struct mt_policy_term mt_policy_term(const struct mt_objective *o, const struct mt_policy_keys *keys,
                                     const struct mt_policy_sums *rollout, const struct mt_policy_token *t);
/** What terms of a rollout with n trained tokens are divided by; n_micro_tokens: of its micro-batch. */
double mt_policy_divisor(const struct mt_objective_step *s, size_t n, size_t n_micro_tokens);

/** Replaces auto in a policy's keys. -EINVAL: they do not go together. */
int mt_policy_resolve(const struct mt_objective *o, struct mt_policy_keys *keys, struct mt_err *err);
/** What of rollouts the keys need but data lack; NULL: nothing. `v`: a trained token's values. */
const char *mt_policy_lacks(const struct mt_objective *o, const struct mt_policy_keys *keys,
                            const union mt_rollout_values *v);

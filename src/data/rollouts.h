/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "data/batch.h"
#include "data/sample.h"
#include "settings/settings.h"

/**
 * Reads a record of format rollouts: "token_ids" with "mask" (1: the policy's own token), or "prompt_ids" and
 * "completion_ids" with "completion_mask" (all 1 unless given); with the byte tokenizer, strings "prompt" and "completion".
 * Of each token, or of each of the completion: "logprobs" (the sampler's), "old_logprobs", "ref_logprobs", where it is
 * trained; "advantage", a number or a list, or "reward" and "group". Further "temperature", "truncated" and "noise".
 * "logprobs_temperature": what "logprobs" are of, if that is another temperature: these are as if they were not there.
 * -EINVAL, -ERANGE: a value is missing or cannot be; *err names it.
 */
int mt_rollouts_read(struct mt_sample_reader *r, const cJSON *o, const char *where, uint64_t place, struct mt_err *err);

/** What of a sample's own values its advantage follows from. */
struct mt_rollout_sample {
    uint64_t group; /* 0: its tokens have advantages */
    uint32_t source, sample;
    float reward;
    bool truncated;
    int noise;
};
/** Of the first value of the sample, as mt_rollouts_read() has written it. */
struct mt_rollout_sample mt_rollout_sample_of(const union mt_rollout_values *v, uint32_t source, uint32_t sample);
/**
 * Fills out[sample] for s[n], which it sorts: TRL's advantages, (R - mean of the group) / (deviation + 1e-4), the
 * deviation with Bessel's correction. *alone: a sample that has a group to itself, which is refused with -EINVAL.
 */
int mt_rollouts_weigh(struct mt_rollout *out, struct mt_rollout_sample *s, size_t n, const struct mt_policy_keys *keys,
                      uint32_t *alone);

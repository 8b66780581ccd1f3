/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/json.h"
#include "cli.h"

/**
 * Rounds of a policy (policy.rollouts): prompts are chosen, a command samples rollouts with the newest checkpoint, they
 * get rewards, and a run of this program, in a process of its own, trains on them from that checkpoint. What a round is
 * made of lies in the output folder: round-R.prompts.jsonl, round-R.jsonl (whole once it has that name), checkpoints.
 * So after a kill the round under way goes on where its newest file says, and has the same bits if its command has.
 *
 * *code: what the program is to exit with; the command's own code if that failed.
 */
int cli_run_rounds(int *code, const struct cli *cli, const struct cli_args *args, const struct mt_config *cfg,
                   struct mt_err *err);

/** What rewards are together. */
struct cli_rewards {
    double sum, cut;         /* cut: rollouts that were cut off */
    size_t n, groups, alike; /* alike: groups of which all have the same */
};
/** Gives the rollouts of a file their rewards by policy.reward, and writes them to another one; the first is removed.
 * Those of a group lie together. */
int cli_give_rewards(const struct mt_config *cfg, const char *from, const char *to, struct cli_rewards *told,
                     struct mt_err *err);
/** Whether policy.reward, if any, can be given to what is made of each of the prompts of the file: they have what it
 * compares, or it is a command that can be started. */
int cli_check_rewards(const struct mt_config *cfg, const char *file, const cJSON *prompts, struct mt_err *err);
/** Makes `path` another name of a file, at once. */
int cli_link_as(const char *path, const char *file, struct mt_err *err);
